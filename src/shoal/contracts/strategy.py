"""Strategy: how one site is served, the cost of that, and the layers that it refuses."""

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
from shoal.contracts.row_weights import Weighing
from shoal.contracts.transfer import Transfer
from shoal.contracts.ways import Ways
from shoal.core.buckets import Buckets
from shoal.core.cost import Cost
from shoal.core.facts import Cluster, LayerProfile, first
from shoal.core.placement import Owner
from shoal.core.registry import Contract
from shoal.core.role import Role


@dataclass(frozen=True)
class RowTraffic:
    """The form in which the rows of a cut layer cross the network."""

    chunks: int = 1  # messages that carry one rank's rows
    codec: Codec | None = None  # codec that writes rows in fewer bytes; None: rows cross unchanged


@dataclass(frozen=True)
class Place:
    """Site in the model: its modules and parameters, this rank, and the ways to other ranks."""

    layers: Mapping[str, nn.Module]
    # the site's own trainable parameters, by dotted name, in the plan's order
    parameters: Mapping[str, nn.Parameter]
    rank: int
    ranks: int  # number of ranks that train; the ranks after them are servers
    servers: int = 0
    # workers run ahead of one another, so a server answers each worker separately
    stale: bool = False
    buckets: Buckets = field(default_factory=Buckets)
    # owners of parameters that one rank owns whole, by dotted name
    owners: Mapping[str, Owner] = field(default_factory=dict)
    # range of each parameter that belongs to the site, if not all of it
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # channel among workers, used by the main thread; set if any layer is cut over them
    comm: Comm | None = None
    # steps between two updates, if gradients are not applied in each step
    period: Period | None = None
    # form in which rows cross, for a layer that is cut
    rows: RowTraffic = field(default_factory=RowTraffic)
    ways: Ways = field(default_factory=Ways)  # ways to layers that other ranks run or hold
    # weight of this rank's rows, for gradients that leave it in backward
    weighs: Weighing = field(default_factory=Weighing)
    # profiles of the layers by name, if they were measured
    profiles: Mapping[str, LayerProfile] = field(default_factory=dict)


class Strategy(Contract, ABC):
    """Way to serve a site. A strategy has no state. It is found by name in the registry."""

    package: ClassVar[str] = "shoal.strategies"
    group: ClassVar[str] = "shoal.strategies"
    role: ClassVar[Role]  # ranks that hold the parameters, and the way in which gradients travel
    # probes that measure each layer for this strategy
    probes: ClassVar[tuple[type[Probe], ...]] = ()
    stays: ClassVar[str] = ""  # reason why it cannot be undone; "" if it can
    # it can send gradients that are sparse tensors, without making them dense
    takes_sparse: ClassVar[bool] = False
    codes_rows: ClassVar[bool] = False  # it sends rows by a codec, if a plan gives it one
    # names of the classes in torch.nn that it serves; empty if it may serve any class
    kinds: ClassVar[tuple[str, ...]] = ()
    # it serves layers of other classes too, if they work like one of `kinds`
    takes_alike: ClassVar[bool] = False

    def takes(self, exchange: Exchange) -> bool:
        """Return whether that exchange can carry its gradients."""
        return self.role.takes_exchange

    @abstractmethod
    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        """Return why it cannot serve this layer, or None."""

    def refusal(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        """Return why it cannot serve this layer, or None. This asks `unable` and `refuses`, and
        looks at sparse gradients and at owners.
        """
        like = first(facts.works_like() for facts in layer.facts)
        if reason := self.unable(layer.kind, len(cluster.servers), like):
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
    def unable(cls, kind: str, servers: int, like: str = "") -> str:
        """Return why it cannot serve a layer, as far as this is known before a measurement.

        Args:
            kind: the class of the layer's module.
            servers: number of hosts that own parameters and do not train.
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
        return ""

    @classmethod
    def unfit(cls, module: nn.Module) -> str:
        """Return why it cannot serve a module, as far as that shows before a measurement.

        Returns:
            The reason; '' if it may be able.
        """
        return ""

    def needs(self, layer: LayerProfile) -> dict[str, str]:
        """Return other layers, each with the strategy that it must have if this one serves
        `layer`.
        """
        return {}

    @abstractmethod
    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        """Return the cost of these layers, served as one site, for one rank in one step."""

    @abstractmethod
    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        """Rewrite the site's modules in place.

        Return the transfers, which are alike on all ranks.
        """

    def release(self, place: Place, transfers: Sequence[Transfer]) -> None:
        """Undo `apply`, which returned these transfers. It is not called if the strategy `stays`.

        Afterwards modules and parameters are as before: the same objects, of the same classes,
        whole, with no hook. This is a collective: every rank makes the same calls, when nothing is
        under way.
        """
        for transfer in transfers:
            transfer.release()

    def flips_at(self, layer: LayerProfile, ranks: int) -> float | None:
        """Return the rows K of a rank above which all-reduce sends fewer bytes; None if K does not
        matter.
        """
        return None


def probes_of(strategies: Iterable[type[Strategy]]) -> tuple[type[Probe], ...]:
    """Return every probe that these strategies ask for, once."""
    return tuple(dict.fromkeys(probe for strategy in strategies for probe in strategy.probes))
