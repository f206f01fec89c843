"""Where the time of `shoal.parallelize` goes, phase by phase, on rank 0.

    sudo .venv/bin/shoal lab --hosts 4 --rate 1gbit -- .venv/bin/python benchmarks/set_up.py alexnet

Models: alexnet, resnet50, gpt25m, alexnet22k, layers500. Each phase is a function of Shoal's, timed
without the phases inside it: wall seconds, and processor seconds of the process. With `--again` the
model is parallelised a second time, built anew, as a notebook's cell does. `--alike` builds every
rank's weights by one seed, otherwise they differ and rank 0's are sent.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import shoal

HERE = Path(__file__).parent
RECIPES = {
    "alexnet": HERE.parent / "examples" / "alexnet.py",
    "resnet50": HERE.parent / "examples" / "resnet50.py",
    "gpt25m": HERE / "gpt25m.py",
    "alexnet22k": HERE / "recipes" / "alexnet22k.py",
}
# where each phase's function is looked up, and by which name
PHASES = {
    "comparing the model": (("shoal.profiling.layers", "require_same_model"),),
    "profiling: steps": (("shoal.profiling.layers", "measured_step"),),
    "profiling: probes": (("shoal.profiling.layers", "_measuring"),),
    "profiling: rows": (("shoal.profiling.layers", "rowwise"),),
    "profiling: optimizer": (("shoal.profiling.layers", "OptimizerCost.of"),),
    "profiling: state": (("shoal.profiling.layers", "moving"), ("shoal.profiling.layers", "seen")),
    "links": (("shoal.front.cluster", "probe_link"),),
    "paces of exchanges": (("shoal.front.cluster", "probe_paces"),),
    "paces of moves": (("shoal.front.cluster", "probe_moves"),),
    "pace of packing": (("shoal.front.cluster", "probe_pack"),),
    "pace of landing": (("shoal.front.cluster", "probe_landing"),),
    "paces of codecs": (("shoal.front.cluster", "probe_codings"),),
    "search": (("shoal.front.earlier_figures", "plan_for"),),
    "waiting for the plan": (("shoal.front.parallel_ranks", "from_first"),),
    "comparing weights, beside the search": (("shoal.front.parallel_ranks", "of_first"),),
    "rewrite": (("shoal.front.parallel_ranks", "attach"),),
}


class Book:
    """Seconds of phases, each without those inside it."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._of_thread = threading.local()

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is noted."""

        @functools.wraps(call)
        def noted(*args: Any, **named: Any) -> Any:
            under_way: list[list[float]] = vars(self._of_thread).setdefault("open", [])
            under_way.append([0.0, 0.0])
            wall, processor = time.perf_counter(), time.process_time()
            try:
                found = call(*args, **named)
            finally:
                wall_s, processor_s = time.perf_counter() - wall, time.process_time() - processor
                inside = under_way.pop()
                self.wall[phase] += wall_s - inside[0]
                self.processor[phase] += processor_s - inside[1]
                for outer in under_way[-1:]:
                    outer[0] += wall_s
                    outer[1] += processor_s
            if phase == "profiling: probes":  # which gives a function, called at once
                return self.timed(f"{phase}: {type(args[0]).__name__}", found)
            return found

        return noted

    def watch(self) -> None:
        """Have every phase's time noted from now on."""
        for phase, places in PHASES.items():
            for module, path in places:
                holder: Any = importlib.import_module(module)
                *within, name = path.split(".")
                for part in within:
                    holder = getattr(holder, part)
                setattr(holder, name, self.timed(phase, getattr(holder, name)))


class Layers500(nn.Module):
    """250 blocks of a linear layer and a layer norm."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(250))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        out: torch.Tensor = self.blocks(x)
        return out


def recipe(path: Path) -> ModuleType:
    """A recipe's module."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(name: str) -> tuple[nn.Module, Any, Any, Any]:
    """A model, its loss, its optimizer and a sample."""
    if name == "layers500":
        model: nn.Module = Layers500()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        return model, nn.MSELoss(), optimizer, (torch.randn(32, 128), torch.randn(32, 128))
    module = recipe(RECIPES[name])
    model = module.model()
    data = module.data()
    loader = data[0] if isinstance(data, tuple) else data
    return model, module.loss(), module.optimizer(model.parameters()), next(iter(loader))


def main() -> None:
    """Measure on the ranks of the lab."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[*RECIPES, "layers500"])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--plan", help="where rank 0 saves the plan")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shoal.init()
    rank = shoal.world().rank
    for time_over in range(1 + asked.again):
        torch.manual_seed(0 if asked.alike else rank)
        model, loss, optimizer, sample = built(asked.model)
        book = Book()
        if time_over == 0:
            book.watch()
            first = book
        first.wall.clear()
        first.processor.clear()
        began = time.perf_counter()
        shoal.parallelize(model, loss, optimizer, sample=sample)
        whole_s = time.perf_counter() - began
        if rank == 0:
            plan = shoal.plan_of(model)
            assert plan is not None
            if asked.plan:
                plan.save(asked.plan)
            report = {
                "model": asked.model,
                "seconds": round(whole_s, 2),
                "predicted_s": round(plan.predicted_s, 4),
                "wall": {name: round(s, 3) for name, s in first.wall.items()},
                "processor": {name: round(s, 3) for name, s in first.processor.items()},
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
