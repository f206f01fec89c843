"""Warns of objects that have unlike states on ranks, because a checkpoint has rank 0's alone.

They are schedulers, scalers, loaders, and any other object with a state except modules and
optimizers. Only numbers and words are compared. They travel with the random states that a save
gathers anyway. Guarded by tests/front/test_save_and_load.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.front.stages import LOGGER
from shoal.front.stateful import members

_MOST = 256  # numbers of an object
_LONGEST = 80  # characters of a value

Numbers = dict[str, str]  # values by the way to them


def numbers_of(objects: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Numbers]:
    """Return the numbers and words in the states that some objects gave, by keyword.

    Args:
        objects: objects to save. Modules, optimizers and plain data are left out.
        forms: their states as plain data.
    """
    found = {}
    for keyword, value in objects.items():
        inside = [member for _, member in members(value)]
        if inside and not any(isinstance(member, nn.Module | Optimizer) for member in inside):
            found[keyword] = dict(islice(_leaves(forms[keyword], keyword), _MOST))
    return found


def warn_of_unlike(ranks: Sequence[Mapping[str, Numbers]]) -> None:
    """Warn of each object that another rank has in another state than rank 0."""
    first, *others = ranks
    for keyword, own in first.items():
        for rank, of_rank in enumerate(others, start=1):
            other = of_rank.get(keyword, {})
            name = next((name for name in own if own[name] != other.get(name)), None)
            if name is not None:
                LOGGER.warning(
                    "%s is %s on rank 0, and %s on rank %d. The checkpoint has rank 0's %s. If "
                    "ranks are to go on alike, load and step it on every rank alike",
                    name,
                    own[name],
                    other.get(name, "not there"),
                    rank,
                    keyword,
                )
                break


def _leaves(form: Any, path: str) -> Any:
    """Yield the numbers and words in plain data, each with the way to it."""
    if isinstance(form, Mapping | list):
        items = form.items() if isinstance(form, Mapping) else enumerate(form)
        for key, part in items:
            yield from _leaves(part, f"{path}.{key}")
    elif isinstance(form, bool | int | float | str):
        yield path, repr(form)[:_LONGEST]
