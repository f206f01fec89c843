"""Local steps with a lag, with codecs, within other calls, and what is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from locally import (
    ROUND,
    RULES,
    STEPS,
    Plain,
    net,
    on_ranks,
    plain,
    sgd,
)
from one_process import (
    Batch,
    State,
    assert_same_bits,
    cluster_of,
    difference,
    features,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.front.joining import using
from shoal.session.local import begin_anew, outer_state
from shoal.session.residuals import residuals


@dataclass
class Late(Plain):
    """As plain averaging, in which what is sent is taken over so many steps later."""

    lag: int = 1
    sent: list[list[Tensor]] = field(default_factory=list)

    def step(self, batches: Sequence[Batch]) -> None:
        super().step(batches)
        if self.sent and self.steps % self.every == self.lag:
            self.take_over()

    @torch.no_grad()
    def come_together(self) -> None:
        self.sent = [[p.detach().clone() for p in m.parameters()] for m in self.models]
        self.sent_rows, self.rows = self.rows, [0] * len(self.rows)

    @torch.no_grad()
    def take_over(self) -> None:
        shares = [rows / sum(self.sent_rows) for rows in self.sent_rows]
        for index, old in enumerate(self.old):
            mean = sum(s * ps[index] for s, ps in zip(shares, self.sent, strict=True))
            for model, sent in zip(self.models, self.sent, strict=True):
                p = list(model.parameters())[index]
                p.add_(mean - sent[index])
            old.copy_(mean)
        self.sent = []


def test_with_a_lag_steps_go_on_meanwhile() -> None:
    batches, outer = features(6, 4, steps=STEPS), shoal.Outer(rule="average", lag=1)
    models = [copy.deepcopy(net()) for _ in range(2)]
    expected = Late(models, [sgd(m.parameters()) for m in models], outer, ROUND)
    for batch in batches:
        expected.step([rows_of(batch, rank, 2, True) for rank in range(2)])
    own, common = on_ranks(net, sgd, outer, 2, batches, uneven=True)
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10


def test_buckets_take_turns() -> None:
    """Each of two buckets goes every third step, one of them a step later."""
    seen: list[list[int]] = []

    def work(comm: ThreadComm) -> None:
        x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                net_of[comm.rank],
                F.cross_entropy,
                sgd(net_of[comm.rank].parameters()),
                sample=(x, y),
                local_steps=4,
                outer=shoal.Outer(rule="average", lag=2),
                search_options=shoal.SearchOptions(bucket_bytes=(8,), least_part_bytes=1),
            )
            changed = []
            for step in range(12):
                with shoal.global_weights(model):
                    before = state(model)
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                with shoal.global_weights(model):
                    changed += [
                        (step, name)
                        for name, value in state(model).items()
                        if not torch.equal(value, before[name])
                    ]
            if comm.rank == 0:
                seen.append([step for step, name in changed if name == "0.weight"])
                seen.append([step for step, name in changed if name == "2.weight"])

    net_of = [net(), net()]
    run(2, work, timeout_s=20)
    first, second = sorted(seen)
    assert first == [5, 9]
    assert second == [7, 11]


@pytest.mark.parametrize(
    ("codec", "bound"), [pytest.param("bfloat16", 1e-2, marks=pytest.mark.slow), ("int8", 5e-2)]
)
def test_codec_stays_near(codec: str, bound: float) -> None:
    """Ranks have the same bits, and are as near to one process as the codec is."""
    batches = features(6, 4, steps=12)
    exact, _ = on_ranks(net, sgd, RULES["average"], 3, batches)
    own, common = on_ranks(
        net, sgd, RULES["average"], 3, batches, pins={"*": f"replicate:direct+{codec}"}
    )
    assert_same_bits(common)
    assert_same_bits(own)  # 12 steps end a round
    assert 0 < difference(exact[0], own[0]) < bound


def test_a_checkpoint_has_what_is_under_way(tmp_path: Path) -> None:
    """Sent at the third step and to be taken over at the fifth, saved at the fourth."""
    batches, outer = features(6, 4, steps=4), shoal.Outer(rule="average", lag=2)
    expected = plain(net, sgd, RULES["average"], 2, batches[:ROUND])
    nets, loaded = [net(), net()], net()

    def work(comm: ThreadComm) -> None:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=mine[0],
                local_steps=ROUND,
                outer=outer,
            )
            for x, y in mine:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            own = state(model)
            shoal.save(tmp_path / "saved", model=model)
            assert_same_bits([own, state(model)])

    run(2, work, timeout_s=20)
    with using(ThreadComm()):
        shoal.load(tmp_path / "saved", model=loaded)
    assert difference(state(expected.models[0]), state(loaded)) <= 1e-10


def test_ranks_that_are_fed_the_same_are_told() -> None:
    batch = features(6, 4, steps=1)[0]

    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=batch,
                local_steps=2,
            )
            with pytest.raises(RanksDiffer, match="fed the same batch"):
                for _ in range(2):
                    optimizer.zero_grad()
                    loss_fn(model(batch[0]), batch[1]).backward()
                    optimizer.step()

    nets = [net(), net()]
    run(2, work, timeout_s=20)


@pytest.mark.slow
def test_a_codec_that_errs_too_much_is_given_up() -> None:
    """From then on all goes exactly, and ranks have the same bits all the time."""

    def work(comm: ThreadComm) -> list[State]:
        batches = features(6, 4, steps=104)
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=mine[0],
                local_steps=1,
                outer=shoal.Outer(rule="average"),
                pins={"*": "replicate:direct+int8"},
                max_error=1e-9,
            )
            states = []
            for x, y in mine:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                states.append(state(model))
            assert not any(row.coded for row in shoal.codec_report(model).rows)
            return states

    nets = [net(), net()]
    for states in zip(*run(2, work, timeout_s=60), strict=True):
        assert_same_bits(states)


@pytest.mark.slow
def test_what_codecs_lost_of_gradients_does_not_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of exact steps with a codec, loaded for local steps."""

    def on(nets: list[nn.Module], *, loads: bool) -> None:
        options = {"local_steps": 2} if loads else {}

        def work(comm: ThreadComm) -> None:
            x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
            with using(comm, cluster_of(2)):
                model, loss_fn, optimizer = shoal.parallelize(
                    nets[comm.rank],
                    F.cross_entropy,
                    sgd(nets[comm.rank].parameters()),
                    sample=(x, y),
                    pins={"*": "replicate:direct+int8"},
                    **options,
                )
                if loads:
                    shoal.load(tmp_path / "saved", model=model)
                    assert not residuals(model)
                    return
                loss_fn(model(x), y).backward()
                optimizer.step()
                shoal.save(tmp_path / "saved", model=model)

        run(2, work, timeout_s=20)

    on([net(), net()], loads=False)
    with caplog.at_level(logging.WARNING, "shoal"):
        on([net(), net()], loads=True)
    assert "local steps have begun or ended" in caplog.text


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """A checkpoint whose model was exchanged for another one of the same names."""
    nets = [net(), net()]

    def work(comm: ThreadComm) -> None:
        x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            model, _, _ = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=(x, y),
                local_steps=2,
            )
            others = outer_state(model)
            others["3.weight"] = others.pop("0.weight")
            with pytest.raises(UsageError, match="another model") as caught:
                begin_anew(model, others)
            assert "3.weight" in str(caught.value)
            short = {"0.weight": {"momentum": torch.zeros(3)}}
            with pytest.raises(UsageError, match="another model"):
                begin_anew(model, short)

    run(2, work, timeout_s=20)


def test_what_was_trained_is_given_back() -> None:
    """After unparallelize every rank has the weights that all have in common."""

    def work(comm: ThreadComm) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=5)]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=mine[0],
                local_steps=ROUND,
            )
            for x, y in mine:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            with shoal.global_weights(model):
                common = state(model)
            shoal.unparallelize(model)
            assert not hasattr(optimizer, "accumulate")
            return common, state(model)

    nets = [net(), net()]
    (common, first), (_, second) = run(2, work, timeout_s=20)
    assert_same_bits([common, first, second])


def test_plan_says_it_and_is_taken_again() -> None:
    def work(comm: ThreadComm) -> tuple[str, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=4)]
        with using(comm, cluster_of(2)):
            made = []
            for number, options in enumerate(
                ({"local_steps": 2, "outer": RULES["bmuf"]}, {"plan": None})
            ):
                if number:
                    options = {"plan": shoal.Plan.from_json(made[0][0])}
                model, loss_fn, optimizer = shoal.parallelize(
                    nets[number][comm.rank],
                    F.cross_entropy,
                    sgd(nets[number][comm.rank].parameters()),
                    sample=mine[0],
                    **options,
                )
                for x, y in mine:
                    optimizer.zero_grad()
                    loss_fn(model(x), y).backward()
                    optimizer.step()
                plan = shoal.plan_of(model)
                assert plan is not None
                made.append((plan.to_json(), state(model)))
                assert "2 local steps, bmuf(lr=1, momentum=0.5)" in str(plan)
            assert_same_bits([made[0][1], made[1][1]])
            return made[1]

    nets = [[net(), net()], [net(), net()]]
    run(2, work, timeout_s=20)


def test_auto_trains() -> None:
    def work(comm: ThreadComm) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=3)]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=mine[0],
                local_steps="auto",
            )
            plan = shoal.plan_of(model)
            assert plan is not None and plan.outer is not None
            assert 1 <= (plan.outer.lag or 0) <= plan.local_steps
            for x, y in mine:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            shoal.unparallelize(model)
            return state(model)

    nets = [net(), net()]
    states = run(2, work, timeout_s=20)
    assert_same_bits(states)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "H of 0": ({"local_steps": 0}, UsageError, "at least 1"),
    "H of True": ({"local_steps": True}, UsageError, "at least 1"),
    "H of 2.5": ({"local_steps": 2.5}, UsageError, "at least 1"),
    "H of a word": ({"local_steps": "many"}, UsageError, '"auto"'),
    "a rule without steps": ({"outer": shoal.Outer()}, UsageError, "no local_steps"),
    "an optimizer of torch": (
        {"local_steps": 4, "outer": SGD([nn.Parameter(torch.zeros(1))], 0.7)},
        UsageError,
        "no shoal.Outer",
    ),
    "a staleness": ({"local_steps": 4, "staleness": 2}, PlanError, "staleness"),
    "another strategy": (
        {"local_steps": 4, "pins": {"*": "sliced:direct"}},
        PlanError,
        "all of every layer",
    ),
    "strategies": ({"local_steps": 4, "strategies": ["factor"]}, PlanError, "all of every layer"),
    "an exchange of one half": (
        {"local_steps": 4, "pins": {"*": "replicate:tree"}},
        PlanError,
        "two halves",
    ),
    "norms over all ranks": (
        {"local_steps": 4, "sync_batchnorm": True},
        PlanError,
        "rows of all",
    ),
    "a lag beyond H": (
        {"local_steps": 4, "outer": shoal.Outer(lag=5)},
        UsageError,
        "lag",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_every_rank(case: str) -> None:
    options, error, said = BAD[case]

    def work(comm: ThreadComm) -> str:
        x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)), pytest.raises(Exception) as caught:
            model = nets[comm.rank]
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=(x, y), **options
            )
        assert isinstance(caught.value, error), caught.value
        return str(caught.value)

    nets = [net(), net()]
    for message in run(2, work, timeout_s=20):
        assert said in message, message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "adam"}, "one of average"),
        ({"lr": 0.0}, "above 0"),
        ({"lr": float("nan")}, "above 0"),
        ({"momentum": 1.0}, "below 1"),
        ({"momentum": -0.1}, "below 1"),
        ({"rule": "average", "momentum": 0.9}, "no momentum"),
        ({"lag": -1}, "number of steps"),
    ],
)
def test_outer_rule_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shoal.Outer(**options)
