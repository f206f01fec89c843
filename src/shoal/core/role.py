"""Role of a strategy: the ranks that hold a layer's parameters, and the way of its gradients.

A strategy declares one role. This file alone says what follows from it: planner, rewriting and
runtime ask the properties of the role.

    role      its site                  parameters are      gradients go
    BUCKET    layers that share one     on every rank       in the bucket, by an exchange
    OWNED     the same                  on every rank       to their owners, who update them
    SERVED    the same                  on every rank       to owners, some of them servers
    ROWS      some layers               on every rank       as rows, which the strategy sends
    LAYER     one layer                 on every rank       as the strategy itself sends them
    CUT       one layer                 a part on each      nowhere: a part's gradient stays there
    TABLE     one layer                 on servers          to the servers
    PIPELINE  all of its layers         on one rank each    nowhere: they stay there
"""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    """Role of a strategy."""

    BUCKET = auto()
    OWNED = auto()
    SERVED = auto()
    ROWS = auto()
    LAYER = auto()
    CUT = auto()
    TABLE = auto()
    PIPELINE = auto()

    @property
    def takes_exchange(self) -> bool:
        """Whether layers share a bucket, and an exchange carries it."""
        return self in (Role.BUCKET, Role.OWNED, Role.SERVED)

    @property
    def joins_layers(self) -> bool:
        """Whether layers share a site."""
        return self.takes_exchange or self is Role.ROWS

    @property
    def is_updated_everywhere(self) -> bool:
        """Whether every rank updates all of the parameters itself."""
        return self in (Role.BUCKET, Role.ROWS, Role.LAYER)

    @property
    def waits_for_updates(self) -> bool:
        """Whether each rank can keep its gradients for some steps, and send them with the last."""
        return self in (Role.BUCKET, Role.OWNED)

    @property
    def has_owners(self) -> bool:
        """Whether a placement says which rank updates which parameter."""
        return self in (Role.OWNED, Role.SERVED)

    @property
    def is_cut(self) -> bool:
        """Whether no rank has all of the layer, so that all ranks call, save and load it
        together.
        """
        return self in (Role.CUT, Role.PIPELINE)

    @property
    def owns_at_servers(self) -> bool:
        """Whether servers are owners, besides the workers."""
        return self is Role.SERVED

    @property
    def has_tables(self) -> bool:
        """Whether only servers have the parameters."""
        return self is Role.TABLE

    @property
    def takes_servers(self) -> bool:
        """Whether servers take part. Then workers can run ahead of one another."""
        return self in (Role.SERVED, Role.TABLE)

    @property
    def names_ranks(self) -> bool:
        """Whether a plan names the rank of each layer, and all of its layers are one site."""
        return self is Role.PIPELINE
