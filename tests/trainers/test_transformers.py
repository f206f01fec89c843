"""Hugging Face's Trainer on ranks trains as it does in one process: trainer_cases.py, compared."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from starting import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TEXTS, EXACT = 21, ["tokens", "best", "classes", "head", "resumed", "adapter", "sft"]
NEEDS = {"adapter": "peft", "sft": "trl"}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the cases alone, on two ranks, and on three the one that goes on."""
    folder = tmp_path_factory.mktemp("trainer")
    return {"at": folder, **on_ranks("trainer_cases.py", folder=folder, sizes=(1, 2, 3))}


@pytest.mark.parametrize("case", EXACT)
def test_weights_are_those_of_one_process(records: Any, case: str) -> None:
    """Tokens of unlike numbers, accumulated, clipped and warmed up.

    To 1e-6: Hugging Face computes losses in float32, of a cut head in parts.
    """
    if case in NEEDS and importlib.util.find_spec(NEEDS[case]) is None:
        pytest.skip(f"{NEEDS[case]} is not installed")
    alone = records[1, 0][case]
    for place in [(2, 0), (2, 1)] + [(3, rank) for rank in range(3) if case == "resumed"]:
        for name, value in alone["weights"].items():
            found = records[place][case]["weights"][name]
            torch.testing.assert_close(found, value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", EXACT[:5])
def test_what_is_logged_is_that_of_one_process(records: Any, case: str) -> None:
    alone, first = records[1, 0][case], records[2, 0][case]
    assert first["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-5)
    assert len(first["logs"]) == len(alone["logs"])
    for own, expected in zip(first["logs"], alone["logs"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert own[name] == pytest.approx(expected[name], abs=1e-5)


def test_pins_are_kept(records: Any) -> None:
    assert set(records[2, 0]["tokens"]["strategies"]) == {"sliced"}
    assert "head" in records[2, 0]["head"]["strategies"]
    assert "column" in records[3, 0]["resumed"]["strategies"]


def test_a_run_goes_on_in_mid_epoch_on_three_ranks(records: Any) -> None:
    """It reads only the rows that were left, and each of them once."""
    whole = [row for batch in records[1, 0]["resumed"]["rows"] for row in batch]
    left = [
        row for rank in range(3) for batch in records[3, rank]["resumed"]["rows"] for row in batch
    ]
    assert sorted(left) == sorted(whole[3 * 6 :])


def test_rows_of_like_length_come_once(records: Any) -> None:
    """group_by_length deals one order out, in bfloat16 here."""
    of_ranks = [records[2, rank]["grouped"]["rows"] for rank in (0, 1)]
    seen = [row for rank in of_ranks for batch in rank for row in batch]
    assert sorted(seen) == sorted([*range(TEXTS)] * 2)


def test_weights_are_saved_whole(records: Any) -> None:
    """Rank 0 writes them, as Hugging Face reads them."""
    saved = load_file(records["at"] / "head-2" / "saved" / "model.safetensors")
    for name, value in records[1, 0]["head"]["weights"].items():
        torch.testing.assert_close(saved[name], value, atol=1e-6, rtol=0)


def test_freeing_memory_gives_an_ordinary_model_back(records: Any) -> None:
    assert all(record["ordinary"] for record in records[2, 0].values())
