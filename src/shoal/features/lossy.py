"""`shoal.Lossy`: everything that changes the mathematics, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.comm import rendezvous
from shoal.core.beginning import Beginning
from shoal.core.errors import UsageError
from shoal.core.outer_step import Outer


@dataclass(frozen=True)
class Lossy:
    """Options of training that change the mathematics. The plan and the report say it.

    Args:
        codecs: names of the codecs that the planner may use, as ["bfloat16", "int8(block=128)"], or
            "all". If the predicted step gets a tenth shorter, values then go in fewer bytes and
            not exactly.
        max_error: with codecs, a bound of the relative error of a parameter's mean over 100 steps.
            If the error is larger, the parameter's bucket goes exactly from then on, with a
            warning. By default each codec has its own bound.
        local_steps: number of steps that each rank makes by itself before all come together by an
            `outer` rule; or "auto", the fewest that hide the exchange. With servers each worker
            pushes its changes to them.
        outer: the outer rule, `shoal.Outer()` by default. It also says whether the ranks of one
            host step together, and how many exact steps come first. With servers it is
            `rule="average"`.
        first: number of exact steps before codecs or local steps begin, or a `shoal.Beginning`:
            steps by a nearer codec, and rounds that grow. The switch keeps the optimizer's state.
        update_every: number of steps from one update of a layer to the next, by dotted layer name
            or glob, as {"classifier.*": 4}. Until then each rank adds up its gradients, and `.grad`
            is None. Then `.grad` is their mean over all rows. The bytes of the steps between are
            saved.

    Examples:
        >>> import shoal
        >>> shoal.Lossy(codecs=["int8"]).asked()
        {'codecs': ['int8']}
    """

    codecs: str | Iterable[str] | None = None
    max_error: float | None = None
    local_steps: int | str | None = None
    outer: Outer | None = None
    first: Beginning | int | None = None
    update_every: Mapping[str, int] | None = None

    def asked(self) -> dict[str, Any]:
        """Return the keywords of `parallelize` that this record stands for.

        With local steps the first steps are the outer rule's exact ones.

        Raises:
            UsageError: there are first steps both here and in the outer rule, or by a codec before
                local steps.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.first is not None and self.local_steps is not None:
            values.update(first=None, outer=_outer_after(Beginning.of(self.first), self.outer))
        return {keyword: value for keyword, value in values.items() if value is not None}


def _outer_after(first: Beginning, outer: Outer | None) -> Outer:
    """Return the outer rule that comes after first steps."""
    if first.codec:
        raise UsageError(
            "before local steps the first steps are exact",
            got=f'codec="{first.codec}"',
            do="leave out the codec of shoal.Beginning",
        )
    outer = outer or Outer(rule="average" if rendezvous.servers() else Outer.rule)
    if outer.warmup_steps or outer.grows:
        raise UsageError(
            "there are first steps, and warm-up steps or growing rounds of the outer rule",
            do="say it in one place: shoal.Lossy(first=shoal.Beginning(100, grows=True))",
        )
    return replace(outer, warmup_steps=first.steps, grows=first.grows)
