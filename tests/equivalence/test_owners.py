"""Updates at the owners: any element-wise optimizer, its state divided and put together again,
clipping, schedules.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from one_process import (
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    numbers,
    rows_of,
    sgd,
)
from owned import OPTIMIZERS, assert_same_state, groups, mlp, stepped
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal.optim.far_state import here


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_element_wise_optimizer(owned_way, name):
    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=OPTIMIZERS[name]), 3, owned_way
    )


def test_groups_and_schedulers_that_edit_them(owned_way):
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
        Training(model=built(mlp), batches=features(7, 3), optimizer=groups, loop=loop),
        3,
        owned_way,
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
def test_settings_that_are_tensors_may_be_edited_in_place(owned_way, make, name):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            value = optimizer.param_groups[0][name]
            (value if isinstance(value, Tensor) else value[0]).mul_(0.5)  # too late for this step

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=make, loop=loop), 2, owned_way
    )


def test_hooks_on_all_optimizers_see_the_users_own_only(owned_way):
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
        Training(model=built(mlp), batches=batches, loop=loop).on_ranks(2, owned_way)
    finally:
        handle.remove()
    assert [len([each for each in seen if each is one]) for one in set(seen)] == [len(batches)] * 2


def test_a_scheduler_made_before_parallelize_and_step_hooks(owned_way):
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
        Training(model=built(mlp), batches=features(7, 3), optimizer=scheduled, loop=loop),
        3,
        owned_way,
    )


@pytest.mark.parametrize("own", [True, False], ids=["the optimizer's", "torch's"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_the_global_norm(owned_way, norm_type, own):
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

    for way in (owned_way, "replicate"):
        assert_same(Training(model=built(seeing), batches=features(7, 3), loop=loop), 3, way)


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(owned_way):
    def loop(model, loss_fn, optimizer, batches):
        loss_fn(model(batches[0][0] * float("inf")), batches[0][1]).backward()
        with pytest.raises(RuntimeError, match="not finite"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, owned_way)


@pytest.mark.parametrize(
    "make", [sgd, adamw, groups, OPTIMIZERS["adagrad"]], ids=["sgd", "adamw", "groups", "adagrad"]
)
def test_the_state_is_saved_in_the_form_of_one_process_and_loaded_again(owned_way, make):
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
        Training(model=built(mlp), batches=features(7, 3), optimizer=make, loop=loop), 3, owned_way
    )
    assert_same_state(states[True], states[False])


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_a_state_loaded_before_parallelize(owned_way, make):
    model, batches = built(mlp), features(7, 3, steps=8)
    optimizer = make(model.parameters())
    stepped(model, F.cross_entropy, optimizer, batches[:3])
    saved = copy.deepcopy(optimizer.state_dict())

    def resumed(parameters):
        optimizer = make(parameters)
        optimizer.load_state_dict(copy.deepcopy(saved))
        return optimizer

    assert_same(Training(model=model, batches=batches[3:], optimizer=resumed), 3, owned_way)


def test_each_rank_holds_its_share_of_the_state():
    """In buckets of ordinary size, beside which flags are small."""
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
            assert not any(map(here, optimizer.state.values())), "what others own is not held here"
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


def test_a_group_added_later(owned_way):
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
        Training(model=built(mlp), batches=features(7, 3), optimizer=first_only, loop=loop),
        3,
        owned_way,
    )


def test_hooks_of_the_step_may_clip_and_edit_groups_and_see_new_parameters(owned_way):
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

    assert_same(Training(model=built(mlp), batches=features(7, 3), optimizer=hooked), 3, owned_way)


def test_what_others_keep_beside_the_state_stays(owned_way):
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

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, owned_way)


class Two(nn.Module):
    """Two nets on one input, in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x).tanh(), self.critic(x).tanh()


def test_the_step_of_one_optimizer_leaves_graphs_of_the_others_parameters_valid(owned_way):
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
    assert_same(training, 3, owned_way)
