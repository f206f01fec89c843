"""Records of runs that never were: of any number of layers, with every part that a page shows."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.explanation import Alternative, Explanation, LayerExplanation, PredictedStep
from shoal.core.foresight import Foresight, Help, Question, Scale
from shoal.core.outcome import BETWEEN, COMPUTE, EXCHANGES, OPTIMIZER, Outcome, Term
from shoal.core.plan import Choice, Plan
from shoal.core.record import (
    PREDICTED,
    CodecRow,
    Contender,
    Curve,
    Machine,
    Record,
    Track,
    Training,
)
from shoal.core.trace import MAIN, STEPS, LinkRate, TraceEvent

WAYS = (
    ("replicate", "ring"),
    ("sliced", "direct+int8"),
    ("factor", ""),
    ("column", ""),
    ("row", ""),
    ("somebodys", ""),
)


def layer(number: int, layers: int) -> LayerExplanation:
    """One of so many layers, the first ones small, the last ones large."""
    name = f"blocks.{number // 4}.{('attention', 'norm', 'up', 'down')[number % 4]}"
    parameters = 20_000 * (1 + number % 7) * (1 + 8 * number // layers)
    plain = 6.0 * parameters
    strategy, exchange = WAYS[number % len(WAYS)]
    chosen = Alternative(Choice(name, strategy, exchange), plain / 3, 0.004, 0.7)
    others = (
        Alternative(Choice(name, "replicate", "allreduce"), plain, 0.012, 0.75),
        Alternative(Choice(name, "embedding"), 0.0, 0.0, 0.0, "it is no embedding"),
    )
    return LayerExplanation(
        name,
        "Linear",
        parameters,
        1024,
        0.002 + 1e-5 * number,
        chosen,
        others,
        "replicate would send 8.00 MB and add 50.0 ms a step",
        "factor sends less while K < 512",
        forward_s=0.001 + 1e-5 * number,
        plain_bytes=plain,
        exact_bytes=plain / (1 if exchange.endswith("int8") else 3),
    )


def explanation(layers: int) -> Explanation:
    """A plan of so many layers, in the order of their gradients."""
    rows = tuple(layer(number, layers) for number in reversed(range(layers)))
    sent = sum(row.chosen.sent_bytes for row in rows)
    step = PredictedStep(0.2, 0.4, 0.06, 0.04, sent)
    return Explanation(4, 125e6, 1e-4, 4 << 20, 3, step, rows)


def step_events(exchanges: int) -> list[TraceEvent]:
    """One step with so many exchanges on three lanes."""
    lanes = [
        TraceEvent(
            f"exchange bucket {number} (blocks.{number // 4}.up)",
            f"lane {number % 3}",
            0.22 + 0.4 * number / exchanges,
            0.22 + 0.4 * number / exchanges + 0.9 / exchanges,
        )
        for number in range(exchanges)
    ]
    return [
        TraceEvent("forward", MAIN, 0.0, 0.2),
        TraceEvent("messages from every rank to every other", MAIN, 0.05, 0.08),
        TraceEvent("backward", MAIN, 0.2, 0.6),
        TraceEvent("wait for gradients", MAIN, 0.6, 0.66),
        TraceEvent("optimizer", MAIN, 0.66, 0.7),
        TraceEvent("step", STEPS, 0.0, 0.71),
        *lanes,
    ]


def track(name: str, exchanges: int, steps: int, slower: float = 1.0) -> Track:
    """Some steps of a rank."""
    starts = [0.72 * slower * number for number in range(steps)]
    events = tuple(
        replace(
            event,
            begin_s=start + slower * event.begin_s,
            end_s=start + slower * event.end_s,
        )
        for start in starts
        for event in step_events(exchanges)
    )
    rates = tuple(
        LinkRate("eth0, sent", start + 0.01 * at, 900.0 * (at % 3))
        for start in starts
        for at in range(70)
    )
    foreign = LinkRate("wg0, received", 0.0, 40.0), LinkRate("wg0, received", 0.1, 0.0)
    return Track(name, events, (*rates, *foreign), interfaces=("eth0",))


def predicted(exchanges: int) -> Track:
    """The planner's step."""
    lanes = tuple(
        TraceEvent(
            f"exchange site {n} (replicate: a, b)",
            f"lane {n % 3}",
            0.02 + 0.4 * n / exchanges,
            0.05 + 0.4 * n / exchanges,
        )
        for n in range(exchanges)
    )
    main = (
        TraceEvent("backward", MAIN, 0.0, 0.38),
        TraceEvent("wait for gradients", MAIN, 0.38, 0.43),
        TraceEvent("optimizer", MAIN, 0.43, 0.47),
        TraceEvent("forward, waits included", MAIN, 0.47, 0.67),
    )
    return Track(
        PREDICTED, main + lanes, (LinkRate("link", 0.0, 900.0), LinkRate("link", 0.4, 0.0))
    )


def simulation(most: int = 1024) -> Foresight:
    """Of 1, 2, 4 … hosts."""
    scales, hosts = [], 1
    while hosts <= most:
        times = hosts / (1 + 0.02 * hosts**0.5)
        step_s = 0.5 * hosts / times
        choices = (Choice("fc", "factor" if hosts < 64 else "replicate"),) if hosts > 1 else ()
        limits = {"compute": 0.5, "link": 0.7 * (step_s - 0.5), "stragglers": 0.3 * (step_s - 0.5)}
        plan = Plan(hosts, "", choices, 1 << 20, 3)
        scales.append(Scale(hosts, step_s, 1.1 * step_s, times, limits, plan))
        hosts *= 2
    helps = (Help("links 2 times as fast", 1.4),)
    return Foresight(Question(codecs=("int8",)), 0.5, tuple(scales), helps)


def trained(layers: int, exchanges: int = 12) -> Record:
    """What `train` writes of a model of so many layers."""
    loss = tuple(4.0 * 0.995**step + 0.1 for step in range(500))
    codecs = tuple(
        CodecRow(
            row.layer,
            row.chosen.choice.way,
            row.exact_bytes,
            row.chosen.sent_bytes,
            0.006,
            None,
            True,
        )
        for row in explanation(layers).layers
        if row.chosen.choice.codec
    )
    return Record(
        "gpt",
        ("shoal", "train", "examples/gpt.py", "--ranks", "4", "--report", "report.html"),
        "2026-11-26T18:00:00+00:00",
        Machine("An ordinary processor", 8, "2.13.0"),
        explanation(layers),
        0.72,
        (
            predicted(exchanges),
            track("rank 0 (h0)", exchanges, 3),
            track("rank 3 (h3)", exchanges, 3, 1.05),
        ),
        Training(500, 0.72, Curve(1, loss), Curve(1, (0.72, 0.71, 0.74) * 166)),
        codecs=codecs,
    )


def timed(layers: int) -> Record:
    """What `bench` writes."""
    contenders = (
        Contender("shoal", 0.72, (0.71, 0.72, 0.73), 17e6),
        Contender("ddp, 25 MB buckets", 3.81, (3.8, 3.81, 3.9), 340e6, (5.3, 5.1, 5.4)),
    )
    return replace(trained(layers), training=None, contenders=contenders)


def outcome() -> Outcome:
    """Of a prediction that knew too little of links."""
    terms = (
        Term(COMPUTE, 0.6, 0.62),
        Term(EXCHANGES, 0.06, 0.16),
        Term(OPTIMIZER, 0.04, 0.04),
        Term(BETWEEN, 0.0, 0.03),
    )
    return Outcome(0.7, 0.82, 40, terms, ("site 3 (factor: head)", 0.1), (2, 0.05), (1e8, 5e7))


def everything(layers: int, exchanges: int = 12) -> Record:
    """Every part at once."""
    return replace(
        trained(layers, exchanges),
        contenders=timed(layers).contenders,
        simulation=simulation(),
        outcome=outcome(),
    )
