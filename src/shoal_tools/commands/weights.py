"""Weights for `shoal test` and `shoal features`: a run's folder, a checkpoint or a file.

The only pickle that is read is torch's own of tensors, which runs no code.
Guarded by tests/tools/commands/test_weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint.fetched import newest
from shoal.checkpoint.folder import STATE, as_path
from shoal.comm.agreement import agreed
from shoal.core.errors import UsageError
from shoal.core.regular_files import require_regular
from shoal.front.save_and_load import load
from shoal.front.stateful import check_module
from shoal.session.session import ranks

_WITHIN = ("model", "state_dict")  # keys under which scripts often keep a model's weights
_PURPOSE = "--weights: reading them"


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights from a folder, a checkpoint or a file (a collective).

    Args:
        model: the model that gets them.
        path: a run's folder, a checkpoint, a file of safetensors, or of torch.save.

    Raises:
        UsageError: there are no weights, or they belong to another model.
    """
    comm = ranks()
    path = agreed(comm, lambda: as_path(path, "--weights"), _PURPOSE)
    if (of_run := newest(comm, path)) is not None:
        path, _ = of_run
    is_file = path.is_file() and not (path / STATE).exists()
    if not any(comm.gather_objects(is_file, _PURPOSE)):
        load(path, model=model)
        return
    saved = agreed(comm, lambda: _check(model, path), _PURPOSE)
    model.load_state_dict(saved)


def _check(model: nn.Module, path: Path) -> Mapping[str, Any]:
    saved = _read(path)
    within = (saved[name] for name in _WITHIN if isinstance(saved, Mapping) and name in saved)
    saved = next((found for found in within if isinstance(found, Mapping)), saved)
    is_weights = isinstance(saved, Mapping) and all(isinstance(name, str) for name in saved)
    if not is_weights or not any(isinstance(value, torch.Tensor) for value in saved.values()):
        raise _no_weights(path, f"a {type(saved).__name__}")
    check_module(model, saved, str(path))
    return saved


def _read(path: Path) -> Any:
    try:
        require_regular(path)
        try:
            return load_file(path)
        except SafetensorError:
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(
            "the weights cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            do="give a path that every rank's host has, and this user may read",
        ) from error
    except Exception as error:  # any error: the file may hold anything
        raise _no_weights(path, f"{type(error).__name__} as it is read") from error


def _no_weights(path: Path, got: str) -> UsageError:
    return UsageError(
        "the file holds no weights",
        where=str(path),
        got=got,
        expected="safetensors, or what torch.save(model.state_dict(), path) writes",
        do="give such a file, a checkpoint, or a folder of `shoal train --checkpoint`",
    )
