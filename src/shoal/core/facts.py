"""What was measured: a model's layers, and the links between ranks. Plain frozen data, no torch.

A `ModelProfile` is the maximum over ranks of what each rank saw while all of them ran, so that
cores shared by several ranks are priced as they will be in training.
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
    """Which host each rank runs on: `hosts[rank]` is a host's name.

    The last `servers` ranks are servers; or the last `tail` of them run the end of the model.

    Examples:
        >>> import shoal
        >>> shoal.Topology(("one", "one", "other", "other")).ranks_per_host
        2
    """

    hosts: tuple[str, ...]
    servers: int = 0
    tail: int = 0
    processors: tuple[str, ...] = ()  # of each rank: alike where they round alike

    def __post_init__(self) -> None:
        check_topology(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @cached_property
    def ranks_on(self) -> Mapping[str, tuple[int, ...]]:
        """Each host's ranks, ascending; the hosts in the order of their first ranks."""
        ranks: dict[str, tuple[int, ...]] = {}
        for rank, host in enumerate(self.hosts):
            ranks[host] = (*ranks.get(host, ()), rank)
        return ranks

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Each rank's place among the ranks of its host."""
        return tuple(self.ranks_on[host].index(rank) for rank, host in enumerate(self.hosts))

    def apart(self, one: int, other: int) -> bool:
        """Whether two ranks are on different hosts."""
        return self.hosts[one] != self.hosts[other]

    @property
    def workers(self) -> int:
        """How many ranks train."""
        return self.size - self.servers - self.tail

    def among(self, ranks: Sequence[int]) -> Topology:
        """Some ranks by themselves."""
        processors = [self.processors[rank] for rank in ranks] if self.processors else []
        return Topology(tuple(self.hosts[rank] for rank in ranks), processors=tuple(processors))

    @property
    def ranks_per_host(self) -> int:
        """Most ranks on one host."""
        return max(len(ranks) for ranks in self.ranks_on.values())


@dataclass(frozen=True)
class Link:
    """What a rank's link carries each way: seconds = `latency_s` + bytes / `bytes_per_s`.

    The ranks of one host share its link: `bytes_per_s` is a rank's share while all of them send to
    other hosts.

    Examples:
        >>> import shoal
        >>> shoal.Link(latency_s=1e-4, bytes_per_s=125e6)  # 1 Gbit/s
        Link(latency_s=0.0001, bytes_per_s=125000000.0, cpu_s_per_byte=0.0, burst_bytes=0.0)
    """

    latency_s: float
    bytes_per_s: float
    cpu_s_per_byte: float = 0.0  # processor time that a sent-and-received byte costs on one rank
    # what passes for free after a pause, as where a token bucket shapes the link
    burst_bytes: float = 0.0
    # bytes a second of a few messages, as it was measured, by which it is known again; 0: not tried
    tried: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        check_link(self)

    @property
    def burst_s(self) -> float:
        """Seconds of pause after which a whole burst passes for free."""
        return self.burst_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """The ranks and the links between them, with each exchange's measured pace.

    `cores_per_rank` says how much compute a rank has for its main thread and what its lanes compute
    and send. Give it to `plan` to plan for hosts that you only imagine.

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
    # seconds of the main thread to bring a byte of gradient into its bucket
    pack_byte_s: float = 0.0
    # and processor seconds for each gradient besides: autograd calls a hook
    pack_each_s: float = 0.0
    # hosts of ranks that only own parameters, behind those of the topology
    servers: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()  # or of ranks that run the end of the model
    # of messages between all ranks that main threads wait for, one move at a time
    moves: Pace | None = None
    # of its rate what each direction of a link keeps while servers' buckets go and come
    duplex: float = 1.0
    ahead: bool = False  # workers run ahead of one another, so that servers own all
    apart: bool = False  # each steps by itself, and servers add what it has learned
    # of codecs, as plans write them
    codings: Mapping[str, CodingPace] = field(default_factory=lambda: MappingProxyType({}))
    # whether each rank has its part of a core all the time, as by a quota. Else ranks that share
    # cores take turns, and whoever computes has a whole one
    steady: bool = False

    def __post_init__(self) -> None:
        check_cluster(self, Topology, Link)

    def pack_s(self, nbytes: float, gradients: int) -> float:
        """Seconds of the main thread to bring so many gradients into a bucket of these bytes."""
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
        """The part of its computing time in which a rank has a core, where ranks take turns."""
        return 1.0 if self.steady else self.core_part

    def pace(self, exchange: str) -> Pace:
        """An exchange's pace: as measured, else all that the link gives at the processor time that
        its bytes cost.
        """
        unmeasured = Pace(
            Price(self.link.latency_s, 1 / self.link.bytes_per_s),
            Price(0.0, self.link.cpu_s_per_byte),
        )
        return self.paces.get(exchange, unmeasured)

    def coding(self, codec: str) -> CodingPace:
        """What a codec takes, as measured."""
        return self.codings.get(codec, CodingPace())

    @property
    def move_pace(self) -> Pace:
        """The pace of what main threads wait for: as measured, else that of `direct`."""
        return self.moves or self.pace("direct")

    def link_s(self, traffic: Traffic) -> float:
        """Seconds of what leaves the busiest host over its whole link: no schedule is faster.

        On one host alone nothing leaves; there it is what the busiest rank moves.
        """
        hosts = self.topology.ranks_on.values()
        if len(hosts) == 1:
            return traffic.worst / self.link.bytes_per_s
        leaving = traffic.leaving or traffic.sent
        busiest = max(sum(leaving[r] for r in ranks) for ranks in hosts)
        return busiest / (self.link.bytes_per_s * self.topology.ranks_per_host)


@dataclass(frozen=True)
class ParameterProfile:
    """One parameter as its owner layer knows it; `name` is the dotted name in the model."""

    name: str
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    used: bool  # got a gradient in the sample run
    ready_s: float  # seconds from the start of backward until its gradient was there
    # who owns it whole, as a plan places it; None: owners have shares of it
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
    """What a probe has found of one layer (contracts/probe.py).

    A subclass is a frozen dataclass. A field's default holds where nothing was measured.
    """

    @classmethod
    def of_ranks(cls, ranks: Sequence[Self]) -> Self:
        """The ranks' facts in one: the largest number, any flag that is set, the first text.

        Raises:
            TypeError: a field is none of these, so that the subclass has to say how.
        """
        values = {f.name: [getattr(facts, f.name) for facts in ranks] for f in fields(cls)}
        return cls(**{name: _of_ranks(found, cls, name) for name, found in values.items()})

    def works_like(self) -> str:
        """Return the class in torch.nn that the layer may work like, though it is of another."""
        return ""

    def in_profile(self, profile: ModelProfile) -> Self:
        """These facts with what follows from the profile of all ranks."""
        return self

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> Self:
        """These facts where some layers are a job of their own; `layer` is as it was before."""
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
    """The first text that says something, or ''."""
    return next(filter(None, texts), "")


@dataclass(frozen=True)
class Excerpt:
    """Layers that make a job of their own: the end of the model, on tail hosts."""

    layers: tuple[str, ...]
    rows: float  # how many times those of a worker each rank of that job has


@dataclass(frozen=True)
class Setting:
    """What a plan says of a layer beside its strategy, most of it of all layers at once."""

    chunks: int = 1  # that rows come in, and go back, to layers that are cut over ranks
    joined: bool = True  # tail hosts run all micro-batches at once
    codec: str = ""  # of this layer's rows, where it is cut
    every: int = 1  # steps from one update of the layer to the next
    rank: int = 0  # holder of the layer, in a pipeline
    parts: int = 1  # parts of each rank's rows, in a pipeline


@dataclass(frozen=True)
class LayerProfile:
    """One module that owns parameters; as a product K, M, N are `rows`, `inputs`, `outputs`.

    `rows` counts samples times tokens on one rank. For an embedding it is the number of ids looked
    up, and `inputs` the number of table rows. What strategies ask for beyond that is in `facts`.
    """

    name: str
    kind: str
    parameters: tuple[ParameterProfile, ...]
    rows: int = 0
    inputs: int = 0
    outputs: int = 0
    calls: int = 1
    calls_vary: bool = False  # from step to step, or from rank to rank
    may_vary: str = ""  # why they may, though the sample does not show it
    needed_s: float = 0.0  # seconds from the start of forward until the layer is first called
    forward_s: float = 0.0
    backward_s: float = 0.0
    # why the weight cannot be served through its layer alone: tied, borrowed, frozen …
    outside_use: str = ""
    setting: Setting = Setting()
    facts: tuple[Facts, ...] = ()  # one of each kind that was measured

    def measured(self, kind: type[F]) -> F:
        """The facts of one kind; that kind's defaults where they were not measured."""
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
        """The layer with these spans of its parameters only."""
        parameters = tuple(
            replace(self.parameters[index], numel=stop - start) for index, start, stop in spans
        )
        return replace(self, parameters=parameters)

    def in_excerpt(self, excerpt: Excerpt, starts_s: float) -> LayerProfile:
        """The layer in an excerpt of its model whose forward starts so late in the whole one."""
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
    """State that training changes on each rank otherwise, and that agrees after each backward.

    `how`: "first" is rank 0's, "mean" the mean over ranks.
    """

    name: str  # dotted, of a buffer or a frozen parameter
    numel: int
    itemsize: int  # of an element as it is sent
    how: str
    in_backward: bool = False  # it changes there, too, so it goes when backward is over

    @property
    def nbytes(self) -> int:
        """Bytes of it, as they are sent."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class SyncNorm:
    """A batch norm over the rows of all ranks: what a rank sends to every other one in a step."""

    name: str  # dotted, of the module
    channels: int
    itemsize: int  # of a sum as it is sent
    calls: int = 1
    returns: bool = True  # its rows take a gradient

    @property
    def forward_bytes(self) -> int:
        """Of a call: means, squares and the number of rows."""
        return (2 * self.channels + 1) * self.itemsize

    @property
    def backward_bytes(self) -> int:
        """Of a call: two sums a channel."""
        return 2 * self.channels * self.itemsize * self.returns

    @property
    def nbytes(self) -> int:
        """Of a step."""
        return self.calls * (self.forward_bytes + self.backward_bytes)


@dataclass(frozen=True)
class UpdatePace:
    """What a step of the optimizers takes whatever sizes parameters have."""

    call_s: float = 0.0  # once
    parameter_s: float = 0.0  # for each parameter

    def of(self, parameters: int) -> float:
        """Seconds of a step for so many parameters of hardly any size."""
        return self.call_s + parameters * self.parameter_s

    def times(self, factor: float) -> UpdatePace:
        """That of ranks that take so many times as long."""
        return UpdatePace(self.call_s * factor, self.parameter_s * factor)


@dataclass(frozen=True)
class ModelProfile:
    """A model's step on one rank: layers in the order of their gradients, and its times."""

    layers: tuple[LayerProfile, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    digest: str  # of names, shapes and types: two models with one digest take the same plan
    state_bytes: float = 0.0  # what the optimizers keep for all parameters
    moving: tuple[MovingState, ...] = ()
    local: tuple[str, ...] = ()  # state that training changes, and that each rank keeps for itself
    norms: tuple[SyncNorm, ...] = ()
    terms: Terms = OF_ROWS  # what the loss is a mean over
    update: UpdatePace = UpdatePace()  # the part of optimizer_s that does not go with bytes
    rank_s: tuple[float, ...] = ()  # seconds of each rank's own forward and backward

    @property
    def nbytes(self) -> int:
        """Bytes of all trainable parameters."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds of a step in which nothing is sent."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def update_bytes_s(self) -> float:
        """The part of optimizer_s that goes with bytes."""
        parameters = sum(len(layer.parameters) for layer in self.layers)
        return max(0.0, self.optimizer_s - self.update.of(parameters))

    def placed(self, owners: Mapping[str, Owner]) -> ModelProfile:
        """The same profile with these owners of whole parameters, by dotted name, and no others."""
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
        """The same profile under what a plan says of all layers at once."""
        return replace(self, layers=tuple(replace(layer, setting=setting) for layer in self.layers))

    def updated(self, every: Mapping[str, int]) -> ModelProfile:
        """The same profile whose layers, by name, are updated every so many steps."""
        if not every:
            return self
        settings = {
            layer.name: replace(layer.setting, every=every.get(layer.name, 1))
            for layer in self.layers
        }
        layers = tuple(replace(layer, setting=settings[layer.name]) for layer in self.layers)
        return replace(self, layers=layers)

    def excerpt(self, excerpt: Excerpt) -> ModelProfile:
        """The last layers of forward as a job of their own: those that it names, with its rows."""
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
        """Names of each layer's parameters, layers in the order their gradients come."""
        return {layer.name: [p.name for p in layer.parameters] for layer in self.layers}

    def layer(self, name: str) -> LayerProfile:
        """The layer of that dotted name (KeyError if there is none)."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)
