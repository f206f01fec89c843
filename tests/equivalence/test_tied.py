"""Weights that several modules share: cut once for all of them, and as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    DEVICE,
    UNEVEN,
    Batch,
    Training,
    adamw,
    assert_same,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    integers,
    on_threads,
    plain,
    rows_of,
    served_by,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError, UsageError
from shoal.front.session_start import using
from shoal.profiling.layers import profile_model
from shoal.profiling.profile_file import Measured
from shoal.strategies.tied_uses import TiedFacts

WORDS, WIDTH = 11, 6


class Speaking(nn.Module):
    """A language model whose head has the weight of its table."""

    def __init__(self, *, bias: bool = True, padding: int | None = 3, scale: float = 0.7) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.head.weight, self.scale = self.table.weight, scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(ids)))) * self.scale


class HeadFirst(Speaking):
    """Its head comes first in the model, and so has the weight."""

    def __init__(self) -> None:
        super().__init__()
        table, head = self.table, self.head
        del self.table, self.head
        self.head, self.table = head, table


class Translating(Speaking):
    """A table for each language, and a head: one weight."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.other = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.other.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        words = self.table(ids) + self.other(ids.roll(1, 1))
        return self.head(torch.tanh(self.body(words)))


class TwoHeads(Speaking):
    """Two heads, each with a loss of its own and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WORDS)
        self.second.weight = self.table.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        words = torch.tanh(self.body(self.table(ids)))
        return self.head(words), self.second(words * words)


class Bags(Speaking):
    """Bags of words; the head is frozen but for the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", padding_idx=2)
        self.table.weight = self.head.weight
        self.head.bias.requires_grad_(False)


class Unit(nn.Linear):
    """A head whose rows have length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight), self.bias)


class WithUnitHead(Speaking):
    def __init__(self) -> None:
        super().__init__()
        self.head = Unit(WIDTH, WORDS)
        self.head.weight = self.table.weight


class Sparse(Speaking):
    """A table that gives a sparse gradient, which the head's makes dense."""

    def __init__(self) -> None:
        super().__init__(padding=2)
        self.table.sparse = True


def of_words(output: Any, ids: Tensor) -> Tensor:
    """The loss of a language model: of every word but the first, by the words before."""
    if isinstance(output, tuple):
        return of_words(output[0], ids) + 0.5 * of_words(output[1], ids)
    if output.dim() == 2:
        return F.cross_entropy(output, ids[:, 0])
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)


def texts(steps: int = 4) -> list[Batch]:
    batches = [integers(WORDS, 12, 5, seed=step) for step in range(steps)]
    return [(ids, ids) for ids in batches]


def training(make: Callable[[], nn.Module] = Speaking, **how: Any) -> Training:
    return Training(model=built(make), batches=texts(), loss_fn=of_words, **how)


MODELS = {
    "bias": Speaking,
    "no bias": partial(Speaking, bias=False, padding=None),
    "head first": HeadFirst,
    "three uses": Translating,
    "two heads": TwoHeads,
    "bags": Bags,
    "unit head": WithUnitHead,
    "sparse": Sparse,
}


@UNEVEN
@pytest.mark.parametrize("model", MODELS)
def test_as_in_one_process(model: str, uneven: bool) -> None:
    assert_same(training(MODELS[model]), 3, "tied", uneven=uneven)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_adamw(ranks: int) -> None:
    assert_same(training(optimizer=adamw), ranks, "tied")


@pytest.mark.parametrize("way", ["replicate", "sliced", "sliced, small"])
def test_a_head_that_comes_first_in_the_model(way: str) -> None:
    """The table is called before the layer by whose name the weight is known."""
    assert_same(training(HeadFirst), 2, way)


def accumulating(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
    """Two backwards a step, clipping, and gradients that are zeroed in place."""
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        (loss_fn(model(x), y) / 2).backward()
        (loss_fn(model(x.flip(1)), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def only_tables(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
    """In every other step the table's output is not trained."""
    handle = None
    for step, batch in enumerate(batches):
        if step % 2:
            handle = model.table.register_forward_hook(lambda table, args, out: out.detach())
        plain(model, loss_fn, optimizer, [batch])
        if handle is not None:
            handle.remove()


def changed(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
    """The weight has a hook, a penalty and a change in place."""
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    for x, y in batches:
        optimizer.zero_grad()
        (loss_fn(model(x), y) + 1e-2 * model.table.weight.square().sum()).backward()
        optimizer.step()
        with torch.no_grad():
            model.table.weight.clamp_(-1.5, 1.5)


@pytest.mark.parametrize("loop", [accumulating, only_tables, changed])
def test_loops(loop: Any) -> None:
    assert_same(training(loop=loop), 3, "tied")


def test_bfloat16() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
                loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    script = Training(
        model=built(Speaking, torch.float32), batches=texts(), loss_fn=of_words, loop=loop
    )
    assert_same(script, 2, "tied", within=2e-2)


def test_a_gradient_with_a_history_is_refused() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
        ((x, y), *_) = batches
        loss_fn(model(x), y).backward(create_graph=True)

    with pytest.raises(UsageError, match="create_graph=True"):
        training(loop=loop).on_ranks(2, "tied")


def test_it_goes_on_on_more_ranks(tmp_path: Path) -> None:
    """Two ranks save, three go on; the optimizer's state of the part goes with it."""
    script = training(optimizer=adamw)
    cluster = cluster_of(3)
    pins = served_by("tied", script.model, of_words, script.batches[0], cluster)

    def train(ranks: int, first: int, last: int) -> list[dict[str, Tensor]]:
        copies = [copy.deepcopy(script.model) for _ in range(ranks)]

        def work(comm: ThreadComm) -> dict[str, Tensor]:
            model, own = copies[comm.rank], [rows_of(b, comm.rank, ranks) for b in script.batches]
            optimizer = adamw(model.parameters())
            with using(comm, cluster_of(ranks)):
                model, loss_fn, _ = shoal.parallelize(
                    model, of_words, optimizer, sample=own[0], pins=pins
                )
                if first:
                    shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
                plain(model, loss_fn, optimizer, own[first:last])
                if not first:
                    shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
                return state(model)

        return on_threads(ranks, work)

    train(2, 0, 2)
    got = train(3, 2, 4)
    assert_same_bits(got)
    assert difference(script.alone(), got[0]) <= 1e-10


def planned(model: nn.Module, **asked: Any) -> shoal.Plan:
    ids = integers(WORDS, 4, 5)
    optimizer = sgd(model.parameters())
    return shoal.plan(model, of_words, optimizer, sample=(ids, ids), cluster=cluster_of(2), **asked)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["table", "head"])
def test_a_pin_by_any_name_of_the_weight(name: str, bias: bool) -> None:
    plan = planned(built(partial(Speaking, bias=bias)), pins={"*": "replicate", name: "tied"})
    served = {choice.layer: choice.strategy for choice in plan.choices}
    tied = {"table": "tied"} | ({"head": "tied"} if bias else {})
    assert served == {"body": "replicate"} | tied


def test_other_options_by_the_name_of_the_head() -> None:
    model = built(partial(Speaking, bias=False))
    plan = planned(model, strategies=["sliced"], placement={"head": 1, "body.bias": 0})
    assert plan.placement == {"table": 1, "body.bias": 0}
    plan = planned(model, strategies=["replicate"], update_every={"head": 2})
    assert plan.update_every == {"table": 2}
    assert planned(model, pins={"head": "sliced", "t*": "replicate"}).choice("table").strategy == (
        "replicate"
    )


def slow(words: int, **asked: Any) -> shoal.Plan:
    """Plan for a model of so many words at 1 MB/s."""
    model = nn.Sequential(nn.Embedding(words, 64), nn.Tanh(), nn.Linear(64, words, bias=False))
    model[2].weight = model[0].weight
    cluster = shoal.Cluster(shoal.Topology(("a", "b")), shoal.Link(1e-4, 1e6))
    ids, optimizer = integers(words, 4, 8), sgd(model.parameters())
    return shoal.plan(model, of_words, optimizer, sample=(ids, ids), cluster=cluster, **asked)


def test_the_planner_cuts_where_that_is_predicted_to_be_fastest() -> None:
    whole = ["replicate", "sliced", "factor"]
    plan = slow(4000, strategies=[*whole, "tied"])  # 1 MB of weight, and 8 kB of rows
    assert plan.choice("0").strategy == "tied"
    assert plan.predicted_s < 0.5 * slow(4000, strategies=whole).predicted_s
    assert slow(40, strategies=[*whole, "tied"]).choice("0").strategy != "tied"


def test_the_facts_of_its_uses_are_kept_in_a_file() -> None:
    ids = integers(WORDS, 4, 5)
    profile = profile_model(built(Speaking), of_words, [], (ids, ids), ThreadComm())
    facts = profile.layer("table").measured(TiedFacts)
    assert facts.layers == ("table", "head")
    assert [(use.layer.name, use.layer.rows) for use in facts.uses] == [("table", 20), ("head", 20)]
    assert facts.uses[0].ids.distinct == len(ids.unique())
    assert facts.uses[1].losses.rows == 16
    assert facts == profile.layer("head").measured(TiedFacts)
    measured = Measured(profile, cluster_of(2))
    assert Measured.from_json(measured.to_json()) == measured


class Borrowing(Speaking):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) @ self.table.weight @ self.table.weight.T


class Renormed(Speaking):
    def __init__(self) -> None:
        super().__init__()
        self.table.max_norm = 1.0


class Inside(Speaking):
    """Two layers inside share a weight, and no loss takes their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(WIDTH, WIDTH)
        self.twin.weight = self.body.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twin(torch.tanh(self.body(self.table(ids))))))


@pytest.mark.parametrize(
    ("make", "layer", "reason"),
    [
        (Borrowing, "table", r"its weight is read by \(model\) \(Borrowing\) without calling it"),
        (Renormed, "table", "table .Embedding.* max_norm: its forward changes its weight"),
        (Inside, "body", "body .Linear.* its output does not go into a cross entropy, or not only"),
        (Speaking, "body", "no other module has its weight"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_cut_is_refused_with_the_reason(
    make: Callable[[], nn.Module], layer: str, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        planned(built(make), pins={layer: "tied"})
    assert planned(built(make)).choice(layer).strategy != "tied"


def test_a_strategy_of_one_use_says_which_one_serves_all() -> None:
    for way, layer in (("embedding", "table"), ("head", "table")):
        with pytest.raises(PlanError, match=r"tied to head(.|\n)*pin the layer to .*\btied\b"):
            planned(built(Speaking), pins={layer: way})
