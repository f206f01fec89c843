"""Trains the same model twice, in one process on whole batches and on ranks on their rows of them,
and compares.

    whole batch ──▶ a copy, ordinary torch, no shoal                      ──▶ state ─┐
       └─ cut ─┬──▶ a copy on rank 0, parallelised ──▶ state ── same bits? ─┐        ├─ how far?
               └──▶ a copy on rank 1, parallelised ──▶ state ───────────────┴────────┘

Ranks are threads, which share torch's random numbers: models are built beforehand and must draw
none in training.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import _pytree as pytree

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy, probes_of
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.random_state import RANDOM_STATE
from shoal.core.registry import of
from shoal.core.role import Role
from shoal.core.way import strategy_and_exchange
from shoal.front.session_start import using
from shoal.planner.search_options import DEFAULT, SearchOptions
from shoal.profiling.layers import ProfileOptions, profile_model
from shoal.servers.servers import serve

# scripts run without conftest.py: no case takes a figure of another
os.environ.setdefault("SHOAL_CACHE", "off")

# where models and batches are
DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
LEARNING_RATE = 0.05
ROWS = 12  # of a whole batch: even on 1, 2, 3 and 4 ranks

T = TypeVar("T")
State = dict[str, Tensor]
Batch = tuple[Any, Any]
Loop = Callable[[Any, Any, Any, Iterable[Batch]], None]

EXACT = [name for name, kind in of(Exchange).items() if kind.exact]
BUCKETED = [name for name, kind in of(Strategy).items() if kind.role.takes_exchange]
# without hosts of its own, for gradients that are dense: of others see test_sparse.py. Of "tied",
# which serves weights that modules share, see test_tied.py
HERE = {
    name: kind
    for name, kind in of(Strategy).items()
    if kind.role is not Role.ROWS and name != "tied"
}
ALL_CUTS = [name for name, kind in HERE.items() if kind.role.is_cut and name != "row_pair"]
# those that serve linear layers anywhere
CUTS = [name for name in ALL_CUTS if name in ("column", "row")]
OTHERS = [name for name, kind in of(Strategy).items() if kind.role is Role.LAYER]
WAYS = [*BUCKETED, *OTHERS]  # each strategy once, in the default exchange: for single circumstances
AUTO = "auto"  # no pins: the planner chooses
# for circumstances in which every rank calls every layer as often as the others
EVERY_RANK = [*WAYS, *CUTS]
# for circumstances that no owner can tell apart
AMONG_WORKERS = [way for way in WAYS if not of(Strategy)[way].role.takes_servers]
UNEVEN = pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW, with a weight decay that one sees."""
    return AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)


def call(model: nn.Module, x: Any) -> Any:
    """Call the model as a sample's x says: a tensor, a tuple of positional or a dict of keyword
    arguments.
    """
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


def plain(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    batches: Iterable[Batch],
) -> None:
    """The ordinary loop."""
    for x, y in batches:
        loss = loss_fn(call(model, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training script: a model (only copies of it are trained), whole batches, and how they are
    used.
    """

    model: nn.Module
    batches: Sequence[Batch]
    loss_fn: Callable[[Any, Any], Tensor] | None = F.cross_entropy
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = sgd
    loop: Loop = plain
    count: Callable[..., float | Tensor] | None = None
    weigh: str = "rows"
    compute_loss: Callable[[Any, Any], Tensor] | None = None  # with loss_fn=None
    placement: str | dict[str, int] = "balanced"
    search_options: SearchOptions = DEFAULT
    has_sample: bool = True  # else the first batch is measured

    def alone(self) -> State:
        """The state after training in one process, without shoal."""
        model = copy.deepcopy(self.model)
        with using(ThreadComm()):  # so that a loop may ask for the rank
            loss = self.compute_loss or self.loss_fn
            self.loop(model, loss, self.optimizer(model.parameters()), self.batches)
        return state(model)

    def on_ranks(self, ranks: int, way: str = BUCKETED[0], *, uneven: bool = False) -> list[State]:
        """Each rank's state after training together.

        `way` is as `pins_of` takes it, with words behind it or none, as `with_options` takes them.
        """
        copies = [copy.deepcopy(self.model) for _ in range(ranks)]
        way, options = with_options(way)
        pins, servers = self.pins_of(way, ranks), servers_of(way, ranks)

        def work(comm: ThreadComm) -> State:
            mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in self.batches]
            model = copies[comm.rank]
            with using(comm, cluster_of(ranks, servers)):
                model, loss_fn, optimizer = shoal.parallelize(
                    model,
                    copy.deepcopy(self.loss_fn),  # a module's hooks are one rank's
                    self.optimizer(model.parameters()),
                    sample=mine[0] if self.has_sample else None,
                    pins=pins,
                    count=self.count,
                    weigh=self.weigh,
                    compute_loss=self.compute_loss,
                    placement=self.placement,
                    **({"search_options": self.search_options} | options),
                )
                self.loop(model, loss_fn, optimizer, mine)
                return state(model)

        return on_threads(ranks, work, servers)

    def pins_of(self, way: str, ranks: int) -> dict[str, str]:
        """Pins for "replicate", for "replicate:ring", or for "factor:ring": factor where it serves,
        ring elsewhere. None for AUTO.
        """
        if way == AUTO:
            return {}
        strategy, _, exchange = way.partition(":")
        if strategy in BUCKETED:
            return {"*": way}
        rest = f"{BUCKETED[0]}:{exchange}" if exchange else BUCKETED[0]
        with using(ThreadComm()):  # so that a loss may ask for the rank
            return {"*": rest} | served_by(
                strategy,
                self.model,
                self.loss_fn,
                self.batches[0],
                cluster_of(ranks),
                compute_loss=self.compute_loss,
                counted=self.count is not None or self.weigh == "ranks",
            )


def served_by(
    strategy: str, model: nn.Module, loss_fn: Any, sample: Any, cluster: Cluster, **how: Any
) -> dict[str, str]:
    """Pins of the layers that a strategy serves, of which there must be one, and of those that it
    needs beside them.
    """
    kind = of(Strategy)[strategy_and_exchange(strategy)[0]]()
    options = ProfileOptions(probes=probes_of([type(kind)]), **how)
    profile = profile_model(copy.deepcopy(model), loss_fn, [], sample, ThreadComm(), options)
    served: dict[str, str] = {}
    for layer in profile.layers:
        together = {layer.name: strategy, **kind.needs(layer)}
        if kind.refusal(layer, cluster) is None and not together.keys() & served.keys():
            served |= together
    assert served, f"{strategy} serves no layer of this model, so the test would show nothing"
    return served


# buckets of a hundred bytes, so that every layer that owners update is cut into several
SMALL = SearchOptions(bucket_bytes=(100,), least_part_bytes=1)


def with_options(way: str) -> tuple[str, dict[str, Any]]:
    """A way without the words behind it, and what `parallelize` takes for them.

    "sliced, low" has low memory, "sliced, small" small buckets, "sliced, low, small" both.
    """
    options: dict[str, Any] = {}
    for word, option in (("small", {"search_options": SMALL}), ("low", {"memory": "low"})):
        without = way.removesuffix(f", {word}")
        options |= option if without != way else {}
        way = without
    return way, options


def on_threads(ranks: int, work: Callable[[ThreadComm], T], servers: int = 0) -> list[T]:
    """What `work` returns on each rank, with so many servers beside."""

    def work_or_serve(comm: ThreadComm) -> T | None:
        return work(comm) if comm.rank < ranks else serve(comm)

    cluster = cluster_of(ranks, servers)
    hosts = cluster.topology.hosts + cluster.servers
    return run(ranks + servers, work_or_serve, timeout_s=20, hosts=hosts, servers=servers)[:ranks]


def servers_of(way: str, ranks: int) -> int:
    """How many servers a way needs: fewer than there are workers where it can, so that these own
    something too.
    """
    if way == AUTO:
        return 0
    strategy, _ = strategy_and_exchange(way.partition(", ")[0])
    return (ranks + 1) // 2 if of(Strategy)[strategy].role.takes_servers else 0


def cluster_of(ranks: int, servers: int = 0) -> Cluster:
    """Two ranks on every host (where their number is odd, one on the last), and links that nobody
    need measure.
    """
    hosts = Topology(tuple(f"host{rank // 2}" for rank in range(ranks)))
    return Cluster(
        hosts,
        Link(latency_s=1e-4, bytes_per_s=1e9),
        servers=tuple(f"server{s}" for s in range(servers)),
    )


def state(model: nn.Module) -> State:
    """Parameters and buffers, copied."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def rows_of(batch: Any, rank: int, ranks: int, uneven: bool = False) -> Any:
    """A rank's rows of every tensor in a batch. Uneven: each rank has more than the one before."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shares = [rank + 1 if uneven else 1 for rank in range(ranks)]
        ends = [len(leaf) * share // sum(shares) for share in accumulate(shares)]
        return leaf[([0, *ends])[rank] : ends[rank]].clone()

    if is_dataclass(batch) and not isinstance(batch, type):
        parts = {
            f.name: rows_of(getattr(batch, f.name), rank, ranks, uneven) for f in fields(batch)
        }
        return replace(batch, **parts)
    return pytree.tree_map(cut, batch)


def difference(expected: State, got: State) -> float:
    """The largest error of a tensor: max|a − b| / max(max|a|, learning rate)."""
    assert expected.keys() == got.keys()
    return max(
        float((a.double() - b.double()).abs().max() / max(float(a.abs().max()), LEARNING_RATE))
        for a, b in ((expected[name], got[name]) for name in expected)
        if a.numel() and a.is_floating_point()
    )


def assert_same_bits(states: Sequence[State]) -> None:
    """Every rank has the same bits."""
    for rank, other in enumerate(states):
        for name, tensor in states[0].items():
            assert torch.equal(tensor, other[name]), (
                f"{name} differs between rank 0 and rank {rank}"
            )


def assert_same(
    training: Training,
    ranks: int = 3,
    way: str = BUCKETED[0],
    *,
    uneven: bool = False,
    within: float = 1e-10,
    expected: State | None = None,
) -> None:
    """Ranks get what one process gets, and every rank the same bits; and training did change
    something.

    `expected` is what one process gets, where that is known already.
    """
    expected, got = expected or training.alone(), training.on_ranks(ranks, way, uneven=uneven)
    assert_trained(state(training.model), expected, got, within)


def assert_trained(
    start: State, expected: State, got: Sequence[State], within: float = 1e-10
) -> None:
    """Ranks have what one process has, and every rank the same bits; from `start` it is far."""
    assert_same_bits(got)
    assert difference(start, expected) > 1e-3, "training changed nothing, so nothing was compared"
    error = difference(expected, got[0])
    assert error <= within, f"{error:.1e} from one process, more than {within:g}"


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers that depend on the seed alone."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(DEVICE, dtype)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Random integers below `high` that depend on the seed alone."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def features(width: int, classes: int, *, steps: int = 5, rows: int = ROWS) -> list[Batch]:
    """Batches of feature vectors and classes, each with other numbers."""
    return [(numbers(rows, width, seed=s), integers(classes, rows, seed=s)) for s in range(steps)]


def built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with the same initial parameters in every test, also where ranks are threads: they
    draw from one state.
    """
    with RANDOM_STATE, torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        return make().to(DEVICE, dtype)


def mlp() -> nn.Module:
    """A small network for `features(7, 3)`, of sizes that no number of ranks divides."""
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
