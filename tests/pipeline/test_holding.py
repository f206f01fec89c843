"""Hosts that hold stages and bring no rows: ranks that train get what one process gets."""

from __future__ import annotations

import pytest
from apart import Apart, assert_same
from piped import script


def test_one_rank_and_one_host() -> None:
    assert_same(Apart(script("mlp"), 2, 1), {"0": "replicate", "2": "pipeline:2"})


def test_two_ranks_and_two_hosts() -> None:
    pins = {"*": "replicate", "blocks.[12].*": "pipeline:2", "norm": "pipeline:3", "head": "pipeline:3"}
    assert_same(Apart(script("gpt"), 2, 2), pins)


def test_all() -> None:
    pins = {"*": "pipeline:0", "blocks.[0].*": "pipeline:1", "blocks.[12].*": "pipeline:2", "norm": "pipeline:3", "head": "pipeline:3"}
    assert_same(Apart(script("gpt"), 2, 2), pins)


def test_middle() -> None:
    pins = {"*": "pipeline:0", "blocks.[0].*": "pipeline:1", "blocks.[12].*": "pipeline:2", "norm": "pipeline:1", "head": "pipeline:1"}
    assert_same(Apart(script("gpt"), 2, 1), pins)


@pytest.mark.parametrize("kind", ["own loss", "vit", "unet", "lstm", "dropout", "adapted", "frozen first"])
def test_kinds(kind: str) -> None:
    first = {"vit": {"blocks.[12].*": "pipeline:2", "norm": "pipeline:2", "head": "pipeline:2"}, "unet": {"up1": "pipeline:2", "conv1.*": "pipeline:2", "out": "pipeline:2"}, "lstm": {"second": "pipeline:2", "head": "pipeline:2"}, "adapted": {"blocks.[12].*": "pipeline:2"}}
    pins = {"*": "replicate"} | first.get(kind, {"blocks.2.*": "pipeline:2", "norm": "pipeline:2", "head": "pipeline:2"})
    assert_same(Apart(script(kind), 2, 1), pins) if kind != "dropout" else Apart(script(kind), 2, 1).trained(pins)
