"""Judges random cases by their numbers, and prints what came of them."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable

import torch

from shoal.profiling import steps

WRONG = {"ENDED", "DIFFERS", "WRONG", "ROWS"}


def judge_cases(
    text: str | None,
    judged: Callable[[int, Counter[str]], str],
    described: Callable[[int], object],
) -> None:
    """Judge the cases that the command line asks for, and exit with 1 if any is wrong.

    Args:
        text: of the help.
        judged: judges a case by its number, and counts the strategies that were chosen.
        described: what a case is.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    steps._MOST = 1  # what is compared does not depend on how exactly times are known
    found, refused, chosen = Counter[str](), Counter[str](), Counter[str]()
    begin = time.perf_counter()
    numbers = range(options.first, options.first + options.cases)
    for number in [options.case] if options.case is not None else numbers:
        if time.perf_counter() - begin > options.seconds:
            break
        try:
            said = judged(number, chosen)
        except Exception:
            said = "WRONG " + traceback.format_exc()
        found[said.partition(" ")[0]] += 1
        if said.startswith("refused"):
            refused[said.partition(" /")[0]] += 1
        if said != "same":
            print(f"case {number}: {said}\n    {described(number)}", flush=True)
    print(f"{sum(found.values())} cases in {time.perf_counter() - begin:.0f} s: {dict(found)}")
    for message, count in refused.most_common():
        print(f"{count:6} {message}")
    print("chosen:", dict(chosen.most_common()))
    sys.exit(1 if WRONG & found.keys() else 0)
