"""Blocks that torch compiles after `parallelize`; a model compiled before is refused."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from one_process import (
    EVERY_RANK,
    Training,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    mlp,
    numbers,
    on_threads,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.front.joining import using
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


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def a_layer(model: nn.Module) -> nn.Module:
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, a_layer])
def test_compiled_before_is_refused(compiled):
    def work(comm: ThreadComm) -> None:
        model = compiled(mlp())
        with using(comm):
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=features(7, 3)[0]
            )

    with pytest.raises(UsageError, match="parallelise first, then compile block by block"):
        run(2, work, timeout_s=20)


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
