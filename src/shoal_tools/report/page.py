"""A run as one page of HTML: plan, step, comparison, training, codecs, scaling. Reads core only.

The page loads nothing from a network: pictures are SVG, and style and script are in the page. It
follows the reader's light or dark theme. Without its script only the timeline is missing.
Guarded by tests/tools/report/test_page.py, and in a browser by test_browser.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shoal.core.numbers import how_many
from shoal.core.record import Contender, Curve, Record, Training
from shoal_tools.report import drawing, scaling, tracks
from shoal_tools.report.figures import measured_step, predicted_step_s
from shoal_tools.report.foresight import limit_words, notes, verdict
from shoal_tools.report.layers import ModelPicture, picture_of, strategies_of
from shoal_tools.report.peer_words import in_words
from shoal_tools.report.step_table import recorded_steps, step_table

_FOLDER = Path(__file__).parent / "templates"
_PAGES = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_PAGES.filters.update(
    duration=drawing.duration, size=drawing.size, percent=drawing.percent, how_many=how_many
)


@dataclass(frozen=True)
class Card:
    """A figure at the top of the page."""

    name: str
    figure: str
    more: str = ""


def page(record: Record) -> str:
    """Return the page as text."""
    explanation, simulation = record.explanation, record.simulation
    model = picture_of(explanation) if explanation is not None else None
    return _PAGES.get_template("page.html").render(
        run=record,
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup((_FOLDER / "page.js").read_text(encoding="utf-8")),
        answer=_answer(record, model),
        cards=_cards(record, model),
        model=model,
        step=step_table(record),
        recorded=recorded_steps(record.tracks),
        timeline=tracks.drawn(record.tracks) if record.tracks else None,
        contenders=_bars(record.contenders),
        compared=in_words(
            record.contenders, strategies_of(explanation) if explanation is not None else ()
        ),
        training=_training(record.training, predicted_step_s(record)),
        scaling=simulation and {"curve": scaling.curve, "bars": scaling.bars, "limit": limit_words},
        told=notes(simulation) if simulation is not None else (),
    )


def _answer(record: Record, model: ModelPicture | None) -> str:
    """Write the most important result, in a sentence or two."""
    if record.simulation is not None:
        return verdict(record.simulation)
    told = [_step(record)]
    sent = record.explanation.step.sent_bytes if record.explanation is not None else 0.0
    if model is not None and model.plain_bytes > sent > 0:
        fewer = model.plain_bytes / sent
        told.append(f"It sends {fewer:.3g} times fewer bytes than an all-reduce of all gradients.")
    told += [
        f"{contender.name}: {contender.ratio[0]:.2f} times Shoal's step."
        for contender in record.contenders[:3]
        if contender.ratio is not None
    ]
    return " ".join(filter(None, told))


def _step(record: Record) -> str:
    """Say how long a step takes, and the prediction's error; "" if neither is known."""
    measured, predicted_s = measured_step(record), predicted_step_s(record)
    if measured is None:
        return (
            f"A step is predicted to take {drawing.duration(predicted_s)}." if predicted_s else ""
        )
    takes = f"A step takes {drawing.duration(measured.seconds)}."
    if not predicted_s or not measured.seconds:
        return takes
    off = abs(predicted_s - measured.seconds) / measured.seconds
    side = "under" if predicted_s < measured.seconds else "over"
    return f"{takes} The prediction is {drawing.percent(off)} {side} that."


def _cards(record: Record, model: ModelPicture | None) -> list[Card]:
    cards = _step_cards(record)
    explanation, simulation = record.explanation, record.simulation
    if explanation is not None and model is not None:
        plain = f"{drawing.size(model.plain_bytes)} as plain all-reduce"
        cards.append(Card("sent a step", drawing.size(explanation.step.sent_bytes), plain))
        ways = ", ".join(way.name for way in model.ways[:3])
        ranks = how_many(explanation.ranks, "rank")
        cards.append(Card("plan", how_many(len(model.rows), "layer"), f"{ranks}: {ways}"))
    if simulation is not None and simulation.scales:
        best = max(simulation.scales, key=lambda scale: scale.times)
        of = f"one host, with {how_many(best.hosts, 'host')}"
        cards.append(Card("at most", f"{best.times:.3g} times", of))
    if record.training is not None:
        loss = [value for value in record.training.loss.values if value is not None]
        steps = how_many(record.training.steps, "step")
        cards.append(Card("loss at the end", f"{loss[-1]:.4g}" if loss else "not finite", steps))
    return cards


def _step_cards(record: Record) -> list[Card]:
    """Make the cards of a step, as measured and as predicted."""
    measured, predicted_s = measured_step(record), predicted_step_s(record)
    cards = []
    if measured is not None:
        cards.append(Card("a step", drawing.duration(measured.seconds), measured.counts))
    if predicted_s:
        more = how_many(record.explanation.ranks, "rank") if record.explanation else ""
        cards.append(Card("a step, predicted", drawing.duration(predicted_s), more))
    return cards


@dataclass(frozen=True)
class ContenderBar:
    """A contender, and its bar in percent of the slowest one's."""

    contender: Contender
    part: float


def _bars(contenders: tuple[Contender, ...]) -> list[ContenderBar]:
    slowest = max((contender.median_s for contender in contenders), default=0.0) or 1.0
    return [ContenderBar(c, 100 * c.median_s / slowest) for c in contenders]


def _training(training: Training | None, predicted_s: float | None) -> Mapping[str, Any] | None:
    """Draw the curves of a training run."""
    if training is None:
        return None
    seconds = {"measured": _points(training.step_s)}
    if predicted_s is not None and seconds["measured"]:
        first, last = seconds["measured"][0][0], seconds["measured"][-1][0]
        seconds["predicted"] = [(first, predicted_s), (last, predicted_s)]
    return {
        "loss": drawing.line_chart(
            "loss by step", {"loss": _points(training.loss)}, "step", lambda y: f"{y:.4g}"
        ),
        "seconds": drawing.line_chart("seconds by step", seconds, "step", drawing.duration),
    }


def _points(curve: Curve) -> list[tuple[float, float | None]]:
    return [
        ((number + 1) * curve.steps_a_point, value) for number, value in enumerate(curve.values)
    ]
