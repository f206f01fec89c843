"""`shoal bench` with peers that send fewer bytes, and with Shoal by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import RECIPE
from shoal.core.plan import Choice, Plan
from shoal.front.options import Options


def test_options_without_codecs_are_exact_in_all_that_they_say() -> None:
    choices = Choice("0", "sliced", "direct+int8"), Choice("1", "factor")
    exact = Options(plan=Plan(2, "digest", choices, 1 << 20, 3)).without_codecs()
    assert isinstance(exact.plan, Plan)
    assert [choice.way for choice in exact.plan.choices] == ["sliced:direct", "factor"]
    pins = {
        "0": "replicate:ring+top_k(share=0.02)",
        "1": "column+bfloat16",
        "2": "stage+bfloat16:sliced:direct",
    }
    exact = Options(pins=pins, codecs="all").without_codecs()
    assert exact.pins == {"0": "replicate:ring", "1": "column", "2": "stage:sliced:direct"}
    assert exact.codecs == ()


@pytest.mark.slow
@pytest.mark.processes
def test_hooks_of_ddp_and_exact_take_turns_with_codecs(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    against = "exact", "ddp", "ddp:fp16", "ddp:bf16", "ddp:powersgd1"
    options = "--against", ",".join(against), "--rounds", "2", "--steps", "1", "--json", str(path)
    pin = "--pin", "*=replicate:direct+int8"
    command = (sys.executable, "-m", "shoal", "bench", RECIPE, "-w", "2", *pin, *options)
    wide = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=wide)
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert set(figures["ratio_to_shoal"]) == set(against)
    names = figures["contenders"]
    assert names["exact"] == "shoal, exact"
    for name, called in (
        ("ddp:fp16", "ddp:fp16"),
        ("ddp:bf16", r"ddp:bf16 \(own\)"),
        ("ddp:powersgd1", r"ddp:powersgd1 \(own\)"),
    ):
        assert re.fullmatch(called + r", \d+ MB buckets", names[name])
        assert names[name] in done.stdout
    coded = [choice["exchange"] for choice in figures["plan"]["choices"]]
    assert coded and all(exchange == "direct+int8" for exchange in coded)
    exact = [choice["exchange"] for choice in figures["exact_plan"]["choices"]]
    assert exact == ["direct"] * len(coded)
    assert [row["layer"] for row in figures["codecs"]] and all(
        row["sent_bytes"] < row["exact_bytes"] for row in figures["codecs"]
    )
    assert "codecs: " in done.stdout and "worst layer: " in done.stdout
