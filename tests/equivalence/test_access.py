"""Whoever looks at a parameter or a gradient that others own gets the right one, whenever it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from one_process import Training, adamw, assert_same, built, cluster_of, cut_small, features, rows_of, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.faulty import FaultyComm, RandomDelay
from shoal.comm.threads import ThreadComm, run
from shoal.core.contracts import Comm
from shoal.core.facts import Cluster, Link, Topology
from shoal.runtime.session import using

WAY = "sliced"


@pytest.fixture(autouse=True, params=["sliced", "sliced, low", "server"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WAY", request.param)
    if request.param != "sliced":
        cut_small(monkeypatch)


class Seeing(nn.Module):
    """Has a place for what a loop saw, which is compared like any other state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)
        self.spare = nn.Linear(2, 2)  # nobody uses it
        self.register_buffer("seen", torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def see(self, place: int, *values: Tensor | None) -> None:
        """Note the sums of some tensors."""
        for offset, value in enumerate(values):
            self.seen[place + offset] += (
                1e3 if value is None else (value * torch.arange(1, value.numel() + 1).view_as(value)).sum()
            )


def gradients(model: Seeing) -> list[Tensor | None]:
    return [model.first.weight.grad, model.last.bias.grad, model.spare.weight.grad]


def assert_seen_alike(loop, optimizer=sgd, ranks=3):
    assert_same(Training(model=built(Seeing), batches=features(7, 3), optimizer=optimizer, loop=loop), ranks, WAY)


@pytest.mark.parametrize("clear", ["first", "before backward", "after step", "the model's", "to zeros", "one by one"])
def test_gradients_are_seen_before_and_after_the_step_and_cleared_anywhere(clear):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            if clear == "first":
                optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            if clear == "before backward":
                optimizer.zero_grad()
            loss.backward()
            if step % 2:
                model.see(0, *gradients(model))
            optimizer.step()
            if step > 2:
                model.see(10, *gradients(model))
            if clear == "after step":
                optimizer.zero_grad()
            elif clear == "the model's":
                model.zero_grad()
            elif clear == "to zeros":
                optimizer.zero_grad(set_to_none=False)
            elif clear == "one by one":
                for parameter in model.parameters():
                    parameter.grad = None
            model.see(20, *gradients(model))

    assert_seen_alike(loop)


def test_what_is_read_in_inference_mode_is_trained_on_outside():
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            with torch.inference_mode():
                model.see(0, *gradients(model))
            optimizer.step()
            with torch.inference_mode():
                model(x)
                model.see(10, model.last.weight)
            optimizer.zero_grad(set_to_none=False)

    assert_seen_alike(loop)


def test_gradients_that_are_never_cleared_add_up():
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if step == 3:
                model.see(0, *gradients(model))
            optimizer.step()

    assert_seen_alike(loop)


@pytest.mark.parametrize("look", [False, True])
def test_accumulation_over_several_backwards(look):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if look and step == 2:
                model.see(0, *gradients(model))
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_seen_alike(loop, adamw)


def test_gradients_that_are_dropped_changed_or_put_there():
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if step == 0:
                optimizer.zero_grad()  # dropped on all ranks
                continue
            if step == 1:
                model.first.weight.grad.mul_(0.1)
            if step == 2:
                model.first.weight.grad = torch.ones_like(model.first.weight)
                del model.last.bias.grad
            optimizer.step()
            if step != 3:
                optimizer.zero_grad()

    assert_seen_alike(loop, adamw)


def test_parameters_are_seen_right_after_the_step():
    def loop(model, loss_fn, optimizer, batches):
        average = copy.deepcopy(model)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                assert type(mean) is nn.Parameter
                mean.detach().mul_(0.9).add_(parameter.detach(), alpha=0.1)
            model.see(0, *average.parameters())

    assert_seen_alike(loop)


def test_parameters_may_be_changed_between_steps():
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            if step == 1:
                model.first.weight.data.clamp_(-0.2, 0.2)
            elif step == 2:
                with torch.no_grad():
                    model.last.bias += 0.5
            elif step == 3:
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})

    assert_seen_alike(loop)


def test_a_frozen_layer_thaws():
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            model.first.requires_grad_(step > 2)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_seen_alike(loop, adamw)


def test_copies_and_pickles_are_plain():
    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches[0])
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert type(theirs) is nn.Parameter and torch.equal(mine, theirs)
                assert isinstance(mine, nn.Parameter) and theirs.grad is None
        for x, y in batches:
            stepped(model, loss_fn, optimizer, (x, y))

    assert_seen_alike(loop)


class Block(nn.Module):
    """Of a class that Dynamo compiles: it skips frames of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks, and hides it
def test_blocks_that_are_compiled_as_one_graph():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    def loop(model, loss_fn, optimizer, batches):
        torch.compiler.reset()
        for block in model:
            block.compile(backend=counting, fullgraph=True)
        for batch in batches:
            stepped(model, loss_fn, optimizer, batch)

    assert_same(
        Training(model=built(lambda: nn.Sequential(Block(), Block())), batches=features(7, 7), loop=loop), 2, WAY
    )
    assert graphs, "nothing was compiled, so nothing was shown"


def test_a_cut_parameter_waits_for_all_its_parts_when_another_is_looked_at(monkeypatch):
    """The bias is in a transfer with the last part of a weight, whose other parts are still on their way."""
    cut_small(monkeypatch)
    model, batches = built(lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))), features(7, 3, steps=20)

    def trained(comm: Comm) -> list[Tensor]:
        mine, rows = copy.deepcopy(model), [rows_of(batch, comm.rank, 2) for batch in batches]
        with using(comm, cluster_of(2)):
            optimizer = sgd(mine.parameters())
            shoal.parallelize(mine, F.cross_entropy, optimizer, sample=rows[0], pins={"*": "sliced:direct"})
            for x, y in rows:
                optimizer.zero_grad()
                F.cross_entropy(mine(x), y).backward()
                optimizer.step()
                assert [mine[2].bias.sum(), mine[0].bias.sum()]
            return [parameter.detach() for parameter in mine.parameters()]

    calm = run(2, trained)[0]
    for late in run(2, lambda comm: trained(FaultyComm(comm, [RandomDelay(0.003, seed=comm.rank)]))):
        assert all(torch.equal(one, other) for one, other in zip(calm, late, strict=True))


def stepped(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    loss_fn(model(batch[0]), batch[1]).backward()
    optimizer.step()


def test_random_starts_and_stops_of_overlap_under_delays_never_give_a_wrong_bit():
    """2,000 steps (500 with low memory); in each, something else happens between, and messages take their time."""
    torch.manual_seed(0)
    if WAY == "server":
        pytest.skip("its plan is its own")
    low = WAY.endswith("low")
    ranks, steps = 2, 500 if low else 2000
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(9, 9), nn.Tanh())))
    rows = torch.randn(ranks, 20, 4, 9)
    acts = torch.randint(12, (steps,)).tolist()

    def trained(comm: Comm, memory: str) -> list[Tensor]:
        mine = copy.deepcopy(model)
        cluster = Cluster(Topology(("host",) * comm.size), Link(1e-4, 1e8))
        with using(comm, cluster) as session:
            optimizer = torch.optim.SGD(mine.parameters(), 0.01, momentum=0.9)
            pins = {"*": "sliced:direct", "2": "replicate:direct", "4": "sliced:ring"}
            sample = rows[comm.rank, 0], rows[comm.rank, 0]
            shoal.parallelize(mine, F.mse_loss, optimizer, sample=sample, pins=pins, memory=memory)
            assert {c.strategy for c in session.attached[mine].plan.choices} == {"sliced", "replicate"}
            for step, act in enumerate(acts):
                x = rows[comm.rank, step % 20]
                F.mse_loss(mine(x), x).backward()
                if act == 0:
                    nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
                elif act == 1:
                    optimizer.clip_grad_norm_(0.1)
                elif act == 2:
                    continue  # one more backward for this step
                elif act == 3:
                    assert mine[0].weight.grad is not None
                optimizer.step()
                if act == 4 and comm.rank == 0:
                    mine.state_dict()
                elif act == 5:
                    mine[6].weight.data.mul_(0.999)
                elif act == 6:
                    optimizer.state_dict()
                optimizer.zero_grad()
            return [p.detach().clone() for p in mine.parameters()]

    def delayed(comm: ThreadComm) -> list[Tensor]:
        return trained(FaultyComm(comm, [RandomDelay(1e-4, seed=comm.rank)]), "low" if low else "fast")

    quiet = run(ranks, lambda comm: trained(comm, "fast"))
    late = run(ranks, delayed, timeout_s=120)
    for a, b in zip(quiet + quiet, quiet[1:] + quiet[:1] + late, strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(one, other)
