"""Updates at the owners: any element-wise optimizer, its state divided and put together again,
clipping, schedules.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from one_process import (
    EVERY_RANK,
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    cut_small,
    features,
    integers,
    numbers,
    rows_of,
    sgd,
)
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.profiling.updates import whole_updates
from shoal.runtime.session import using

WAY = "sliced"


@pytest.fixture(autouse=True, params=["sliced", "sliced, low"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whole and buckets kept; and layers cut into parts whose buckets take memory on their
    way only.
    """
    monkeypatch.setitem(globals(), "WAY", request.param)
    if request.param == "sliced, low":
        cut_small(monkeypatch)


def mlp() -> nn.Module:
    """Sizes that no number of ranks divides, and an own parameter without dimensions."""
    return nn.Sequential(nn.Linear(7, 5), Scaled(), nn.Tanh(), nn.Linear(5, 3))


class Scaled(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.05),
    "nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused sgd": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "foreach sgd": partial(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "adam": partial(optim.Adam, lr=0.05, amsgrad=True),
    "fused adamw": partial(optim.AdamW, lr=0.05, fused=True),
    "adam with a tensor for its rate": partial(
        optim.Adam, lr=torch.tensor(0.05, dtype=torch.float64)
    ),
    "rmsprop": partial(optim.RMSprop, lr=0.05, momentum=0.5, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.3),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=0.05),
    "nadam": partial(optim.NAdam, lr=0.05),
    "radam": partial(optim.RAdam, lr=0.05),
    "rprop": partial(optim.Rprop, lr=0.05),
    "asgd": partial(optim.ASGD, lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_element_wise_optimizer(name):
    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=OPTIMIZERS[name]), 3, WAY
    )


class Normed(optim.Optimizer):
    """A step of the length of the parameter, as LARS has it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            parameter -= 0.1 * parameter.norm() / (1e-9 + parameter.grad.norm()) * parameter.grad


WHOLE: dict[str, Callable[..., optim.Optimizer]] = {
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Muon": lambda parameters: optim.Muon([p for p in parameters if p.dim() == 2], lr=0.05),
    "Normed": Normed,
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_whole_tensors_is_left_to_replicate(name):
    training = Training(model=built(mlp), batches=features(7, 3), optimizer=WHOLE[name])
    with pytest.raises(PlanError, match=f"sliced cannot serve layer .*{name}"):
        training.on_ranks(2, WAY)
    assert_same(training, 2, "replicate")


def groups(parameters):
    """Two groups with settings of their own."""
    first, *rest = parameters
    return optim.AdamW(
        [{"params": [first], "lr": 0.01, "weight_decay": 0.3}, {"params": rest}], lr=0.05
    )


def test_groups_and_schedulers_that_edit_them():
    def loop(model, loss_fn, optimizer, batches):
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=10)
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            optimizer.step()
            optimizer.param_groups[1]["betas"] = (0.5, 0.6)  # too late for this step
            schedule.step()
            optimizer.zero_grad()

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=groups, loop=loop), 3, WAY
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: optim.SGD(p, lr=torch.tensor(0.05)), "lr"),
        (
            lambda p: optim.AdamW(
                p, lr=0.05, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
            ),
            "betas",
        ),
    ],
    ids=["a rate", "a pair"],
)
def test_settings_that_are_tensors_may_be_edited_in_place(make, name):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            value = optimizer.param_groups[0][name]
            (value if isinstance(value, Tensor) else value[0]).mul_(0.5)  # too late for this step

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=make, loop=loop), 2, WAY
    )


def test_hooks_on_all_optimizers_see_the_users_own_only():
    seen = []

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        model.state_dict()  # all updates are made

    handle = register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(optimizer)
    )
    try:
        batches = features(7, 3)
        Training(model=built(mlp), batches=batches, loop=loop).on_ranks(2, WAY)
    finally:
        handle.remove()
    assert [len([each for each in seen if each is one]) for one in set(seen)] == [len(batches)] * 2


def test_a_scheduler_made_before_parallelize_and_step_hooks():
    def scheduled(parameters):
        optimizer = sgd(parameters)
        optimizer.schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.calls = []
        optimizer.register_step_pre_hook(lambda *_: optimizer.calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: optimizer.calls.append("after"))
        return optimizer

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.schedule.step()
        assert optimizer.calls == ["before", "after"] * len(batches)

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=scheduled, loop=loop), 3, WAY
    )


@pytest.mark.parametrize("own", [True, False], ids=["the optimizer's", "torch's"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_the_global_norm(norm_type, own):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            (3 * loss_fn(model(x), y)).backward()
            if own and hasattr(optimizer, "clip_grad_norm_"):
                norm = optimizer.clip_grad_norm_(0.3, norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type)
            assert norm > 0.3
            model.seen.add_(norm)
            optimizer.step()

    def seeing() -> nn.Module:
        model = mlp()
        model.register_buffer("seen", torch.zeros(()))
        return model

    for way in (WAY, "replicate"):
        assert_same(Training(model=built(seeing), batches=features(7, 3), loop=loop), 3, way)


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for():
    def loop(model, loss_fn, optimizer, batches):
        loss_fn(model(batches[0][0] * float("inf")), batches[0][1]).backward()
        with pytest.raises(RuntimeError, match="not finite"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, WAY)


def stepped(model, loss_fn, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def assert_same_state(expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Two optimizer states are the same to 1e-10."""
    assert expected["param_groups"] == got["param_groups"]
    assert expected["state"].keys() == got["state"].keys()
    for index, state in expected["state"].items():
        assert state.keys() == got["state"][index].keys()
        for name, value in state.items():
            other = got["state"][index][name]
            assert torch.is_tensor(value) == torch.is_tensor(other)
            if torch.is_tensor(value):
                assert value.shape == other.shape and value.dtype == other.dtype, name
                torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-10)
            else:
                assert value == other


@pytest.mark.parametrize(
    "make", [sgd, adamw, groups, OPTIMIZERS["adagrad"]], ids=["sgd", "adamw", "groups", "adagrad"]
)
def test_the_state_is_saved_in_the_form_of_one_process_and_loaded_again(make):
    states: dict[bool, dict[str, Any]] = {}

    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches[:3])
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        # loading may take the tensors themselves
        states[shoal.world().size == 1] = copy.deepcopy(saved)
        stepped(model, loss_fn, optimizer, batches[3:])  # on from here, then back, and on once more
        optimizer.load_state_dict(saved)
        stepped(model, loss_fn, optimizer, batches[3:])

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=make, loop=loop), 3, WAY
    )
    assert_same_state(states[True], states[False])


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_a_state_loaded_before_parallelize(make):
    model, batches = built(mlp), features(7, 3, steps=8)
    optimizer = make(model.parameters())
    stepped(model, F.cross_entropy, optimizer, batches[:3])
    saved = copy.deepcopy(optimizer.state_dict())

    def resumed(parameters):
        optimizer = make(parameters)
        optimizer.load_state_dict(copy.deepcopy(saved))
        return optimizer

    assert_same(Training(model=model, batches=batches[3:], optimizer=resumed), 3, WAY)


def test_each_rank_holds_its_share_of_the_state(monkeypatch):
    monkeypatch.undo()  # in buckets of ordinary size, beside which flags are small
    model, ranks = built(lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))), 4
    x, y = numbers(8, 64), integers(64, 8)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def work(comm: ThreadComm) -> shoal.Memory:
        mine = copies[comm.rank]
        with using(comm, cluster_of(ranks)):
            optimizer = adamw(mine.parameters())
            batch = rows_of((x, y), comm.rank, ranks)
            shoal.parallelize(mine, F.cross_entropy, optimizer, sample=batch, pins={"*": "sliced"})
            stepped(mine, F.cross_entropy, optimizer, [batch])
            mine.state_dict()
            assert not any(optimizer.state.values()), "what others own is not held here"
            return shoal.memory(mine)

    held = run(ranks, work)
    whole = 8 * sum(p.numel() for p in model.parameters())
    assert {each.parameters for each in held} == {whole}
    # and flags
    assert whole / ranks <= max(each.gradients for each in held) <= 1.02 * whole / ranks
    # and counters
    assert (
        2 * whole / ranks <= max(each.optimizer_state for each in held) <= 1.02 * 2 * whole / ranks
    )


def test_a_group_added_later():
    def first_only(parameters):
        first, *rest = parameters
        optimizer = sgd([first])
        optimizer.rest = rest
        return optimizer

    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches[:2])
        optimizer.add_param_group({"params": optimizer.rest, "lr": 0.2})
        stepped(model, loss_fn, optimizer, batches[2:])

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=first_only, loop=loop), 3, WAY
    )


@pytest.mark.parametrize("way", EVERY_RANK)
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_accumulate_sends_once_for_several_backwards(make, way):
    def loop(model, loss_fn, optimizer, batches):
        quiet = optimizer.accumulate if hasattr(optimizer, "accumulate") else nullcontext
        for step, (x, y) in enumerate(batches):
            with nullcontext() if step % 2 else quiet():
                loss_fn(model(x), y).backward()
            if step == 2:
                optimizer.zero_grad()  # drops what was kept
                with quiet():
                    (loss_fn(model(x), y) * 0.5).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_same(
        Training(model=built(mlp), batches=features(7, 3, steps=6), optimizer=make, loop=loop),
        3,
        way,
    )


@pytest.mark.parametrize("way", EVERY_RANK)
def test_a_step_before_what_was_accumulated_is_sent_is_refused(way):
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        with optimizer.accumulate():
            loss_fn(model(x), y).backward()
        with pytest.raises(UsageError, match="have not been sent"):
            optimizer.step()

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, way)


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_closure_that_only_accumulates_is_refused(way):
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]

        def closure():
            with optimizer.accumulate():
                loss = loss_fn(model(x), y)
                loss.backward()
            return loss

        with pytest.raises(UsageError, match="have not been sent"):
            optimizer.step(closure)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, way)


def test_what_is_accumulated_is_not_seen_as_global():
    def loop(model, loss_fn, optimizer, batches):
        x, y = batches[0]
        with optimizer.accumulate():
            loss_fn(model(x), y).backward()
            with pytest.raises(UsageError, match="have not been sent"):
                print(model[0].weight.grad)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, WAY)


def test_hooks_of_the_step_may_clip_and_edit_groups_and_see_new_parameters():
    def hooked(parameters):
        parameters = list(parameters)
        optimizer = sgd(parameters)

        def before(optimizer, args, kwargs):
            nn.utils.clip_grad_norm_(parameters, 0.3)
            optimizer.param_groups[0]["lr"] *= 0.9

        def after(optimizer, args, kwargs):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data.clamp_(-0.3, 0.3)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    assert_same(Training(model=built(mlp), batches=features(7, 3), optimizer=hooked), 3, WAY)


def warming_up(parameters):
    """Adafactor at the beginning of a warm-up: at a rate of 0 every update of halves is the same as
    of the whole.
    """
    optimizer = optim.Adafactor(parameters, lr=0.05)
    optimizer.param_groups[0]["lr"] = 0.0
    return optimizer


class Counting(optim.SGD):
    """Counts its steps where it finds gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["t"] = group.get("t", 0) + 1
        super().step(closure)


class Around(optim.Optimizer):
    """Leaves the step to another optimizer inside."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Outside(optim.Optimizer):
    """Keeps momentum in an attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momenta: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            momentum = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter -= 0.1 * momentum


class LooksFirst(optim.SGD):
    """Looks where its first parameter is."""

    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["params"][0].device
        super().step(closure)


class Clipping(optim.SGD):
    """Clips the norm of all gradients, where it is above 10."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 10.0)
        super().step(closure)


SUSPECTS = {
    "warm-up": warming_up,
    "counting": partial(Counting, lr=0.1),
    "around": Around,
    "outside": Outside,
    "looks first": partial(LooksFirst, lr=0.1),
    "clipping": partial(Clipping, lr=0.1),
}


@pytest.mark.parametrize("make", SUSPECTS.values(), ids=SUSPECTS.keys())
def test_a_trial_that_would_show_nothing_is_not_trusted(make):
    with pytest.raises(PlanError, match="sliced cannot serve layer"):
        Training(model=built(mlp), batches=features(7, 3), optimizer=make).on_ranks(2, WAY)


class Centering(optim.SGD):
    """Centers gradients of convolutions, as gradient centralization has it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.dim() > 2):
            if parameter.grad is not None:
                parameter.grad -= parameter.grad.mean((1, 2, 3), keepdim=True)
        super().step(closure)


def test_an_optimizer_that_looks_at_convolutions_is_given_no_pieces():
    model = built(lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(18, 3)))
    batches = [(numbers(12, 1, 4, 3, seed=s), integers(3, 12, seed=s)) for s in range(2)]
    with pytest.raises(PlanError, match="updates a tensor otherwise than its parts"):
        Training(model=model, batches=batches, optimizer=partial(Centering, lr=0.1)).on_ranks(
            2, WAY
        )


class Projecting(optim.SGD):
    """Shrinks a parameter to whose rows its gradient is nearly at right angles, as AdamP does
    something else there.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.dim() > 1):
            cosines = F.cosine_similarity(parameter.grad.flatten(1), parameter.flatten(1))
            if cosines.abs().max() < 0.1 / parameter[0].numel() ** 0.5:
                parameter.mul_(0.9)
        super().step(closure)


def test_an_optimizer_that_looks_at_angles_is_given_no_pieces():
    with pytest.raises(PlanError, match="updates a tensor otherwise than its parts"):
        Training(
            model=built(mlp), batches=features(7, 3), optimizer=partial(Projecting, lr=0.1)
        ).on_ranks(2, WAY)


def test_what_others_keep_beside_the_state_stays():
    """As Lookahead, which has its slow weights there."""

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            stepped(model, loss_fn, optimizer, [(x, y)])
            for parameter in model.parameters():
                slow = optimizer.state[parameter].setdefault("slow", parameter.detach().clone())
                with torch.no_grad():
                    slow.add_(parameter - slow, alpha=0.5)
                    parameter.copy_(slow)
            assert "slow" in optimizer.state_dict()["state"][0]

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, WAY)


def test_what_may_join_an_optimizer_of_whole_tensors_is_given_no_pieces():
    model = built(mlp)
    first, *_, last = model.parameters()
    reasons = whole_updates(model.parameters(), [optim.Adafactor([first], lr=0.05)])
    assert "Adafactor" in reasons[last].whole
    assert not reasons[last].joint


class Special(nn.Parameter):
    """A user's own kind of parameter."""


def test_a_parameter_of_a_users_own_class_keeps_it():
    def special() -> nn.Module:
        model = mlp()
        model[0].weight = Special(model[0].weight.data)
        return model

    with pytest.raises(PlanError, match="is a Special, not a plain nn"):
        Training(model=built(special), batches=features(7, 3)).on_ranks(2, WAY)


class Two(nn.Module):
    """Two nets on one input, in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x).tanh(), self.critic(x).tanh()


def test_the_step_of_one_optimizer_leaves_graphs_of_the_others_parameters_valid():
    def both(parameters):
        parameters = list(parameters)
        return [sgd(parameters[:2]), adamw(parameters[2:])]

    def loop(model, loss_fn, optimizers, batches):
        for x, y in batches:
            action, value = model(x)
            F.cross_entropy(action, y).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            value.square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()

    def first(outputs, y):
        return F.cross_entropy(outputs[0], y) + outputs[1].sum() * 0

    training = Training(
        model=built(Two), batches=features(7, 3), optimizer=both, loop=loop, loss_fn=first
    )
    assert_same(training, 3, WAY)


def test_ranks_that_do_different_things_are_told():
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            if shoal.world().rank == 0:
                model[0].weight.grad.norm()  # a collective, and alone
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RanksDiffer, match="something else than"):
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, WAY)


def test_a_copy_or_pickle_of_the_optimizer_is_refused():
    def loop(model, loss_fn, optimizer, batches):
        stepped(model, loss_fn, optimizer, batches)
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="would lose it"):
                take(optimizer)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, WAY)
