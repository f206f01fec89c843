"""What part a strategy plays: who holds a layer's parameters, and who carries its gradients.

A strategy declares one role. What follows from it is answered here and nowhere else: planner,
rewriting and runtime ask by a question's name.

    role      its site                  parameters are      gradients go
    BUCKET    layers that share one     on every rank       in the bucket, by an exchange
    OWNED     the same                  on every rank       to their owners, who update them
    SERVED    the same                  on every rank       to owners, of which servers are some
    ROWS      some layers               on every rank       as rows, which the strategy sends
    LAYER     one layer                 on every rank       as the strategy itself sends them
    CUT       one layer                 a part on each      nowhere: a part's gradient stays there
    TABLE     one layer                 on servers          to these
    STAGE     the end of the model      on tail hosts       to these
    PIPELINE  all of its layers         on one rank each    nowhere: they stay there
"""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    """What part a strategy plays."""

    BUCKET = auto()
    OWNED = auto()
    SERVED = auto()
    ROWS = auto()
    LAYER = auto()
    CUT = auto()
    TABLE = auto()
    STAGE = auto()
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
        """Whether its gradients can be kept on each rank for some steps, and go with the last."""
        return self in (Role.BUCKET, Role.OWNED)

    @property
    def has_owners(self) -> bool:
        """Whether a placement says who updates what."""
        return self in (Role.OWNED, Role.SERVED)

    @property
    def is_cut(self) -> bool:
        """Whether no rank has all of the layer, so that all of them call, save and load it."""
        return self in (Role.CUT, Role.STAGE, Role.PIPELINE)

    @property
    def owns_at_servers(self) -> bool:
        """Whether servers are owners beside the workers."""
        return self is Role.SERVED

    @property
    def has_tables(self) -> bool:
        """Whether servers alone have the parameters."""
        return self is Role.TABLE

    @property
    def takes_servers(self) -> bool:
        """Whether servers take part, which lets workers run ahead of one another."""
        return self in (Role.SERVED, Role.TABLE)

    @property
    def is_at_tail(self) -> bool:
        """Whether tail hosts run its layers, all of which are one site."""
        return self is Role.STAGE

    @property
    def names_ranks(self) -> bool:
        """Whether a plan names the rank of each layer, and all of its layers are one site."""
        return self is Role.PIPELINE

    @property
    def runs_elsewhere(self) -> bool:
        """Whether other ranks, or tail hosts, run the layers in a rank's call of the model."""
        return self.is_at_tail or self.names_ranks

    @property
    def fits_tail_hosts(self) -> bool:
        """Whether tail hosts can share a layer so: it needs no hosts but those that run it."""
        return not (self.takes_servers or self.runs_elsewhere)
