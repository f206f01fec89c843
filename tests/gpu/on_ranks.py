"""Run by two processes that share one GPU: trains as one process does, way after way.

Each rank trains a copy alone, on all rows, beside the copy that it trains with the other rank on
its own rows. Rank 0 prints the largest difference of each case. Too large a one is an error.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.profiling import steps
from shoal.session.session import current

steps._MOST = 1  # what is compared does not depend on how exactly times are known
ROWS, STEPS = 12, 4


class Letters(nn.Module):
    """Tokens to classes: an embedding, norms, and layers that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.widen, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 6)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.narrow(F.gelu(self.widen(hidden)))
        return self.head(hidden.mean(1))


def images() -> nn.Module:
    """Convolutions, and a layer that can be cut."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(144, 6),
    )


@dataclass(frozen=True)
class Case:
    """How a model is trained, and how far from one process it may be."""

    name: str
    pins: dict[str, str]
    model: Callable[[], nn.Module] = Letters
    dtype: torch.dtype = torch.float64
    within: float = 1e-10
    options: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    compiled: bool = False
    uneven: bool = True


PINS = {
    "replicate:direct": {"*": "replicate:direct"},
    "replicate:ring": {"*": "replicate:ring"},
    "replicate:tree": {"*": "replicate:tree"},
    "replicate:allreduce": {"*": "replicate:allreduce"},
    "sliced:direct": {"*": "sliced:direct"},
    "sliced:ring": {"*": "sliced:ring"},
    "replicate:collective": {"*": "replicate:collective"},
    "sliced:collective": {"*": "sliced:collective"},
    "factor": {"*": "replicate", "widen": "factor", "narrow": "factor"},
    "column, row": {"*": "replicate", "widen": "column", "narrow": "row"},
    "pair": {"*": "sliced", "widen": "column_pair", "narrow": "row_pair"},
    "embedding, head": {"*": "replicate", "embed": "embedding", "head": "head"},
}
CODED = [
    f"{way}+{codec}"
    for way in ("replicate:direct", "sliced:direct", "replicate:ring")
    for codec in ("bfloat16", "int8", "one_bit", "top_k", "low_rank")
]
ROWS_CODED = {"*": "replicate", "widen": "column+bfloat16", "narrow": "row+bfloat16"}
HALF = {"dtype": torch.float32, "within": 2e-2}
CASES = [
    *(Case(name, pins) for name, pins in PINS.items()),
    Case("sliced, low", PINS["sliced:direct"], options={"memory": "low"}),
    Case("auto", {}),
    Case("images, channels last", {"*": "replicate", "4": "row"}, model=images),
    Case("images, sliced", {"*": "sliced"}, model=images),
    *(
        Case(f"autocast {kind}, {name}", PINS[name], autocast=kind, **HALF)
        for kind in (torch.bfloat16, torch.float16)
        for name in ("replicate:direct", "sliced:direct", "factor", "column, row")
    ),
    Case("compiled", PINS["replicate:direct"], dtype=torch.float32, within=1e-4, compiled=True),
    *(Case(f"coded, {pin}", {"*": pin}, dtype=torch.float32, within=0.5) for pin in CODED),
    Case("rows in bfloat16", ROWS_CODED, dtype=torch.float32, within=2e-2),
]


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Whole batches at the host, the same on every rank; pinned, as a loader has them."""
    drawn = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        y = torch.randint(6, (ROWS,), generator=drawn)
        if case.model is images:
            x = torch.randn(ROWS, 3, 8, 8, generator=drawn, dtype=torch.float64).to(case.dtype)
            x = x.to(memory_format=torch.channels_last)
        else:
            x = torch.randint(13, (ROWS, 5), generator=drawn)
        found.append((x, y))
    return found


def pinned(tensor: Tensor) -> Tensor:
    """In memory that the GPU reads by itself, where there is one."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def train(case: Case, model: nn.Module, loss_fn: Any, optimizer: Any, rows: Any) -> list[Tensor]:
    """The ordinary loop; the parameters behind it."""
    half = case.autocast == torch.float16
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=half)
    for x, y in (map(pinned, batch) for batch in rows):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        precision = torch.autocast(x.device.type, case.autocast) if case.autocast else nullcontext()
        with precision:
            loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [value.detach().clone() for value in model.state_dict().values()]


def of(case: Case, world: shoal.World, device: torch.device) -> float:
    """How far from one process a case is; infinite where ranks differ."""
    torch.manual_seed(3)
    model = case.model().to(device, case.dtype)
    if case.model is images:
        model = model.to(memory_format=torch.channels_last)
    alone, whole = copy.deepcopy(model), batches(case)
    expected = train(
        case, alone, nn.CrossEntropyLoss(), torch.optim.AdamW(alone.parameters(), lr=0.01), whole
    )
    cut = ROWS * 2 // 3 if case.uneven else ROWS // 2
    begin, end = (0, cut) if world.rank == 0 else (cut, ROWS)
    rows = [(x[begin:end], y[begin:end]) for x, y in whole]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sample = tuple(part.to(device) for part in rows[0])
    model, loss_fn, optimizer = shoal.parallelize(
        model, nn.CrossEntropyLoss(), optimizer, sample=sample, pins=case.pins, **case.options
    )
    if case.compiled:
        model.widen.compile()
    got = train(case, model, loss_fn, optimizer, rows)
    shoal.unparallelize(model)
    mine = torch.cat([value.double().flatten() for value in got])
    first, second = shoal.gather(mine[None])
    if not torch.equal(first, second):
        return float("inf")
    return max(
        float((a - b).abs().max() / a.abs().max().clamp(min=0.01))
        for a, b in zip(expected, got, strict=True)
    )


def main() -> None:
    """Train every case that is asked for, or all."""
    world = shoal.init(timeout_s=60)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    carried = device.type == "cuda" and current().comm.carries(device)
    if world.rank == 0:
        print("carried by NCCL:", carried, flush=True)
    chosen = [case for case in CASES if case.name in sys.argv[1:] or len(sys.argv) == 1]
    failed = []
    for case in chosen:
        try:
            difference = of(case, world, device)
        except shoal.UsageError as error:
            failed.append(case.name)
            if world.rank == 0:
                print(f"{case.name}: {error}", flush=True)
            continue
        if not difference <= case.within:
            failed.append(case.name)
        if world.rank == 0:
            print(f"{case.name}: {difference:.1e}", flush=True)
    if failed:
        sys.exit(f"not as one process: {', '.join(failed)}")


if __name__ == "__main__":
    main()
