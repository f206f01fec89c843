"""A simulation for people: whether more hosts are worth it, on one screen. Reads core only."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.foresight import COMPUTE, Flip, Foresight, Scale
from shoal.core.numbers import how_many
from shoal_tools.report.drawing import duration
from shoal_tools.report.peer_words import AS_WELL, why_less

_WORTH = 0.5  # least efficiency of a host that is worth it
_MOST = 5  # most lines about flips
_HELPS = 1.01  # least gain that is a help, in times as fast


def foresight(answer: Foresight) -> RenderableType:
    """Write a verdict, a row for each number of hosts, and notes on limits, flips and helps."""
    lines = Text("\n".join(notes(answer)))
    return Group(Text(verdict(answer)), Text(), _table(answer), Text(), lines)


def notes(answer: Foresight) -> list[str]:
    """Return notes on DDP, on gains beyond the hosts, flips, helps and assumptions, a line each."""
    return [
        *_ddp(answer),
        *_beyond(answer),
        *_flips(answer),
        *_helps(answer),
        *_assumptions(answer),
    ]


def verdict(answer: Foresight) -> str:
    """Write the answer in one sentence.

    Examples:
        >>> from shoal.core.foresight import Question
        >>> from shoal.core.plan import Plan
        >>> scale = Scale(4, 1.0, 1.1, 3.6, {"compute": 0.9}, Plan(4, "", (), 1, 1))
        >>> verdict(Foresight(Question(), 0.9, (scale,), ()))
        'Worth it: 4 hosts train 3.6 times as fast as one, each at 90 % of what it could.'
    """
    several = [scale for scale in answer.scales if scale.hosts > 1]
    if not several:
        return "One host alone: nothing is sent."
    best = max(several, key=lambda scale: scale.times)
    worth = [scale for scale in several if scale.efficiency >= _WORTH]
    if best.times <= 1:
        return f"Not worth it: {best.hosts} hosts train {best.times:.2f} times as fast as one."
    largest = max(worth, key=lambda scale: scale.hosts, default=best)
    fast = f"{largest.hosts} hosts train {largest.times:.1f} times as fast as one"
    used = f"each at {largest.efficiency:.0%} of what it could".replace("%", " %")
    if not worth:
        return f"Hardly worth it: {fast}, {used}."
    beyond = [scale.hosts for scale in several if scale.hosts > largest.hosts]
    more = f" From {min(beyond)} hosts on it is less than half." if beyond else ""
    return f"Worth it: {fast}, {used}.{more}"


def _ddp(answer: Foresight) -> list[str]:
    """Compare the plans with an all-reduce of all layers."""
    told = [(scale.hosts, scale.ddp_s / scale.step_s) for scale in answer.scales if scale.ddp_s]
    if not told:
        return []
    alike = [f"{hosts:,}" for hosts, times in told if times < AS_WELL]
    longer = [
        f"{times:.2f} times as long on {hosts:,}" for hosts, times in told if times >= AS_WELL
    ]
    said = [f"would do as well on {', '.join(alike)} hosts"] if alike else []
    said += [f"would take {', '.join(longer)} hosts"] if longer else []
    return [f"DDP, with an all-reduce of all layers, {', and '.join(said)}"]


def _beyond(answer: Foresight) -> list[str]:
    """Say why several hosts may do more than as many single hosts."""
    beyond = [scale for scale in answer.scales if scale.is_beyond]
    if not beyond:
        return []
    most = max(beyond, key=lambda scale: scale.efficiency)
    # if all hosts share one host's rows, a host's share of the step is the measure
    whole_s = answer.alone_s / (most.hosts if answer.question.strong else 1)
    of_whole = "its share of one host's step" if answer.question.strong else "one host alone"
    saved = duration(whole_s - most.limits[COMPUTE])
    why = why_less(choice.strategy for choice in most.plan.choices)
    hosts = ", ".join(f"{scale.hosts:,}" for scale in beyond)
    return [
        f"more than 100% of a host on {hosts} hosts: on {most.hosts:,} a rank computes {saved} "
        f"less than {of_whole}, because {why}"
    ]


def _table(answer: Foresight) -> Table:
    rows = "as many rows in all" if answer.question.strong else "as many rows a host"
    table = Table(title=f"a step on more hosts, {rows}", title_justify="left", box=None)
    for name in ("hosts", "step", "p95", "times one", "of a host"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    table.add_column("served")
    for scale in answer.scales:
        table.add_row(
            f"{scale.hosts:,}",
            duration(scale.step_s),
            duration(scale.p95_s),
            f"{scale.times:.2f}",
            f"{scale.efficiency:.0%}",
            limit_words(scale),
            _ways(scale),
        )
    return table


def limit_words(scale: Scale) -> str:
    """Say which part limits the step, and how much of it that part takes."""
    if scale.limit == COMPUTE:
        return COMPUTE
    return f"{scale.limit} ({scale.limits[scale.limit] / scale.step_s:.0%})"


def _ways(scale: Scale) -> str:
    named = [f"{count} {way}" for way, count in list(scale.ways.items())[:2]]
    said = ", ".join(named) + (" …" if len(scale.ways) > 2 else "")
    return said + (f", {scale.micro_batches} micro-batches" if scale.micro_batches else "")


def _flips(answer: Foresight) -> list[str]:
    """Write a line for each number of hosts at which layers begin to be served in another way."""
    by_change: Counter[tuple[int, str, str]] = Counter()
    first: dict[tuple[int, str, str], Flip] = {}
    for flip in answer.flips():
        change = flip.hosts, flip.before, flip.way
        by_change[change] += 1
        first.setdefault(change, flip)
    lines = []
    for change, count in by_change.most_common(_MOST):
        hosts, before, way = change
        layers = first[change].layer if count == 1 else how_many(count, "layer")
        lines.append(f"from {hosts} hosts on: {layers} by {way}, no longer by {before}")
    return lines


def _helps(answer: Foresight) -> list[str]:
    if not answer.helps:
        return []
    last = answer.scales[-1].hosts
    told = [f"{help.change} {help.gain:.2f}" for help in answer.helps if help.gain >= _HELPS]
    if not told:
        return [f"with {last} hosts none of {', '.join(h.change for h in answer.helps)} would help"]
    return [f"with {last} hosts, so many times as fast: {', '.join(told)}"]


def _assumptions(answer: Foresight) -> list[str]:
    question = answer.question
    return [
        f"taken to be: hosts' step times vary by {question.straggler:.1%}, links are shared "
        f"{question.network.oversubscription:g} to 1 between switches"
    ]
