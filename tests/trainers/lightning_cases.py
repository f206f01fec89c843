"""Trainings by Lightning that the contract does not have, on this rank or in one process.

python lightning_cases.py FOLDER [CASE …]
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import shoal
from shoal.integrations.lightning import ShoalStrategy

SIZE, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def case(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def rows(batch_size: int = 4) -> DataLoader[Any]:
    """27 rows, so that the last batch is uneven."""
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(27, 6, generator=made), torch.randint(5, (27,), generator=made)
    return DataLoader(TensorDataset(x, y, torch.arange(27)), batch_size=batch_size)


def trainer(options: Any = None, **given: Any) -> pl.Trainer:
    given = {"max_epochs": 2, "enable_checkpointing": False, **given}
    if SIZE > 1:
        given["strategy"] = ShoalStrategy(batch="global", **(options or {}))
    return pl.Trainer(
        accelerator="cpu",
        devices=SIZE,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


class Net(pl.LightningModule):
    """A classifier that logs, and keeps a list and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.losses: list[float] = []
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.enter(x)))))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.steps += 1
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Scheduled(Net):
    """One that has a scheduler, which steps with the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Net):
    """Manual optimisation: clipping, a scheduler, and no loss is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


class Windows(Manual):
    """Manual accumulation, whose last window ends without a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, ends = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(self.loss(batch) / 2)
        if ends:
            optimizer.step()
            optimizer.zero_grad()


class Gan(pl.LightningModule):
    """Two optimizers, in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def says(self, x: Tensor, true: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), true))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        making, judging = self.optimizers()
        self.toggle_optimizer(making)
        fake = self.maker(batch[0])
        making.zero_grad()
        self.manual_backward(self.says(fake, 1.0))
        making.step()
        self.untoggle_optimizer(making)
        self.toggle_optimizer(judging)
        judging.zero_grad()
        self.manual_backward(self.says(batch[0], 1.0) + self.says(fake.detach(), 0.0))
        judging.step()
        self.untoggle_optimizer(judging)

    def configure_optimizers(self) -> Any:
        parts = self.maker, self.critic
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts], []


class ReturnsNone(Net):
    """One that skips a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


class TakesLoader(Net):
    """One that draws its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class EndsEarly(Net):
    """One that ends its epochs in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Beside(Net):
    """One that takes batches of two loaders in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["long"]) + 2 * self.loss(batch["short"])


class Normed(Net):
    """One with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(torch.tanh(self.enter(x)))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two(long: int, short: int, **given: Any) -> dict[str, Any]:
    """Make two loaders of so many rows, for one step."""
    data = rows().dataset
    return {
        name: DataLoader(Subset(data, range(num)), batch_size=4, **given)
        for name, num in (("long", long), ("short", short))
    }


def fitted(
    module: Any,
    options: Any = None,
    ckpt_path: Path | None = None,
    loader: Any = None,
    **given: Any,
) -> dict[str, Any]:
    """Train a module, and return its weights, and facts that one process has alike."""
    fitting = trainer(options, **given)
    fitting.fit(module, rows() if loader is None else loader, ckpt_path=ckpt_path)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "steps": fitting.global_step,
        "rates": [group["lr"] for o in fitting.optimizers for group in o.param_groups],
        "own": [len(getattr(module, "losses", "")), getattr(module, "steps", 0)],
        "epoch": float(fitting.callback_metrics.get("train_epoch", 0.0)),
        "extended": hasattr(fitting.optimizers[0], "accumulate"),
    }


@case
def plain(folder: Path) -> dict[str, Any]:
    return fitted(Net())


@case
def scheduled(folder: Path) -> dict[str, Any]:
    return fitted(Scheduled(), {"pins": {"*": "sliced"}})


@case
def windows_of_three(folder: Path) -> dict[str, Any]:
    pins = {"*": "sliced"}
    return fitted(Net(), {"pins": pins}, accumulate_grad_batches=3, gradient_clip_val=0.2)


@case
def ended_early(folder: Path) -> dict[str, Any]:
    return fitted(EndsEarly(), accumulate_grad_batches=2)


@case
def clipped_by_value(folder: Path) -> dict[str, Any]:
    return fitted(Net(), gradient_clip_val=0.02, gradient_clip_algorithm="value")


@case
def precise(folder: Path) -> dict[str, Any]:
    return fitted(Net(), precision="64-true")


@case
def normed(folder: Path) -> dict[str, Any]:
    return fitted(Normed(), sync_batchnorm=SIZE > 1)


@case
def beside(folder: Path) -> dict[str, Any]:
    """Batches of two loaders in a step. The shorter one begins anew in the middle of the epoch."""
    return fitted(Beside(), loader=two(26, 14))


@case
def beside_alike(folder: Path) -> dict[str, Any]:
    """Two loaders whose last batches are uneven, but in one step and alike."""
    return fitted(Beside(), loader=two(27, 27))


@case
def beside_dropped(folder: Path) -> dict[str, Any]:
    """Two loaders whose last batches would be uneven."""
    return fitted(Beside(), loader=two(27, 14, drop_last=True))


@case
def scaled(folder: Path) -> dict[str, Any]:
    """A scaler of float16, whose first scales are too large: ranks leave out the same steps."""
    torch.set_default_dtype(torch.float32)
    try:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        half = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        found = fitted(Scheduled(), {"pins": {"*": "sliced"}}, plugins=[half], max_epochs=6)
    finally:
        torch.set_default_dtype(torch.float64)
    return {**found, "scale": scaler.get_scale()}


@case
def manual(folder: Path) -> dict[str, Any]:
    return fitted(Manual())


@case
def manual_cut(folder: Path) -> dict[str, Any]:
    return fitted(Manual(), {"pins": {"*": "sliced", "head": "head", "middle": "column"}})


@case
def manual_windows(folder: Path) -> dict[str, Any]:
    return fitted(Windows())


@case
def gan(folder: Path) -> dict[str, Any]:
    return fitted(Gan(), {"pins": {"*": "sliced"}})


@case
def saved(folder: Path) -> dict[str, Any]:
    """Stop in the middle of an epoch."""
    half = ModelCheckpoint(folder, "half", every_n_train_steps=3)
    return fitted(Net(), max_steps=3, enable_checkpointing=True, callbacks=[half])


@case
def gone_on(folder: Path) -> dict[str, Any]:
    """Go on from the middle of an epoch, where two ranks have stopped."""
    file = folder.parent / "saved-2" / "half.ckpt"
    return fitted(Net(), ckpt_path=file) if file.exists() else {}


@case
def evaluated(folder: Path) -> dict[str, Any]:
    """Sanity check, early stop, best and last checkpoints, validate, test and predict."""
    module, best = Net(), ModelCheckpoint(folder, "best-{epoch}", "val", save_last=True)
    writer = Writer("batch")
    stop = EarlyStopping("val", patience=1, min_delta=10.0)
    whole = trainer(max_epochs=6, enable_checkpointing=True, callbacks=[best, stop, writer])
    whole.fit(module, rows(), rows(5))
    found = {
        "epochs": whole.current_epoch,
        "best": Path(best.best_model_path).name,
        "values": [
            float(whole.callback_metrics["val"]),
            whole.validate(module, rows(5), verbose=False)[0]["val"],
            whole.test(module, rows(5), ckpt_path="best", verbose=False)[0]["val"],
        ],
    }
    shown = whole.predict(module, rows())
    again = Net()
    trainer(max_epochs=4).fit(again, rows(), ckpt_path=folder / "last.ckpt")
    kept = torch.load(folder / "last.ckpt", weights_only=False)
    return {
        **found,
        "predicted": torch.cat(shown).tolist(),
        "noted": writer.rows,
        "weights": {f"again.{name}": value for name, value in again.state_dict().items()}
        | {f"kept.{name}": value for name, value in kept["state_dict"].items()},
    }


class Writer(BasePredictionWriter):
    """Notes which rows Lightning says that a batch of predictions is of."""

    def __init__(self, when: str) -> None:
        super().__init__(when)
        self.rows: list[int] = []

    def write_on_batch_end(self, *arguments: Any) -> None:
        _, _, _, indices, *_ = arguments
        self.rows += indices


@case
def refused(folder: Path) -> dict[str, Any]:
    """Give what cannot be served, and return the errors' texts."""
    with torch.device("meta"):
        empty = Net()
    tries: dict[str, Callable[[], Any]] = {
        "meta": lambda: fitted(empty),
        "pipeline": lambda: fitted(Manual(), {"pins": {"*": "pipeline"}}),
        "option": lambda: ShoalStrategy(pinz={}),
        "loss": lambda: ShoalStrategy(compute_loss=print),
        "batch": lambda: ShoalStrategy(batch="all"),
        "iter": lambda: fitted(TakesLoader()),
        "sharded": lambda: trainer().predict(Net(), shoal.shard(rows())),
        "beside": lambda: fitted(Beside(), loader=two(27, 14)),
        "none": lambda: fitted(ReturnsNone()),
    }
    return {"texts": {name: _error_of(attempt) for name, attempt in tries.items() if SIZE > 1}}


def _error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except shoal.UsageError as error:
        return str(error)
    return ""


def main(folder: Path, *names: str) -> None:
    """Write what each case has found on this rank."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names or CASES:
        own = folder / f"{name}-{SIZE}"
        own.mkdir(exist_ok=True)
        found[name] = CASES[name](own)
    torch.save(found, folder / f"{SIZE}-{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
