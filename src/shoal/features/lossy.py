"""`shoal.Lossy`: everything that changes the mathematics, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.core.outer import Outer


@dataclass(frozen=True)
class Lossy:
    """What training may do that changes the mathematics. The plan and the report say it.

    Args:
        codecs: names of those that the planner may use, as ["bfloat16", "int8(block=128)"], or
            "all". Where the predicted step gets a tenth shorter, values then go in fewer bytes and
            not exactly.
        max_error: with codecs, a bound of the relative error of a parameter's mean over 100 steps.
            Where it is off by more, its bucket goes exactly from then on, with a warning. By
            default each codec has its own bound.
        local_steps: each rank makes so many steps by itself, then all come together by an `outer`
            rule; or "auto", the fewest that hide the exchange. With servers each pushes what it has
            learned to these.
        outer: that rule, `shoal.Outer()` by default. It also says whether the ranks of one host
            step together, and how many exact steps come first. With servers it is `rule="average"`.
        update_every: by dotted layer name or glob, every how many steps a layer is updated, as
            {"classifier.*": 4}. Until then each rank adds up its gradients, and `.grad` is None.
            Then it is their mean over all rows, and the bytes of the steps between are saved.

    Examples:
        >>> import shoal
        >>> shoal.Lossy(codecs=["int8"]).asked()
        {'codecs': ['int8']}
    """

    codecs: str | Iterable[str] | None = None
    max_error: float | None = None
    local_steps: int | str | None = None
    outer: Outer | None = None
    update_every: Mapping[str, int] | None = None

    def asked(self) -> dict[str, Any]:
        """The keywords of `parallelize` that it stands for."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {keyword: value for keyword, value in values.items() if value is not None}
