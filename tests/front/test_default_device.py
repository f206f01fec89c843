"""Under `torch.set_default_device("cuda")` what is the host's stays there; meta tensors stand for
what is not.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.codecs.coded_exchange import read_codec
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import LinearCodec
from shoal.front.session_start import using
from shoal.tensors.row_crossing import RowCrossing

# They make a tensor at the default device, unless told which.
MAKERS = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
    *("randint", "randn", "randperm", "tensor", "zeros"),
}


@pytest.mark.parametrize(
    "strategy",
    [
        "sliced",
        "column",
        pytest.param("replicate", marks=pytest.mark.slow),
        pytest.param("factor", marks=pytest.mark.slow),
    ],
)
def test_a_model_on_the_host_trains_whatever_device_is_the_default(strategy: str) -> None:
    def work(comm: ThreadComm) -> list[float]:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(3 + comm.rank, 8), torch.randint(4, (3 + comm.rank,))
        with using(comm), torch.device("meta"):
            pins = {"0": strategy, "2": "replicate"}
            _, loss_fn, _ = shoal.parallelize(
                model, nn.CrossEntropyLoss(), optimizer, sample=(x, y), pins=pins
            )
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.clip_grad_norm_(1.0)  # type: ignore[attr-defined]
                optimizer.step()
                losses.append(loss.item())
            model.state_dict()
        return losses

    for losses in run(2, work):
        assert losses[-1] < losses[0]


def test_codes_of_rows_land_on_the_host_whatever_device_is_the_default() -> None:
    with torch.device("meta"):
        landing = RowCrossing(read_codec("bfloat16")).landing(torch.empty(3, 5))
    assert landing.device.type == "cpu" and landing.shape == (3, 5, 2)


def test_low_rank_has_a_basis_whatever_device_is_the_default() -> None:
    matrix = torch.randn(24, 16)
    with torch.device("meta"):
        codec = read_codec("low_rank")
        assert isinstance(codec, LinearCodec)
        terms = codec.to_terms(matrix, {}, 0)
    assert terms.device.type == "cpu"


def test_every_tensor_that_the_library_makes_names_its_device() -> None:
    sources = sorted(Path(shoal.__file__).parent.rglob("*.py"))
    made = [
        (source.name, call)
        for source in sources
        for call in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in MAKERS) == ("torch", True)
    ]
    assert len(made) > 100
    unnamed = [
        f"{name}:{call.lineno} {ast.unparse(call)}"
        for name, call in made
        if "device" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not unnamed
