"""Faults at every moment of a job: does every other rank end soon, and name the rank and its host?

    sudo .venv/bin/python benchmarks/faults.py [--only WORDS] [--chunk 1/10] [--beside 4]
                                               [--json FILE] [--show] [--case FAULT …] [--chosen]

A fault is four words: a plan and how many ranks follow it, the rank that it strikes, a moment of
that rank's, and what happens:

    kill        SIGKILL: a process that dies
    stop        SIGSTOP: a process that hangs
    link down   a host whose cable is pulled
    exception   one that nobody catches
    interface   GLOO_SOCKET_IFNAME names no interface of this host

The first four are kinds of `shoal_tools.testing.planned_faults`. Each fault is a job of its own in
a lab of its own, so a link that is down cuts off a host as a pulled cable would. The moments are
found by a run without a fault, which counts the groups of connections that each rank makes and the
messages that it waits for. A fault has passed when all other ranks have ended by themselves within
30 s, each of them naming the rank and its host, and neither a process nor a network namespace is
left. A host that is cut off cannot know who else is: it has to end too, and that is all. A fault at
the very end may be nobody's loss.

Needs root and Linux (the lab). `tests/faults/test_every_moment.py` runs a few of them, and
`make test-proof` the twelve that are `CHOSEN`: every plan and every kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

from fault_job import (
    INTERFACE,
    LAST,
    LIMIT_S,
    LOOP,
    MESSAGES,
    MOMENTS,
    STAGES,
    START_S,
    TRAINING,
    WAYS,
    Case,
    Started,
    all_ended,
    is_late,
)

from shoal_tools.launch.lab import Lab
from shoal_tools.launch.namespaces import NAMES

KINDS = ("kill", "stop", "link down", "exception")
SOON_S = 30.0
CHOSEN = (
    "replicate, 3 ranks, rank 1, in backward 2, kill",
    "replicate, 2 ranks, rank 0, measuring the links, link down",
    "replicate, 3 ranks, rank 2, group 2/3, interface",
    "sliced, 3 ranks, rank 2, before step 2, exception",
    "sliced, 2 ranks, rank 1, in save, kill",
    "factor, 3 ranks, rank 0, in backward 0, stop",
    "cuts, 3 ranks, rank 1, in forward 2, link down",
    "servers, 3 ranks, rank 2, message 2/4, kill",
    "tables, 3 ranks, rank 0, before forward 2, exception",
    "staleness, 3 ranks, rank 1, before step 2, stop",
    "store at rank 0, 3 ranks, rank 0, in forward 2, kill",
    "tails, 3 ranks, rank 2, message 2/4, stop",
)


@dataclass
class Outcome:
    """What came of it: seconds from the fault to each rank's last word, and to the end of all."""

    case: Case
    complaints: list[str] = field(default_factory=list)
    struck: bool = False
    seconds: float = 0.0
    last_words_s: dict[int, float] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    words: dict[int, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all was as it should be."""
        return not self.complaints


def cases() -> list[Case]:
    """Some three hundred: every moment of every plan, with kinds, ranks and victims in turn."""
    found: list[Case] = []
    turn = count()
    for number, (name, way) in enumerate(WAYS.items()):
        sizes = (2, 3, 4) if not way.others else (3, 4)
        moments = [*MOMENTS, *STAGES, *LOOP, *MESSAGES]
        for round_ in range(2 if way.others or way.kept or name == "cuts" else 1):
            for place, moment in enumerate(moments):
                ranks = sizes[(place + round_) % len(sizes)]
                training = ranks - bool(way.others)
                who = (next(turn) + round_) % (training if moment in TRAINING else ranks)
                kind = KINDS[(place + number + round_) % len(KINDS)]
                found.append(Case(name, ranks, who, moment, kind))
        for place, moment in enumerate(("before init", *MOMENTS[1:-1])):
            found.append(Case(name, 3, (place + number) % 3, moment, INTERFACE))
    return found


def named(fault: str) -> Case:
    """The fault of that name, as `str` gives it."""
    way, ranks, who, *moment, kind = fault.split(", ")
    return Case(way, int(ranks.split()[0]), int(who.split()[1]), ", ".join(moment), kind)


def judged(started: Started) -> Outcome:
    """Hold what came of a case against what should."""
    case, lines, ended = started.case, started.lines, time.time()
    outcome = Outcome(case)
    text = "\n".join(line for _, line in lines)
    if os.environ.get("FAULTS_SHOW"):
        print(text, flush=True)
    fault = re.search(r"fault at ([\d.]+)", text)
    codes = re.search(r"exit codes (\[.*\])", text)
    outcome.struck = fault is not None
    if any(line == "hangs" for _, line in lines) or codes is None:
        outcome.complaints.append(f"it had not ended {LIMIT_S:g} s after its start")
    outcome.codes = json.loads(codes[1]) if codes else []
    struck_at = float(fault[1]) if fault else ended
    outcome.seconds = ended - struck_at
    others = [code for rank, code in enumerate(outcome.codes) if rank != case.who]
    if case.kind == "stop" and others and not any(others):  # it went on when they had ended
        outcome.seconds = 0.0
    for number in range(case.ranks):
        ours = [(at, line[5:]) for at, line in lines if line.startswith(f"[h{number}] ")]
        said = [(at, re.sub(r"^\[rank\d+\]: ", "", line)) for at, line in ours]
        outcome.last_words_s[number] = said[-1][0] - struck_at if said else 0.0
        errors = [line for _, line in said if re.match(r"shoal\.core\.errors\.\w+: ", line)]
        outcome.words[number] = errors[-1] if errors else ""
    if not outcome.struck:
        outcome.complaints.append("the moment never came")
    elif outcome.codes:
        outcome.complaints += list(wrong(outcome, text))
    if outcome.seconds > SOON_S:
        outcome.complaints.append(f"it took {outcome.seconds:.1f} s")
    outcome.complaints += [f"process {left} is left" for left in left_running(started.folder)]
    outcome.complaints += [
        f"namespace {p.name} is left" for p in NAMES.glob(f"shoal-{started.pid}-*")
    ]
    return outcome


def wrong(outcome: Outcome, launcher: str) -> Iterator[str]:
    """What the other ranks did that they should not; `launcher` is what that has said."""
    case = outcome.case
    named = [f"rank {case.who} (host h{case.who})"]
    if case.moment == "before init":  # nobody has heard of its host, but for the launcher
        named.append(f"ranks did not start within {START_S:g} s: rank {case.who}")
        if f"h{case.who} ended first" in launcher:
            return
    if WAYS[case.way].kept:
        named.append(f"rank {case.who} (or the launcher)")  # which nobody has met yet
    may_be_done = is_late(case.moment)
    for number, code in enumerate(outcome.codes):
        if number == case.who or (may_be_done and code == 0):
            continue
        if code != 1:
            yield f"rank {number} ended with exit code {code}"
        elif not any(name in outcome.words[number] for name in named):
            yield f"rank {number} does not name it: {outcome.words[number] or 'no word'}"
    if case.kind in ("link down", INTERFACE) and outcome.codes[case.who] not in (0, 1):
        yield f"the rank itself ended with exit code {outcome.codes[case.who]}"


def left_running(folder: str) -> list[str]:
    """The ranks of a case that are there still."""
    pids = [path.read_text() for path in Path(folder).glob("pid*")]
    return [pid for pid in pids if Path("/proc", pid).exists()]


# ------------------------------------------------------------------- all of them


def numbered(case: Case, counts: Mapping[int, Mapping[str, int]]) -> Case:
    """The same with a moment that is a number: "group 2/3" is two thirds of the way to the last."""
    match = re.fullmatch(r"(group|message) (\d)/(\d)", case.moment)
    if match is None:
        return case
    last = counts[case.who][match[1]]
    number = 1 + round((last - 1) * int(match[2]) / int(match[3]))
    return replace(case, moment=f"{match[1]} {number}" + (LAST if number == last else ""))


def run(chosen: Sequence[Case], beside: int) -> Iterator[Outcome]:
    """Run these cases, some of them side by side, behind a run of each plan without a fault."""
    kinds = sorted({(case.way, case.ranks) for case in chosen if "/" in case.moment})
    counts = {}
    for started in all_ended((Case(way, ranks, 0, "", "") for way, ranks in kinds), beside):
        try:
            counts[started.case.way, started.case.ranks] = started.counts()
        except FileNotFoundError:
            raise SystemExit("\n".join(line for _, line in started.lines)) from None
    numbers = [numbered(case, counts.get((case.way, case.ranks), {})) for case in chosen]
    for started in all_ended(numbers, beside):
        yield judged(started)


def table(outcomes: Sequence[Outcome]) -> str:
    """By kind of fault and plan: how many, how many passed, the longest of all."""
    lines = ["| plan | fault | tried | passed | median s | worst s |", "|---|---|---|---|---|---|"]
    for way in WAYS:
        for kind in (*KINDS, INTERFACE):
            of = [o for o in outcomes if (o.case.way, o.case.kind) == (way, kind)]
            if of:
                seconds = sorted(outcome.seconds for outcome in of)
                passed = sum(outcome.passed for outcome in of)
                lines.append(
                    f"| {way} | {kind} | {len(of)} | {passed} | {statistics.median(seconds):.1f} "
                    f"| {seconds[-1]:.1f} |"
                )
    return "\n".join(lines)


def main() -> int:
    """Run the faults that were asked for, and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words that a fault's name has, all of them")
    parser.add_argument("--case", action="append", help="a fault by its name, in place of those")
    parser.add_argument("--chosen", action="store_true", help="those of `make test-proof`")
    parser.add_argument("--chunk", default="1/1", help="such a part of them: 3/10")
    parser.add_argument("--beside", type=int, default=4, help="jobs at once")
    parser.add_argument("--json", type=Path, help="a file to add the outcomes to, a line each")
    parser.add_argument("--show", action="store_true", help="what the ranks print")
    asked = parser.parse_args()
    if asked.show:
        os.environ["FAULTS_SHOW"] = "yes"
    if (lacks := Lab().missing()) is not None:
        print(f"no faults are tried, because there is no lab here: {lacks}")
        return 0 if asked.chosen else 1
    part, parts = map(int, asked.chunk.split("/"))
    fitting = [case for case in cases() if all(w in str(case) for w in asked.only.split())]
    names = asked.case or (CHOSEN if asked.chosen else ())
    chosen = [named(name) for name in names] or fitting[part - 1 :: parts]
    outcomes = []
    for outcome in run(chosen, asked.beside):
        outcomes.append(outcome)
        mark = "ok  " if outcome.passed else "FAIL"
        print(f"{mark} {outcome.seconds:5.1f} s  {outcome.case}", flush=True)
        for complaint in outcome.complaints:
            print(f"       {complaint}", flush=True)
        if asked.json is not None:
            with asked.json.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    print(table(outcomes))
    print(f"{sum(outcome.passed for outcome in outcomes)} of {len(outcomes)} passed")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
