"""Run public scripts of a trainer in this process, which may be one of several.

python trainer_scripts.py TRAINER FOLDER [SCRIPT …]

A script is a file in public/, small, written anew in the order of its author's. A line that Shoal
needs ends in "# shoal". If it stands for a line of the author's, that one is above, as a comment
"# author: ". Alone a script runs with its author's lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PUBLIC = Path(__file__).parent / "public"
SCRIPTS = {  # each with the number of its lines that Shoal changes
    "accelerate": {
        "nlp_example": 1,
        "complete_nlp_example": 1,
        "cv_example": 2,
        "gradient_accumulation": 1,
    },
    "lightning": {
        "backbone_image_classifier": 0,  # and a word of the command line
        "transformer": 2,
        "imagenet": 2,
        "generative_adversarial_net": 2,
        "computer_vision_fine_tuning": 2,
    },
    "transformers": {"run_clm": 1, "run_glue": 1, "run_image_classification": 1},
}
_CHANGED = re.compile(r"(?:^( *)# author: (.*)\n)?^.*  # shoal\n", re.MULTILINE)


def changed_lines(name: str) -> list[str]:
    """Return the lines of a script that Shoal needs."""
    return [line for line in _text_of(name).splitlines() if line.endswith("  # shoal")]


def authors_text(name: str) -> str:
    """Return a script with its author's lines in place of Shoal's."""
    return _CHANGED.sub(lambda own: f"{own[1]}{own[2]}\n" if own[2] else "", _text_of(name))


def _text_of(name: str) -> str:
    return (PUBLIC / f"{name}.py").read_text()


def run(name: str, folder: Path, size: int, **options: Any) -> dict[str, Any]:
    """Run a script, and return its weights and what it has found."""
    folder.mkdir(exist_ok=True)
    text = _text_of(name) if size > 1 else authors_text(name)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(text, str(PUBLIC / f"{name}.py"), "exec"), namespace)
    arguments = SimpleNamespace(processes=size, folder=str(folder), **options)
    model, found = namespace["main"](arguments)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "found": found}


def by_accelerate(name: str, folder: Path, size: int, *, last: bool) -> dict[str, Any]:
    """Run a script of Accelerate. All but the last leave the ranks together as they end."""
    state = import_module("accelerate.state")
    configuration = import_module("accelerate.utils").DataLoaderConfiguration
    ends = state.PartialState.destroy_process_group
    if not last:
        state.PartialState.destroy_process_group = lambda *_: None
    try:
        # one order for any number of ranks; a batch for a rank, or for all of them
        order, split = (
            configuration(use_seedable_sampler=True, split_batches=split) for split in (False, True)
        )
        return run(name, folder, size, cpu=True, order=order, split=split)
    finally:
        state.PartialState.destroy_process_group = ends
        if not last:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def by_lightning(name: str, folder: Path, size: int, *, last: bool) -> dict[str, Any]:
    """Run a script of Lightning."""
    own = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": size,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    return run(name, folder, size, own=own)


def by_transformers(name: str, folder: Path, size: int, *, last: bool) -> dict[str, Any]:
    """Run a script of Hugging Face's Trainer, which shuffles rows by its seed."""
    told = {
        "output_dir": str(folder),
        "use_cpu": True,
        "do_train": True,
        "do_eval": True,
        "num_train_epochs": 2,
        "learning_rate": 0.02,
        "per_device_train_batch_size": 8 // size,
        "per_device_eval_batch_size": 4,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,  # else Trainer adds up the loss of rank 0 alone
        "save_strategy": "no",
    }
    return run(name, folder, size, told=told)


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "transformers": by_transformers,
}


def main(trainer: str, folder: Path, *names: str) -> None:
    """Write what each script has found on this rank."""
    sys.path.insert(0, str(PUBLIC))
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    chosen = list(names or SCRIPTS[trainer])
    torch.set_default_dtype(torch.float64 if trainer == "lightning" else torch.float32)
    records = {
        name: RUNS[trainer](name, folder / f"{name}-{size}", size, last=name == chosen[-1])
        for name in chosen
    }
    torch.save(records, folder / f"{size}-{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
