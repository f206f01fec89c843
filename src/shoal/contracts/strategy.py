"""Strategy: how one site is served, what that costs, and whom it refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.contracts.period import Period
from shoal.contracts.probe import Probe
from shoal.contracts.transfer import Transfer
from shoal.contracts.ways import Ways
from shoal.contracts.weighing import Weighing
from shoal.core.buckets import Buckets
from shoal.core.cost import Cost
from shoal.core.facts import Cluster, LayerProfile, first
from shoal.core.placement import Owner
from shoal.core.registry import Contract
from shoal.core.role import Role


@dataclass(frozen=True)
class RowTraffic:
    """The form in which the rows of a cut layer cross the network."""

    chunks: int = 1  # messages that the rows of one rank come in
    codec: Codec | None = None  # writes rows in fewer bytes; None: they cross as they are


@dataclass(frozen=True)
class Place:
    """One site in the model: its modules and parameters, this rank, and the ways to others."""

    layers: Mapping[str, nn.Module]
    # the site's own trainable ones, by dotted name, in the plan's order
    parameters: Mapping[str, nn.Parameter]
    rank: int
    ranks: int  # that train; servers stand behind them
    servers: int = 0
    stale: bool = False  # workers run ahead of one another: a server answers each by itself
    buckets: Buckets = field(default_factory=Buckets)
    # of parameters that are owned whole, by dotted name
    owners: Mapping[str, Owner] = field(default_factory=dict)
    # the site's part of a parameter, where not all
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # among the ranks that train, for the main thread: where any layer is cut over them,
    comm: Comm | None = None
    period: Period | None = None  # of steps, where gradients are not applied in each
    rows: RowTraffic = field(default_factory=RowTraffic)  # of a layer that is cut
    ways: Ways = field(default_factory=Ways)  # to layers that others run or hold
    # this rank's rows, for what leaves it in backward
    weighs: Weighing = field(default_factory=Weighing)
    # profiles of the layers by name, where they were measured
    profiles: Mapping[str, LayerProfile] = field(default_factory=dict)


class Strategy(Contract, ABC):
    """How a site is served. Stateless; found by name in the registry."""

    package: ClassVar[str] = "shoal.strategies"
    group: ClassVar[str] = "shoal.strategies"
    role: ClassVar[Role]  # who holds the parameters, and who carries the gradients
    probes: ClassVar[tuple[type[Probe], ...]] = ()  # what it wants to know of every layer
    stays: ClassVar[str] = ""  # why it cannot be undone, where it cannot
    takes_sparse: ClassVar[bool] = False  # gradients that are sparse tensors, as these
    codes_rows: ClassVar[bool] = False  # the rows that it sends, where a plan gives it a codec
    # names of the classes in torch.nn that it serves; empty if it may serve any
    kinds: ClassVar[tuple[str, ...]] = ()
    takes_alike: ClassVar[bool] = False  # layers of other classes, if they work like one of these

    def takes(self, exchange: Exchange) -> bool:
        """Whether that exchange can carry it."""
        return self.role.takes_exchange

    @abstractmethod
    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        """Why it cannot serve this layer, or None."""

    def refusal(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        """Return why it cannot serve this layer, or None. Asks `unable` and `refuses`, and looks at
        sparse gradients and at owners.
        """
        servers, tail_hosts = len(cluster.servers), len(cluster.tail)
        like = first(facts.works_like() for facts in layer.facts)
        if reason := self.unable(layer.kind, servers, tail_hosts, like):
            return reason
        for parameter in layer.parameters:
            if parameter.sparse and not self.takes_sparse:
                return (
                    f"the gradient of {parameter.name} is a sparse tensor, which only "
                    '"sparse" sends as what it is'
                )
            if parameter.owner is not None and parameter.owner.given and not self.role.has_owners:
                return (
                    f"it has no owners, but the placement gives {parameter.name} "
                    f"to rank {parameter.owner.number}"
                )
        return self.refuses(layer, cluster)

    @classmethod
    def unable(cls, kind: str, servers: int, tail_hosts: int, like: str = "") -> str:
        """Return why it cannot serve a layer, as far as that is known before a measurement.

        Args:
            kind: the class of the layer's module.
            servers: number of hosts that own parameters and do not train.
            tail_hosts: number of hosts that run the end of the model.
            like: the class in torch.nn that the layer may work like, or ''.

        Returns:
            The reason; '' if it may be able.
        """
        may_serve = kind in cls.kinds or (cls.takes_alike and like in cls.kinds)
        if cls.kinds and not may_serve:
            served = " and ".join(f"nn.{name}" for name in cls.kinds)
            return f"it serves {served}, and this is a {kind}"
        if cls.role.takes_servers and not servers:
            return "there are no servers (shoal lab --servers, or SHOAL_SERVERS beside torchrun)"
        if cls.role.is_at_tail and not tail_hosts:
            return "there are no tail hosts (shoal lab --tail, or SHOAL_TAIL beside torchrun)"
        return ""

    @classmethod
    def unfit(cls, module: nn.Module) -> str:
        """Return why it cannot serve a module, as far as that shows before a measurement.

        Returns:
            The reason; '' if it may be able.
        """
        return ""

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        """Other layers, each with the strategy that it must have where this one serves `layer`."""
        return {}

    @abstractmethod
    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        """What serving these layers as one site costs one rank in one step."""

    @abstractmethod
    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        """Rewrite the site's modules in place; return what the engine sends, on all alike."""

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        """Undo `apply`, which returned these transfers; not called where the strategy `stays`.

        Modules and parameters are what they were: the same objects, of the same classes, whole,
        with no hook. A collective: the same calls on every rank, when nothing is under way.
        """
        for transfer in transfers:
            transfer.release()

    def flips_at(self, layer: LayerProfile, ranks: int) -> float | None:
        """Rows K a rank above which all-reduce sends fewer bytes; None if K does not matter."""
        return None


def probes_of(strategies: Iterable[type[Strategy]]) -> tuple[type[Probe], ...]:
    """Every probe that these strategies ask for, once."""
    return tuple(dict.fromkeys(probe for strategy in strategies for probe in strategy.probes))
