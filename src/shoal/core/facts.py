"""What was measured: a model's layers, and the links between ranks. Plain frozen data, no torch.

A `ModelProfile` is the maximum over ranks of what each rank saw while all of them ran, so that
cores shared by several ranks are priced as they will be in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from shoal.core.cost import Pace, Price, Traffic
from shoal.core.placement import Owner


@dataclass(frozen=True)
class Topology:
    """Which host each rank runs on: `hosts[rank]` is a host's name.

    The last `servers` ranks are servers; or the last `tail` of them run the end of the model
    (strategies/stage.py).
    """

    hosts: tuple[str, ...]
    servers: int = 0
    tail: int = 0

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

    def among(self, ranks: range) -> Topology:
        """Some ranks by themselves."""
        return Topology(self.hosts[ranks.start : ranks.stop])

    @property
    def ranks_per_host(self) -> int:
        """Most ranks on one host."""
        return max(len(ranks) for ranks in self.ranks_on.values())


@dataclass(frozen=True)
class Link:
    """What one rank's way to the others carries: seconds = `latency_s` + bytes / `bytes_per_s`,
    each direction.

    The ranks of one host share its link: `bytes_per_s` is a rank's share while all of them send to
    other hosts.
    """

    latency_s: float
    bytes_per_s: float
    cpu_s_per_byte: float = 0.0  # processor time that a sent-and-received byte costs on one rank
    # what passes for free after a pause, as where a token bucket shapes the link
    burst_bytes: float = 0.0

    @property
    def burst_s(self) -> float:
        """Seconds of pause after which a whole burst passes for free."""
        return self.burst_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """The ranks and the links between them, with each exchange's measured pace.

    `cores_per_rank` says how much compute a rank has for its main thread and what its lanes compute
    and send.
    """

    topology: Topology
    link: Link
    cores_per_rank: float = 1.0
    paces: Mapping[str, Pace] = field(default_factory=lambda: MappingProxyType({}))
    # seconds of the main thread to bring a byte of gradient into its bucket
    pack_byte_s: float = 0.0
    # hosts of ranks that only own parameters, behind those of the topology
    servers: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()  # or of ranks that run the end of the model
    # of messages between all ranks that main threads wait for, one move at a time
    moves: Pace | None = None
    # of its rate what each direction of a link keeps while servers' buckets go and come
    duplex: float = 1.0
    ahead: bool = False  # workers run ahead of one another, so that servers own all

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    def pace(self, exchange: str) -> Pace:
        """An exchange's pace: as measured, else all that the link gives at the processor time that
        its bytes cost.
        """
        unmeasured = Pace(
            Price(self.link.latency_s, 1 / self.link.bytes_per_s),
            Price(0.0, self.link.cpu_s_per_byte),
        )
        return self.paces.get(exchange, unmeasured)

    @property
    def move_pace(self) -> Pace:
        """The pace of what main threads wait for: as measured, else `direct`'s, whose messages are
        like theirs.
        """
        return self.moves or self.pace("direct")

    def link_s(self, traffic: Traffic) -> float:
        """Seconds below which no schedule gets this traffic through: what leaves the busiest host,
        over its whole link.

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

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, and of its gradient."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Tail:
    """An end of the model: what its modules put out goes to the loss and nowhere else. Bytes and
    seconds of a rank.
    """

    # called one after the other, each with what the one before has put out
    modules: tuple[str, ...]
    layers: tuple[str, ...]
    micro_batches: int
    sent_bytes: float  # to where it runs: activations, targets, and what goes with them
    received_bytes: float  # from there
    # all micro-batches go through it at once: their transfer is hidden, its compute is not
    joined: bool = True
    body_forward_s: float = 0.0  # of what comes before it
    body_backward_s: float = 0.0
    forward_s: float = 0.0  # of itself and the loss
    backward_s: float = 0.0
    pass_s: float = 0.0  # of the last two what takes as long however few rows there are


@dataclass(frozen=True)
class LayerProfile:
    """One module that owns parameters. K, M and N are `rows`, `inputs` and `outputs` of the layer
    as a product.

    `rows` counts samples times tokens on one rank; for an embedding it is the number of ids looked
    up and `inputs` the number of table rows. `product_s(k)` prices the weight's gradient product
    over k rows, into memory that is there.
    """

    name: str
    kind: str
    parameters: tuple[ParameterProfile, ...]
    rows: int = 0
    inputs: int = 0
    outputs: int = 0
    calls: int = 1
    calls_vary: bool = False  # from step to step, or from rank to rank
    chunks: int = 1  # that its rows come in, and go back, where it is cut over ranks
    input_grad: bool = True  # something it is called with takes a gradient
    taken: int = 0  # elements of what it is called with, in all calls
    # each of its outputs follows from one row of its weight: it can be cut by outputs
    rowwise: bool = False
    # rows of its output that go into cross entropies and nowhere else; 0 where some go elsewhere
    loss_rows: int = 0
    loss_calls: int = 0  # in how many of these, with the softmaxes on the way,
    softmax_rows: int = 0  # and the rows in those
    # the linear layer that takes all of its output and nothing else, with element-wise work between
    feeds: str = ""
    fed_by: str = ""  # the layer that feeds this one so
    distinct: int = 0  # different ids that an embedding looks up, each call's by themselves
    needed_s: float = 0.0  # seconds from the start of forward until the layer is first called
    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: int = 0
    product_fixed_s: float = 0.0
    product_s_per_row: float = 0.0
    # the product of its own K rows as autograd makes it, in what is new memory in a step
    own_product_s: float = 0.0
    whole_update: str = ""  # why its optimizer cannot update parts of its parameters by themselves
    joint_update: str = ""  # why not even its parameters, each whole and by itself
    # a parameter gets a gradient, and none of PyTorch's functions was seen to read it: C++ code?
    unread: bool = False
    # why the weight cannot be served through its layer alone: tied, borrowed, frozen …
    outside_use: str = ""
    tail: Tail | None = None  # the smallest end of the model that has it,
    no_tail: str = ""  # or why there is none

    @property
    def nbytes(self) -> int:
        """Bytes of all its trainable parameters."""
        return sum(p.nbytes for p in self.parameters)

    @property
    def ready_s(self) -> float:
        """Seconds from the start of backward until the last of its gradients is there."""
        return max((p.ready_s for p in self.parameters), default=0.0)

    def part(self, spans: Iterable[tuple[int, int, int]]) -> LayerProfile:
        """The layer with no more than these elements of its parameters: of which, from where to
        where.
        """
        mine = tuple(
            replace(self.parameters[index], numel=stop - start) for index, start, stop in spans
        )
        return replace(self, parameters=mine)

    def product_s(self, rows: float) -> float:
        """Seconds that the weight's gradient product takes over `rows` rows."""
        return self.product_fixed_s + self.product_s_per_row * rows


@dataclass(frozen=True)
class ModelProfile:
    """A model's step on one rank: layers in the order their gradients come, and the times of the
    step's parts.
    """

    layers: tuple[LayerProfile, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    digest: str  # of names, shapes and types: two models with one digest take the same plan
    state_bytes: float = 0.0  # what the optimizers keep for all parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all trainable parameters."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds of a step in which nothing is sent."""
        return self.forward_s + self.backward_s + self.optimizer_s

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

    def joining(self, joined: bool) -> ModelProfile:
        """The same profile, in which micro-batches go through the model's end at once, or each by
        itself.
        """
        tails = {
            layer.name: layer.tail and replace(layer.tail, joined=joined) for layer in self.layers
        }
        return replace(
            self, layers=tuple(replace(layer, tail=tails[layer.name]) for layer in self.layers)
        )

    def in_chunks(self, chunks: int) -> ModelProfile:
        """The same profile, in which rows come to layers that are cut in so many chunks."""
        return replace(self, layers=tuple(replace(layer, chunks=chunks) for layer in self.layers))

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
