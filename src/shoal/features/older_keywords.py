"""Keywords of `parallelize` that are not named in its signature, with their types.

Each of them is an option of the core (front/options.py) or of a feature, which checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from shoal.core.beginning import Beginning
from shoal.core.outer_step import Outer
from shoal.planner.search_options import SearchOptions


class LossyKeywords(TypedDict, total=False):
    """Keywords that change the mathematics. `shoal.Lossy` says the same, but for `total_steps`."""

    accuracy: str
    codecs: str | Iterable[str]
    first: Beginning | int | None
    local_steps: int | str | None
    max_error: float | None
    outer: Outer | None
    staleness: int | None
    total_steps: int | None


class Older(LossyKeywords, total=False):
    """All of these keywords. `features=` takes a record of each in their place."""

    buffers: str | Mapping[str, str]
    check_every: int
    micro_batches: int
    replan: bool
    schedule: str
    search_options: SearchOptions
    sync_batchnorm: bool
    update_every: Mapping[str, int] | None
