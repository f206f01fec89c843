"""Keywords of `parallelize` that are not named in its signature, with their types.

Each of them is an option of the core (front/options.py) or of a feature, which checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from shoal.core.beginning import Beginning
from shoal.core.outer_step import Outer
from shoal.planner.search_options import SearchOptions


class Older(TypedDict, total=False):
    """Keywords that work as before. `shoal.Lossy` and `features=` say the same."""

    accuracy: str
    buffers: str | Mapping[str, str]
    check_every: int
    codecs: str | Iterable[str]
    first: Beginning | int | None
    local_steps: int | str | None
    max_error: float | None
    micro_batches: int
    outer: Outer | None
    replan: bool
    schedule: str
    search_options: SearchOptions
    staleness: int | None
    sync_batchnorm: bool
    total_steps: int | None
    update_every: Mapping[str, int] | None
