"""Layers that are cut, whose rows cross as codes: near the exact run, as far off as is said."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from one_process import (
    DEVICE,
    State,
    Training,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    numbers,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.codecs.coded_exchange import read_codec
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError
from shoal.front.session_start import using
from shoal.planner.search_options import SearchOptions
from shoal.tensors.row_crossing import RowCrossing

BATCHES = [(x.float(), y) for x, y in features(7, 3, rows=12, steps=6)]
# half of a step of 8 bits, and of 11: at most, of a value
MOST = {"bfloat16": 2**-8, "float16": 2**-11}


def trained(pin: str, chunks: int = 1) -> list[tuple[State, shoal.CodecReport]]:
    return trained_by({"*": pin}, chunks)


def trained_by(pins: dict[str, str], chunks: int = 1) -> list[tuple[State, shoal.CodecReport]]:
    ranks = 3
    network = built(mlp, torch.float32)

    def work(comm: ThreadComm) -> tuple[State, shoal.CodecReport]:
        mine = copy.deepcopy(network)
        own = [rows_of(batch, comm.rank, ranks, uneven=True) for batch in BATCHES]
        with using(comm, cluster_of(ranks)):
            optimizer = sgd(mine.parameters())
            _, loss_fn, _ = shoal.parallelize(
                mine,
                F.cross_entropy,
                optimizer,
                sample=own[0],
                pins=pins,
                search_options=SearchOptions(chunks=(chunks,)),
            )
            for x, y in own:
                optimizer.zero_grad()
                loss_fn(mine(x), y).backward()
                optimizer.step()
            return state(mine), shoal.codec_report(mine)

    return run(ranks, work, timeout_s=60)


@pytest.mark.parametrize(
    ("way", "codec", "chunks"),
    [
        ("column", "bfloat16", 2),
        ("row", "float16", 1),
        pytest.param("row", "bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("column", "float16", 1, marks=pytest.mark.slow),
    ],
)
def test_training_is_near_the_exact_run_and_the_report_says_how_far(
    way: str, codec: str, chunks: int
) -> None:
    exact, coded = trained(way), trained(f"{way}+{codec}", chunks=chunks)
    moved = difference(state(built(mlp, torch.float32)), exact[0][0])
    for states, report in coded:
        assert all(torch.equal(states[name], coded[0][0][name]) for name in states)
        assert 0 < difference(exact[0][0], states) < 4 * MOST[codec] * moved
        assert {row.way for row in report.rows} == {f"{way}+{codec}"} and len(report.rows) == 2
        for row in report.rows:
            assert row.step_error is not None and 0 < row.step_error < MOST[codec]
            assert row.mean_error is None, "of rows nothing comes later"
            assert 1 < row.ratio < 2, "the numbers of rows go as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_other_ranks_get_what_a_code_stands_for_and_own_rows_stay(dtype: torch.dtype) -> None:
    def work(comm: ThreadComm) -> list[Tensor]:
        crossing = RowCrossing(read_codec("bfloat16"))
        outgoing = list(rows[comm.rank].unbind())
        incoming = [torch.empty_like(part) for part in outgoing]
        incoming[0] = torch.empty_like(outgoing[0])
        crossing.start_all_to_all(comm, incoming, outgoing)()
        assert (crossing.error is not None) == (dtype in (torch.float32, torch.float64))
        return incoming

    generator = torch.Generator().manual_seed(0)
    rows = (100 * torch.randn(3, 3, 4, 5, generator=generator)).to(dtype)
    for rank, got in enumerate(run(3, work, timeout_s=20)):
        for source, part in enumerate(got):
            sent = rows[source][rank]
            known = dtype == torch.int64 or source == rank
            assert torch.equal(part, sent if known else sent.bfloat16().to(dtype))


def test_empty_rows_send_nothing() -> None:
    def work(comm: ThreadComm) -> float | None:
        crossing = RowCrossing(read_codec("bfloat16"))
        nothing = [torch.empty(0, 3)] * 2
        crossing.start_all_to_all(comm, [torch.empty(0, 3) for _ in nothing], nothing)()
        return crossing.error

    assert run(2, work, timeout_s=20) == [None, None]


def planned(**options: Any) -> shoal.Plan:
    def work(comm: ThreadComm) -> shoal.Plan | None:
        network, own = built(mlp, torch.float32), rows_of(BATCHES[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                network, F.cross_entropy, sgd(network.parameters()), sample=own, **options
            )
            return shoal.plan_of(network)

    plan = run(2, work, timeout_s=60)[0]
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "pins",
    [
        {"0": "column_pair+bfloat16", "2": "row_pair+bfloat16"},
        {"0": "replicate", "2": "head+bfloat16"},
    ],
    ids=["pair", "head"],
)
def test_what_stays_cut_between_layers_and_in_the_loss_is_exact(pins: dict[str, str]) -> None:
    bare = {name: way.partition("+")[0] for name, way in pins.items()}
    exact, coded = trained_by(bare), trained_by(pins)
    moved = difference(state(built(mlp, torch.float32)), exact[0][0])
    for states, report in coded:
        assert all(torch.equal(states[name], coded[0][0][name]) for name in states)
        assert 0 < difference(exact[0][0], states) < 4 * MOST["bfloat16"] * moved
        assert {row.way for row in report.rows} == {way for way in pins.values() if "+" in way}
        for row in report.rows:
            assert row.step_error is not None and 0 < row.step_error < MOST["bfloat16"]


def test_a_plan_says_it_and_is_read_again() -> None:
    plan = planned(pins={"0": "column+bfloat16", "2": "row"})
    assert [choice.way for choice in plan.choices] == ["row", "column+bfloat16"]
    assert shoal.Plan.from_json(plan.to_json()) == plan
    assert planned(plan=plan).choices == plan.choices


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("column+int8", "codes each value by itself: bfloat16, float16"),
        ("column+bfloat", "no codec called 'bfloat'(.|\n)*did you mean 'bfloat16'"),
        ("factor+bfloat16", "factor takes no codec(.|\\n)*column"),
        ("embedding+bfloat16", "embedding takes no codec"),
        ("column:direct", "column takes no exchange"),
        ("sliced+bfloat16", r"write for instance \"sliced:\w+\+bfloat16\""),
    ],
)
def test_what_cannot_cross_so_is_refused(pin: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(pins={"0": pin})


def test_the_channels_of_a_convolution_cross_so() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))

    pictures = [
        (torch.randn(6, 2, 4, 4, generator=generator).to(DEVICE), y[:6]) for _, y in BATCHES
    ]
    network = built(make, torch.float32)
    exact, coded = (
        Training(model=copy.deepcopy(network), batches=pictures, optimizer=sgd).on_ranks(2, pin)[0]
        for pin in ("column", "column+bfloat16")
    )
    assert 0 < difference(exact, coded) < difference(state(network), exact) / 50


generator = torch.Generator().manual_seed(1)


class OfOneType(ThreadComm):
    """Takes messages of one type only, as NCCL does."""

    def start_all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        assert len({part.dtype for part in (*outputs, *inputs)}) == 1
        return super().start_all_to_all(outputs, inputs)


def test_messages_are_of_one_type() -> None:
    def work(comm: ThreadComm) -> Tensor:
        rows = numbers(2 * comm.rank + 1, 5, seed=comm.rank, dtype=torch.float32)
        coming = [rows.new_empty(2 * rank + 1, 5) for rank in range(comm.size)]
        alike = OfOneType(comm.rank, comm.hub, comm.name, comm.topology)
        crossing = RowCrossing(read_codec("bfloat16"))
        crossing.start_all_to_all(alike, coming, [rows] * comm.size)()
        assert torch.equal(coming[comm.rank], rows)
        return torch.cat(coming)

    first, second = run(2, work, timeout_s=10)
    torch.testing.assert_close(first, second, rtol=2**-7, atol=0)
