"""What is printed of training while it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shoal_tools.report.progress import Progress


@pytest.mark.parametrize("speaks", [True, False])
def test_an_epoch_is_a_line_on_one_rank(speaks: bool) -> None:
    output = io.StringIO()
    with Progress(Console(file=output), 4, share=0.5, speaks=speaks) as progress:
        for epoch, losses in enumerate([(1.0, 3.0), (0.5, 0.25)]):
            for loss in losses:
                progress.count(epoch, 0.002, loss, rows=3)
            progress.end_epoch(epoch)
        progress.end_epoch(2)  # without a step
    totals = progress.end()
    lines = output.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == (
        ["epoch 1: loss 2.0000", "epoch 2: loss 0.3750"] if speaks else []
    )
    assert not lines[2:]
    assert totals.startswith("4 steps of 6 rows in ") and totals.endswith("loss 0.3750")
    assert progress.num_steps == 4


def test_the_median_step_leaves_out_those_that_warm_up() -> None:
    progress = Progress(Console(file=io.StringIO()), 8, share=1.0, speaks=False)
    for seconds in (9.0, 8.0, 7.0, 6.0, 5.0):
        progress.count(0, seconds, 1.0, rows=1)
    assert progress.median_step_s == 7.0
    for seconds in (0.1, 0.3, 0.2):
        progress.count(0, seconds, 1.0, rows=1)
    assert progress.median_step_s == 0.2
