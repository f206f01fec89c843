"""Measured facts: a model's layers, and the links between ranks. Plain frozen data, no torch.

A `ModelProfile` is the maximum over the figures of all ranks, measured while all of them ran. So
cores that several ranks share have the price that they have in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self, TypeVar

from shoal.core.cost import CodingPace, Pace, Price, Traffic
from shoal.core.facts_checks import check_cluster, check_link, check_topology
from shoal.core.placement import Owner
from shoal.core.terms import OF_ROWS, Terms


@dataclass(frozen=True)
class Topology:
    """Hosts of the ranks: `hosts[rank]` is a host's name.

    The last `servers` ranks are servers, or the last `tail` ranks run the end of the model.

    Examples:
        >>> import shoal
        >>> shoal.Topology(("one", "one", "other", "other")).ranks_per_host
        2
    """

    hosts: tuple[str, ...]
    servers: int = 0
    tail: int = 0
    processors: tuple[str, ...] = ()  # processor of each rank; equal names if they round alike

    def __post_init__(self) -> None:
        check_topology(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @cached_property
    def ranks_on(self) -> Mapping[str, tuple[int, ...]]:
        """Each host's ranks, ascending; the hosts are in the order of their first ranks."""
        ranks: dict[str, tuple[int, ...]] = {}
        for rank, host in enumerate(self.hosts):
            ranks[host] = (*ranks.get(host, ()), rank)
        return ranks

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Each rank's place among the ranks of its host."""
        return tuple(self.ranks_on[host].index(rank) for rank, host in enumerate(self.hosts))

    def apart(self, one: int, other: int) -> bool:
        """Return whether two ranks are on different hosts."""
        return self.hosts[one] != self.hosts[other]

    @property
    def workers(self) -> int:
        """Number of ranks that train."""
        return self.size - self.servers - self.tail

    def among(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some ranks alone."""
        processors = [self.processors[rank] for rank in ranks] if self.processors else []
        return Topology(tuple(self.hosts[rank] for rank in ranks), processors=tuple(processors))

    @property
    def ranks_per_host(self) -> int:
        """Largest number of ranks on one host."""
        return max(len(ranks) for ranks in self.ranks_on.values())


@dataclass(frozen=True)
class Link:
    """Link of a rank, each way: seconds = `latency_s` + bytes / `bytes_per_s`.

    The ranks of one host share its link: `bytes_per_s` is a rank's share while all of them send to
    other hosts.

    Examples:
        >>> import shoal
        >>> shoal.Link(latency_s=1e-4, bytes_per_s=125e6)  # 1 Gbit/s
        Link(latency_s=0.0001, bytes_per_s=125000000.0, cpu_s_per_byte=0.0, burst_bytes=0.0)
    """

    latency_s: float
    bytes_per_s: float
    cpu_s_per_byte: float = 0.0  # processor time for a byte sent and received, on one rank
    # bytes that pass at once after a pause, if a token bucket shapes the link
    burst_bytes: float = 0.0
    # rate of a few messages, in bytes a second, when the link was measured; it shows later whether
    # the link is the same. 0: not tried
    tried: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        check_link(self)

    @property
    def burst_s(self) -> float:
        """Seconds of pause after which a whole burst passes for free."""
        return self.burst_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Ranks and the links between them, with each exchange's measured pace.

    `cores_per_rank` is the compute that a rank has for its main thread and for its lanes. Give it
    to `plan` to plan for hosts that you only imagine.

    Examples:
        >>> import shoal
        >>> hosts = shoal.Topology(("one", "other"))
        >>> shoal.Cluster(hosts, shoal.Link(latency_s=1e-4, bytes_per_s=125e6)).size
        2
    """

    topology: Topology
    link: Link
    cores_per_rank: float = 1.0
    paces: Mapping[str, Pace] = field(default_factory=lambda: MappingProxyType({}))
    # seconds of the main thread to copy a byte of gradient into its bucket
    pack_byte_s: float = 0.0
    # additional processor seconds for each gradient, because autograd calls a hook
    pack_each_s: float = 0.0
    # hosts of ranks that only own parameters, after the hosts of the topology
    servers: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()  # hosts of ranks that run the end of the model, after them
    # pace of messages between all ranks that main threads wait for, one move at a time
    moves: Pace | None = None
    # part of its rate that each direction of a link keeps while servers' buckets go and come
    duplex: float = 1.0
    ahead: bool = False  # workers run ahead of one another, so that servers own all parameters
    apart: bool = False  # each worker steps by itself, and servers add its changes
    # paces of codecs, by their names in plans
    codings: Mapping[str, CodingPace] = field(default_factory=lambda: MappingProxyType({}))
    # whether each rank has its part of a core all the time, e.g. by a quota. Otherwise ranks that
    # share cores take turns, and a rank that computes has a whole one
    steady: bool = False

    def __post_init__(self) -> None:
        check_cluster(self, Topology, Link)

    def pack_s(self, nbytes: float, gradients: int) -> float:
        """Return the main thread's seconds to fill a bucket of these bytes with gradients."""
        return nbytes * self.pack_byte_s + gradients * self.pack_each_s / self.core_part

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    @property
    def core_part(self) -> float:
        """The part of a core that a rank's main thread had in the profile, at most 1."""
        return min(1.0, self.cores_per_rank)

    @property
    def turn(self) -> float:
        """Part of its computing time in which a rank has a core, if ranks take turns."""
        return 1.0 if self.steady else self.core_part

    def pace(self, exchange: str) -> Pace:
        """Return an exchange's measured pace, or one at the link's rate and processor time."""
        unmeasured = Pace(
            Price(self.link.latency_s, 1 / self.link.bytes_per_s),
            Price(0.0, self.link.cpu_s_per_byte),
        )
        return self.paces.get(exchange, unmeasured)

    def coding(self, codec: str) -> CodingPace:
        """Return a codec's measured pace, or the default."""
        return self.codings.get(codec, CodingPace())

    @property
    def move_pace(self) -> Pace:
        """Pace of messages that main threads wait for: as measured, or that of `direct`."""
        return self.moves or self.pace("direct")

    def link_s(self, traffic: Traffic) -> float:
        """Return the seconds for the bytes that leave the busiest host, over its whole link.

        No schedule is faster. If there is one host only, nothing leaves it: then the bytes of the
        busiest rank count.
        """
        hosts = self.topology.ranks_on.values()
        if len(hosts) == 1:
            return traffic.worst / self.link.bytes_per_s
        leaving = traffic.leaving or traffic.sent
        busiest = max(sum(leaving[r] for r in ranks) for ranks in hosts)
        return busiest / (self.link.bytes_per_s * self.topology.ranks_per_host)


@dataclass(frozen=True)
class ParameterProfile:
    """Parameter as its own layer knows it. `name` is the dotted name in the model."""

    name: str
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    used: bool  # it got a gradient in the sample run
    ready_s: float  # seconds from the start of backward until its gradient was there
    # owner of the whole parameter, as a plan places it; None: owners have shares of it
    owner: Owner | None = None
    sparse: bool = False  # its gradient is a sparse tensor
    is_real: bool = True  # its numbers are not complex; codecs take real ones
    again: bool = False  # its gradient comes in several parts of one backward

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, and of its gradient."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Facts:
    """Facts that a probe has found about one layer (contracts/probe.py).

    A subclass is a frozen dataclass. Its defaults hold if nothing was measured.
    """

    @classmethod
    def of_ranks(cls, ranks: Sequence[Self]) -> Self:
        """Join the ranks' facts: the largest number, any flag that is set, the first text.

        Raises:
            TypeError: a field is none of these, so the subclass has to define how.
        """
        values = {f.name: [getattr(facts, f.name) for facts in ranks] for f in fields(cls)}
        return cls(**{name: _of_ranks(found, cls, name) for name, found in values.items()})

    def works_like(self) -> str:
        """Return the class in torch.nn that the layer may work like, though it is of another."""
        return ""

    def in_profile(self, profile: ModelProfile) -> Self:
        """Return the facts with the additions that follow from the profile of all ranks."""
        return self

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> Self:
        """Return the facts for a job of some layers only; `layer` is the layer before that."""
        return self


F = TypeVar("F", bound=Facts)


def _of_ranks(values: Sequence[Any], kind: type[Facts], name: str) -> Any:
    if all(isinstance(value, str) for value in values):
        return first(values)
    if all(isinstance(value, int | float) for value in values):
        return max(values)
    form = f"{kind.__name__}.{name} is no number, flag or text"
    raise TypeError(f"{form}: write {kind.__name__}.of_ranks, which makes one of the ranks' facts")


def first(texts: Iterable[str]) -> str:
    """Return the first text that is not empty, or ''."""
    return next(filter(None, texts), "")


@dataclass(frozen=True)
class Excerpt:
    """Layers that make a job of their own: the end of the model, on tail hosts."""

    layers: tuple[str, ...]
    rows: float  # rows of each rank of that job, in multiples of a worker's rows


@dataclass(frozen=True)
class Setting:
    """Settings of a layer in a plan besides its strategy, most of them the same for all layers."""

    chunks: int = 1  # chunks of rows, to and from a layer that is cut
    joined: bool = True  # tail hosts run all micro-batches at once
    codec: str = ""  # codec of this layer's rows, if it is cut
    every: int = 1  # steps from one update of the layer to the next
    rank: int = 0  # holder of the layer, in a pipeline
    parts: int = 1  # parts of each rank's rows, in a pipeline


@dataclass(frozen=True)
class LayerProfile:
    """Module that owns parameters. In a matrix product, K, M, N are `rows`, `inputs`, `outputs`.

    `rows` counts samples times tokens on one rank. For an embedding it is the number of ids looked
    up, and `inputs` the number of table rows. More figures are in `facts`.
    """

    name: str
    kind: str
    parameters: tuple[ParameterProfile, ...]
    rows: int = 0
    inputs: int = 0
    outputs: int = 0
    calls: int = 1
    calls_vary: bool = False  # the number differs between steps, or between ranks
    may_vary: str = ""  # reason why the calls may vary, though the sample does not show it
    needed_s: float = 0.0  # seconds from the start of forward until the layer is first called
    forward_s: float = 0.0
    backward_s: float = 0.0
    # reason why the weight cannot be served through its layer alone: tied, borrowed, frozen …
    outside_use: str = ""
    setting: Setting = Setting()
    facts: tuple[Facts, ...] = ()  # one object for each kind that was measured

    def measured(self, kind: type[F]) -> F:
        """Return the facts of one kind, or its defaults if they were not measured."""
        return next((facts for facts in self.facts if isinstance(facts, kind)), kind())

    @property
    def nbytes(self) -> int:
        """Bytes of all its trainable parameters."""
        return sum(p.nbytes for p in self.parameters)

    @property
    def ready_s(self) -> float:
        """Seconds from the start of backward until the last of its gradients is there."""
        return max((p.ready_s for p in self.parameters), default=0.0)

    def part(self, spans: Iterable[tuple[int, int, int]]) -> LayerProfile:
        """Return the layer with these spans of its parameters only."""
        parameters = tuple(
            replace(self.parameters[index], numel=stop - start) for index, start, stop in spans
        )
        return replace(self, parameters=parameters)

    def in_excerpt(self, excerpt: Excerpt, starts_s: float) -> LayerProfile:
        """Return the layer in an excerpt that starts so late in the whole model's forward."""
        return replace(
            self,
            parameters=tuple(replace(p, ready_s=p.ready_s * excerpt.rows) for p in self.parameters),
            rows=round(self.rows * excerpt.rows),
            needed_s=(self.needed_s - starts_s) * excerpt.rows,
            forward_s=self.forward_s * excerpt.rows,
            backward_s=self.backward_s * excerpt.rows,
            facts=tuple(facts.in_excerpt(self, excerpt) for facts in self.facts),
        )


@dataclass(frozen=True)
class MovingState:
    """State that drifts apart between ranks in training, and is made equal after each backward.

    `how` is "first" to take rank 0's state, or "mean" for the mean over ranks.
    """

    name: str  # dotted name of a buffer or a frozen parameter
    numel: int
    itemsize: int  # bytes of an element as it is sent
    how: str
    in_backward: bool = False  # it also changes in backward, so it is sent when backward is over

    @property
    def nbytes(self) -> int:
        """Bytes of the state as it is sent."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class SyncNorm:
    """Batch norm over the rows of all ranks: the bytes from a rank to every other one in a step."""

    name: str  # dotted name of the module
    channels: int
    itemsize: int  # bytes of a sum as it is sent
    calls: int = 1
    returns: bool = True  # its rows take a gradient

    @property
    def forward_bytes(self) -> int:
        """Bytes of a call's forward: means, squares and the number of rows."""
        return (2 * self.channels + 1) * self.itemsize

    @property
    def backward_bytes(self) -> int:
        """Bytes of a call's backward: two sums for each channel."""
        return 2 * self.channels * self.itemsize * self.returns

    @property
    def nbytes(self) -> int:
        """Bytes of a step."""
        return self.calls * (self.forward_bytes + self.backward_bytes)


@dataclass(frozen=True)
class UpdatePace:
    """Time of the optimizers' step that does not depend on the sizes of parameters."""

    call_s: float = 0.0  # seconds once for each step
    parameter_s: float = 0.0  # seconds for each parameter

    def of(self, parameters: int) -> float:
        """Return the seconds of a step for so many parameters of hardly any size."""
        return self.call_s + parameters * self.parameter_s

    def times(self, factor: float) -> UpdatePace:
        """Return the pace of ranks that take so many times as long."""
        return UpdatePace(self.call_s * factor, self.parameter_s * factor)


@dataclass(frozen=True)
class ModelProfile:
    """Step of a model on one rank: layers in the order of their gradients, and its times."""

    layers: tuple[LayerProfile, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    digest: str  # digest of names, shapes and types: two models with one digest take the same plan
    state_bytes: float = 0.0  # bytes that the optimizers keep for all parameters
    moving: tuple[MovingState, ...] = ()
    local: tuple[str, ...] = ()  # state that training changes, and that each rank keeps for itself
    norms: tuple[SyncNorm, ...] = ()
    terms: Terms = OF_ROWS  # the terms that the loss is a mean over
    update: UpdatePace = UpdatePace()  # the part of optimizer_s that does not depend on bytes
    rank_s: tuple[float, ...] = ()  # seconds of each rank's own forward and backward

    @property
    def nbytes(self) -> int:
        """Bytes of all trainable parameters."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds of a step that sends nothing."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def update_bytes_s(self) -> float:
        """The part of optimizer_s that depends on bytes."""
        parameters = sum(len(layer.parameters) for layer in self.layers)
        return max(0.0, self.optimizer_s - self.update.of(parameters))

    def with_owners(self, owners: Mapping[str, Owner]) -> ModelProfile:
        """Return the profile with these owners of whole parameters only, by dotted name."""
        return replace(
            self,
            layers=tuple(
                replace(
                    layer,
                    parameters=tuple(
                        replace(p, owner=owners.get(p.name)) for p in layer.parameters
                    ),
                )
                for layer in self.layers
            ),
        )

    def under(self, setting: Setting) -> ModelProfile:
        """Return the profile with one setting for all layers."""
        return replace(self, layers=tuple(replace(layer, setting=setting) for layer in self.layers))

    def updated(self, every: Mapping[str, int]) -> ModelProfile:
        """Return the profile with update periods in steps, by the names of layers."""
        if not every:
            return self
        settings = {
            layer.name: replace(layer.setting, every=every.get(layer.name, 1))
            for layer in self.layers
        }
        layers = tuple(replace(layer, setting=settings[layer.name]) for layer in self.layers)
        return replace(self, layers=layers)

    def excerpt(self, excerpt: Excerpt) -> ModelProfile:
        """Return the profile of the named last layers of forward, with the excerpt's rows."""
        layers = [layer for layer in self.layers if layer.name in excerpt.layers]
        starts_s = min(layer.needed_s for layer in layers)
        share = sum(layer.nbytes for layer in layers) / max(self.nbytes, 1)
        fixed_s = self.update.of(sum(len(layer.parameters) for layer in layers))
        return ModelProfile(
            layers=tuple(layer.in_excerpt(excerpt, starts_s) for layer in layers),
            forward_s=max(0.0, self.forward_s - starts_s) * excerpt.rows,
            backward_s=max(layer.ready_s for layer in layers) * excerpt.rows,
            optimizer_s=fixed_s + self.update_bytes_s * share,
            digest=self.digest,
            state_bytes=self.state_bytes * share,
            update=self.update,
        )

    @property
    def names(self) -> dict[str, list[str]]:
        """Names of each layer's parameters; layers are in the order of their gradients."""
        return {layer.name: [p.name for p in layer.parameters] for layer in self.layers}

    def layer(self, name: str) -> LayerProfile:
        """Return the layer of that dotted name (KeyError if there is none)."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)
