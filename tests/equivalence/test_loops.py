"""What else a loop does: several models and optimizers, evaluation on one rank, saving, copying,
compiling.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    BUCKETED,
    CUTS,
    EVERY_RANK,
    WAYS,
    Training,
    adamw,
    assert_same,
    assert_same_bits,
    built,
    cluster_of,
    cut_small,
    difference,
    features,
    integers,
    numbers,
    on_threads,
    plain,
    rows_of,
    servers_of,
    sgd,
    state,
    with_memory,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.runtime.session import using

WAY = pytest.mark.parametrize("way", EVERY_RANK)
FORMATS = [torch.contiguous_format, torch.channels_last]


class Block(nn.Module):
    """Of a class that Dynamo compiles: it skips the frames of torch's own modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


class Convolved(nn.Module):
    """Its norm stays in eval, where it trains its scale but not its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(5),
        )
        self.head = nn.Linear(5, 3)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3)))


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@WAY
def test_convolution_and_batch_norm(way, layout):
    model = built(Convolved).train().to(memory_format=layout)
    batches = [
        (numbers(12, 2, 7, 7, seed=s).contiguous(memory_format=layout), integers(3, 12, seed=s))
        for s in range(5)
    ]
    assert_same(Training(model=model, batches=batches), 3, way, uneven=True)


def fused(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


@pytest.mark.parametrize("looks", [False, True], ids=["unseen", "clipped by torch"])
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@WAY
def test_a_fused_optimizer_takes_strides_for_granted(way, layout, looks):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            if looks:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    model = built(Convolved).train().to(memory_format=layout)
    batches = [(numbers(12, 2, 7, 7, seed=s), integers(3, 12, seed=s)) for s in range(5)]
    assert_same(Training(model=model, batches=batches, optimizer=fused, loop=loop), 3, way)


class Gan(nn.Module):
    """Two models which are parallelised each for itself, and trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7))
        self.judge = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def versus(make, judge, makes, judges, batches, freeze):
    """The ordinary steps of a GAN; it may freeze the judge while the maker learns."""
    for noise, real in batches:
        fake = make(noise)
        judges.zero_grad()
        right, wrong = judge(real), judge(fake.detach())
        (F.softplus(-right).mean() + F.softplus(wrong).mean()).backward()
        judges.step()
        judge.requires_grad_(not freeze)
        makes.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        makes.step()
        judge.requires_grad_(True)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@WAY
def test_two_models_side_by_side(way, uneven, freeze):
    gan, ranks = built(Gan), 3
    pin, memory = with_memory(way)
    pins = {"*": BUCKETED[0], "0" if pin in CUTS else "*": pin}
    servers = servers_of(way, ranks)
    batches = [(numbers(12, 4, seed=s), numbers(12, 7, seed=s + 30)) for s in range(5)]
    copies = [copy.deepcopy(gan) for _ in range(ranks)]
    alone = copy.deepcopy(gan)
    versus(
        alone.make,
        alone.judge,
        adamw(alone.make.parameters()),
        sgd(alone.judge.parameters()),
        batches,
        freeze,
    )

    def work(comm: ThreadComm) -> dict[str, Tensor]:
        mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in batches]
        make, judge = copies[comm.rank].make, copies[comm.rank].judge
        with using(comm, cluster_of(ranks, servers)):
            plain = {"loss_fn": lambda out, _: out.square().mean(), "pins": pins, "memory": memory}
            make, _, makes = shoal.parallelize(
                make, optimizer=adamw(make.parameters()), sample=(mine[0][0], 0), **plain
            )
            judge, _, judges = shoal.parallelize(
                judge, optimizer=sgd(judge.parameters()), sample=(mine[0][1], 0), **plain
            )
            versus(make, judge, makes, judges, mine, freeze)
        return state(copies[comm.rank])

    got = on_threads(ranks, work, servers)
    assert_same_bits(got)
    assert difference(alone.state_dict(), got[0]) <= 1e-10


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
                if not way.startswith(("sliced", "server")):
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


@WAY
def test_autocast_bfloat16(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    batches = [(x.float(), y) for x, y in features(7, 3)]
    assert_same(
        Training(model=built(mlp, torch.float32), batches=batches, loop=loop), 3, way, within=2e-2
    )


@pytest.mark.parametrize("way", [*EVERY_RANK, "head", "sliced, low"])
def test_a_grad_scaler(way, monkeypatch):
    if way.endswith("low"):
        cut_small(monkeypatch)

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


@WAY
def test_bfloat16_parameters(way):
    batches = [(x.bfloat16(), y) for x, y in features(7, 3)]
    assert_same(Training(model=built(mlp, torch.bfloat16), batches=batches), 3, way, within=5e-2)


@WAY
def test_parameters_of_two_types(way):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(7, 5).float(), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x.float())).double())

    model = built(Mixed)
    model.body.float()
    assert_same(Training(model=model, batches=features(7, 3)), 3, way, within=1e-5)


class Looking(nn.Module):
    """Every kind of layer that a strategy may rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(11, 6),
            nn.Linear(6, 5, bias=False),
            nn.Linear(5, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids)))).mean(1)


def looked_up() -> list[tuple[Tensor, Tensor]]:
    return [(integers(11, 12, 5, seed=s), integers(3, 12, seed=s + 9)) for s in range(5)]


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@WAY
def test_a_copy_is_an_ordinary_model(way, copied):
    """It runs on one rank alone, has torch's own layers, leaves the original alone, and can be
    parallelised anew.
    """

    def loop(model, loss_fn, optimizer, batches):
        (x, y), *rest = batches
        loss_fn(model(x), y).backward()
        optimizer.step()
        if copied == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        trained = model.state_dict()
        if shoal.world().rank == 0:
            assert [type(m) for m in twin.modules()] == [
                Looking,
                nn.Embedding,
                nn.Linear,
                nn.Linear,
            ]
            ordinary = Looking().double()
            ordinary.load_state_dict(trained)
            for each in (twin, ordinary):
                each(x).square().sum().backward()
            assert_same_gradients(twin, ordinary)
            sgd(twin.parameters()).step()
        for x, y in rest:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(Training(model=built(Looking), batches=looked_up(), loop=loop), 2, way)


@WAY
def test_a_copy_parallelised_anew(way):
    first = Training(model=built(Looking), batches=looked_up())
    copies: list[nn.Module] = []

    def loop(model, loss_fn, optimizer, batches):
        copies.append(copy.deepcopy(model))

    Training(model=first.model, batches=first.batches, loop=loop).on_ranks(2, way)
    assert_same(Training(model=copies[0], batches=looked_up()), 2, way)


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


@pytest.mark.parametrize("way", [*EVERY_RANK, "head", "sliced, low"])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_torchs_checkpoint_functions_save_and_load_the_state_and_leave_it_alone(
    way, make, monkeypatch
):
    if way.endswith("low"):
        cut_small(monkeypatch)

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


def test_models_one_after_another_leave_no_threads_and_no_channels(monkeypatch):
    """As in cross-validation; rank 0 keeps the second model longer than the others do."""
    opened, closed = Counter[str](), Counter[str]()
    channel, close = ThreadComm.channel, ThreadComm.close

    def opening(comm: ThreadComm, name: str, **how: object) -> ThreadComm:
        its = channel(comm, name, **how)
        vars(its)["its_name"] = name
        opened[name] += 1
        return its

    def closing(comm: ThreadComm) -> None:
        closed[vars(comm).get("its_name", "")] += 1
        close(comm)

    monkeypatch.setattr(ThreadComm, "channel", opening)
    monkeypatch.setattr(ThreadComm, "close", closing)

    models = [[built(mlp) for _ in range(4)] for _ in range(2)]

    def work(comm):
        kept = []
        with using(comm, cluster_of(2)) as session:
            for fold in range(4):
                model, mine = (
                    models[comm.rank].pop(),
                    [rows_of(batch, comm.rank, 2) for batch in features(7, 3)],
                )
                optimizer = sgd(model.parameters())
                pins = {"*": "sliced", "2": "column"}
                shoal.parallelize(model, F.cross_entropy, optimizer, sample=mine[0], pins=pins)
                plain(model, F.cross_entropy, optimizer, mine)
                if fold == 1 and comm.rank == 0:
                    kept.append(model)
                del model, optimizer
                gc.collect()
            return set(session.threads), len(kept)

    assert on_threads(2, work) == [({1, 3}, 1), ({1, 3}, 0)]
    for fold in (0, 2):
        mine = {name for name in opened if name.startswith(f"model{fold}-")}
        assert {f"model{fold}-{which}" for which in ("boundary", "counts", "lane0")} <= mine
        assert all(closed[name] == opened[name] for name in mine)


def converted(model: nn.Module) -> None:
    model.double()


def one_layer_converted(model: nn.Module) -> None:
    model[2].to(torch.bfloat16)


def replaced(model: nn.Module) -> None:
    model[2] = nn.Linear(7, 5)


def tied(model: nn.Module) -> None:
    model[2].bias = model[4].bias


def wrapped(model: nn.Module) -> None:
    model[2] = nn.Sequential(model[2], nn.Linear(5, 5))


@pytest.mark.parametrize("strategy", ["replicate", "sliced", "factor"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrapped, "2.1.weight is new"),
        (converted, "0.weight was converted after parallelize"),
        (one_layer_converted, "2.weight was converted after parallelize"),
        (replaced, "2.weight is no longer the model's"),
        (tied, "2.bias is no longer the model's"),
    ],
)
def test_a_model_changed_after_parallelize_is_refused(change, says, strategy) -> None:
    first = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5))

    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(first)
        with using(comm, cluster_of(2)):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            shoal.parallelize(
                model,
                nn.MSELoss(),
                optimizer,
                sample=(batch, torch.zeros(4, 5)),
                pins={"*": strategy},
            )
            model(batch).sum().backward()
            optimizer.step()
            change(model)
            with pytest.raises(UsageError, match=says):
                model(batch).sum().backward()

    run(2, work)


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
            with pytest.raises(UsageError, match="not parallelised"):
                shoal.plan_of(model)
            optimizer, sample = (
                torch.optim.SGD(model.parameters(), lr=0.1),
                (torch.ones(4, 3), torch.ones(4, 2)),
            )
            shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample, pins={"*": "factor"})
            plan = shoal.plan_of(model)
            assert ([each.strategy for each in plan.choices] if plan else []) == ["factor"] * (
                comm.size > 1
            )

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


def test_a_frozen_layer_may_be_taken_out() -> None:
    first = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5))

    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(first)
        with using(comm, cluster_of(2)):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            shoal.parallelize(
                model,
                nn.MSELoss(),
                optimizer,
                sample=(batch, torch.zeros(4, 5)),
                pins={"*": "replicate"},
            )
            model[1].requires_grad_(False)
            model[1] = nn.Identity()
            model(batch).sum().backward()
            assert model[0].weight.grad is not None

    run(2, work)


def test_a_sparse_buffer_and_a_sparse_input_are_trained_with() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 3)
            self.register_buffer("adjacent", torch.eye(4).to_sparse())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.sparse.mm(mask, torch.sparse.mm(self.adjacent, self.lin(x)))

    def work(comm: ThreadComm) -> Tensor:
        with using(comm, cluster_of(2)):
            torch.manual_seed(0)
            model = copy.deepcopy(first)
            x = torch.full((4, 4), 1.0 + comm.rank), torch.eye(4).to_sparse()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, loss_fn, optimizer = shoal.parallelize(
                model, nn.MSELoss(), optimizer, sample=(x, torch.ones(4, 3))
            )
            plain(model, loss_fn, optimizer, [(x, torch.ones(4, 3))] * 2)
            return model.lin.weight.detach().clone()

    first = Graph()
    one, other = run(2, work)
    assert torch.equal(one, other)


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
def test_a_gradient_that_comes_transposed(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, _ in batches:
            optimizer.zero_grad()
            weights = numbers(5, 1).expand(5, len(x)).contiguous()
            (model(x).t() * weights).sum(0).mean().backward()
            optimizer.step()

    assert_same(
        Training(model=built(lambda: nn.Linear(7, 5)), batches=features(7, 3), loop=loop), 3, way
    )


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


def test_with_low_memory_nobody_waits_for_what_another_rank_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_small(monkeypatch)
    rows = numbers(2 * 2 * 4, 7).abs().view(2, 2, 4, 7)  # steps, ranks
    rows[1, 1] *= -1  # rank 1 does not use it in the second
    model = built(Gated)

    def work(comm: ThreadComm) -> Tensor:
        mine = copy.deepcopy(model)
        with using(comm, cluster_of(2)):
            optimizer = sgd(mine.parameters())
            options = {"pins": {"*": "sliced", "cut": "column"}, "memory": "low"}
            shoal.parallelize(mine, None, optimizer, sample=(rows[0, comm.rank], None), **options)
            for step in rows:
                optimizer.zero_grad()
                mine(step[comm.rank]).backward()
                optimizer.step()
            return mine.extra.weight.detach().clone()

    one, other = run(2, work, timeout_s=10)
    assert torch.equal(one, other)
