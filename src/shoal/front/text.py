"""Tables for people: a plan with its reasons, a benchmark's figures, a check's differences.

This file reads core only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import shorten

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.contracts.feature import lines_of
from shoal.core.explanation import (
    Explanation,
    LayerExplanation,
    StationExplanation,
    TailExplanation,
)
from shoal.core.facts import Cluster, MovingState, SyncNorm
from shoal.core.numbers import how_many
from shoal.core.placement import BALANCED, Placement
from shoal.core.plan import Plan
from shoal.planner.plan_details import DEALT_WORTH, LEAST_SAVED_S

_MOST_ROWS = 15  # rows of a table that fits one screen
# characters of a layer's name in a table of 80 columns, and of it and its way together
_NAME, _NAME_AND_WAY = 26, 46


def console() -> Console:
    """Return the console for reports: as wide as the terminal, or as COLUMNS says, or 80 columns.

    Names are shown unchanged: "[red]" in a name is no colour, and a number in it gets none.
    """
    return Console(soft_wrap=False, markup=False, emoji=False, highlight=False)


def plain(shown: RenderableType) -> str:
    """Return a report as text of at most 100 columns, without colours."""
    page = Console(
        width=100,
        color_system=None,
        force_terminal=False,
        soft_wrap=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with page.capture() as written:
        page.print(shown)
    return "\n".join(line.rstrip() for line in written.get().splitlines())


def explained(explanation: Explanation, *, reasons: bool = False) -> RenderableType:
    """Show the plan as a table of at most 15 rows, with the predicted step.

    Args:
        explanation: the plan's explanation.
        reasons: whether to list, for each layer, the compared alternatives and the reason.
    """
    parts: list[RenderableType] = [_layers(explanation)]
    if reasons:
        parts += [_reasons(row) for row in explanation.layers if row.others]
        parts.append(_refusals(explanation))
    if explanation.step.stations:
        parts.append(_stations(explanation.step.stations))
    if explanation.stage is not None:
        parts.append(_routes(explanation.stage))
    parts.append(_step(explanation))
    return Group(*parts)


def _table(**columns: JustifyMethod) -> Table:
    """Make a table without frames, which would take columns from the text."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name, justify in columns.items():
        table.add_column(name.replace("_", " "), justify=justify, no_wrap=True)
    return table


def _layers(explanation: Explanation) -> RenderableType:
    title = f"plan for {how_many(explanation.ranks, 'rank')}, in the order in which gradients come"
    table = _table(
        layer="left",
        parameters="right",
        rows_K="right",
        served_by="left",
        sends="right",
    )
    shown, rest = _largest(explanation.layers)
    longest = max((len(row.chosen.choice.way) for row in shown), default=0)
    most = max(min(_NAME, _NAME_AND_WAY - longest), 8)  # ways with codecs take many columns
    for row in shown:
        # the table of stations shows a pipeline's bytes
        sent = "" if explanation.step.stations else megabytes(row.chosen.sent_bytes)
        size = f"{row.parameters:,}"
        table.add_row(_short(row.layer, most), size, f"{row.rows:,}", row.chosen.choice.way, sent)
    if rest:
        served = {row.chosen.choice.way for row in rest}
        table.add_row(
            f"{len(rest)} smaller layers",
            f"{sum(row.parameters for row in rest):,}",
            "",
            served.pop() if len(served) == 1 else f"{len(served)} ways",
            megabytes(sum(row.chosen.sent_bytes for row in rest)),
        )
    return Group(Text(title, style="bold"), table)


def _largest(
    layers: Sequence[LayerExplanation],
) -> tuple[list[LayerExplanation], list[LayerExplanation]]:
    """Return the layers with a row of their own, and the layers that share the last row."""
    by_size = sorted(range(len(layers)), key=lambda at: -layers[at].parameters)
    alone = len(layers) if len(layers) <= _MOST_ROWS else _MOST_ROWS - 1
    return (
        [layers[at] for at in sorted(by_size[:alone])],
        [layers[at] for at in sorted(by_size[alone:])],
    )


def _reasons(row: LayerExplanation) -> RenderableType:
    """Show a layer's choice (*) and its alternatives, and in one line the unable ones."""
    facts = [row.kind, f"{row.parameters:,} parameters", f"{row.rows:,} rows"]
    facts.append(f"backward {_ms(row.backward_s)}")
    about = f"\n{row.layer}: {', '.join(facts)}\n  {row.reason}"
    about += f"\n  {row.flips}" if row.flips else ""
    table = _table(way="left", sends="right", alone="right", step="right")
    table.box = None
    able = [other for other in row.others if not other.refusal]
    for mark, way in [("*", row.chosen), *((" ", other) for other in able)]:
        cells = megabytes(way.sent_bytes), _ms(way.link_s), _ms(way.step_s)
        table.add_row(f"{mark} {way.choice.way}", *cells)
    parts: list[RenderableType] = [Text(about), Padding(table, (0, 0, 0, 2))]
    if unable := dict.fromkeys(o.choice.strategy for o in row.others if o.refusal):
        parts.append(Text("  " + shorten(f"cannot: {', '.join(unable)}", 76, placeholder=" …")))
    return Group(*parts)


def _refusals(explanation: Explanation) -> Text:
    """Return why strategies cannot serve layers: each reason once, with all that it keeps away."""
    layers: dict[tuple[str, str], dict[str, None]] = {}
    for row in explanation.layers:
        for other in row.others:
            if other.refusal:
                layers.setdefault((other.choice.strategy, other.refusal), {})[row.layer] = None
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (strategy, why), of in sorted(layers.items()):
        alike.setdefault((why, tuple(of)), []).append(strategy)
    lines = [
        f"  {', '.join(strategies)}: {why} ({of[0]}{_and_more(len(of) - 1)})"
        for (why, of), strategies in alike.items()
    ]
    compared = sum(bool(row.others) for row in explanation.layers)
    if not compared:
        return Text("")
    left_out = len(explanation.layers) - compared
    of_many = f"\nonly the {compared} largest layers were compared\n" if left_out else "\n"
    return Text("\n".join([of_many + "what cannot serve a layer, and why", *lines, ""]))


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""


def _routes(stage: TailExplanation) -> RenderableType:
    at_once = "which go through it at once" if stage.joined else "one after the other"
    layers = ", ".join(stage.layers)
    title = f"the end of the model, {layers}: {stage.micro_batches} micro-batches a step, {at_once}"
    table = _table(worker="left", to="left", sends="right", gets_back="right")
    for route in stage.routes[:_MOST_ROWS]:
        table.add_row(
            route.worker, route.to, megabytes(route.sent_bytes), megabytes(route.received_bytes)
        )
    if more := stage.routes[_MOST_ROWS:]:
        table.add_row(f"{len(more)} more workers, likewise")
    return Group(Text(title, style="bold"), table)


def _stations(stations: Sequence[StationExplanation]) -> RenderableType:
    table = _table(
        held_by="left",
        layers="left",
        parameters="right",
        forward="right",
        backward="right",
        sends="right",
    )
    for station in stations[:_MOST_ROWS]:
        first, *_, last = station.layers * 2
        table.add_row(
            station.rank,
            first if len(station.layers) == 1 else f"{first} … {last}",
            megabytes(station.parameter_bytes),
            _ms(station.forward_s),
            _ms(station.backward_s),
            megabytes(station.sent_bytes),
        )
    title = "stations, in the order of forward; seconds are for one rank's rows"
    return Group(Text(title, style="bold"), table)


def _rival(rival: tuple[str, float] | None, is_pipeline: bool) -> str:
    if rival is None:
        return ""
    rule = f"{DEALT_WORTH:g} times as fast as the best other plan and saves {_ms(LEAST_SAVED_S)}"
    return f"\n{rival[0]} would take {_ms(rival[1])}" + (
        f"; unasked, a pipeline is taken if it is {rule}" if is_pipeline else ""
    )


def _step(explanation: Explanation) -> Text:
    step = explanation.step
    parts = {
        "forward": step.forward_s,
        "backward": step.backward_s,
        "communication that hides under nothing": step.exposed_s,
        "optimizer": step.optimizer_s,
    }
    rate = explanation.rate_bytes_per_s
    predicted = (
        f"predicted step {_ms(step.total_s)} = "
        + " + ".join(f"{name} {_ms(seconds)}" for name, seconds in parts.items())
        + f"\nthe busiest rank sends {megabytes(step.sent_bytes)} a step over {_rate(rate)} "
        + f"(latency {explanation.latency_s * 1e6:.0f} µs)"
    )
    if not step.stations:
        bucket = f"{explanation.bucket_bytes / 2**20:.0f} MiB"
        predicted += f", in buckets of {bucket}, {explanation.lanes} in flight"
    return Text(
        (predicted if step.total_s else "such plans have no prediction of the step")
        + "".join(f"\n{line}" for line in explanation.features)
        + _rival(step.rival, bool(step.stations))
        + _exact(explanation.without_codecs)
        + _moving(explanation.moving)
        + _norms(explanation.norms)
        + _placement(explanation.placement)
        + _idle(explanation.idle)
    )


def _exact(without: tuple[float, float] | None) -> str:
    if without is None:
        return ""
    step_s, sent_bytes = without
    return f"\nexact, without codecs: a step of {_ms(step_s)}, and {megabytes(sent_bytes)}"


def _moving(moving: Sequence[MovingState]) -> str:
    return f"\n{moved(moving)}, in each backward" if moving else ""


def moved(moving: Sequence[MovingState]) -> str:
    """Say which buffers agree, and how, in one line.

    Examples:
        >>> from shoal.core.facts import MovingState
        >>> from shoal.front.text import moved
        >>> moved((MovingState("codes", 1000, 4, "first"), MovingState("norm.mean", 8, 4, "mean")))
        "buffers: 1 as rank 0's (4,000 bytes), 1 as the ranks' mean (32 bytes)"
    """
    names = {"first": "as rank 0's", "mean": "as the ranks' mean"}
    told = []
    for how, words in names.items():
        sizes = [state.nbytes for state in moving if state.how == how]
        if sizes:
            told.append(f"{len(sizes)} {words} ({sum(sizes):,} bytes)")
    return f"buffers: {', '.join(told)}"


def _norms(norms: Sequence[SyncNorm]) -> str:
    return f"\n{norms_in_step(norms)}" if norms else ""


def norms_in_step(norms: Sequence[SyncNorm]) -> str:
    """Count the batch norms over all ranks, with their bytes, in one line.

    Examples:
        >>> from shoal.core.facts import SyncNorm
        >>> from shoal.front.text import norms_in_step
        >>> norms_in_step((SyncNorm("one", channels=8, itemsize=4),))
        'batch norm over all ranks: 1 layer (132 bytes to every other rank a step)'
    """
    layers = how_many(len(norms), "layer")
    nbytes = sum(norm.nbytes for norm in norms)
    return f"batch norm over all ranks: {layers} ({nbytes:,} bytes to every other rank a step)"


def _placement(placement: Placement) -> str:
    if placement == BALANCED:
        return ""
    if isinstance(placement, str):
        return f"\nplacement {placement}: what has owners is theirs by whole parameters"
    ranks = ", ".join(f"{name} to rank {rank}" for name, rank in placement.items())
    return f"\nplacement: {ranks}; what else has owners is shared equally"


def _idle(ranks: Sequence[str]) -> str:
    return f"\nthis plan has nothing to do for {', '.join(ranks)}" if ranks else ""


def measured_cluster(cluster: Cluster) -> RenderableType:
    """Show the links as probed, and how fast each exchange goes over them."""
    hosts = len(set(cluster.topology.hosts))
    table = Table(
        title=f"{how_many(cluster.size, 'rank')} on {how_many(hosts, 'host')}",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("measured", justify="right")
    shared = ", a rank's share" if 1 < len(cluster.topology.ranks_on) < cluster.size else ""
    table.add_row(f"link rate, each direction{shared}", _rate(cluster.link.bytes_per_s))
    table.add_row("latency of a message", f"{cluster.link.latency_s * 1e6:.0f} µs")
    table.add_row("processor time of a byte", f"{cluster.link.cpu_s_per_byte * 1e9:.2f} ns")
    table.add_row("cores a rank", f"{cluster.cores_per_rank:g}")
    for name, pace in [
        *sorted(cluster.paces.items()),
        ("rows that main threads wait for", cluster.move_pace),
    ]:
        rate = _rate(1 / pace.wall.byte_s) if pace.wall.byte_s else "no limit"
        table.add_row(f"{name}: rate of its stated bytes", rate)
        table.add_row(
            f"{name}: time of a message that follows another", f"{pace.wall.round_s * 1e6:,.0f} µs"
        )
        table.add_row(
            f"{name}: processor time",
            f"{pace.cpu.byte_s * 1e9:.2f} ns a byte, {pace.cpu.round_s * 1e6:.0f} µs a message",
        )
    return table


def lags(rank: int, observed: Mapping[int, int]) -> Table:
    """Show how often workers were so many steps ahead of the slowest, at a server."""
    table = Table(
        title=f"server, rank {rank}: parameters were given to workers", title_justify="left"
    )
    table.add_column("ahead by", justify="right")
    table.add_column("times", justify="right")
    table.add_column("of all", justify="right")
    for steps, times in sorted(observed.items()):
        table.add_row(f"{steps} steps", f"{times:,}", f"{times / sum(observed.values()):.0%}")
    return table


def ratios(title: str, rows: Sequence[tuple[str, float, str]]) -> Table:
    """Show a benchmark's contenders: name, median seconds a step, ratio to Shoal, interval."""
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    table.add_column("median step", justify="right")
    table.add_column("÷ shoal's, median of rounds (95 %)", justify="right")
    for name, seconds, ratio in rows:
        table.add_row(name, _ms(seconds), ratio)
    return table


def differences(rows: Sequence[tuple[str, float]]) -> Table:
    """Show a check's largest relative difference by parameter, the worst first."""
    table = Table(
        title="largest relative difference to one process, by parameter", title_justify="left"
    )
    table.add_column("parameter")
    table.add_column("difference", justify="right")
    for name, difference in sorted(rows, key=lambda row: -row[1]):
        table.add_row(name, f"{difference:.1e}")
    return table


def summary(plan: Plan, moving: Sequence[MovingState] = (), norms: Sequence[SyncNorm] = ()) -> str:
    """Summarise a plan in one line: the number of layers for each way, and the predicted step.

    With `moving` it also names the buffers that agree, with `norms` the bytes of batch norms.

    Examples:
        >>> from shoal.core.plan import Choice, Plan
        >>> from shoal.front.text import summary
        >>> choices = Choice("a", "replicate", "ring"), Choice("b", "factor"), Choice("c", "factor")
        >>> summary(Plan(4, "digest", choices, 1 << 20, 3, predicted_s=1.05))
        '4 ranks, 3 layers: 2 factor, 1 replicate:ring; predicted step 1050.0 ms'
    """
    ways = Counter(choice.way for choice in plan.choices).most_common()
    served = ", ".join(f"{count} {way}" for way, count in ways)
    predicted = f"; predicted step {_ms(plan.predicted_s)}" if plan.predicted_s else ""
    state = f"; {moved(moving)}" if moving else ""
    state += "".join(f"; {line}" for line in lines_of(plan))
    state += f"; {norms_in_step(norms)}" if norms else ""
    of = f"{how_many(plan.ranks, 'rank')}, {how_many(len(plan.choices), 'layer')}"
    return f"{of}: {served}{predicted}{state}"


def batch(rows: Sequence[int]) -> str:
    """Describe the batch of a rank and of all ranks, in one line.

    Examples:
        >>> from shoal.front.text import batch
        >>> batch([64, 64]), batch([64, 32])
        ('batch: 64 rows a rank, 128 of all ranks', 'batch: 32 to 64 rows a rank, 96 of all ranks')
    """
    least, most = min(rows), max(rows)
    of_rank = how_many(most, "row") if least == most else f"{least:,} to {how_many(most, 'row')}"
    return f"batch: {of_rank} a rank, {sum(rows):,} of all ranks"


def _short(name: str, most: int) -> str:
    """Return the end of a long name, which says more than its beginning."""
    return name if len(name) <= most else "…" + name[1 - most :]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def megabytes(nbytes: float) -> str:
    """Return megabytes as "7.56 MB"."""
    return f"{nbytes / 1e6:.2f} MB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
