"""A `compute_loss` without a sample, one of several arguments, and one that returns more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_process import (
    AUTO,
    State,
    Training,
    assert_same,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    on_threads,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import UsageError
from shoal.front.session_start import using

BATCHES = features(7, 3)
SAMPLED = pytest.mark.parametrize("has_sample", [False, True], ids=["first", "sample"])


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def of_three(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def scaled(model: nn.Module, batch: Any, scale: float, *, bias: float = 0.0) -> Tensor:
    return scale * of_pair(model, batch) + bias


@dataclass
class Output:
    """An output as models of Hugging Face have it."""

    loss: Tensor
    logits: Tensor


def plain(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        compute(model, batch).backward()
        optimizer.step()


def check(
    loop: Callable[..., None],
    compute_loss: Any,
    way: str = AUTO,
    *,
    has_sample: bool = False,
    count: Any = None,
) -> None:
    training = Training(
        model=built(mlp),
        batches=BATCHES,
        loss_fn=None,
        compute_loss=compute_loss,
        count=count,
        loop=loop,
        has_sample=has_sample,
    )
    assert_same(training, 2, way, uneven=True)


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor", "column"])
def test_the_first_batch_is_the_sample(way: str) -> None:
    check(plain, of_pair, way)


def unpacked(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        compute(model, x, y=y).backward()
        optimizer.step()


@SAMPLED
@pytest.mark.parametrize("count", [None, lambda x, y: 3 * len(y)], ids=["rows", "count"])
def test_arguments_that_have_rows_are_the_batch(has_sample: bool, count: Any) -> None:
    check(unpacked, of_three, count=count, has_sample=has_sample)


def beside(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        compute(model, batch, 1.0 + number, bias=torch.tensor(2.0)).backward()
        optimizer.step()


def test_arguments_without_rows_are_passed_on() -> None:
    check(beside, scaled)


def named(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        compute(model, batch=batch).backward()
        optimizer.step()


@SAMPLED
def test_the_batch_may_be_given_by_its_name(has_sample: bool) -> None:
    check(named, of_pair, has_sample=has_sample)


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "a pair": (lambda loss, logits: (loss, logits), lambda given: given[0]),
    "with numbers": (lambda loss, logits: (loss, {"loss": loss.item()}), lambda given: given[0]),
    "several scalars": (lambda loss, logits: (loss, logits.mean()), lambda given: given[0]),
    "behind": (lambda loss, logits: (logits, loss), lambda given: given[1]),
    "a dict": (
        lambda loss, logits: {"loss": loss, "logits": logits.detach()},
        lambda given: given["loss"],
    ),
    "an object": (lambda loss, logits: Output(loss, logits), lambda given: given.loss),
}


@pytest.mark.parametrize("way", ["replicate", "column"])
@pytest.mark.parametrize("form", FORMS)
@SAMPLED
def test_more_than_a_loss(form: str, has_sample: bool, way: str) -> None:
    make, loss_of = FORMS[form]

    def computes(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        return make(F.cross_entropy(logits, batch[1]), logits)

    def loop(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(compute(model, batch)).backward()
            optimizer.step()

    check(loop, computes, way, has_sample=has_sample)


def test_a_sum_with_more() -> None:
    def computes(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="sum") / 10, logits

    def loop(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            compute(model, batch)[0].backward()
            optimizer.step()

    check(loop, computes)


def accumulated(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    """The first batch comes in a backward that sends nothing."""
    quiet = getattr(optimizer, "accumulate", None)
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        optimizer.zero_grad()
        if quiet is None:
            compute(model, first).backward()
        else:
            with optimizer.accumulate():
                compute(model, first).backward()
        compute(model, second).backward()
        optimizer.step()


def unsynced(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        optimizer.zero_grad()
        if hasattr(model, "no_sync"):
            with model.no_sync():
                compute(model, first).backward()
        else:
            compute(model, first).backward()
        compute(model, second).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [accumulated, unsynced])
@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_the_first_batch_is_one_of_several_in_a_step(loop: Any, way: str) -> None:
    check(loop, of_pair, way)


def test_a_step_before_the_first_batch_is_refused_and_evaluation_is_free() -> None:
    def work(comm: ThreadComm) -> None:
        model = built(mlp)
        batch = rows_of(BATCHES[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            assert not shoal.is_parallelized(model) and shoal.plan_of(model) is None
            model, computes, optimizer = shoal.parallelize(
                model, None, sgd(model.parameters()), compute_loss=of_pair
            )
            assert shoal.is_parallelized(model) and shoal.plan_of(model) is None
            if comm.rank:
                with torch.no_grad():
                    computes(model, batch)  # on one rank alone
            assert shoal.plan_of(model) is None
            model(batch[0]).sum().backward()
            with pytest.raises(UsageError, match="steps before the first batch"):
                optimizer.step()
            with pytest.raises(UsageError, match="parallelised already"):
                shoal.parallelize(model, None, optimizer, compute_loss=of_pair)

    on_threads(2, work)


def test_it_is_undone_before_the_first_batch() -> None:
    def work(comm: ThreadComm) -> bool:
        model, own = built(mlp), built(mlp)
        batch = rows_of(BATCHES[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            model, computes, optimizer = shoal.parallelize(
                model, None, sgd(model.parameters()), compute_loss=of_pair
            )
            shoal.unparallelize(model)
            assert not shoal.is_parallelized(model)
            plain(model, computes, optimizer, [batch])
        plain(own, of_pair, sgd(own.parameters()), [batch])
        return difference(state(own), state(model)) == 0.0

    assert on_threads(2, work) == [True, True]


def test_a_checkpoint_is_loaded_before_the_first_batch(tmp_path: Any) -> None:
    """Also what a codec has left over, which nobody can take before there is a plan."""

    def work(comm: ThreadComm, goes_on: bool, sampled: bool) -> State:
        model = built(mlp)
        mine = [rows_of(batch, comm.rank, 2) for batch in BATCHES]
        how: dict[str, Any] = {"sample": mine[0]} if sampled else {}
        with using(comm, cluster_of(2)):
            model, computes, optimizer = shoal.parallelize(
                model,
                None,
                sgd(model.parameters()),
                compute_loss=of_pair,
                pins={"*": "replicate:direct+top_k"},
                **how,
            )
            if goes_on:
                shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
            else:
                plain(model, computes, optimizer, mine[:2])
                shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
            plain(model, computes, optimizer, mine[2:])
            return state(model)

    on_threads(2, lambda comm: work(comm, False, True))
    expected = on_threads(2, lambda comm: work(comm, True, True))
    got = on_threads(2, lambda comm: work(comm, True, False))
    assert all(difference(a, b) == 0 for a, b in zip(expected, got, strict=True))


def test_a_plan_of_a_compute_loss_with_several_arguments() -> None:
    model = built(mlp)
    cluster = cluster_of(2)
    plan = shoal.plan(
        model,
        None,
        sgd(model.parameters()),
        sample=BATCHES[0],
        cluster=cluster,
        compute_loss=of_three,
    )
    assert len(plan.choices) == 2


def by_closure(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for batch in batches:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = compute(model, batch)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
        scheduler.step()


@pytest.mark.parametrize("way", [AUTO, "sliced", "pipeline"])
def test_a_first_step_may_have_a_closure(way: str) -> None:
    check(by_closure, of_pair, way)


def test_a_first_step_of_lbfgs_wants_a_sample() -> None:
    training = Training(
        model=built(mlp),
        batches=BATCHES,
        loss_fn=None,
        compute_loss=of_pair,
        optimizer=torch.optim.LBFGS,
        loop=by_closure,
        has_sample=False,
    )
    with pytest.raises(UsageError, match="For LBFGS give"):
        training.on_ranks(2, AUTO)


def test_casts_of_autocast_are_of_the_weights_that_ranks_agree_on() -> None:
    """The first batch is measured and then computed within autocast, which keeps casts."""
    models = [built(mlp, torch.float32) for _ in range(2)]
    alone = copy.deepcopy(models[0])
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1.0)  # as where each rank has a seed of its own
    batches = [(x.float(), y) for x, y in BATCHES[:1]]

    def losses(model: Any, compute: Any, rank: int | None) -> list[float]:
        found = []
        for batch in batches:
            own = batch if rank is None else rows_of(batch, rank, 2)
            with torch.autocast("cpu", torch.bfloat16):
                loss = compute(model, own)
            loss.backward()
            found.append(float(shoal.mean(loss.detach(), weight=len(own[1]))))
        return found

    def work(comm: ThreadComm) -> list[float]:
        with using(comm, cluster_of(2)):
            model = models[comm.rank]
            _, compute, _ = shoal.parallelize(
                model, None, sgd(model.parameters()), compute_loss=of_pair
            )
            return losses(model, compute, comm.rank)

    with using(ThreadComm()):
        expected = losses(alone, of_pair, None)
    for found in on_threads(2, work):
        assert found == pytest.approx(expected, rel=2e-2)
