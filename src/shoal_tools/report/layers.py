"""A plan as a picture of the model: for each layer time, bytes before and after, and strategy.

    overview   a column for each layer, in the order of forward: time above, bytes below
    rows       the same in words; if layers are many, the slowest or largest are shown at first
    stations   of a pipeline: a row for each rank, a box for each of its stations

Reads core only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup, escape

from shoal.core.explanation import Explanation, LayerExplanation, StationExplanation
from shoal_tools.report.drawing import LEFT, RIGHT, duration, picture, size, text

_FEW = 30  # up to so many layers are all shown at once
_SHOWN = 16  # number of layers that are shown if there are more
_NAMED = 12  # columns that have room for a name
# a colour of the page's style for each kind of strategy; an unknown one has the last colour
_HUES = {
    "replicate": 0,
    "sliced": 1,
    "factor": 2,
    "column": 3,
    "column_pair": 3,
    "row": 4,
    "row_pair": 4,
    "embedding": 5,
    "sparse": 5,
    "server": 6,
    "server_rows": 6,
    "stage": 7,
    "head": 7,
    "tied": 5,
    "pipeline": 7,
}
_OTHER = 8
_WIDTH, _HEIGHT, _MIDDLE, _TOP = 1000, 210, 96, 18
_BOX, _GAP, _FIRST = 26, 14, 8  # heights of stations' boxes and of gaps, and the top


@dataclass(frozen=True)
class LayerRow:
    """A layer in the picture. Parts are in percent of the largest layer's."""

    number: int  # place in the order of forward
    layer: LayerExplanation
    hue: int
    is_large: bool
    time_s: float
    forward_part: float
    backward_part: float
    plain_part: float
    exact_part: float
    sent_part: float

    @property
    def is_coded(self) -> bool:
        """Whether a codec makes its messages smaller."""
        return bool(self.layer.chosen.choice.codec)


@dataclass(frozen=True)
class Way:
    """All layers that are served in one way."""

    name: str
    hue: int
    layers: int
    parameters: int
    time_s: float
    plain_bytes: float
    sent_bytes: float


@dataclass(frozen=True)
class ModelPicture:
    """The page's picture of a plan."""

    rows: tuple[LayerRow, ...]
    ways: tuple[Way, ...]
    overview: Markup  # '' if the rows show everything
    plain_bytes: float
    sent_bytes: float
    stations: Markup  # stations of a pipeline; '' without one

    @property
    def hidden(self) -> int:
        """Number of rows that are not shown at first."""
        return sum(not row.is_large for row in self.rows)


def picture_of(explanation: Explanation) -> ModelPicture:
    """Draw a plan."""
    # gradients come in the order of backward, so layers are reversed
    rows = _rows(explanation.layers[::-1])
    return ModelPicture(
        rows,
        _ways(rows),
        _overview(rows) if len(rows) > _NAMED else Markup(),
        sum(row.layer.plain_bytes for row in rows),
        sum(row.layer.chosen.sent_bytes for row in rows),
        draw_stations(explanation.step.stations),
    )


def strategies_of(explanation: Explanation) -> set[str]:
    """Return the strategies that serve a plan's layers."""
    return {layer.chosen.choice.strategy for layer in explanation.layers}


def _rows(layers: Sequence[LayerExplanation]) -> tuple[LayerRow, ...]:
    longest_s = max((_time_s(layer) for layer in layers), default=0.0) or 1.0
    most = max((max(_nbytes(layer)) for layer in layers), default=0.0) or 1.0
    by_weight = sorted(
        range(len(layers)),
        key=lambda at: -max(_time_s(layers[at]) / longest_s, max(_nbytes(layers[at])) / most),
    )
    large = set(by_weight if len(layers) <= _FEW else by_weight[:_SHOWN])
    return tuple(
        LayerRow(
            number,
            layer,
            _HUES.get(layer.chosen.choice.strategy, _OTHER),
            number in large,
            _time_s(layer),
            100 * layer.forward_s / longest_s,
            100 * layer.backward_s / longest_s,
            *(100 * nbytes / most for nbytes in _nbytes(layer)),
        )
        for number, layer in enumerate(layers)
    )


def _time_s(layer: LayerExplanation) -> float:
    return layer.forward_s + layer.backward_s


def _nbytes(layer: LayerExplanation) -> tuple[float, float, float]:
    """Return a layer's bytes by a plain all-reduce, without its codec, and as it is served."""
    sent = layer.chosen.sent_bytes
    return layer.plain_bytes, max(layer.exact_bytes, sent), sent


def _ways(rows: Sequence[LayerRow]) -> tuple[Way, ...]:
    of_way: dict[str, list[LayerRow]] = defaultdict(list)
    for row in rows:
        of_way[row.layer.chosen.choice.way].append(row)
    ways = [
        Way(
            name,
            same[0].hue,
            len(same),
            sum(row.layer.parameters for row in same),
            sum(row.time_s for row in same),
            sum(row.layer.plain_bytes for row in same),
            sum(row.layer.chosen.sent_bytes for row in same),
        )
        for name, same in of_way.items()
    ]
    return tuple(sorted(ways, key=lambda way: (-way.plain_bytes, way.name)))


def _overview(rows: Sequence[LayerRow]) -> Markup:
    """Draw a column for each layer: time above the middle line, bytes below it."""
    wide = _WIDTH / len(rows)
    gap = min(2.0, wide / 5)
    above, below = _MIDDLE - _TOP, _HEIGHT - _MIDDLE - 20
    longest_s = max(row.time_s for row in rows) or 1.0
    parts = [
        f'<text x="0" y="12">time, forward and backward; the longest {duration(longest_s)}</text>',
        f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{_MIDDLE}" y2="{_MIDDLE}"/>',
    ]
    for row in rows:
        x, width = row.number * wide, f'width="{wide - gap:.2f}"'
        tall = row.time_s / longest_s * above
        chosen = row.layer.chosen
        told = (
            f"{row.layer.layer} · {chosen.choice.way} · {duration(row.time_s)} · "
            f"{size(row.layer.plain_bytes)} → {size(chosen.sent_bytes)}"
        )
        plain, sent = (part / 100 * below for part in (row.plain_part, row.sent_part))
        top = _MIDDLE + 1
        parts.append(
            f'<a href="#layer-{row.number}"><title>{escape(told)}</title>'
            f'<rect class="hit" x="{x:.2f}" y="{_TOP}" {width} height="{above + below}"/>'
            f'<rect class="time" x="{x:.2f}" y="{_MIDDLE - tall:.2f}" {width} '
            f'height="{tall:.2f}"/>'
            f'<rect class="plain" x="{x:.2f}" y="{top}" {width} height="{plain:.2f}"/>'
            f'<rect class="s{row.hue}" x="{x:.2f}" y="{top}" {width} height="{sent:.2f}"/></a>'
        )
    most = max(max(_nbytes(row.layer)) for row in rows)
    parts.append(
        f'<text x="0" y="{_HEIGHT - 4}">bytes of a step: grey as plain all-reduce, coloured as '
        f"sent; the most {size(most)}</text>"
    )
    return picture("the model, a column a layer", parts, _WIDTH, _HEIGHT)


def draw_stations(stations: Sequence[StationExplanation]) -> Markup:
    """Draw the way of one rank's rows. A box is as wide as the seconds of forward and backward.

    Args:
        stations: in the order of forward; empty for a plan without a pipeline.
    """
    if not stations:
        return Markup()
    took_s = [station.forward_s + station.backward_s for station in stations]
    ranks = {rank: row for row, rank in enumerate(dict.fromkeys(s.rank for s in stations))}
    scale = (RIGHT - LEFT) / (sum(took_s) or 1.0)
    parts, before = list[str](), (0.0, 0.0)
    for station, end_s, own_s in zip(stations, accumulate(took_s), took_s, strict=True):
        x, y = LEFT + (end_s - own_s) * scale, _FIRST + ranks[station.rank] * (_BOX + _GAP)
        if parts:
            parts.append(f'<polyline class="axis" fill="none" points="{_way(before, (x, y))}"/>')
        parts.append(
            f'<rect class="c0" x="{x:.1f}" y="{y}" width="{max(own_s * scale, 1.0):.1f}" '
            f'height="{_BOX}"><title>{escape(_describe(station))}</title></rect>'
        )
        before = x + own_s * scale, y + _BOX / 2
    for rank, row in ranks.items():
        middle = _FIRST + row * (_BOX + _GAP) + _BOX / 2 + 4
        parts.append(text(LEFT - 8, middle, rank.partition(" (")[0], "end"))
    high = _FIRST + len(ranks) * (_BOX + _GAP)
    return picture("the stations of the pipeline, in the order of forward", parts, height=high)


def _way(begin: tuple[float, float], end: tuple[float, float]) -> str:
    """Return the points of a line from the end of one box to the begin of the next."""
    (x, y), (to_x, to_y) = begin, end
    return f"{x:.1f},{y:.1f} {to_x:.1f},{to_y + _BOX / 2:.1f}"


def _describe(station: StationExplanation) -> str:
    first, *_, last = station.layers * 2
    layers = first if len(station.layers) == 1 else f"{first} … {last}"
    return (
        f"{station.rank}: {layers}, {size(station.parameter_bytes)}; forward "
        f"{duration(station.forward_s)}, backward {duration(station.backward_s)}, sends "
        f"{size(station.sent_bytes)}"
    )
