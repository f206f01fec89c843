"""`accuracy`: one word for how near to exact training is to be. It stands for a list of codecs.

    exact   no codec: as one process
    near    codecs that lost nothing measurable, by their own price in samples
    fast    every codec, if a loss is then reached sooner by the clock

planner/lossy_plans.py takes a codec only if a loss is reached sooner. Guarded by
tests/front/test_options.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from shoal.contracts.codec import Codec
from shoal.contracts.feature import Feature
from shoal.core.errors import UsageError
from shoal.core.option import Flag, option
from shoal.core.registry import of
from shoal.session.opening import Opening

_WORDS = ("exact", "near", "fast")


@final
@dataclass(frozen=True)
class Accuracy(Feature[Opening]):
    """A word for the codecs that the planner may use.

    Args:
        word: "exact", "near" (16 bits, int8 and int4, each with error feedback) or "fast".

    Raises:
        UsageError: there is no such word.

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
            f'fast every codec that reaches a loss sooner. "{_WORDS[0]}" by default.',
            "--accuracy",
            read=str,
            choices=_WORDS,
            plans=True,
        ),
    )

    def __post_init__(self) -> None:
        word: Any = self.word
        if not isinstance(word, str) or word not in _WORDS:
            raise UsageError(
                "accuracy is none of its words",
                got=repr(word)[:80],
                expected=" or ".join(map(repr, _WORDS)),
                do='leave it out for exact training, or give "near"',
            )

    @property
    def codecs(self) -> tuple[str, ...]:
        """The names of the codecs that the word allows."""
        if self.word == "exact":
            return ()
        kinds = of(Codec).items()
        return tuple(name for name, kind in kinds if self.word == "fast" or kind.learning.is_near)
