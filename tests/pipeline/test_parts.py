"""Pipelines whose ranks' rows go in parts: they train as one process does, or are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    adamw,
    built,
    cluster_of,
    difference,
    features,
    integers,
    on_threads,
    state,
)
from piped import LOOPS, PIPELINE, Script, assert_same, plain, script
from small_models import ResNet18, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError
from shoal.core.random_state import RANDOM_STATE, drawing_from, mix_seeds, undrawn
from shoal.front.session_start import using
from shoal.pipeline.calls import ModelCall
from shoal.pipeline.parts import RowPart, RowParts, joined
from shoal.pipeline.run import ForwardRun
from shoal.strategies import row_parts

QUICK = [("mlp", "clipped", 2, 2), ("tied", "with evaluation", 3, 2)]
MORE = [
    ("mlp", "plain", 1, 3),
    ("gpt", "accumulated", 4, 3),
    ("gpt", "scheduled", 2, 6),
    ("vit", "plain", 2, 4),
    ("unet", "plain", 3, 2),
    ("lstm", "plain", 4, 2),
    ("adapted", "accumulated", 2, 2),
    ("frozen first", "plain", 3, 2),
]


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of micro-batches that forwards have had."""
    found = set[int]()
    compute = ForwardRun.compute

    def noted(run: ForwardRun, inputs: Any) -> None:
        found.add(len(run.parts))
        compute(run, inputs)

    monkeypatch.setattr(ForwardRun, "compute", noted)
    return found


@pytest.mark.parametrize(
    ("kind", "loop", "ranks", "parts"),
    [
        *(pytest.param(*cell, marks=pytest.mark.quick) for cell in QUICK),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE),
    ],
)
def test_parts_train_as_one_process(
    kind: str, loop: str, ranks: int, parts: int, in_flight: set[int]
) -> None:
    options = {"micro_batches": parts}
    assert_same(script(kind, optimizer=adamw, loop=LOOPS[loop], options=options), ranks)
    assert ranks == 1 or all(ranks < count <= ranks * parts for count in in_flight)


def test_rows_are_cut_in_order() -> None:
    call = ModelCall((torch.zeros(3, 5), torch.zeros(3, 3)), {}, {})
    parts = RowParts(2, {call.form: (True, False)})
    shapes = [[((rows, 5), torch.float32), ((3, 3), torch.float32)] for rows in (3, 1, 0)]
    cut = (True, False)
    expected = [RowPart(0, 0, 2, cut), RowPart(0, 2, 1, cut), RowPart(1, 0, 1), RowPart(2, 0, 0)]
    assert parts.of_ranks(call, shapes) == expected
    x, mask = call.tensors
    assert expected[1].of(0, x).shape == (1, 5) == expected[1].shape(0, (3, 5))
    assert expected[1].of(1, mask) is mask and expected[1].shape(1, (3, 3)) == (3, 3)
    other = ModelCall((torch.zeros(3, 5), None), {}, {})
    assert parts.of_ranks(other, [[((3, 5), torch.float32)]]) == [RowPart(0, 0, 3)]


def test_each_station_and_part_draws_its_own() -> None:
    with RANDOM_STATE, torch.random.fork_rng(devices=()):
        before, numbers = torch.random.get_rng_state(), []
        for seeds in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0)):
            with drawing_from(mix_seeds(*seeds), torch.device("cpu")):
                numbers.append(float(torch.rand(())))
        with undrawn():
            torch.rand(3)
        assert torch.equal(before, torch.random.get_rng_state())
    assert len(set(numbers)) == 4 and numbers[0] == numbers[-1]


def test_outputs_of_parts_are_joined() -> None:
    halves = [{"logits": torch.ones(1, 2), "n": 3}, {"logits": torch.zeros(2, 2), "n": 3}]
    whole = joined(halves)
    assert whole["n"] == 3 and whole["logits"].tolist() == [[1, 1], [0, 0], [0, 0]]


class Masked(nn.Module):
    """Attention that is given its mask of (tokens, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(7, 8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.words(ids)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1)
        return self.head(torch.tanh(weights @ v).mean(1))


def masked(tokens: int) -> list[Batch]:
    """Batches of twelve rows, of which the mask is one for all."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    ids = [integers(7, 12, tokens, seed=step) for step in range(5)]
    return [((own, mask), integers(5, 12, seed=step)) for step, own in enumerate(ids)]


@pytest.mark.parametrize("tokens", [4, 6])
def test_a_mask_of_as_many_tokens_as_rows_is_not_cut(tokens: int, in_flight: set[int]) -> None:
    tried = Script(model=built(Masked), batches=masked(tokens), loss_fn=F.cross_entropy)
    (_, expected), got = tried.alone(), parallel(tried, micro_batches=3)
    for _, each in got:
        assert difference(expected, each) <= 1e-10
    assert in_flight == {6}


def parallel(tried: Script, **options: Any) -> list[Any]:
    """The plan of each of two ranks that have half of the rows, and the state behind the loop."""
    copies = [copy.deepcopy(tried.model) for _ in range(2)]

    def work(comm: ThreadComm) -> Any:
        model, half = copies[comm.rank], slice(6 * comm.rank, 6 * comm.rank + 6)
        own = [((ids[half], mask), y[half]) for (ids, mask), y in tried.batches]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                tried.loss_fn,
                tried.optimizer(model.parameters()),
                sample=own[0],
                **({} if "plan" in options else {"pins": PIPELINE}),
                **options,
            )
            plain(model, loss_fn, optimizer, own)
            return shoal.plan_of(model), state(model)

    return on_threads(2, work)


class Centred(nn.Module):
    """A model of which a row depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x - x.mean(0))


class Averaging(Centred):
    """A model with a buffer that follows all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.last(torch.tanh(self.first(x)))


class Keeping(Centred):
    """A model that keeps a term of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.term = hidden.square().mean()
        return self.last(hidden)


ROWS_TOGETHER = {
    "own loss": (script("own loss"), "returns its own loss"),
    "batch norm": (
        Script(model=built(ResNet18), batches=pictures(20), loss_fn=F.cross_entropy),
        "norm normalises by all rows",
    ),
    "centred": (
        Script(model=built(Centred), batches=features(7, 3), loss_fn=F.cross_entropy),
        "computes something else",
    ),
    "kept": (
        Script(model=built(Keeping), batches=features(7, 3), loss_fn=F.cross_entropy),
        "keeps a number of all rows of a rank .term.",
    ),
    "buffer": (
        Script(model=built(Averaging), batches=features(7, 3), loss_fn=F.cross_entropy),
        "a buffer by all rows",
    ),
}


@pytest.mark.parametrize("case", ROWS_TOGETHER)
def test_rows_that_belong_together_are_not_cut(case: str) -> None:
    tried, reason = ROWS_TOGETHER[case]
    with pytest.raises(PlanError, match=rf"into parts: .*{reason}[^$]*micro_batches=1"):
        Script(**{**vars(tried), "options": {"micro_batches": 2}}).on_ranks(2)


def test_a_saved_plan_has_its_parts(tmp_path: Path, in_flight: set[int]) -> None:
    tried = Script(model=built(Masked), batches=masked(4)[:1], loss_fn=F.cross_entropy)
    (usual, _), _ = parallel(tried)
    (plan, _), _ = parallel(tried, micro_batches=2)
    assert (usual.micro_batches, plan.micro_batches) == (1, 2)
    assert in_flight == {2, 4}
    plan.save(tmp_path / "plan.json")
    in_flight.clear()
    (again, _), _ = parallel(tried, plan=str(tmp_path / "plan.json"))
    assert again.micro_batches == 2 and in_flight == {4}


@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ({}, True),
        ({"micro_batches": 1}, False),
        ({"strategies": ["replicate"]}, False),
        ({"pins": {"*": "replicate"}}, False),
        ({"pins": {"*": "pipeline"}}, False),
        ({"pins": {"*": "pipeline"}, "micro_batches": 2}, True),
    ],
)
def test_parts_are_tried_only_where_a_pipeline_may_have_them(
    options: dict[str, Any], tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    tried_one = lambda *call: (calls.append(call), ("", 0.0))[1]  # noqa: E731
    monkeypatch.setattr(row_parts._RowTrial, "differs", tried_one)
    model = Masked()
    hosts = shoal.Cluster(shoal.Topology(("one", "other")), shoal.Link(1e-4, 1e8))
    sample = (torch.ones(4, 3, dtype=torch.long), torch.ones(3, 3, dtype=torch.bool)), None
    shoal.plan(
        model,
        lambda output, _: output.square().mean(),
        SGD(model.parameters(), lr=0.1),
        sample=sample,
        cluster=hosts,
        **options,
    )
    assert bool(calls) is tried
