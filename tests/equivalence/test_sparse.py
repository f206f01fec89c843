"""Tables of sparse gradients, and bags: as in one process, and sparse for the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from one_process import (
    DEVICE,
    UNEVEN,
    Batch,
    Training,
    assert_same,
    assert_same_bits,
    built,
    call,
    cluster_of,
    integers,
    numbers,
    on_threads,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError, UsageError
from shoal.front.session_start import using

# torch's own optimizers make sparse tensors so
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

LR = 0.05
WIDTH = 5  # of tables, and of no dense layer
WAYS = ["sparse", "embedding"]  # that take sparse gradients


class Recommender(nn.Module):
    """Bags of one table, ids of another, and numbers."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(11, WIDTH, sparse=sparse)
        self.table = nn.Embedding(7, WIDTH, sparse=sparse, padding_idx=2)
        self.top = nn.Linear(2 * WIDTH + 4, 3)

    def forward(self, several: Tensor, one: Tensor, values: Tensor) -> Tensor:
        return self.top(torch.cat([self.bags(several), self.table(one), values], 1))


def batches(steps: int = 5, rows: int = 12) -> list[Batch]:
    """Of steps, each of other rows."""

    def x(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        several = integers(11, rows, 3, seed=seed)
        return several, integers(7, rows, seed=seed + 50), numbers(rows, 4, seed=seed)

    return [(x(step), integers(3, rows, seed=step)) for step in range(steps)]


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=LR)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=LR, momentum=0.9)


def adagrad(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adagrad(parameters, lr=LR)


def sparse_adam(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """SparseAdam for the tables, and Adam for the rest."""
    listed = list(parameters)
    tables = [p for p in listed if p.dim() == 2 and p.shape[1] == WIDTH]
    rest = [p for p in listed if all(p is not table for table in tables)]
    return [SparseAdam(tables, lr=LR), Adam(rest, lr=LR)]


def train(model: Any, loss_fn: Any, optimizer: Any, steps: Iterable[Batch]) -> None:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for x, y in steps:
        loss = loss_fn(call(model, x), y)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()


@dataclass(frozen=True, kw_only=True)
class Pinned(Training):
    """Tables pinned to "sparse", all else to what is asked for."""

    tables: tuple[str, ...] = ("bags", "table")

    def pins_of(self, way: str, ranks: int) -> dict[str, str]:
        return {"*": way} | dict.fromkeys(self.tables, "sparse")


@UNEVEN
@pytest.mark.parametrize("optimizer", [plain_sgd, momentum, adagrad, sparse_adam])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_tables_train_as_in_one_process(way, ranks, optimizer, uneven):
    training = Training(
        model=built(Recommender), batches=batches(), optimizer=optimizer, loop=train
    )
    assert_same(training, ranks, way, uneven=uneven)


@UNEVEN
@pytest.mark.parametrize("way", ["replicate", "replicate:ring", "sliced", "factor", "column"])
def test_beside_dense_layers_that_are_served_otherwise(way, uneven):
    assert_same(Pinned(model=built(Recommender), batches=batches()), 3, way, uneven=uneven)


def test_the_planner_finds_what_serves_them():
    """Without a pin."""

    def work(comm: ThreadComm) -> str:
        model = copy.deepcopy(start)
        x, y = rows_of(batches()[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            shoal.parallelize(model, F.cross_entropy, plain_sgd(model.parameters()), sample=(x, y))
            plan = shoal.plan_of(model)
            assert plan is not None
            return " ".join(plan.choice(name).strategy for name in ("bags", "table"))

    start = built(Recommender)
    assert set(on_threads(2, work)) <= {"sparse sparse"}  # small tables are not cut unasked


def gradients(way: str, steps: list[Batch], ranks: int = 2, sparse: bool = True) -> list[Any]:
    """What each rank sees in `.grad` of both tables after the last of some backwards."""

    def work(comm: ThreadComm) -> list[Tensor | None]:
        model = copy.deepcopy(start)
        own = [rows_of(batch, comm.rank, ranks) for batch in steps]
        with using(comm, cluster_of(ranks)):
            shoal.parallelize(
                model,
                F.cross_entropy,
                plain_sgd(model.parameters()),
                sample=own[0],
                pins={"*": "replicate", "bags": way, "table": way},
            )
            for x, y in own:
                model.zero_grad()
                F.cross_entropy(call(model, x), y).backward()
            return [model.bags.weight.grad, model.table.weight.grad]

    start = built(lambda: Recommender(sparse))
    return on_threads(ranks, work)


@pytest.mark.parametrize("way", WAYS)
def test_what_the_optimizer_sees_is_a_sparse_tensor_with_the_rows_that_were_used(way):
    (x, y) = batches(1)[0]
    model = built(Recommender)
    F.cross_entropy(call(model, x), y).backward()
    expected = [model.bags.weight.grad.coalesce(), model.table.weight.grad.coalesce()]
    for found in gradients(way, [(x, y)]):
        for gradient, alone in zip(found, expected, strict=True):
            assert gradient.layout is torch.sparse_coo
            assert gradient.coalesce().indices().tolist() == alone.indices().tolist()
            assert (gradient.to_dense() - alone.to_dense()).abs().max() < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_what_is_done_to_a_gradient_counts(way):
    """As by clip_grad_value_, or by a scaler."""

    def loop(model, loss_fn, optimizer, steps):
        for x, y in steps:
            optimizer.zero_grad()
            loss_fn(call(model, x), y).backward()
            for table in (model.bags, model.table):
                table.weight.grad.mul_(0.5)
            optimizer.step()

    training = Training(model=built(Recommender), batches=batches(), optimizer=momentum, loop=loop)
    assert_same(training, 3, way, uneven=True)


@pytest.mark.parametrize("way", WAYS)
def test_clipping_takes_sparse_gradients_in(way):
    def loop(model, loss_fn, optimizer, steps):
        for x, y in steps:
            optimizer.zero_grad()
            loss_fn(call(model, x), y).backward()
            if hasattr(optimizer, "clip_grad_norm_"):
                optimizer.clip_grad_norm_(0.1)
            else:
                grads = [p.grad for p in model.parameters()]
                flat = [(g.to_dense() if g.is_sparse else g).reshape(-1) for g in grads]
                factor = (0.1 / (torch.cat(flat).norm() + 1e-6)).clamp(max=1.0)
                for grad in grads:
                    grad.mul_(factor)
            optimizer.step()

    training = Training(model=built(Recommender), batches=batches(), optimizer=momentum, loop=loop)
    assert_same(training, 3, way, uneven=True)


@UNEVEN
@pytest.mark.parametrize("way", WAYS)
def test_kept_gradients_go_with_the_last_backward(way, uneven):
    def loop(model, loss_fn, optimizer, steps):
        for (x, y), (other, its) in zip(steps, reversed(steps), strict=True):
            optimizer.zero_grad()
            if hasattr(optimizer, "accumulate"):
                with optimizer.accumulate():
                    loss_fn(call(model, x), y).backward()
            else:
                loss_fn(call(model, x), y).backward()
            loss_fn(call(model, other), its).backward()
            optimizer.step()

    training = Training(model=built(Recommender), batches=batches(4), optimizer=adagrad, loop=loop)
    assert_same(training, 2, way, uneven=uneven)


@pytest.mark.parametrize("way", WAYS)
def test_two_backwards_that_both_send(way):
    def loop(model, loss_fn, optimizer, steps):
        for (x, y), (other, its) in zip(steps, reversed(steps), strict=True):
            optimizer.zero_grad()
            loss_fn(call(model, x), y).backward()
            loss_fn(call(model, other), its).backward()
            optimizer.step()

    training = Training(model=built(Recommender), batches=batches(4), optimizer=adagrad, loop=loop)
    assert_same(training, 3, way, uneven=True)


class Sometimes(nn.Module):
    """Has a table that not every batch looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)
        self.never = nn.EmbeddingBag(4, WIDTH, sparse=True)
        self.top = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, values: Tensor) -> Tensor:
        return self.top(self.table(ids) + values if bool((ids > 2).all()) else values)


def test_a_table_that_a_rank_or_every_rank_leaves_out():
    def x(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([3, 4, 5, 6] * 3, device=DEVICE)
        ids[4 * (step % 4) : 4 * (step % 4) + 4] = step % 3  # one rank's; in the last nobody's
        return (ids if step < 4 else ids * 0), numbers(12, WIDTH, seed=step)

    def alone(model, loss_fn, optimizer, steps):
        for (ids, values), y in steps:
            optimizer.zero_grad()
            parts = [slice(first, first + 4) for first in (0, 4, 8)]
            outputs = [model(ids[part], values[part]) for part in parts]
            loss_fn(torch.cat(outputs), y).backward()
            optimizer.step()

    model, steps = built(Sometimes), [(x(step), integers(3, 12, seed=step)) for step in range(5)]
    expected = Training(model=model, batches=steps, optimizer=adagrad, loop=alone).alone()
    training = Pinned(model=model, batches=steps, optimizer=adagrad, tables=("table", "never"))
    assert_same(training, 3, "replicate", expected=expected)


class Mixed(nn.Module):
    """A table and a bias in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(9, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows, sparse=True) + self.bias


class Tied(nn.Module):
    """Scores against the table that ids are looked up in: its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) @ self.table.weight.t()


class Whole(Tied):
    """Does so in some steps only, of which the sample is none."""

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids)
        return found @ self.table.weight.t() if int(ids[0]) > 4 else F.pad(found, (0, 5))


@UNEVEN
@pytest.mark.parametrize(
    ("kind", "pins"),
    [
        (Mixed, {"*": "sparse"}),
        (Tied, {"*": "replicate"}),
        (Whole, {"*": "sparse"}),
    ],
)
def test_gradients_that_are_dense_too(kind, pins, uneven):
    @dataclass(frozen=True, kw_only=True)
    class AsPinned(Training):
        def pins_of(self, way: str, ranks: int) -> dict[str, str]:
            return pins

    def x(step: int) -> Tensor:
        ids = integers(9, 12, seed=step)
        ids[[0, 2, 4, 6, 8]] = 8 if step % 2 else 0  # where a rank's rows begin, even or uneven
        return ids

    steps = [(x(step), integers(4, 12, seed=step)) for step in range(5)]
    training = AsPinned(model=built(kind), batches=steps, optimizer=plain_sgd)
    assert_same(training, 3, uneven=uneven)


def test_refused_by_what_sends_dense_gradients():
    with pytest.raises(PlanError) as caught:
        gradients("replicate", batches(1))
    assert 'only "sparse" sends' in str(caught.value)
    with pytest.raises(PlanError, match="its gradient is dense"):
        gradients("sparse", batches(1), sparse=False)


def test_a_gradient_that_turns_sparse_names_the_pin():
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(9, 4))
            self.sparse = False

        def forward(self, ids: Tensor) -> Tensor:
            return F.embedding(ids, self.rows, sparse=self.sparse)

    def work(comm: ThreadComm) -> None:
        model = nn.Sequential(copy.deepcopy(start))
        x, y = integers(9, 4, seed=comm.rank), integers(4, 4, seed=comm.rank)
        with using(comm, cluster_of(2)):
            shoal.parallelize(model, F.cross_entropy, plain_sgd(model.parameters()), sample=(x, y))
            model[0].sparse = True
            F.cross_entropy(model(x), y).backward()

    start = built(Turning)
    with pytest.raises(UsageError) as caught:
        on_threads(2, work)
    assert 'pins={"0": "sparse"}' in str(caught.value)


class Bags(nn.Module):
    """Bags of unlike lengths, some of them empty, in one row of ids."""

    def __init__(self, form: str, **options: Any) -> None:
        super().__init__()
        self.form = form
        self.bags = nn.EmbeddingBag(
            11, WIDTH, include_last_offset=form == "last offset", padding_idx=3, **options
        )
        self.top = nn.Linear(WIDTH, 3)
        self.importance = nn.Linear(1, 1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.form == "table":
            return self.top(self.bags(ids))
        flat = ids[torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)]
        ends = lengths.cumsum(0)
        if self.form == "last offset":
            return self.top(self.bags(flat, torch.cat([ends.new_zeros(1), ends])))
        weights = None
        if self.form == "weights":
            weights = self.importance(flat.to(self.top.weight.dtype).unsqueeze(1)).squeeze(1)
        return self.top(self.bags(input=flat, offsets=ends - lengths, per_sample_weights=weights))


BAGS = [
    ("table", "mean"),
    ("table", "max"),
    ("offsets", "sum"),
    ("last offset", "mean"),
    ("weights", "sum"),
]


OF_TABLES = [("replicate", False), ("sliced", False), ("embedding", False)]
OF_SPARSE = [("sparse", True), ("embedding", True)]


@UNEVEN
@pytest.mark.parametrize(
    ("way", "sparse", "form", "mode"),
    [
        (*way, *bags)
        for way, bags in product(OF_TABLES + OF_SPARSE, BAGS)
        if not (way[1] and bags[1] == "max")  # which torch has no sparse gradients of
    ],
)
def test_bags(way, form, mode, sparse, uneven):
    def x(step: int) -> tuple[Tensor, Tensor]:
        return integers(11, 12, 4, seed=step), integers(4, 12, seed=step + 9)

    steps = [(x(step), integers(3, 12, seed=step)) for step in range(4)]
    model = built(lambda: Bags(form, mode=mode, sparse=sparse))
    assert_same(Training(model=model, batches=steps), 3, way, uneven=uneven)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_whose_bags_are_all_empty(way):
    def x(step: int) -> tuple[Tensor, Tensor]:
        lengths = integers(4, 12, seed=step)
        lengths[:4] = 0
        return integers(11, 12, 4, seed=step), lengths

    steps = [(x(step), integers(3, 12, seed=step)) for step in range(4)]
    model = built(lambda: Bags("offsets", mode="sum", sparse=True))
    assert_same(Training(model=model, batches=steps), 3, way)


@pytest.mark.parametrize("way", WAYS)
def test_state_is_that_of_one_process_and_comes_back(way):
    """SparseAdam's, by state_dict, and after unparallelize."""

    def work(comm: ThreadComm) -> tuple[dict[str, Tensor], list[Any], bool]:
        model = copy.deepcopy(start)
        own = [rows_of(batch, comm.rank, 2) for batch in batches()]
        with using(comm, cluster_of(2)):
            optimizers = sparse_adam(model.parameters())
            shoal.parallelize(
                model,
                F.cross_entropy,
                optimizers,
                sample=own[0],
                pins={"*": "replicate", "bags": way, "table": way},
            )
            train(model, F.cross_entropy, optimizers, own)
            saved = optimizers[0].state_dict()["state"]
            shoal.unparallelize(model)
            plain = type(model.bags) is nn.EmbeddingBag and model.bags.weight.grad.is_sparse
            return state(model), [saved, optimizers[0].state_dict()["state"]], plain

    start, alone = built(Recommender), built(Recommender)
    optimizers = sparse_adam(alone.parameters())
    train(alone, F.cross_entropy, optimizers, batches())
    results = on_threads(2, work)
    assert_same_bits([result[0] for result in results])
    for _, states, plain in results:
        assert plain
        for found in states:
            for number, expected in optimizers[0].state_dict()["state"].items():
                for name in ("exp_avg", "exp_avg_sq"):
                    assert (found[number][name] - expected[name]).abs().max() < 1e-12
