"""Plain data as JSON, and back: the same value, or an error that names the place."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.tree import decoded, encoded
from shoal.core.errors import UsageError

VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": [0, -3, 1 << 70, True, 0.1, 1e-320, -0.0],
    "infinite": [math.inf, -math.inf],
    "text": {"a": "ä", "": "empty", "b": ["$"]},
    "a dict with our own key": {"$": "tensor", "name": 1},
    "keys": {1: "a", (2, "b"): {None: 3}, 1.5: 0},
    "kinds": [(1, (2,)), {1, 2}, frozenset({3}), deque([4]), b"\x00\xff", 1 + 2j],
    "dicts": [OrderedDict(a=1, b=2), Counter({3: 2}), OrderedDict({1: 2})],
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "numpy": [np.float32(0.5), np.int64(7)],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_plain_data_comes_back(value: Any) -> None:
    got, tensors = through_json(value)
    assert not tensors
    assert got == value
    assert "np." in repr(value) or repr(got) == repr(value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(through_json(math.nan)[0])


def test_tensors_are_named_by_the_way_to_them() -> None:
    value = {"a": [torch.ones(2), {"b": (torch.zeros(3),)}], 7: torch.tensor(1)}
    got, tensors = through_json(value)
    assert set(tensors) == {"a/0", "a/1/b/0", "7"}
    assert torch.equal(got["a"][1]["b"][0], torch.zeros(3))
    assert torch.equal(got[7], torch.tensor(1))


def test_an_array_comes_back_as_one() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    got, _ = through_json(array)
    assert isinstance(got, np.ndarray)
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    got, _ = through_json(model.state_dict())
    assert got._metadata["1"]["version"] == model.state_dict()._metadata["1"]["version"] == 2
    model.load_state_dict(got)


@pytest.mark.parametrize("value", [object(), lambda: 0, defaultdict], ids=type)
def test_what_is_no_plain_data_is_refused_with_the_way_to_it(value: Any) -> None:
    with pytest.raises(UsageError, match=r"model\.a\.1 cannot be saved"):
        encoded({"a": [0, value]}, lambda path, tensor: "", ("model",))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'code'"):
        decoded({"$": "code", "value": "1"}, lambda name: torch.ones(1))


def through_json(value: Any) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[str, ...], tensor: Tensor) -> str:
        tensors["/".join(path)] = tensor
        return "/".join(path)

    form = json.loads(json.dumps(encoded(value, take), allow_nan=False))
    return decoded(form, tensors.__getitem__), tensors
