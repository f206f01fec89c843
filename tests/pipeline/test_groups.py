"""Groups: a layer held by several ranks trains as in one process, and is read and saved once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import adamw, assert_same_bits, difference, sgd
from piped import LOOPS, PIPELINE, assert_same, loss_of, plain, script
from test_states import of_part
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.row_weights import Weighing
from shoal.core.errors import PlanError, UsageError
from shoal.pipeline.model import PipelinedModel

OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
FRONT = {"words": "pipeline:0+1", "places": "pipeline:0+1", "blocks.0.*": "pipeline:0+1"}
GPT = {"*": "pipeline:2+3", **FRONT}
PINS = {
    "gpt": GPT,
    "dropout": GPT,
    "tied": {**GPT, "head": "pipeline:0+1"},
    "own loss": {"*": "pipeline:1+3", **dict.fromkeys(FRONT, "pipeline:0+2")},
    "mlp": {"*": "pipeline:2+3", "0": "pipeline:0+1"},
    "frozen first": {"*": "pipeline:2+3", "blocks.2.*": "pipeline:0+1"},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "optimizer", "loop"),
    [
        ("mlp", "adamw", "clipped"),
        ("own loss", "adamw", "accumulated"),
        ("tied", "sgd", "with evaluation"),
        pytest.param("gpt", "sgd", "plain", marks=SLOW),
        pytest.param("tied", "adamw", "clipped", marks=SLOW),
        pytest.param("frozen first", "sgd", "scheduled", marks=SLOW),
    ],
)
def test_groups_get_what_one_process_gets(kind: str, optimizer: str, loop: str) -> None:
    tried = script(kind, optimizer=OPTIMIZERS[optimizer], loop=LOOPS[loop])
    assert_same(tried, 4, pins=PINS[kind])


@pytest.mark.parametrize("ranks", [5, pytest.param(6, marks=SLOW)])
def test_ranks_without_layers_and_replicas_of_unlike_size(ranks: int) -> None:
    assert_same(script("mlp", options={"micro_batches": 2}, uneven=False), ranks, pins=PINS["mlp"])


def own_clipping(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> list[float]:
    """Clip by the norm that the optimizer's own method returns."""
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, loss_fn, batch).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.1)))
        optimizer.step()
    return norms


def test_a_norm_counts_a_group_once() -> None:
    tried = script("mlp", loop=own_clipping)

    def alone(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> list[float]:
        norms = []
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, loss_fn, batch).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        return norms

    expected, _ = script("mlp", loop=alone).alone()
    for norms, _ in tried.on_ranks(4, PINS["mlp"]):
        assert norms == pytest.approx(expected, rel=1e-10)


def penalised(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    """Add a penalty on weights that ranks read whole, in a backward of its own and with a loss."""
    for batch in batches:
        optimizer.zero_grad()
        (0.1 * model[2].weight.square().sum()).backward()
        loss = loss_of(model, loss_fn, batch)
        (loss + 0.1 * model[0].weight.square().sum()).backward()
        optimizer.step()


def gradients_of_inputs(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    """Add a penalty on the gradient of inputs."""
    for x, y in batches:
        x = x.clone().requires_grad_()
        loss = loss_fn(model(x), y)
        (gradient,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        optimizer.zero_grad()
        (loss + gradient.square().sum(1).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [penalised, gradients_of_inputs])
def test_penalties(loop: Any) -> None:
    assert_same(script("mlp", loop=loop), 4, pins=PINS["mlp"])


def accumulated_here(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    """Keep gradients of a first backward on each rank."""
    for first in range(len(batches)):
        optimizer.zero_grad()
        with getattr(optimizer, "accumulate", torch.enable_grad)():
            (loss_of(model, loss_fn, batches[first]) / 2).backward()
        (loss_of(model, loss_fn, batches[first - 1]) / 2).backward()
        optimizer.step()


def test_gradients_that_are_kept_on_each_rank() -> None:
    assert_same(script("mlp", loop=accumulated_here), 4, pins=PINS["mlp"])


@pytest.mark.parametrize("kind", ["mlp", pytest.param("tied", marks=SLOW)])
def test_a_checkpoint_goes_from_groups_to_two_ranks_and_back(tmp_path: Path, kind: str) -> None:
    tried, pins = script(kind, optimizer=adamw), PINS[kind]
    _, expected = tried.alone()
    first, second = tmp_path / "first", tmp_path / "second"
    of_part(tried, 0, 2, None, first).on_ranks(4, pins)
    of_part(tried, 2, 4, first, second).on_ranks(2, PIPELINE)
    got = of_part(tried, 4, 5, second, None).on_ranks(4, pins)
    assert_same_bits([each for _, each in got])
    assert difference(expected, got[0][1]) <= 1e-10


def test_a_rank_keeps_the_layers_of_its_group_alone() -> None:
    def loop(model: Any, loss_fn: Any, steps: Any, batches: Any) -> Any:
        plain(model, loss_fn, steps, batches)
        return shoal.memory(model)

    tried = script("mlp", optimizer=adamw, loop=loop)
    held = [memory for memory, _ in tried.on_ranks(4, PINS["mlp"])]
    whole = sum(p.numel() * 8 for p in tried.model.parameters())
    assert [each.parameters for each in held] == [each.parameters for each in held[:1] * 2] + [
        each.parameters for each in held[2:3] * 2
    ]
    assert held[0].parameters + held[2].parameters == whole


def test_replicas_draw_numbers_of_their_own() -> None:
    """The ranks of all replicas have equal generators, and dropout drops other values in each."""
    seeds = []
    for replica in (0, 1, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = PipelinedModel(nn.Linear(1, 1), {}, {}, ThreadComm(), Weighing(), None, replica)
            seeds.append(model.draw_seed())
    assert seeds[0] != seeds[1] == seeds[2]


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"*": "pipeline:2+3", "0": "pipeline:0"}, "unlike sizes"),
        ({"*": "pipeline:2+3", "0": "pipeline:0+3"}, "rank 3 is named twice"),
        ({"*": "pipeline:2+2", "0": "pipeline:0+1"}, "rank 2 is named twice"),
        ({"*": "pipeline:2+3", "0": "pipeline:0+4"}, "a rank that there is not"),
        ({"*": "pipeline:2+3"}, "which is no pipeline"),
    ],
)
def test_groups_that_are_refused(pins: dict[str, str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        script("mlp").on_ranks(4, pins)


def test_buffers_that_training_changes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.raises(PlanError, match="a buffer of a pipeline with groups"):
        replace(script("mlp", uneven=False), model=model).on_ranks(4, PINS["mlp"])


def test_hooks_on_parameters_are_refused() -> None:
    """They would see the gradient of one replica's rows."""

    def loop(model: Any, loss_fn: Any, steps: Any, batches: Any) -> None:
        model[0].weight.register_hook(lambda grad: grad)

    with pytest.raises(UsageError, match="register_hook"):
        script("mlp", loop=loop).on_ranks(4, PINS["mlp"])
