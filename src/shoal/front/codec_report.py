"""`codec_report`: the bytes that codecs save on each layer, and the error of the sent values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shoal.codecs.carrier_memory import Remembering, coded_carriers
from shoal.core.plan import Choice, Plan
from shoal.core.record import CodecRow
from shoal.front.plan_queries import attached_of
from shoal.planner.timeline import Predictor
from shoal.session.compiled_models import without_compilation
from shoal.strategies.cut_layer import error_of_rows
from shoal.strategies.pipeline import error_of_crossing


@dataclass(frozen=True)
class CodecReport:
    """The layers that codecs serve. Print it for a table.

    Errors are of values that this rank has sent.

    Examples:
        >>> import shoal
        >>> print(shoal.CodecReport(()))
        no layer is served with a codec
    """

    rows: tuple[CodecRow, ...]

    @property
    def worst(self) -> CodecRow | None:
        """The layer with the largest mean error over 100 steps, or the largest error of a step."""
        return max(
            self.rows, key=lambda row: (row.mean_error or 0.0, row.step_error or 0.0), default=None
        )

    @property
    def summary(self) -> str:
        """The bytes of all layers, the worst layer, and the layers that have become exact again.

        Examples:
            >>> import shoal
            >>> row = shoal.CodecRow("head", "replicate:ring+int8", 4e6, 1e6, 0.007, None, True)
            >>> print(shoal.CodecReport((row,)).summary)
            codecs: 1 layer sends 1.000 MB a step in place of 4.000 MB (4.0 times fewer)
            worst layer: head (replicate:ring+int8), one step off by 0.70%
        """
        if self.worst is None:
            return str(self)
        exact, sent = self._megabytes
        layers = "1 layer sends" if len(self.rows) == 1 else f"{len(self.rows)} layers send"
        lines = [
            f"codecs: {layers} {sent:.3f} MB a step in place of {exact:.3f} MB "
            f"({exact / max(sent, 1e-6):.1f} times fewer)"
        ]
        worst = f"worst layer: {self.worst.layer} ({self.worst.way})"
        if self.worst.step_error is not None:
            worst += f", one step off by {self.worst.step_error:.2%}"
        if self.worst.mean_error is not None:
            worst += f", the mean of 100 steps by {self.worst.mean_error:.2%}"
        lines.append(worst)
        if exact_again := [row.layer for row in self.rows if not row.coded]:
            lines.append(f"exact again, since off by more than allowed: {', '.join(exact_again)}")
        return "\n".join(lines)

    @property
    def _megabytes(self) -> tuple[float, float]:
        """Megabytes of all layers, exact and sent."""
        return (
            sum(row.exact_bytes for row in self.rows) / 1e6,
            sum(row.sent_bytes for row in self.rows) / 1e6,
        )

    def __str__(self) -> str:
        if not self.rows:
            return "no layer is served with a codec"
        width = max(len(row.layer) for row in self.rows)
        lines = [f"{'layer':{width}}  exact MB  sent MB  one step  100 steps  way"]
        for row in self.rows:
            lines.append(
                f"{row.layer:{width}}  {row.exact_bytes / 1e6:8.3f}  {row.sent_bytes / 1e6:7.3f}  "
                f"{_percent(row.step_error):>8}  {_percent(row.mean_error):>9}  {row.way}"
                + ("" if row.coded else " (exact again)")
            )
        exact, sent = self._megabytes
        lines.append(f"in all {exact:.3f} MB a step, sent as {sent:.3f} MB")
        return "\n".join(lines)


def codec_report(model: nn.Module) -> CodecReport:
    """Report for each layer the bytes that codecs save, and the error of the sent values.

    The error of one step compares the sent values with the exact ones. The loss of a code is sent
    in later steps, so training sees the error of the mean over 100 steps. Not a collective.

    Returns:
        A row for each layer that the plan serves with a codec. Print it for a table.

    Raises:
        UsageError: the model was not parallelised, or before `init`.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = shoal.parallelize(
        ...     model, loss_fn, optimizer, sample=(torch.ones(8, 4), torch.zeros(8, 2))
        ... )
        >>> print(shoal.codec_report(model))
        no layer is served with a codec
    """
    attached = attached_of(model)
    if attached is None:
        return CodecReport(())
    predictor = Predictor(attached.profile, attached.cluster)
    errors = _Errors.of(coded_carriers(attached.engine.transfers))
    coded = [choice for choice in attached.plan.choices if choice.codec]
    modules = dict(without_compilation(model).named_modules())
    # all layers of a pipeline share one crossing
    held = [choice for choice in coded if predictor.role(choice.strategy).names_ranks]
    coded = [choice for choice in coded if choice not in held]
    steps = attached.plan.steps_per_exchange
    rows = [_row(choice, predictor, errors, steps) for choice in coded]
    for at, choice in enumerate(coded):
        if choice.exchange.startswith("+"):
            own = error_of_rows(modules[choice.layer])
            rows[at] = replace(rows[at], step_error=own)
    if held:
        rows.append(_of_pipeline(attached.plan, held, predictor, modules[""]))
    return CodecReport(tuple(rows))


@dataclass(frozen=True)
class _Errors:
    """The worst error of all buckets with a parameter, by the parameter's name."""

    step: dict[str, float]
    mean: dict[str, float]
    exact: set[str]  # names of parameters that have become exact again

    @classmethod
    def of(cls, carriers: Iterable[Remembering]) -> _Errors:
        errors = cls({}, {}, set())
        for carrier in carriers:
            for worst, by_name in (
                (errors.step, carrier.ledger.step_errors()),
                (errors.mean, carrier.ledger.mean_errors()),
            ):
                for name, error in by_name.items():
                    worst[name] = max(error, worst.get(name, 0.0))
            if carrier.given_up:
                errors.exact.update(carrier.bucket.numels)
        return errors


def _row(choice: Choice, predictor: Predictor, errors: _Errors, steps: int) -> CodecRow:
    """Return one layer's row. A step sends one part in so many."""
    names = [p.name for p in predictor.layer(choice.layer).parameters]
    coded = errors.exact.isdisjoint(names)
    exact_bytes, _ = predictor.alone_s(choice.without_codec())
    sent_bytes, _ = predictor.alone_s(choice if coded else choice.without_codec())
    return CodecRow(
        choice.layer,
        choice.way,
        exact_bytes / steps,
        sent_bytes / steps,
        max((errors.step[name] for name in names if name in errors.step), default=None),
        max((errors.mean[name] for name in names if name in errors.mean), default=None),
        coded,
    )


def _of_pipeline(
    plan: Plan, held: Sequence[Choice], predictor: Predictor, model: nn.Module
) -> CodecRow:
    """Return the row of values that cross between the ranks of a pipeline."""
    exact = replace(plan, choices=tuple(choice.without_codec() for choice in plan.choices))
    first = held[0]
    before, after = (
        sum(
            predictor.cost(site).traffic.worst
            for site in predictor.sites(each)
            if site.strategy == first.strategy
        )
        for each in (exact, plan)
    )
    layers = "all layers" if len(held) == len(plan.choices) else f"{len(held)} layers on hosts"
    way, error = f"{first.strategy}{first.rows}", error_of_crossing(model)
    return CodecRow(layers, way, before, after, error, None, True)


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.2%}"
