"""Homes of tensors that no plan names: one rank's stations use each.

Frozen parameters, and buffers that training changes, belong to the station in which a function uses
them. The first call of the model shows it. Later calls put their cuts so that it stays so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import nn

from shoal.core.freed_memory import return_free_memory
from shoal.pipeline.moving_buffers import MovingBuffer
from shoal.pipeline.stations import Stations
from shoal.pipeline.walk import Position


@final
class Homes:
    """The ranks of frozen parameters, and of buffers that training changes.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.frozen: dict[str, nn.Parameter] = {}  # frozen parameters that every rank has
        self.hold: Callable[[str, nn.Parameter, int], None] = _nothing
        self.moving: dict[str, MovingBuffer] = {}  # buffers that training changes
        self._homes: dict[str, int] = {}  # the rank of each buffer

    def keep(self, name: str, buffer: MovingBuffer, home: int | None) -> None:
        """Keep a buffer that training changes on a rank, or on that of its first use."""
        self.moving[name] = buffer
        self.frozen.pop(name, None)
        if home is not None:
            self._homes[name] = home

    @property
    def unlike(self) -> dict[str, MovingBuffer]:
        """Buffers with values that only one rank has within a call; others count calls."""
        return {name: buffer for name, buffer in self.moving.items() if not _counts(buffer)}

    def of(self, name: str) -> int:
        """Return the rank that has the present value of a buffer."""
        return self._homes.get(name, 0)

    def buffers(self, *, here: bool) -> list[MovingBuffer]:
        """Return the buffers with present values here, or all others."""
        return [
            buffer
            for name, buffer in self.moving.items()
            if (self._homes.get(name) == self._rank) is here
        ]

    def first(
        self,
        uses: Mapping[Position, Iterable[str]],
        holders: Mapping[str, int],
        layers: Mapping[str, str],
    ) -> dict[str, int]:
        """Return the ranks of buffers without a home: each is where the layer before its use is.

        Args:
            uses: the names of tensors that the events of a forward use, in order.
            holders: the rank of each layer.
            layers: the layer of each tensor that has a home.
        """
        homeless = self.moving.keys() - self._homes.keys()
        found: dict[str, int] = {}
        waiting: list[str] = []
        before: int | None = None
        for names in uses.values():
            ranks = [holders[layers[name]] for name in names if name in layers]
            before = ranks[0] if ranks else before
            waiting += sorted(name for name in names if name in homeless)
            if before is not None:
                for name in waiting:
                    found.setdefault(name, before)
                waiting.clear()
        return found

    def settle(self, homes: Mapping[str, int]) -> None:
        """Leave tensors with these ranks (a collective)."""
        with torch.inference_mode(False), torch.no_grad():
            for name, rank in homes.items():
                if name in self.moving:
                    self._homes[name] = rank
                else:
                    self.hold(name, self.frozen.pop(name), rank)
        if homes.keys() - self.moving.keys():
            return_free_memory()


def homes_of(
    uses: Mapping[Position, Iterable[str]], found: Stations, names: Iterable[str]
) -> dict[str, int]:
    """Return the rank of each of these tensors that the stations of one rank alone use.

    Args:
        uses: the names of tensors that the events of a forward use.
        found: the stations.
        names: the names of tensors without a home.
    """
    ranks: dict[str, set[int]] = {name: set() for name in names}
    for position, used in uses.items():
        holder = found.holders[bisect_right(found.cuts, position)]
        for name in used:
            if name in ranks:
                ranks[name].add(holder)
    return {name: min(its) for name, its in ranks.items() if len(its) == 1}


def _counts(buffer: MovingBuffer) -> bool:
    return not buffer.value.dim() and not buffer.value.is_floating_point()


def _nothing(name: str, parameter: nn.Parameter, rank: int) -> None:
    """Leave a parameter where it is."""
