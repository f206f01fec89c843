"""Loops of Accelerate beside the contract, in this process, which may be one of several.

python accelerate_cases.py FOLDER

Alone they train by `Accelerator` itself, so that test_accelerate.py can compare.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shoal
from shoal.integrations.accelerate import ShoalAccelerator

SIZE, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
ROWS, BATCH, IGNORED = 22, 4, -100


class Words(Dataset[dict[str, Tensor]]):
    """Made-up rows of words, with unlike numbers of targets that count."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(7)
        self.words = torch.randint(10, (ROWS, 5), generator=made)
        chance = torch.rand(ROWS, 5, generator=made)
        self.labels = self.words.masked_fill(
            chance < torch.linspace(0, 0.8, ROWS)[:, None], IGNORED
        )

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"words": self.words[row], "labels": self.labels[row]}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Words()
        return (rows[row] for row in range(ROWS))


class Model(nn.Module):
    """A model that returns its own loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.table = nn.Embedding(10, 6, dtype=torch.float64)
            self.head = nn.Linear(6, 10, dtype=torch.float64)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.table(words)))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def accelerator_of(**options: Any) -> Any:
    split = DataLoaderConfiguration(split_batches=True)
    defaults: dict[str, Any] = {"dataloader_config": split}
    if SIZE == 1:
        defaults["cpu"] = True
        options.pop("pins", None)
        return Accelerator(**defaults, **options)
    return ShoalAccelerator(**defaults, **options)


def own_loss(data: Any, pins: Any = None, **options: Any) -> dict[str, Any]:
    """Train a model that returns its loss, with a schedule, in windows; then evaluate it."""
    accelerator = accelerator_of(pins=pins, gradient_accumulation_steps=4, **options)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    loader, valid = DataLoader(data, batch_size=BATCH), DataLoader(Words(), batch_size=BATCH)
    prepared = accelerator.prepare(model, optimizer, loader, valid, schedule)
    model, optimizer, loader, valid, schedule = prepared
    before = evaluated(accelerator, model, valid)
    steps = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    record = {
        "steps": steps,
        "rate": schedule.get_last_lr(),
        "before": before,
        "after": evaluated(accelerator, model, valid),
        "strategies": strategies_of(model),
    }
    hooked = list[str]()
    accelerator.register_save_state_pre_hook(lambda *_: hooked.append("called"))
    record["weights"] = {n: p.clone() for n, p in accelerator.get_state_dict(model).items()}
    record["hooked"] = hooked
    accelerator.save_state(os.path.join(sys.argv[1], f"state-{SIZE}"))
    accelerator.free_memory()
    record["ordinary"] = shoal.plan_of(model) is None
    return record


def evaluated(accelerator: Any, model: Any, valid: Any) -> tuple[Tensor, Tensor, int]:
    """Gather predictions of every row, a loss of each batch by rows, and objects."""
    found, losses, names = [], [], []
    model.eval()
    with torch.no_grad():
        for batch in valid:
            output = model(**batch)
            found.append(accelerator.gather_for_metrics(output["logits"].argmax(-1)))
            losses.append(
                accelerator.gather_for_metrics(output["loss"].repeat(len(batch["words"])))
            )
            names += accelerator.gather_for_metrics([str(row) for row in batch["words"].tolist()])
    model.train()
    return torch.cat(found), torch.cat(losses), len(names)


def strategies_of(model: Any) -> list[str]:
    plan = shoal.plan_of(model)
    return [] if plan is None else [choice.strategy for choice in plan.choices]


def two_models() -> dict[str, Any]:
    """Train a pair that are called in turn, beside a frozen one."""
    accelerator = accelerator_of(weigh="ranks") if SIZE > 1 else accelerator_of()
    pair = [Model(), Model()]
    frozen = Model().requires_grad_(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in pair]
    loader: Any = DataLoader(Words(), batch_size=BATCH, drop_last=True)
    first, second, frozen, *optimizers, loader = accelerator.prepare(
        *pair, frozen, *optimizers, loader
    )
    for batch in loader:
        told = frozen(batch["words"])["logits"]
        for model, optimizer in zip((first, second), optimizers, strict=True):
            accelerator.backward((model(batch["words"])["logits"] - 2 * told).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weights = {
        f"{number}.{name}": value.clone()
        for number, model in enumerate((first, second))
        for name, value in model.state_dict().items()
    }
    accelerator.end_training()
    return {"weights": weights}


def in_bfloat16(*, plain: bool) -> dict[str, Any]:
    """Train a float32 model in bfloat16, by Shoal or by Accelerate's own DDP."""
    kind = Accelerator if plain or SIZE == 1 else ShoalAccelerator
    split = DataLoaderConfiguration(split_batches=True)
    accelerator = kind(cpu=True, mixed_precision="bf16", dataloader_config=split)
    model = Model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader: Any = DataLoader(Words(), batch_size=BATCH, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for batch in loader:
            words = batch["words"]
            logits = model(words)["logits"]
            accelerator.backward(F.cross_entropy(logits.flatten(0, 1), words.flatten()))
            optimizer.step()
            optimizer.zero_grad()
    module = getattr(model, "module", model)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=False)  # another precision may follow
    return {"weights": weights}


def main(folder: Path) -> None:
    records = {
        "bf16": in_bfloat16(plain=False),
        "bf16 by DDP": in_bfloat16(plain=True),
        "words": own_loss(Words()),
        "stream": own_loss(Stream(), {"*": "sliced"}),
        "two": two_models(),
    }
    torch.save(records, folder / f"{SIZE}-{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
