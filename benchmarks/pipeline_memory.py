"""Memory of a rank in a pipeline of four, beside that of one process: AdamW, float32, one thread.

    python benchmarks/pipeline_memory.py gpt21m      the GPT of pipelines.py, 2 × 128 tokens a rank
    python benchmarks/pipeline_memory.py gpt2        GPT-2 of 124 M, tied, 1 × 128 tokens a rank

Each line is a job of its own. Columns are bytes of weights, gradients and optimizer state between
two steps; the process's private resident memory then, less the freed memory that glibc keeps for
the next step; and the peak in three steps. The last two are above the process's memory before it
made the model. A small model was trained in the same way before.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
from memory import resident
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.contracts.launcher import Job
from shoal.core.freed_memory import return_free_memory
from shoal_tools.launch.local import Local

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

RANKS, STEPS = 4, 3
SIZES = {  # words, width, blocks, heads, rows of a rank, tokens of a row, tied ends
    "gpt21m": (8192, 384, 8, 6, 2, 128, False),
    "gpt2": (50257, 768, 12, 12, 1, 128, True),
    "small": (64, 48, 4, 2, 2, 32, False),
}


def private() -> int:
    """The process's private resident bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def loss_fn(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of all tokens."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def pinned(blocks: int, *, tied: bool) -> dict[str, str]:
    """Give each rank a run of blocks, and few of them to the rank that has tied ends."""
    shares = [1, *[(blocks - 1) / 3] * 3] if tied else [blocks / RANKS] * RANKS
    ends = list(accumulate(shares))
    pins = {"*": f"pipeline:{0 if tied else RANKS - 1}", "position": "pipeline:0"}
    pins["letter"] = "pipeline:0"
    for block in range(blocks):
        rank = next(number for number, end in enumerate(ends) if block < end - 1e-6)
        pins[f"blocks.{block}.*"] = f"pipeline:{rank}"
    return pins


def trained(size: str) -> nn.Module:
    """Train a GPT for some steps."""
    words, width, blocks, heads, rows, tokens, tied = SIZES[size]
    torch.manual_seed(0)
    model: nn.Module = GPT(words, tokens, width=width, num_blocks=blocks, num_heads=heads)
    if tied:
        model.head.weight = model.letter.weight
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    world = shoal.world()
    torch.manual_seed(world.rank)
    x, y = torch.randint(words, (2, rows, tokens))
    pins = pinned(blocks, tied=tied) if world.size > 1 else None
    model, loss, optimizer = shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), pins=pins)
    for number in range(1 + STEPS):
        if number == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def train(size: str, folder: Path) -> None:
    """Train, and leave this rank's figures in a folder."""
    torch.set_num_threads(1)
    world = shoal.init(timeout_s=600)
    trained("small")
    gc.collect()
    return_free_memory()
    before, peak_before = private(), resident("VmRSS")
    model = trained(size)
    gc.collect()
    held = shoal.memory(model)
    return_free_memory()
    figures = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer state": held.optimizer_state,
        "together": held.parameters + held.gradients + held.optimizer_state,
        "resident": private() - before,
        "peak": resident("VmHWM") - peak_before,
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(figures))


def measured(size: str, ranks: int) -> list[dict[str, int]]:
    """Return each rank's figures."""
    with tempfile.TemporaryDirectory() as name:
        job = Job((sys.executable, str(Path(__file__).resolve()), size, name), ranks)
        if Local().launch(job).exit_code:
            sys.exit(1)
        return [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(ranks)]


def main(size: str) -> None:
    """Print a table."""
    (alone,) = measured(size, 1)
    ranks = measured(size, RANKS)
    print(f"| {size}, MB | " + " | ".join(alone) + " |")
    print("|---|" + "---|" * len(alone))
    for name, figures in [("one process", alone), *((f"rank {n}", f) for n, f in enumerate(ranks))]:
        print(f"| {name} | " + " | ".join(f"{each / 1e6:.0f}" for each in figures.values()) + " |")
    largest = {kind: max(f[kind] for f in ranks) / max(alone[kind], 1) for kind in alone}
    print("| largest part | " + " | ".join(f"{part:.2f}" for part in largest.values()) + " |")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1])
