"""Pipelines: what is read, saved and loaded is one process's, on any ranks and in any plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    adamw,
    assert_same_bits,
    cluster_of,
    difference,
    on_threads,
    rows_of,
    sgd,
    state,
)
from piped import PIPELINE, Script, plain, script
from small_models import Gpt, of_words
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm
from shoal.front.session_start import using

LAYERED = {
    "pipeline": PIPELINE,
    "replicate": {"*": "replicate"},
    "column": {"*": "replicate", "blocks.*.mlp.*": "column"},
}


def of_part(tried: Script, begin: int, end: int, before: Any, after: Any) -> Script:
    """The script for some of its steps, which loads before and saves after."""

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        if before:
            shoal.load(before, model=model, optimizer=optimizer)
        plain(model, loss_fn, optimizer, batches)
        if after:
            shoal.save(after, model=model, optimizer=optimizer)

    return replace(tried, batches=tried.batches[begin:end], loop=loop)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("last", ["pipeline", "replicate"])
@pytest.mark.parametrize(
    "kind",
    ["mlp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tied", "vit", "unet"))],
)
def test_a_checkpoint_goes_on_with_other_ranks(
    tmp_path: Path, kind: str, last: str, optimizer: Any
) -> None:
    tried = script(kind, optimizer=optimizer)
    _, expected = tried.alone()
    first, second = tmp_path / "first", tmp_path / "second"
    of_part(tried, 0, 2, None, first).on_ranks(4)
    of_part(tried, 2, 4, first, second).on_ranks(2)
    got = of_part(tried, 4, 5, second, None).on_ranks(3, LAYERED[last])
    assert_same_bits([each for _, each in got])
    assert difference(expected, got[0][1]) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_one_plan_follows_another(optimizer: Any) -> None:
    tried = script("gpt", optimizer=optimizer)
    _, expected = tried.alone()
    copies = [copy.deepcopy(tried.model) for _ in range(3)]

    def work(comm: ThreadComm) -> Any:
        model, own = copies[comm.rank], [rows_of(b, comm.rank, 3, True) for b in tried.batches]
        steps = optimizer(model.parameters())
        parameters = [*model.parameters()]
        with using(comm, cluster_of(3)):
            for pins, part in zip(
                ("replicate", "pipeline", "column", "pipeline"),
                (own[:1], own[1:3], own[3:4], own[4:]),
                strict=True,
            ):
                model, loss, steps = shoal.parallelize(
                    model, of_words, steps, sample=own[0], pins=LAYERED[pins]
                )
                plain(model, loss, steps, part)
                shoal.unparallelize(model)
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            assert type(model) is Gpt and all(type(p) is nn.Parameter for p in parameters)
            assert "Run" not in repr(model)
            loss_of_own = of_words(model(own[0][0]), own[0][1])  # each rank by itself
            return float(loss_of_own.detach()), state(model), copy.deepcopy(steps.state_dict())

    got = on_threads(3, work)
    assert_same_bits([each for _, each, _ in got])
    assert difference(expected, got[0][1]) <= 1e-10


@pytest.mark.parametrize("optimizer", [adamw, pytest.param(sgd, marks=pytest.mark.slow)])
def test_states_are_those_of_one_process(optimizer: Any) -> None:
    def loop(model: Any, loss_fn: Any, steps: Any, batches: Any) -> Any:
        plain(model, loss_fn, steps, batches[:2])
        kept = copy.deepcopy((model.state_dict(), steps.state_dict()))
        plain(model, loss_fn, steps, batches[2:3])
        gradients = {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        model.load_state_dict(kept[0])
        steps.load_state_dict(copy.deepcopy(kept[1]))
        plain(model, loss_fn, steps, batches[3:])
        return kept, gradients

    tried = script("tied", optimizer=optimizer, loop=loop)
    (kept, gradients), expected = tried.alone()
    for (its_kept, its_gradients), got in tried.on_ranks(3):
        assert difference(expected, got) <= 1e-10
        assert difference(kept[0], its_kept[0]) <= 1e-10
        assert difference(gradients, its_gradients) <= 1e-10
        assert its_kept[1]["param_groups"] == kept[1]["param_groups"]
        for number, its in kept[1]["state"].items():
            for name, value in its.items():
                torch.testing.assert_close(its_kept[1]["state"][number][name], value)
        assert its_kept[1]["state"].keys() == kept[1]["state"].keys()


def test_a_rank_keeps_its_layers_alone() -> None:
    def loop(model: Any, loss_fn: Any, steps: Any, batches: Any) -> Any:
        plain(model, loss_fn, steps, batches)
        return shoal.memory(model)

    tried = script("gpt", optimizer=adamw, loop=loop)
    first = {"words": "pipeline:0", "places": "pipeline:0", "blocks.0.*": "pipeline:0"}
    rest = {"blocks.[12].*": "pipeline:1", "norm": "pipeline:2", "head": "pipeline:2"}
    held = [memory for memory, _ in tried.on_ranks(3, first | rest)]
    whole = sum(p.numel() * 8 for p in tried.model.parameters())
    assert sum(each.parameters for each in held) == whole
    assert all(0 < each.parameters < 0.7 * whole for each in held)
    assert all(each.optimizer_state < 2.1 * each.parameters + 200 for each in held)


def test_copies_are_ordinary_models_with_memory_of_their_own() -> None:
    def loop(model: Any, loss_fn: Any, steps: Any, batches: Any) -> Any:
        copied, read = copy.deepcopy(model), [p.detach() for p in model.parameters()]
        kept = state(copied)
        plain(model, loss_fn, steps, batches)
        assert type(copied) is Gpt
        assert difference(kept, state(copied)) == 0
        assert all(torch.equal(a, b) for a, b in zip(read, kept.values(), strict=True))
        return of_words(copied(batches[0][0]), batches[0][1])  # by itself

    script("gpt", loop=loop).on_ranks(2)
