"""Blocks that torch compiles after `parallelize`, and models that it has compiled before."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from one_process import (
    EVERY_RANK,
    State,
    Training,
    assert_same,
    assert_trained,
    built,
    cluster_of,
    features,
    integers,
    mlp,
    numbers,
    on_threads,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.front.session_start import using
from shoal_tools.launch.local import Local

WAY = pytest.mark.parametrize("way", EVERY_RANK)


class Block(nn.Module):
    """Of a class that Dynamo compiles: it skips the frames of torch's own modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


# Dynamo looks, and hides it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@WAY
def test_blocks_compiled_afterwards(way, backend):
    def loop(model, loss_fn, optimizer, batches):
        torch.compiler.reset()
        for block in model:
            block.compile(backend=backend)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    def model() -> nn.Module:
        return nn.Sequential(
            Block(mlp()), Block(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)))
        )

    assert_same(Training(model=built(model), batches=features(7, 3), loop=loop), 2, way)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], (
        "nothing was compiled, so nothing was shown"
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@WAY
def test_a_rank_compiles_anew_by_itself_while_gradients_are_kept(way):
    """For rows that the other one does not have."""

    def loop(model, loss_fn, optimizer, batches):
        torch.compiler.reset()
        model[0].compile(backend="eager", dynamic=False)
        for x, y in batches:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batches = [
        *features(7, 3),
        (numbers(11, 7, seed=50), integers(3, 11, seed=50)),
        *features(7, 3),
    ]
    assert_same(
        Training(model=built(lambda: nn.Sequential(Block(mlp()))), batches=batches, loop=loop),
        2,
        way,
    )


class Two(nn.Module):
    """Two blocks, of which one may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(mlp()), Block(nn.Linear(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def a_block(model: Any) -> Any:
    model.second.compile(backend="eager")
    return model


def a_block_around(model: Any) -> Any:
    model.first = torch.compile(model.first, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [whole, in_place, a_block, a_block_around])
@pytest.mark.parametrize("way", ["replicate", "sliced", "column"])
@pytest.mark.parametrize("used", [False, True], ids=["not called yet", "called before"])
def test_what_was_compiled_before_is_compiled_anew(compiled: Any, way: str, used: bool) -> None:
    """The caller's own name trains, and `parallelize` gives it back."""
    batches = features(7, 4)
    expected = Training(model=built(Two), batches=batches).alone()
    torch.compiler.reset()

    def work(comm: ThreadComm) -> State:
        mine = [rows_of(batch, comm.rank, 2, True) for batch in batches]
        plain_one = built(Two)
        model = compiled(plain_one)
        if used:
            F.cross_entropy(model(mine[0][0]), mine[0][1]).backward()
            comm.gather_objects(None, "no rank runs compiled code")  # ranks share torch's cache
        optimizer = sgd(model.parameters())
        with using(comm, cluster_of(2)):
            got, loss_fn, _ = shoal.parallelize(
                model,
                nn.CrossEntropyLoss(),
                optimizer,
                sample=mine[0],
                pins={"*": "replicate", "second*": way},
            )
            assert got is model and shoal.is_parallelized(model)
            torch._dynamo.utils.counters.clear()
            comm.gather_objects(None, "all have begun")
            plain(model, loss_fn, optimizer, mine)
            return state(plain_one)

    ranks = on_threads(2, work)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    got = [{name.replace("_orig_mod.", ""): t for name, t in own.items()} for own in ranks]
    assert_trained(state(built(Two)), expected, got)


def test_what_is_asked_of_a_model_that_was_compiled_since():
    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(start)
        optimizer = sgd(model.parameters())
        with using(comm, cluster_of(2)):
            shoal.parallelize(model, F.cross_entropy, optimizer, sample=features(7, 3)[comm.rank])
            compiled = torch.compile(model, backend="eager")
            assert shoal.plan_of(compiled) == shoal.plan_of(model) is not None
            assert shoal.memory(compiled) == shoal.memory(model)
            shoal.unparallelize(compiled)
            assert shoal.plan_of(compiled) is None
            with pytest.raises(UsageError, match="not parallelised"):
                shoal.unparallelize(compiled)

    start = built(mlp)
    on_threads(2, work)


WHOLE = """
import copy, warnings
import torch
from torch import nn
from torch.nn import functional as F
import shoal

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(7, 50), nn.Linear(50, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))

world = shoal.init()
torch.manual_seed(0)
start = Net().double()
draw = torch.Generator().manual_seed(world.rank)
rows = 4 + world.rank
steps = [
    (
        torch.randn(rows, 7, generator=draw, dtype=torch.float64),
        torch.randint(3, (rows,), generator=draw),
    )
    for _ in range(3)
]

def trained(way, by, count):
    torch.compiler.reset()
    model, loss_fn = copy.deepcopy(start), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shoal.parallelize(
        model, loss_fn, optimizer, sample=steps[0], pins={"*": way}, count=count
    )
    if by == "method":
        model.compile(backend="eager")
    called = torch.compile(model, backend="eager") if by == "function" else model
    for x, y in steps:
        optimizer.zero_grad()
        loss_fn(called(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]

warnings.simplefilter("error")
# Dynamo looks, and hides it
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
for way, count in [("sliced", None), ("replicate", lambda out, y: len(y))]:
    expected = trained(way, "", count)
    for by in ("function", "method"):
        assert torch._dynamo.utils.counters.clear() is None
        for one, other in zip(expected, trained(way, by, count)):
            assert (one - other).abs().max() < 1e-12, (way, by)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_whole_model_compiled_afterwards_trains_alike_and_without_a_warning(tmp_path, capfd):
    """Dynamo leaves the hooks alone: it would warn of what it cannot trace in them."""
    (tmp_path / "whole.py").write_text(WHOLE)
    result = Local().launch(Job((sys.executable, str(tmp_path / "whole.py")), 2))
    assert result.exit_code == 0, capfd.readouterr().err
