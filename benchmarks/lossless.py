"""Whether a lossless stage behind a codec pays: how far codes of real gradients shrink, how fast.

    .venv/bin/pip install lz4 zstandard         for all stages; zlib is Python's own
    .venv/bin/python benchmarks/lossless.py     two minutes of one core

Gradients are those of accuracy.py's two tasks, early and later in training, without
embeddings. A stage of ratio r that packs p and unpacks u bytes a second pays on links of less than
(1 − 1/r) / (1/p + 1/u). The entropy is that of single bytes: what no coder of bytes one by one
beats. Of zstd and lz4 only fast levels are tried. Times are those of the processor.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import accuracy
import torch
from torch import Tensor

from shoal.codecs.coded_exchange import read_codec
from shoal.codecs.runs import Runs

CODECS = "bfloat16", "int8", "int4", "one_bit", "top_k"
Stage = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {
        "zlib, level 1": (lambda raw: zlib.compress(raw, 1), zlib.decompress)
    }
    if find_spec("lz4"):
        lz4 = importlib.import_module("lz4.frame")
        found["lz4"] = lz4.compress, lz4.decompress
    if find_spec("zstandard"):
        zstd = importlib.import_module("zstandard")
        found["zstd, level 1"] = (
            lambda raw: zstd.ZstdCompressor(level=1).compress(raw),
            lambda code: zstd.ZstdDecompressor().decompress(code),
        )
    return found


def gradients(task: accuracy.Task, at: Iterable[int]) -> dict[int, Tensor]:
    """Of the parameters that codecs take, after so many steps."""
    torch.manual_seed(0)
    model, batches, found = task.model(), task.batches(0), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    tables = {
        id(p) for m in model.modules() if "Embedding" in type(m).__name__ for p in m.parameters()
    }
    for step in range(1, max(at) + 1):
        x, y = next(batches)
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        if step in at:
            coded = [p.grad for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
            found[step] = torch.cat([gradient.reshape(-1) for gradient in coded])
        optimizer.step()
    return found


def entropy(raw: Tensor) -> float:
    """Bits a byte."""
    shares = torch.bincount(raw.int(), minlength=256) / len(raw)
    return float(-(shares[shares > 0] * shares[shares > 0].log2()).sum())


def timed(work: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
    """What comes of it, and the least of five times."""
    least = float("inf")
    for _ in range(5):
        began = time.process_time()
        out = work(argument)
        least = min(least, time.process_time() - began)
    return out, least


def show(name: str, code: Tensor) -> None:
    """A row for each stage."""
    raw = code.numpy().tobytes()
    for stage, (pack, unpack) in stages().items():
        packed, pack_s = timed(pack, raw)
        back, unpack_s = timed(unpack, packed)
        assert back == raw
        ratio = len(raw) / len(packed)
        below = 8 * max(1 - 1 / ratio, 0) * len(raw) / (pack_s + unpack_s) / 1e6
        paces = " | ".join(f"{len(raw) / s / 1e6:.0f}" for s in (pack_s, unpack_s))
        bits = f"{entropy(code):.2f}"
        print(f"| {name} | {bits} | {stage} | {ratio:.2f} | {paces} | {below:.0f} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print("| codes of | bits a byte | stage | ratio | packs, MB/s | unpacks | pays below, Mbit/s |")
    print("|---|---|---|---|---|---|---|")
    for name, task, at in (
        ("digits", accuracy.digits(), (20, 300)),
        ("text", accuracy.text(), (5, 100)),
    ):
        for step, values in gradients(task, at).items():
            for codec in CODECS:
                runs = Runs(read_codec(codec))
                code = torch.empty(runs.nbytes(len(values), 4), dtype=torch.uint8)
                runs.encode(values, code, None, {})
                show(f"{name}, step {step}: {codec}", code)
                if codec == "bfloat16":  # sign and most of the exponent
                    show(f"{name}, step {step}: its high bytes", code[1::2].contiguous())
            high = values.view(torch.uint8)[3::4].contiguous()
            show(f"{name}, step {step}: high bytes of float32", high)


if __name__ == "__main__":
    main()
