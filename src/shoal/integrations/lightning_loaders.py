"""Loaders of Lightning, dealt by `shoal.shard`. Guarded by tests/trainers/test_lightning.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, final

from shoal.core.errors import UsageError
from shoal.data.sharded import ShardedBatches, ShardedLoader
from shoal.front.shard import shard
from shoal.integrations.lightning_package import distributed


@dataclass(frozen=True)
class DealtRows:
    """The rows of a loader, which tell the ranks' shares of each batch.

    Args:
        count: number of rows in an epoch.
        whole: rows of all ranks in a whole batch.
        drop_last: whether a last batch that is not whole is left out.
        size: number of ranks.
    """

    count: int
    whole: int
    drop_last: bool
    size: int

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many rows in every batch."""
        rest = 0 if self.drop_last else self.count % self.whole
        return self.whole % self.size == 0 and rest % self.size == 0


@final
class EpochLoader:
    """A loader of this rank's rows with the length of a whole epoch.

    Lightning counts batches from the start of an epoch, also if training goes on in its middle.
    All else is the sharded loader's.
    """

    def __init__(self, loader: Any, rows: DealtRows | None = None) -> None:
        self._loader, self.rows = loader, rows
        try:
            self._length: int | None = len(loader)
        except TypeError:
            self._length = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length of this loader is not known")
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of all ranks."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position, on any number of ranks."""
        self._loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def epoch_loader(loader: Any, batch: Any, size: int) -> EpochLoader:
    """Deal a loader to the ranks, unless that is done. Refuse one that Lightning has remade."""
    if isinstance(loader, ShardedLoader) and "source" not in vars(loader):
        raise UsageError(
            "Lightning has made another loader of one that went through shoal.shard",
            where="predict, or overfit_batches",
            do="give Lightning the DataLoader itself. ShoalStrategy deals its rows",
        )
    if isinstance(loader, ShardedLoader | ShardedBatches):
        return EpochLoader(loader)
    return EpochLoader(_deal(loader, batch), _rows_of(loader, batch, size))


def _deal(loader: Any, batch: Any) -> Any:
    """Deal a loader. That of `predict` notes which rows each rank has taken."""
    wrapper = getattr(loader, "batch_sampler", None)
    if not isinstance(wrapper, distributed._IndexBatchSamplerWrapper):
        return shard(loader, batch=batch)
    plain = copy(loader)
    vars(plain)["batch_sampler"] = wrapper._batch_sampler
    dealt = shard(plain, batch=batch)
    vars(dealt)["batch_sampler"] = type(wrapper)(dealt.batch_sampler)
    return dealt


def _rows_of(loader: Any, batch: str, size: int) -> DealtRows | None:
    """Return a loader's rows; None if nobody knows them, as of a stream."""
    try:
        count, batch_size = len(loader.sampler), int(loader.batch_size)
    except (AttributeError, TypeError, NotImplementedError):
        return None
    return DealtRows(count, batch_size * (1 if batch == "global" else size), loader.drop_last, size)


def check_beside(loaders: Sequence[Any]) -> None:
    """Refuse loaders beside one another of which a step has unlike shares of rows.

    A loss that is a sum of means over the batches of several loaders has one weight a rank. So a
    rank must have the same share of every batch in a step.

    Raises:
        UsageError: it has not.
    """
    known = [getattr(loader, "rows", None) for loader in loaders]
    uneven = next((rows for rows in known if rows is not None and not rows.is_even), None)
    if uneven is None or len(set(known)) == 1:
        return
    raise UsageError(
        "a step takes batches of several loaders, and ranks have unlike shares of their rows",
        got=f"a loader of {uneven.count} rows, {uneven.whole} in a batch of all {uneven.size} "
        f"ranks{' (drop_last)' if uneven.drop_last else ''}, beside other ones",
        expected="loaders whose every batch is divisible by the number of ranks",
        do="give the loaders drop_last=True, or let one dataset hold the rows of all; or take "
        'every rank for the same weight, as DDP does: ShoalStrategy(weigh="ranks")',
    )
