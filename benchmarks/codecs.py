"""Codecs on one core: how many times fewer bytes, how fast, how far off.

    .venv/bin/python benchmarks/codecs.py [--megabytes 16]

Of normal numbers in float32. Coding keeps what is lost; reading adds. `share` is the pace of coding
without that and reading, one after the other, as a part of that of copying memory. The figures of
docs/lab/codecs.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from shoal.codecs.runs import Runs
from shoal.contracts.codec import Codec
from shoal.core.registry import of

_TIMES = 15


def seconds(work: Callable[[], object]) -> float:
    """The least of some times: what else the machine does only adds."""
    work()
    least = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=16.0)
    numel = int(parser.parse_args().megabytes * 250_000)
    torch.set_num_threads(1)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    copied = torch.empty_like(values)
    nbytes = values.nbytes
    copy_s = seconds(lambda: copied.copy_(values))
    print(f"copying memory: {nbytes / copy_s / 1e9:.1f} GB/s\n")
    print("| codec | ratio | code, GB/s | code and keep | read and add | share | error of a step |")
    print("|---|---|---|---|---|---|---|")
    for kind in of(Codec).values():
        print(row(kind(), values, copy_s))


def row(codec: Codec, values: torch.Tensor, copy_s: float) -> str:
    """What a codec does to values, as a line of the table."""
    runs, nbytes = Runs(codec), values.nbytes
    lost, back, total = (torch.zeros_like(values) for _ in range(3))
    code = torch.empty(runs.nbytes(len(values), 4), dtype=torch.uint8)
    encode_s = seconds(lambda: runs.encode(values, code, None, {}))
    decode_s = seconds(lambda: runs.decode(code, back))
    error = float((back - values).norm() / values.norm())
    keep_s = seconds(lambda: runs.encode(values, code, lost, {}))
    add_s = seconds(lambda: runs.decode_add(code, total))
    cells = " | ".join(f"{nbytes / s / 1e9:.1f}" for s in (encode_s, keep_s, add_s))
    share = copy_s / (encode_s + decode_s)
    return f"| `{codec}` | {nbytes / len(code):.1f} | {cells} | {share:.2f} | {error:.4f} |"


if __name__ == "__main__":
    main()
