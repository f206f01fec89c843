"""`accuracy`: one word for how near to exact training is to be. It stands for a list of codecs.

    exact   no codec: as one process
    near    codecs that lost nothing measurable, by their own price in samples
    fast    every codec, and local steps, if a loss is then reached sooner by the clock

planner/lossy_plans.py takes a codec only if a loss is reached sooner, and planner/local_ways.py
local steps. Guarded by tests/front/test_options.py and test_fast.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from shoal.contracts.codec import Codec
from shoal.contracts.feature import Feature
from shoal.core.errors import UsageError
from shoal.core.numbers import check_whole
from shoal.core.option import Flag, option
from shoal.core.registry import of
from shoal.session.opening import Opening

_WORDS = ("exact", "near", "fast")
_MOST = 1 << 40  # steps of a run


@final
@dataclass(frozen=True)
class Accuracy(Feature[Opening]):
    """A word for the codecs that the planner may use, and for local steps.

    Args:
        word: "exact", "near" (16 bits, int8 and int4, each with error feedback) or "fast".
        total_steps: exact steps that the whole run would have. With "fast", the length of rounds
            and the start of local steps depend on it. None: 448.

    Raises:
        UsageError: there is no such word, or the number is none; or it is given without "fast".

    Examples:
        >>> import shoal
        >>> shoal.Accuracy("near").codecs
        ('bfloat16', 'float16', 'int4', 'int8')
    """

    name: ClassVar[str] = "accuracy_word"
    word: str = option(
        _WORDS[0],
        keyword="accuracy",
        flag=Flag(
            "How near to exact training is to be: near allows codecs that lost nothing measurable, "
            f'fast every codec and local steps that reach a loss sooner. "{_WORDS[0]}" by default.',
            "--accuracy",
            read=str,
            choices=_WORDS,
            plans=True,
        ),
    )
    total_steps: int | None = option(None)

    def __post_init__(self) -> None:
        word: Any = self.word
        if not isinstance(word, str) or word not in _WORDS:
            raise UsageError(
                "accuracy is none of its words",
                got=repr(word)[:80],
                expected=" or ".join(map(repr, _WORDS)),
                do='leave it out for exact training, or give "near"',
            )
        if self.total_steps is not None:
            rule = "total_steps is the number of steps of the whole run, at least 1"
            check_whole(rule, self.total_steps, 1, _MOST, do="give 5000, or leave it out")
            if not self.takes_local_steps:
                raise UsageError(
                    'total_steps is for accuracy="fast", which chooses its start by it',
                    got=f"accuracy={word!r}",
                    do='leave total_steps out, or give accuracy="fast"',
                )

    @property
    def takes_local_steps(self) -> bool:
        """Whether the word allows local steps."""
        return self.word == "fast"

    @property
    def codecs(self) -> tuple[str, ...]:
        """The names of the codecs that the word allows."""
        if self.word == "exact":
            return ()
        kinds = of(Codec).items()
        every = self.takes_local_steps
        return tuple(name for name, kind in kinds if every or kind.learning.is_near)
