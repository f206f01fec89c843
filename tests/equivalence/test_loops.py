"""What else a loop does: evaluation on one rank, schedules, closures, clipping, averaging."""

from __future__ import annotations

import copy
import io
import threading
from functools import partial

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    BUCKETED,
    EVERY_RANK,
    WAYS,
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    features,
    mlp,
    numbers,
    plain,
    sgd,
    with_options,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.strategy import Strategy
from shoal.core.errors import UsageError
from shoal.core.registry import of
from shoal.front.session_start import using

WAY = pytest.mark.parametrize("way", EVERY_RANK)


@WAY
def test_a_list_of_optimizers(way):
    def optimizers(parameters):
        first, *rest = parameters
        return [sgd([first]), adamw(rest)]

    def loop(model, loss_fn, optimizers, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=optimizers, loop=loop), 3, way
    )


@pytest.mark.parametrize("way", WAYS)
def test_what_rank_0_alone_does_between_steps(way):
    """Evaluation without gradients, and saving."""

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            if shoal.world().rank == 0:
                model.eval()
                with torch.no_grad():
                    loss_fn(model(x * 2), y).item()
                with torch.inference_mode():
                    model(x[:1])
                model.train()
                torch.save(model.state_dict(), io.BytesIO())
                # what ranks own, all of them bring together
                if not of(Strategy)[way].role.has_owners:
                    torch.save(optimizer.state_dict(), io.BytesIO())

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@WAY
def test_learning_rate_schedule(way):
    def loop(model, loss_fn, optimizer, batches):
        schedule = StepLR(optimizer, 2, gamma=0.3)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            schedule.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@WAY
def test_closure(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@pytest.mark.parametrize("way", [*EVERY_RANK, "head", "sliced, low, small"])
def test_a_grad_scaler(way):
    def loop(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            # a step that is skipped
            loss = loss_fn(model(x), y) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@pytest.mark.parametrize("way", [*EVERY_RANK, "head"])
def test_the_optimizers_own_clipping(way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            clip = getattr(
                optimizer, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, model.parameters())
            )
            clip(*[(0.1,), (0.05, float("inf")), (0.2, 1.0)][step % 3])
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@pytest.mark.parametrize("way", [*EVERY_RANK, "head", "sliced, low, small"])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_torchs_checkpoint_functions_save_and_load_the_state_and_leave_it_alone(way, make):
    def loop(model, loss_fn, optimizer, batches):
        plain(model, loss_fn, optimizer, batches[:3])
        optimizer.zero_grad()
        _, saved = get_state_dict(model, optimizer)
        saved = copy.deepcopy(saved)
        plain(model, loss_fn, optimizer, batches[3:])
        optimizer.zero_grad()
        set_state_dict(
            model, optimizer, model_state_dict=model.state_dict(), optim_state_dict=saved
        )
        plain(model, loss_fn, optimizer, batches[3:])

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=make, loop=loop), 3, way
    )


@WAY
def test_gradients_clipped_one_by_one(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 2, way)


# a part of what is shown
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@WAY
def test_gradients_detached_and_cleared_by_hand(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 2, way)


@WAY
def test_a_functional_call_trains_the_parameters_it_is_given(way):
    """As averaged or meta-learned weights are run: nothing of it goes to the model's own
    parameters.
    """

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            others = {
                name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()
            }
            loss_fn(torch.func.functional_call(model, others, (x,)), y).backward()
            assert all(other.grad is not None for other in others.values())
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 2, way)


@WAY
def test_averaged_weights(way):
    def loop(model, loss_fn, optimizer, batches):
        average = torch.optim.swa_utils.AveragedModel(model)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 2, way)


@WAY
def test_hooks_of_the_users_own(way):
    """On modules."""

    def loop(model, loss_fn, optimizer, batches):
        model[2].register_full_backward_hook(
            lambda module, before, after: tuple(g * 2 for g in before)
        )
        model[0].register_forward_hook(lambda module, args, output: output * 3)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 2, way)


@pytest.mark.parametrize(
    ("rows", "batch_size", "says"),
    [((64, 64), (16, 32), "1 batches of 32"), ((64, 60), (16, 16), "of 16 rows, 60 rows")],
)
def test_ranks_that_shard_different_loaders_hear_it(rows, batch_size, says) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm), pytest.raises(UsageError, match="shard different loaders") as caught:
            shoal.shard(DataLoader(range(rows[comm.rank]), batch_size=batch_size[comm.rank]))
        assert "2 batches of 16 rows, 64 rows" in str(caught.value)
        assert says in str(caught.value)

    run(2, work)


def test_the_plan_in_use_can_be_read() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(comm.size)):
            model = nn.Linear(3, 2)
            assert shoal.plan_of(model) is None and not shoal.is_parallelized(model)
            with pytest.raises(UsageError, match="not parallelised"):
                shoal.explain(model)
            optimizer, sample = (
                torch.optim.SGD(model.parameters(), lr=0.1),
                (torch.ones(4, 3), torch.ones(4, 2)),
            )
            shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample, pins={"*": "factor"})
            plan = shoal.plan_of(model)
            assert ([each.strategy for each in plan.choices] if plan else []) == ["factor"] * (
                comm.size > 1
            )
            assert shoal.is_parallelized(model)

    run(1, work)
    run(2, work)


def test_alone_a_sample_is_looked_at_too() -> None:
    model = nn.Linear(3, 2)

    def work(comm: ThreadComm) -> None:
        with using(comm), pytest.raises(UsageError, match="sample is not a pair"):
            shoal.parallelize(
                model,
                nn.MSELoss(),
                torch.optim.SGD(model.parameters(), lr=0.1),
                sample=torch.ones(4, 3),
            )

    run(1, work)


class Heads(nn.Module):
    """Two ends of one model; a loss may ask one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.actor(x) + self.critic(x)


@WAY
def test_a_loss_of_a_submodule_alone_leaves_parts_of_every_bucket_unused(way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss_fn((model if step % 2 else model.critic)(x), y).backward()
            optimizer.step()

    assert_same(Training(model=built(Heads), batches=features(7, 3), loop=loop), 3, way)


@WAY
def test_all_but_a_norm_join_the_optimizer_later(way):
    def optimizer(parameters):
        weight, bias, *rest = parameters
        first = adamw([weight, bias])
        first.rest = rest
        return first

    def loop(model, loss_fn, optimizer, batches):
        plain(model, loss_fn, optimizer, batches[:2])
        optimizer.add_param_group({"params": optimizer.rest, "lr": 0.2})
        optimizer.zero_grad()
        plain(model, loss_fn, optimizer, batches[2:])

    model = built(
        lambda: nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    )
    assert_same(
        Training(model=model, batches=features(7, 3), optimizer=optimizer, loop=loop), 3, way
    )


@pytest.mark.parametrize("way", BUCKETED[:1])
def test_gradients_by_example_beside_training(way):
    def loop(model, loss_fn, optimizer, batches):
        def loss(parameters, x, y):
            return loss_fn(torch.func.functional_call(model, parameters, (x[None],)), y[None])

        for x, y in batches:
            each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
                {name: parameter.detach() for name, parameter in model.named_parameters()}, x, y
            )
            assert each["0.weight"].shape == (len(x), 5, 7)
            plain(model, loss_fn, optimizer, [(x, y)])

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way)


@pytest.mark.parametrize("way", AMONG_WORKERS)
def test_another_thread_evaluates_while_the_model_is_called(way):
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.between = mlp(), None

        def forward(self, x: Tensor) -> Tensor:
            if self.between is not None:
                self.between()
            return self.layers(x)

    def loop(model, loss_fn, optimizer, batches):
        def elsewhere(x: Tensor) -> None:
            with torch.no_grad():
                model(x)

        for x, y in batches:

            def between(x: Tensor = x) -> None:
                model.between = None
                thread = threading.Thread(target=elsewhere, args=(x,))
                thread.start()
                thread.join()

            model.between = between
            optimizer.zero_grad()
            # of two calls each is weighed by itself
            (loss_fn(model(x), y) + loss_fn(model(2 * x), y)).backward()
            optimizer.step()

    assert_same(
        Training(model=built(Calls), batches=features(7, 3), loop=loop), 3, way, uneven=True
    )


class Gated(nn.Module):
    """A layer that only some batches use, early in backward, before one that all ranks evaluate
    together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.body, self.extra = nn.Linear(7, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(torch.tanh(self.cut(x))))
        return (self.extra(hidden) if x[0, 0] > 0 else hidden).square().mean()


def test_with_low_memory_nobody_waits_for_what_another_rank_does_not_use() -> None:
    rows = numbers(2 * 2 * 4, 7).abs().view(2, 2, 4, 7)  # steps, ranks
    rows[1, 1] *= -1  # rank 1 does not use it in the second
    model = built(Gated)

    def work(comm: ThreadComm) -> Tensor:
        mine = copy.deepcopy(model)
        with using(comm, cluster_of(2)):
            optimizer = sgd(mine.parameters())
            _, options = with_options("sliced, low, small")
            options["pins"] = {"*": "sliced", "cut": "column"}
            shoal.parallelize(mine, None, optimizer, sample=(rows[0, comm.rank], None), **options)
            for step in rows:
                optimizer.zero_grad()
                mine(step[comm.rank]).backward()
                optimizer.step()
            return mine.extra.weight.detach().clone()

    one, other = run(2, work, timeout_s=10)
    assert torch.equal(one, other)
