"""Ignite needs no adapter: its trainer calls model, loss and optimizer as a loop does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract import GLOBAL_BATCH, Net, Rows, optimizer_of
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.comm.threads import run
from shoal.front.session_start import using

engine = pytest.importorskip("ignite.engine")


def trained(model: Net, pins: dict[str, str] | None, windows: int) -> dict[str, Any]:
    """Train by Ignite's own trainer, with a line for each of `shard` and `parallelize`."""
    optimizer, rows = optimizer_of(model), Rows()
    loader = shoal.shard(DataLoader(rows, batch_size=GLOBAL_BATCH), batch="global")
    sample = rows.x[:2], rows.y[:2]
    model, loss_fn, optimizer = shoal.parallelize(
        model, F.cross_entropy, optimizer, sample=sample, pins=pins
    )
    trainer = engine.create_supervised_trainer(
        model,
        optimizer,
        loss_fn,
        prepare_batch=lambda batch, **_: (batch["x"], batch["y"]),
        gradient_accumulation_steps=windows,
    )
    epochs: list[int] = []
    trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, lambda e: epochs.append(e.state.epoch))
    trainer.run(loader, max_epochs=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {**state, "epochs": torch.tensor(epochs), "steps": torch.tensor(trainer.state.iteration)}


@pytest.mark.parametrize(
    "pins, windows",
    [(None, 1), ({"*": "sliced"}, 2), ({"*": "factor"}, 1), ({"*head": "head"}, 2)],
)
def test_weights_are_those_of_one_process(pins: dict[str, str] | None, windows: int) -> None:
    models = [Net() for _ in range(3)]
    alone = trained_among(1, models[:1], None, windows)[0]
    for own in trained_among(2, models[1:], pins, windows):
        assert own.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(own[name], value, atol=1e-10, rtol=0)


def trained_among(ranks: int, models: list[Net], pins: Any, windows: int) -> list[dict[str, Any]]:
    """Train a copy on each rank, which is a thread."""

    def body(comm: Any) -> dict[str, Any]:
        with using(comm):
            return trained(copy.deepcopy(models[comm.rank]), pins, windows)

    return run(ranks, body)
