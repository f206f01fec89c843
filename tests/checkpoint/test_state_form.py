"""The form of state.json: each field, whatever else stands in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shoal.checkpoint.state import State, _packed, parsed
from shoal.checkpoint.tensors import checksum
from shoal.contracts.state_dicts import unlike_tensors
from shoal.core.errors import UsageError

SOUND = State(objects={"model": {}}, random=[{}], files={"model.safetensors": {"": "00"}}, step=3)


def text_of(**fields: Any) -> bytes:
    document = json.loads(SOUND.text())
    document["state"] |= fields
    document["crc32"] = checksum(_packed(document["state"]))
    return json.dumps(document).encode()


def test_a_sound_one_is_read() -> None:
    assert parsed(SOUND.text().encode(), "here") == SOUND


@pytest.mark.parametrize("step", [-1, 1.5, float("nan"), "3", True, 10**18, 10**400])
def test_a_number_of_steps(step: Any) -> None:
    with pytest.raises(UsageError, match=r"corrupted(.|\n)*step is"):
        parsed(text_of(step=step), "here")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "objects": ({"objects": [1]}, "objects is list"),
    "names": ({"objects": {"../x": 1}}, "which no file can have"),
    "random": ({"random": None}, "random is NoneType"),
    "no ranks": ({"random": []}, "random is list"),
    "models": ({"models": {"model": 3}}, "models.model is int"),
    "ranks": ({"models": {"model": {"ranks": "2"}}}, "ranks is str"),
    "rows": ({"models": {"model": {"usual_rows": float("inf")}}}, "usual_rows is float"),
    "plan": ({"models": {"model": {"plan": []}}}, "plan is list"),
    "features": ({"features": [1]}, "features is list"),
    "residuals": ({"residuals": 3}, "residuals is int"),
    "outer": ({"outer": None}, "outer is NoneType"),
    "files": ({"files": {"model.safetensors": {}}}, "no checksum of the header"),
    "outside": ({"files": {"../model.safetensors": {"": "00"}}}, "is not in this folder"),
    "checksums": ({"files": {"model.safetensors": {"": 3}}}, "is int 3"),
    "classes": ({"classes": {"optimizer": None}}, "classes.optimizer is NoneType"),
    "written by": ({"written_by": "me"}, "written_by is str"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_a_field_of_another_form(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"corrupted(.|\n)*{message}"):
        parsed(text_of(**fields), "here")


TEXTS: dict[str, bytes] = {
    "brackets": b"[" * 100_000,
    "digits": b'{"format": "shoal checkpoint", "version": ' + b"9" * 5000 + b"}",
    "twice": SOUND.text().replace('"objects"', '"step": 3, "objects"').encode(),
    "no number": SOUND.text().replace('"version": 1', '"version": Infinity').encode(),
    "a text": SOUND.text().replace('"version": 1', '"version": "1"').encode(),
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_of_another_form(text: bytes) -> None:
    with pytest.raises(UsageError, match="corrupted"):
        parsed(text, "here")


def test_states_of_features() -> None:
    flat, one = torch.ones(3), torch.ones(1)
    assert unlike_tensors({"0.weight": {"sum": flat, "steps": one}}, ["sum"], ["steps"]) == ""
    for states, message in (
        ([1], "list"),
        ({"w": flat}, "w has no dict"),
        ({3: {}}, "3 has no dict"),
        ({"w": {"sum": 3}}, "no tensors"),
        ({"w": {"sum": flat[None]}}, "no flat tensor sum"),
        ({"w": {"sum": flat}}, "no number steps"),
        ({"w": {"sum": flat, "steps": -one}}, "no number steps"),
        ({"w": {"sum": flat, "steps": one * torch.nan}}, "no number steps"),
        ({"w": {"sum": flat, "steps": flat}}, "no number steps"),
    ):
        assert message in unlike_tensors(states, ["sum"], ["steps"])
