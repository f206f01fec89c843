"""The random state of a process, on which the next draws of torch, Python and numpy depend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DERIVED = 2**63 - 25


def drawn() -> dict[str, Any]:
    """Return the state of all generators that a script draws from unless it makes its own."""
    version, words, gauss = random.getstate()  # save 9
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_of_numpy = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, device="cpu"), gauss],
        "numpy": [str(name), words_of_numpy, position, has_gauss, cached],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(states: Sequence[Any], rank: int, size: int) -> None:
    """Restore random states, so that draws go on from the saved point.

    Args:
        states: states of all ranks that trained, in their order; one if all had the same.
        rank: rank of this process.
        size: number of ranks that train now. If the number has changed, ranks get new states, which
            follow from the saved ones.
    """
    if len(states) == 1 or len(states) == size:
        _put(states[rank % len(states)])
        return
    seed = 0
    for state in states:
        words: Tensor = state["torch"]
        for word in words[:64].tolist():
            seed = (seed * 1_000_003 + word) % _DERIVED
    seed = (seed * 1_000_003 + rank) % _DERIVED
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def problem(states: Any) -> str:
    """Say why a checkpoint's states cannot be restored; '' if they can. Nothing changes."""
    if not isinstance(states, list) or not states:
        return "no list with a state for each rank"
    for rank, state in enumerate(states):
        try:
            torch.Generator().set_state(state["torch"])
            random.Random().setstate(_of_python(state))
            np.random.RandomState().set_state(_of_numpy(state))
            if "cuda" in state and torch.cuda.is_available():
                torch.Generator(device="cuda").set_state(state["cuda"])
        except Exception as error:  # any error: the state may be anything
            return f"rank {rank}: {type(error).__name__}: {error}"[:200]
    return ""


def _put(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(_of_python(state))
    np.random.set_state(_of_numpy(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _of_python(state: dict[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = state["python"]
    return version, tuple(words.tolist()), gauss


def _of_numpy(state: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state["numpy"]
    return name, keys.numpy().astype(np.uint32), position, has_gauss, cached


def is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states are the same."""
    if one.keys() != other.keys():
        return False
    return all(_same(one[name], other[name]) for name in one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, list):
        return all(map(_same, one, other))
    return bool(one == other)
