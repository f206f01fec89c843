"""Beginning: how a lossy run begins, before fewer bytes and fewer meetings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UsageError
from shoal.core.numbers import check_truth, check_whole

_MOST = 1 << 30


@dataclass(frozen=True)
class Beginning:
    """The first steps of a lossy run: exact, or by a nearer codec. The lossy way follows.

    The first steps change weights most, so a loss there costs most. The switch keeps the
    optimizer's state and the values that codecs will send later.

    Args:
        steps: number of first steps.
        codec: the codec of these steps, such as "int8". '' for exact steps. If the exchange adds
            on its way, these steps are exact in any case. So they are before local steps.
        grows: with local steps, whether the first rounds are short: 1 step, then 2, 4 and so on, up
            to the usual length.

    Raises:
        UsageError: a number is not right.

    Examples:
        >>> import shoal
        >>> shoal.Lossy(codecs=["top_k"], first=shoal.Beginning(100, codec="int8")).first.steps
        100
    """

    steps: int
    codec: str = ""
    grows: bool = False

    def __post_init__(self) -> None:
        rule = "first is a number of steps, at least 0"
        check_whole(rule, self.steps, 0, _MOST, do="give for instance 100")
        check_truth("grows is True or False", self.grows, do="give grows=True for short rounds")
        codec: Any = self.codec
        if not isinstance(codec, str):
            raise UsageError(
                "the codec of first steps is a name",
                got=repr(codec)[:80],
                do='give for instance codec="int8", or leave it out for exact steps',
            )

    @classmethod
    def of(cls, asked: Beginning | int) -> Beginning:
        """Return the record that a number of exact steps stands for; a record as it is."""
        return asked if isinstance(asked, Beginning) else cls(asked)
