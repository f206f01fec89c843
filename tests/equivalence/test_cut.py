"""Layers cut over the ranks: their parameters look whole, take a part of the memory, and train as
in one process.
"""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import (
    CUTS,
    DEVICE,
    Training,
    adamw,
    assert_same,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    integers,
    mlp,
    numbers,
    on_threads,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.registry import named
from shoal.front.session_start import using
from shoal.planner.search import search
from shoal.planner.search_options import Constraints
from shoal.profiling.layers import profile_model
from shoal.tensors.cut import part_of

CUT = pytest.mark.parametrize("way", CUTS)


def stepped(model, loss_fn, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def in_place(change):
    """A loop that changes parameters between steps."""

    def loop(model, loss_fn, optimizer, batches):
        for batch in batches:
            stepped(model, loss_fn, optimizer, [batch])
            with torch.no_grad():
                for parameter in model.parameters():
                    change(parameter)

    return loop


CHANGES = {
    "clamp_": lambda p: p.clamp_(-0.2, 0.2),
    "mul_": lambda p: p.mul_(0.9),
    "*=": lambda p: p.__imul__(0.9),
    "a tensor of its shape": lambda p: p.add_(
        torch.linspace(0, 1, p.numel(), dtype=p.dtype, device=p.device).view(p.shape)
    ),
    "a row of it": lambda p: p.sub_(
        torch.linspace(0, 1, p.shape[-1], dtype=p.dtype, device=p.device)
    ),
    "itself": lambda p: p.copy_(p / 2),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.1),
    "out": lambda p: torch.mul(p, 0.9, out=p),
    "init": lambda p: nn.init.constant_(p, 0.1),
    "sign_": lambda p: p.sign_(),
    "an item": lambda p: p.__setitem__(0, 1.0),
    "a row in place": lambda p: p[1].mul_(2.0),
    ".data": lambda p: p.data.zero_(),
    ".data of a column": lambda p: p.data.view(-1)[::2].add_(0.5),
    ".data = …": lambda p: setattr(p, "data", p.data * 0.9),
    "what is turned": lambda p: (p.T if p.dim() == 2 else p)[0].mul_(2.0),
}


@pytest.mark.parametrize("change", CHANGES)
@CUT
def test_element_wise_changes_in_place(way, change):
    assert_same(
        Training(model=built(mlp), batches=features(7, 3), loop=in_place(CHANGES[change])), 3, way
    )


REFUSED = {
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(print),
    ".data = …": lambda p: setattr(p, "data", p.data.float()),
}


@pytest.mark.parametrize("change", REFUSED)
@CUT
def test_what_would_reach_one_part_only_is_refused(way, change):
    with pytest.raises(UsageError, match="of which this rank has a part") as refused:
        Training(model=built(mlp), batches=features(7, 3), loop=in_place(REFUSED[change])).on_ranks(
            2, way
        )
    assert change in str(refused.value)
    assert 'pins={"' in str(refused.value)


@CUT
def test_a_parameter_looks_whole_and_takes_a_part_of_the_memory(way):
    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches)
        weight = model[0].weight
        assert (weight.shape, weight.numel(), len(weight), weight.stride()) == (
            (8, 12),
            96,
            8,
            (12, 1),
        )
        assert weight.grad.shape == weight.shape
        assert torch.equal(weight.sum(), model.state_dict()["0.weight"].sum())
        if hasattr(optimizer, "accumulate"):
            assert part_of(weight).numel() == 96 / 4
            held = shoal.memory(model)
            assert held.parameters == (96 + 8) / 4 * 8
            # Adam's two moments, and two steps
            assert held.optimizer_state == 2 * held.parameters + 2 * 4

    model = built(lambda: nn.Sequential(nn.Linear(12, 8)))
    assert_same(Training(model=model, batches=features(12, 8), loop=loop, optimizer=adam), 4, way)


def adam(parameters):
    return Adam(parameters, lr=0.05)


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
@CUT
def test_state_in_one_process_form_goes_both_ways(way, make):
    """Saved by ranks and taken by one process, and saved by one process and taken by ranks, before
    or after.
    """
    batches, model = features(7, 3), built(mlp)
    first, then = batches[:2], batches[2:]
    alone = copy.deepcopy(model)
    optimizer = make(alone.parameters())
    stepped(alone, F.cross_entropy, optimizer, first)
    saved = copy.deepcopy((alone.state_dict(), optimizer.state_dict()))
    stepped(alone, F.cross_entropy, optimizer, then)

    def resumed(when: str) -> list[dict[str, Tensor]]:
        copies = [copy.deepcopy(model) for _ in range(3)]

        def work(comm: ThreadComm) -> dict[str, Tensor]:
            mine, own = [rows_of(batch, comm.rank, 3) for batch in batches], copies[comm.rank]
            with using(comm, cluster_of(3)):
                optimizer = make(own.parameters())
                if when == "before":
                    own.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                shoal.parallelize(own, F.cross_entropy, optimizer, sample=mine[0], pins={"*": way})
                if when == "after":
                    own.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                if when == "nothing":
                    stepped(own, F.cross_entropy, optimizer, mine[:2])
                    same(optimizer.state_dict()["state"], saved[1]["state"])
                stepped(own, F.cross_entropy, optimizer, mine[2:])
                return state(own)

        return on_threads(3, work)

    for when in ("before", "after", "nothing"):
        got = resumed(when)
        assert_same_bits(got)
        assert difference(alone.state_dict(), got[0]) <= 1e-10, when


def same(got, expected):
    assert got.keys() == expected.keys()
    for index, its in expected.items():
        for name, value in its.items():
            torch.testing.assert_close(got[index][name], value, rtol=1e-9, atol=1e-12)


@CUT
def test_the_optimizers_own_clipping(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            if hasattr(optimizer, "clip_grad_norm_"):
                before = optimizer.clip_grad_norm_(0.1)
            else:
                before = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert before > 0.1
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=True)


@CUT
def test_gradients_that_are_read_in_inference_mode_stay_usable(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            with torch.inference_mode():
                assert model[0].weight.grad.norm() > 0
            model[0].weight.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=sgd, loop=loop), 3, way
    )


@CUT
def test_gradients_that_are_read_and_set(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 2
                parameter.grad.add_(0.1)
                assert parameter.grad.shape == parameter.shape
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@CUT
def test_more_leading_dimensions_and_parts_of_several_sizes(way):
    model = built(lambda: nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 7, bias=False)))
    batches = [(numbers(12, 2, 3, 7, seed=s), numbers(12, 2, 3, 7, seed=s + 9)) for s in range(5)]
    assert_same(Training(model=model, batches=batches, loss_fn=F.mse_loss), 4, way, uneven=True)


@CUT
def test_a_layer_with_fewer_columns_than_ranks_is_refused(way):
    with pytest.raises(PlanError, match=r"[23] (outputs|inputs) cannot be cut over 4 ranks"):
        model, (x, y) = nn.Linear(3, 2, device=DEVICE), features(3, 2)[0]
        profile = profile_model(
            model.double(), F.cross_entropy, [sgd(model.parameters())], (x, y), ThreadComm()
        )
        search(profile, cluster_of(4), Constraints(pins={"*": way}))


class Fields(nn.Module):
    """Some ids a row, of one table."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 3, padding_idx=padding), nn.Linear(4 * 3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).flatten(1))


def fields(high: int = 11) -> list[tuple[Tensor, Tensor]]:
    return [(integers(high, 12, 4, seed=s), integers(3, 12, seed=s + 9)) for s in range(5)]


@pytest.mark.parametrize("high", [11, 2], ids=["ids of all ranks", "ids of one"])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("padding", [None, 1, 9])
def test_rows_of_a_table_are_given_out(padding, make, uneven, high):
    """Some twice, some never: their momentum and weight decay go on, as in one process."""
    model = built(lambda: Fields(padding))
    assert_same(
        Training(model=model, batches=fields(high), optimizer=make), 4, "embedding", uneven=uneven
    )


def test_ids_of_32_bits_and_none_at_all():
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            assert model.table(x[:0]).shape == (0, 4, 3)
            loss_fn(model(x.int()), y).backward()
            optimizer.step()

    assert_same(Training(model=built(Fields), batches=fields(), loop=loop), 3, "embedding")


GRADIENTS = {
    "added to": lambda model: model.table.weight.grad.add_(0.01),
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "set": lambda model: setattr(model.table.weight, "grad", torch.ones_like(model.table.weight)),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("change", GRADIENTS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_gradient_of_a_table_after_it_was_changed(change, set_to_none):
    def loop(model, loss_fn, optimizer, batches):
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_fn(model(x), y).backward()
            loss_fn(model(x.flip(1)), y).backward()
            if number % 2:
                GRADIENTS[change](model)
            optimizer.step()

    assert_same(Training(model=built(Fields), batches=fields(4), loop=loop), 3, "embedding")


def test_a_penalty_on_a_table_before_another_backward():
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            (loss_fn(model(x), y) + 0.1 * model.table.weight.square().sum()).backward()
            loss_fn(model(x.flip(1)), y).backward()
            optimizer.step()

    assert_same(Training(model=built(Fields), batches=fields(4), loop=loop), 3, "embedding")


def test_an_id_beyond_the_table_is_refused():
    def loop(model, loss_fn, optimizer, batches):
        model(batches[0][0] + 11)

    with pytest.raises(IndexError, match="not one of the table's 11 rows"):
        Training(model=built(Fields), batches=fields(), loop=loop).on_ranks(2, "embedding")


class Wide(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize(("classes", "cut"), [(3, False), (40_000, True)])
def test_the_planner_cuts_what_is_worth_it(classes, cut):
    model = Wide(classes).to(DEVICE)
    sample = numbers(4, 32, dtype=torch.float32), integers(classes, 4)
    profile = profile_model(model, F.cross_entropy, [sgd(model.parameters())], sample, ThreadComm())
    cluster = Cluster(Topology(("a", "b", "c", "d")), Link(1e-4, 2e7))
    plan = search(profile, cluster, Constraints(strategies=["replicate", *CUTS]))
    assert (plan.choice("head").strategy in CUTS) == cut
    assert plan.choice("body").strategy == "replicate"


# what keeps to it; times decide which
LIMITS = {0.75: {"sliced", "cut"}, 0.5: {"sliced", "cut"}, 0.3: {"cut"}}


@pytest.mark.parametrize("share", LIMITS)
def test_a_limit_of_memory_is_kept(share):
    """Of what one rank would hold by itself: 4 bytes of every parameter, its gradient, and Adam's
    two moments.
    """
    width, ranks = 512, 4

    def big() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 64),
        )

    model = built(big, torch.float32)
    whole = 4 * 4 * sum(p.numel() for p in model.parameters())
    batches = [(x.float(), y) for x, y in features(64, 64)]
    held: list[int] = []
    kinds: set[str] = set()

    def work(comm: ThreadComm) -> dict[str, Tensor]:
        mine, own = [rows_of(batch, comm.rank, ranks) for batch in batches], copy.deepcopy(model)
        fast = Cluster(Topology(tuple("abcd")), Link(1e-4, 1e9))
        with using(comm, fast) as session:
            optimizer = adam(own.parameters())
            shoal.parallelize(
                own, F.cross_entropy, optimizer, sample=mine[0], memory_limit=share * whole
            )
            stepped(own, F.cross_entropy, optimizer, mine)
            memory = shoal.memory(own)
            held.append(memory.parameters + memory.gradients + memory.optimizer_state)
            chosen = {choice.strategy for choice in session.attached[own].plan.choices}
            kinds.update("cut" if named(Strategy, name).role.is_cut else name for name in chosen)
            return state(own)

    assert_same_bits(run(ranks, work, timeout_s=20))
    assert max(held) <= share * whole
    assert kinds & LIMITS[share]


def test_a_limit_that_no_plan_keeps_is_refused():
    model, (x, y) = nn.Sequential(nn.Linear(64, 64, device=DEVICE)), features(64, 64)[0]
    profile = profile_model(
        model.double(), F.cross_entropy, [adamw(model.parameters())], (x, y), ThreadComm()
    )
    with pytest.raises(
        PlanError, match=r"no plan was found that keeps the limit of memory(.|\n)*more ranks"
    ):
        search(profile, cluster_of(4), Constraints(memory_limit=10_000))
