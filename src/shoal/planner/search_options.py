"""Settings of a search: other things to try than strategies, and limits that plans must keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.buckets import MEMORY
from shoal.core.errors import UsageError
from shoal.core.numbers import check_whole, shown
from shoal.core.placement import BALANCED, Placement
from shoal.core.plan import LEAST_PART_BYTES

_START_BYTES = 4 << 20
_MOST_LAYERS = 96
_USUAL = {"least_part_bytes": LEAST_PART_BYTES, "most_layers": _MOST_LAYERS}
_EXAMPLES = {"bucket_bytes": "(1 << 20,)", "chunks": "(1, 2)"}


@dataclass(frozen=True)
class SearchOptions:
    """Settings that a search of plans tries. The defaults suit training.

    Narrow them for an experiment.

    Args:
        bucket_bytes: sizes of buckets.
        least_part_bytes: the least size of the parts that a layer with owners is cut into.
        chunks: numbers of chunks that rows come in to layers that are cut over ranks.
        most_layers: the largest number of layers that are decided one by one. With more, small
            neighbours change together.

    Raises:
        UsageError: a setting leaves nothing to try, or has another type.

    Examples:
        >>> import shoal
        >>> shoal.SearchOptions(bucket_bytes=(1 << 20,), chunks=(1,)).start_bytes
        1048576
    """

    bucket_bytes: tuple[int, ...] = tuple(mib << 20 for mib in (1, 2, 4, 8, 16, 25, 50, 100))
    least_part_bytes: int = LEAST_PART_BYTES
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    most_layers: int = _MOST_LAYERS

    def __post_init__(self) -> None:
        for name, example in _EXAMPLES.items():
            values, do = getattr(self, name), f"give for instance {name}={example}"
            if isinstance(values, str | bytes) or not isinstance(values, Sequence):
                rule = f"{name} of a search is a tuple of values to try"
                raise UsageError(rule, got=shown(values), do=do)
            if not values:
                raise UsageError(f"a search has no {name} to try", do="give at least one")
            for value in values:
                rule = f"{name} of a search are whole numbers, at least 1"
                check_whole(rule, value, 1, do=do)
            object.__setattr__(self, name, tuple(dict.fromkeys(sorted(values))))
        for name in ("least_part_bytes", "most_layers"):
            rule, value = f"{name} of a search is a whole number, at least 1", getattr(self, name)
            check_whole(rule, value, 1, do=f"leave it out: it is {_USUAL[name]:,}")

    @property
    def least_bytes(self) -> int:
        """The smallest bucket."""
        return min(self.bucket_bytes)

    @property
    def start_bytes(self) -> int:
        """The size of buckets at the start of a search."""
        small = [nbytes for nbytes in self.bucket_bytes if nbytes <= _START_BYTES]
        return max(small, default=self.least_bytes)

    def sizes_within(self, limit: float) -> tuple[int, ...]:
        """Return the sizes of buckets up to a limit, or the least size."""
        within = tuple(nbytes for nbytes in self.bucket_bytes if nbytes <= limit)
        return within or (self.least_bytes,)


@dataclass(frozen=True)
class Constraints:
    """Limits that the user sets to the plans of a search."""

    # strategy ("factor"), or strategy and exchange ("replicate:ring"), by dotted layer name or glob
    pins: Mapping[str, str] | None = None
    strategies: Iterable[str] | None = None  # names of strategies that may be used; None: all
    # ranks as owners; a layer with a parameter that is given to a rank gets a strategy with owners
    placement: Placement = BALANCED
    # "low" limits all buckets in memory at one time to a fifth of the model
    memory: str = MEMORY[0]
    # bytes of a rank between steps: parameters, gradients, buckets and optimizer state
    memory_limit: float | None = None


DEFAULT = SearchOptions()
UNCONSTRAINED = Constraints()
