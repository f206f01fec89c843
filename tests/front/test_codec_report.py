"""The report of codecs, and the guard that sends a layer exactly again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from one_process import assert_same_bits, cluster_of
from torch import Tensor, nn

import shoal
from shoal.codecs.carrier import CodedCarrier
from shoal.codecs.coded_exchange import read_codec
from shoal.codecs.runs import Runs
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.session_start import using

ROWS, COLUMNS = 6, 40


def trained(
    pin: str, steps: int, **options: Any
) -> list[tuple[shoal.CodecReport, Tensor, list[Tensor]]]:
    """Two ranks with a linear loss: each step's gradient is the same. Report, weight, changes."""

    def work(comm: ThreadComm) -> tuple[shoal.CodecReport, Tensor, list[Tensor]]:
        network = nn.Sequential(nn.Linear(COLUMNS, ROWS))
        nn.init.zeros_(network[0].weight)
        x, changes = inputs(comm.rank), []
        with using(comm, cluster_of(2)):
            optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
            _, loss_fn, _ = shoal.parallelize(
                network,
                lambda out, _: (out * torch.arange(1.0, ROWS + 1)).mean(),
                optimizer,
                sample=(x, None),
                pins={"*": pin},
                **options,
            )
            for _ in range(steps):
                before = network[0].weight.detach().clone()
                optimizer.zero_grad()
                loss_fn(network(x), None).backward()
                optimizer.step()
                changes.append(before - network[0].weight.detach())
            return shoal.codec_report(network), network[0].weight.detach().clone(), changes

    return run(2, work, timeout_s=100)


def inputs(rank: int) -> Tensor:
    return torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(rank))


def gradient(rank: int) -> Tensor:
    """Of the mean over ROWS outputs and 3 rows, halved for two ranks; flat."""
    of_outputs = torch.arange(1.0, ROWS + 1)[:, None] / ROWS
    return (of_outputs * inputs(rank).mean(0) / 2).reshape(-1)


def sent(values: Tensor, codec: str) -> Tensor:
    """What a code of these values stands for."""
    runs, back = Runs(read_codec(codec)), torch.empty_like(values)
    code = torch.empty(runs.nbytes(len(values), 4), dtype=torch.uint8)
    runs.encode(values, code, None, {})
    runs.decode(code, back)
    return back


def test_the_error_of_a_step_is_as_by_hand() -> None:
    """Sliced in two: rank 0 sends the code of rank 1's half, of its own gradient.

    Back goes the code of the change of its own half, by the sum of its gradient and what it got.
    """
    codec = "one_bit(block=8)"
    # the biases stand behind the weights: rank 1 owns them, and fewer weights
    first = (ROWS * COLUMNS + ROWS) // 2
    halves = [gradient(rank).split([first, ROWS * COLUMNS - first]) for rank in range(2)]
    for rank, (report, _, _) in enumerate(trained(f"sliced:direct+{codec}", 1)):
        there = halves[rank][1 - rank]
        back = -(halves[rank][rank] + sent(halves[1 - rank][rank], codec))
        by_hand = max(
            float((sent(values, codec) - values).norm() / values.norm()) for values in (there, back)
        )
        (row,) = report.rows
        assert row.mean_error is None
        assert row.step_error == pytest.approx(by_hand, rel=1e-4)
        assert row.layer == "0" and row.way == f"sliced:direct+{codec}" and row.coded
        assert 3 < row.ratio < 32
        assert "0.0" in str(report) and codec in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicate:direct", "sliced:direct"])
def test_the_mean_over_100_steps_is_nearer_than_a_step(way: str) -> None:
    for report, _, _ in trained(f"{way}+one_bit(block=8)", 101):
        (row,) = report.rows
        assert report.worst == row and row.coded
        assert row.step_error is not None and row.mean_error is not None
        assert 0 < row.mean_error < row.step_error / 4


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("replicate:direct", marks=pytest.mark.slow),
        pytest.param("replicate:ring", marks=pytest.mark.slow),
        "sliced:direct",
    ],
)
def test_a_layer_beyond_its_bound_is_exact_again(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 104
    with caplog.at_level(logging.WARNING, logger="shoal"):
        outcomes = trained(f"{way}+one_bit(block=8)", steps, max_error=1e-4)
    assert_same_bits([{"weight": weight} for _, weight, _ in outcomes])
    exact = (gradient(0) + gradient(1)).view(ROWS, COLUMNS)
    for report, weight, changes in outcomes:
        assert not report.rows[0].coded and "exact again" in str(report)
        assert report.rows[0].ratio == 1
        assert "exact again, since off by more than allowed: 0" in report.summary
        assert not torch.allclose(changes[99], exact, rtol=1e-3)
        for change in changes[102:]:
            torch.testing.assert_close(change, exact, rtol=1e-3, atol=1e-4)
        # what codes had lost has come with the first exact steps
        torch.testing.assert_close(-weight / steps, exact, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("0.weight: the mean of 100 steps was off by more than 0.0001") == 1


@pytest.mark.slow
def test_a_bound_that_holds_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shoal"):
        outcomes = trained("replicate:direct+int8", 101, max_error=0.5)
    assert all(report.rows[0].coded for report, _, _ in outcomes)
    assert "off by more" not in caplog.text


@pytest.mark.parametrize("bound", [0, -1.0, "much", float("nan"), float("inf"), True])
def test_a_bound_out_of_range_is_refused(bound: Any) -> None:
    with pytest.raises(UsageError, match="max_error is a bound of a relative error, above 0"):
        trained("replicate:direct+int8", 0, max_error=bound)


def test_an_exact_plan_has_an_empty_report() -> None:
    for report, _, _ in trained("replicate:direct", 1):
        assert report.rows == () and str(report) == "no layer is served with a codec"
        assert report.worst is None and report.summary == str(report)


def test_the_summary_has_all_bytes_and_the_worst_layer() -> None:
    rows = (
        shoal.CodecRow("near", "replicate:ring+int8", 6e6, 1.5e6, 0.009, 0.0001, True),
        shoal.CodecRow("far", "sliced:direct+one_bit", 3e6, 0.1e6, 0.6, 0.02, True),
        shoal.CodecRow("exact", "sliced:direct+top_k", 1e6, 1e6, 0.97, 0.01, False),
    )
    assert shoal.CodecReport(rows).summary.splitlines() == [
        "codecs: 3 layers send 2.600 MB a step in place of 10.000 MB (3.8 times fewer)",
        "worst layer: far (sliced:direct+one_bit), one step off by 60.00%, "
        "the mean of 100 steps by 2.00%",
        "exact again, since off by more than allowed: exact",
    ]


def test_without_a_codec_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a carrier of codes was made")

    monkeypatch.setattr(CodedCarrier, "__init__", refuse)
    trained("sliced:direct", 2)
