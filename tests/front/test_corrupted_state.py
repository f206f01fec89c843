"""A state.json of any form with a right checksum: it is loaded, or refused with nothing changed."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import built, features
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.checkpoint.folder import STATE
from shoal.checkpoint.state import _packed
from shoal.checkpoint.tensors import checksum
from shoal.comm.threads import ThreadComm
from shoal.core.errors import ShoalError
from shoal.front.joining import using

GONE = object()  # the node is removed
OTHERS: tuple[Any, ...] = (
    *(GONE, None, True, -1, 0.5, float("nan"), 10**30, "x", "../x", "", [], [1], {}, {"x": 1}),
    *({"$": "evil"}, {"$": "tensor", "name": "none"}, {"$": "float", "value": "x"}),
)
Way = tuple[str | int, ...]


def nodes(value: Any, way: Way = ()) -> Iterator[Way]:
    """Yield the ways to all values within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*way, key)
        if isinstance(part, dict | list):
            yield from nodes(part, (*way, key))


def changed(document: Any, way: Way, other: Any) -> Any:
    """Return a copy of a state.json with another value at one place, and the right checksum."""
    document = copy.deepcopy(document)
    *most, last = way
    parent = document
    for key in most:
        parent = parent[key]
    if other is GONE:
        del parent[last]
    else:
        parent[last] = other
    if way[0] != "crc32" and "state" in document:
        document["crc32"] = checksum(_packed(document["state"]))
    return document


def folder_of(sound: Path, folder: Path, document: Any) -> Path:
    """Make a checkpoint of this state.json and the files of a sound one."""
    folder.mkdir(exist_ok=True)
    for file in sound.glob("*.safetensors"):
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / STATE).write_text(json.dumps(document))
    return folder


def kept(objects: dict[str, Any]) -> Any:
    """Return the states of objects, as they are now."""
    having = {name: value for name, value in objects.items() if hasattr(value, "state_dict")}
    return copy.deepcopy({name: value.state_dict() for name, value in having.items()})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def made() -> dict[str, Any]:
    model = built(lambda: nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    optimizer = optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters()}])
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0),
        "loader": shoal.shard(DataLoader(range(8), 2)),
        "history": [0.5, {"best": torch.ones(2), 3: (1, None)}],
    }


def stepped(objects: dict[str, Any]) -> None:
    x, y = next(iter(features(7, 3, steps=1)))
    objects["scaler"].scale(F.cross_entropy(objects["model"](x), y)).backward()
    objects["scaler"].step(objects["optimizer"])
    objects["scaler"].update()
    objects["optimizer"].zero_grad()
    objects["scheduler"].step()


def sampled(ways: list[Way], number: int | None) -> list[tuple[Way, Any]]:
    pairs = [(way, other) for way in ways for other in OTHERS]
    return pairs if number is None else random.Random(0).sample(pairs, number)


@pytest.mark.parametrize("number", [120, pytest.param(None, marks=pytest.mark.slow)])
def test_each_node_of_another_type(tmp_path: Path, number: int | None) -> None:
    with using(ThreadComm()), torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objects = made()
        stepped(objects)
        sound = tmp_path / "sound"
        shoal.save(sound, **objects)
        document = json.loads((sound / STATE).read_text())
        refused = 0
        for way, other in sampled(list(nodes(document)), number):
            folder = folder_of(sound, tmp_path / "changed", changed(document, way, other))
            before, drawn = kept(objects), torch.get_rng_state()
            try:
                shoal.load(folder, **objects)
            except ShoalError:
                refused += 1
                assert same(before, kept(objects)), f"{way}: {other} has changed something"
                assert torch.equal(drawn, torch.get_rng_state())
            except Exception as error:
                raise AssertionError(f"{way}: {other} is a bare {type(error).__name__}") from error
            else:  # a value that may be right: begin again
                objects = made()
                shoal.load(sound, **objects)
    assert refused > len(sampled(list(nodes(document)), number)) / 2
