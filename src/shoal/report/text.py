"""Tables for people: a plan with its reasons, a benchmark's figures, a check's differences. Reads
core only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.explanation import Alternative, Explanation, LayerExplanation, Stage
from shoal.core.facts import Cluster
from shoal.core.placement import BALANCED, Placement

_WIDTH = 130  # where the output is no terminal


def console() -> Console:
    """Where reports go: the terminal as it is, a file or pipe in a fixed width."""
    probe = Console()
    return probe if probe.is_terminal else Console(width=_WIDTH, soft_wrap=False)


def explained(explanation: Explanation, *, refused: bool = True) -> RenderableType:
    """The plan as a table, one row a layer; below it the alternatives that were compared, and the
    predicted step.

    `refused` says whether to list strategies that cannot serve a layer, with the reason.
    """
    parts: list[RenderableType] = [_layers(explanation)]
    if any(row.others for row in explanation.layers):
        parts.append(_alternatives(explanation, refused))
    if explanation.stage is not None:
        parts.append(_routes(explanation.stage))
    parts.append(_step(explanation))
    return Group(*parts)


def _layers(explanation: Explanation) -> Table:
    table = Table(
        title=f"plan for {explanation.ranks} ranks, in the order the gradients come",
        title_justify="left",
    )
    for name in ("layer", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("parameters", "rows K", "backward"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("served by", no_wrap=True)
    for name in ("sends", "alone"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("flips")
    for row in explanation.layers:
        table.add_row(
            row.layer,
            row.kind,
            f"{row.parameters:,}",
            f"{row.rows:,}",
            _ms(row.backward_s),
            _served(row.chosen),
            _mb(row.chosen.sent_bytes),
            _ms(row.chosen.link_s),
            row.flips,
        )
    return table


def _alternatives(explanation: Explanation, refused: bool) -> Table:
    compared = [row for row in explanation.layers if row.others]
    of_many = f", the {len(compared)} largest" if len(compared) < len(explanation.layers) else ""
    more = "" if refused else "; `shoal plan` also says what cannot serve it"
    table = Table(
        title=f"why: each layer's choice (*) beside its alternatives{of_many}{more}",
        title_justify="left",
    )
    table.add_column("layer", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for name in ("sends", "alone", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason")
    for row in compared:
        for cells in _ways(row) + (_refusals(row) if refused else []):
            table.add_row(*cells)
        table.add_section()
    return table


def _ways(row: LayerExplanation) -> list[tuple[str, ...]]:
    chosen = row.chosen
    ways: list[tuple[str, ...]] = [
        (
            row.layer,
            "* " + _served(chosen),
            _mb(chosen.sent_bytes),
            _ms(chosen.link_s),
            _ms(chosen.step_s),
            row.reason,
        )
    ]
    for other in row.others:
        if not other.refusal:
            cells = _mb(other.sent_bytes), _ms(other.link_s), _ms(other.step_s)
            ways.append(("", "  " + _served(other), *cells, ""))
    return ways


def _refusals(row: LayerExplanation) -> list[tuple[str, ...]]:
    refusals = {other.choice.strategy: other.refusal for other in row.others if other.refusal}
    return [("", "  " + name, "", "", "", f"cannot: {why}") for name, why in refusals.items()]


def _routes(stage: Stage) -> Table:
    at_once = "which go through it at once" if stage.joined else "one after the other"
    layers = ", ".join(stage.layers)
    title = f"the end of the model, {layers}: {stage.micro_batches} micro-batches a step, {at_once}"
    table = Table(title=title, title_justify="left")
    for name in ("from", "to"):
        table.add_column(name, no_wrap=True)
    for name in ("activations and targets", "loss and gradients back"):
        table.add_column(name, justify="right", no_wrap=True)
    for route in stage.routes:
        table.add_row(route.worker, route.to, _mb(route.sent_bytes), _mb(route.received_bytes))
    return table


def _step(explanation: Explanation) -> Text:
    parts = {
        "forward": explanation.forward_s,
        "backward": explanation.backward_s,
        "communication that hides under nothing": explanation.exposed_s,
        "optimizer": explanation.optimizer_s,
    }
    rate = explanation.rate_bytes_per_s
    return Text(
        f"predicted step {_ms(explanation.step_s)} = "
        + " + ".join(f"{name} {_ms(seconds)}" for name, seconds in parts.items())
        + f"\nthe busiest rank sends {_mb(explanation.sent_bytes)} a step over {_rate(rate)} "
        + f"(latency {explanation.latency_s * 1e6:.0f} µs), "
        + f"in buckets of {explanation.bucket_bytes / 2**20:.0f} MiB, {explanation.lanes} in flight"
        + _placed(explanation.placement)
        + _idle(explanation.idle)
    )


def _placed(placement: Placement) -> str:
    if placement == BALANCED:
        return ""
    if isinstance(placement, str):
        return f"\nplacement {placement}: what has owners is theirs by whole parameters"
    ranks = ", ".join(f"{name} to rank {rank}" for name, rank in placement.items())
    return f"\nplacement: {ranks}; what else has owners is shared equally"


def _idle(ranks: Sequence[str]) -> str:
    return f"\nthis plan has nothing to do for {', '.join(ranks)}" if ranks else ""


def measured_cluster(cluster: Cluster) -> RenderableType:
    """The links as probed, and how fast each exchange goes over them."""
    hosts = len(set(cluster.topology.hosts))
    table = Table(
        title=f"{cluster.size} ranks on {hosts} host{'s' * (hosts > 1)}", title_justify="left"
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


def staleness(rank: int, observed: Mapping[int, int]) -> Table:
    """By how many steps workers were ahead of the slowest when a server gave them parameters, and
    how often.
    """
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
    """A benchmark's contenders: name, median seconds a step, and how many times Shoal's that is
    (with its interval).
    """
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    table.add_column("median step", justify="right")
    table.add_column("÷ shoal's, median of rounds (95 %)", justify="right")
    for name, seconds, ratio in rows:
        table.add_row(name, _ms(seconds), ratio)
    return table


def differences(rows: Sequence[tuple[str, float]]) -> Table:
    """A check's largest relative difference by parameter, the worst first."""
    table = Table(
        title="largest relative difference to one process, by parameter", title_justify="left"
    )
    table.add_column("parameter")
    table.add_column("difference", justify="right")
    for name, difference in sorted(rows, key=lambda row: -row[1]):
        table.add_row(name, f"{difference:.1e}")
    return table


def _served(way: Alternative) -> str:
    return way.choice.strategy + (f" {way.choice.exchange}" if way.choice.exchange else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
