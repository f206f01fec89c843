"""Compares what ranks have in common now and then, if no bucket can tell it in each backward.

On a GPU a look at the sums of a bucket would wait for the device. There ranks tell their words
behind the second backward, and behind every hundredth. Costs one small message to every other rank
then. Guarded by tests/equivalence/test_in_common.py.
"""

from __future__ import annotations

from typing import final

from shoal.contracts.comm import Comm
from shoal.engine.common import Common, exchanged
from shoal.engine.lanes import Lane

_EVERY = 100  # backwards


@final
class NowAndThen:
    """The comparisons of one model, on one rank.

    Args:
        common: tells what this rank has.
        lane: a lane among the ranks that train.
    """

    def __init__(self, common: Common, lane: Lane) -> None:
        self._common, self._lane = common, lane
        self._backwards = 0

    def backward_ended(self) -> None:
        """Count a backward that has sent. Compare if it is time (a collective).

        Raises:
            RanksDiffer: ranks differ in what matters.
        """
        self._backwards += 1
        if self._backwards != 2 and self._backwards % _EVERY:
            return
        where = f"backward {self._backwards - 1}"
        mark = self._common.mark(where)

        def compare(comm: Comm) -> None:
            if len(set(exchanged(comm, mark.word))) > 1:
                mark.compare(comm)

        self._lane.run(compare, "comparing what ranks have in common").wait(where)
