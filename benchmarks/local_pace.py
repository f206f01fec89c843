"""What a step on local steps takes against compute alone, in turn, and the bytes that it sends.

    sudo .venv/bin/shoal lab --hosts 4 --rate 100mbit -- \
        .venv/bin/python benchmarks/local_pace.py examples/gpt.py

Contenders are "plain", which sends nothing, and H = "auto" by averaging; they take turns of two
rounds each. Steps are judged by their mean, as some may wait for what is under way. With --codec
differences of weights go as codes. Prints H, the lag, mean steps and their ratio, and the bytes of
a step: as the plan states them, and as the host's interfaces have seen them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import shoal
from shoal.front.recipe import load
from shoal.planner.explain import explain
from shoal.profiling.interfaces import carried
from shoal.session.session import current
from shoal_tools.contenders.peers import Workload, plain


def mean_step_s(step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and bytes that this host has sent in one."""
    current().comm.gather_objects(None, "a turn begins")
    sent, begin_s = sent_bytes(), perf_counter()
    for _ in range(steps):
        step()
    seconds = perf_counter() - begin_s
    slowest = max(current().comm.gather_objects(seconds, "a turn ends"))
    return slowest / steps, (sent_bytes() - sent) / steps


def sent_bytes() -> int:
    """Of this host's interfaces, so far."""
    counts = carried().items()
    return sum(n for name, n in counts if name.endswith(", sent") and not name.startswith("lo"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--codec", default="")
    asked = parser.parse_args()
    world = shoal.init()
    recipe = load(asked.recipe)
    batch = recipe.batch(next(iter(shoal.shard(recipe.data()[0]))))
    alone = plain(Workload(recipe.model, recipe.loss(), recipe.optimizer, batch))
    mine = plain(Workload(recipe.model, recipe.loss(), recipe.optimizer, batch))
    pins = {"*": f"replicate:direct+{asked.codec}"} if asked.codec else None
    _, mine.loss, _ = shoal.parallelize(
        mine.model,
        mine.loss,
        mine.optimizer,
        sample=batch,
        local_steps="auto",
        outer=shoal.Outer(rule="average"),
        pins=pins,
    )
    plan = shoal.plan_of(mine.model)
    assert plan is not None
    steps = 2 * plan.local_steps
    figures: dict[str, list[float]] = {"plain": [], "local": []}
    sent_by_step = []
    for peer in (alone, mine):  # the first steps of each are not judged
        mean_step_s(partial(peer.step, *batch), plan.local_steps)
    for _ in range(asked.turns):
        for name, peer in (("plain", alone), ("local", mine)):
            step_s, sent = mean_step_s(partial(peer.step, *batch), steps)
            figures[name].append(step_s)
            sent_by_step += [sent] if name == "local" else []
    attached = current().attached[mine.model]
    stated = explain(plan, attached.profile, attached.cluster, alternatives=False).step.sent_bytes
    if world.is_main:
        ratios = [local / plain for local, plain in zip(*reversed(figures.values()), strict=True)]
        print(f"{plan.locally}; turns of {steps} steps")
        for name, seconds in figures.items():
            print(f"{name}: {median(seconds) * 1e3:.1f} ms a step {seconds}")
        print(
            f"local is {median(ratios):.3f} times plain; predicted {plan.predicted_s * 1e3:.1f} ms"
        )
        print(f"bytes a step: stated {stated:,.0f}, interfaces {median(sent_by_step):,.0f}")


if __name__ == "__main__":
    main()
