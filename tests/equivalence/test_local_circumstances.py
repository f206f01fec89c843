"""Local steps with a lag, with codecs, within other calls, and what is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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
    on_each,
    on_ranks,
    plain,
    sgd,
    spread,
    steps,
)
from one_process import (
    Batch,
    State,
    assert_same_bits,
    difference,
    features,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.optim import SGD

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.features.residuals import residuals
from shoal.front.session_start import using
from shoal.session.session import current


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

    def work(comm: ThreadComm, model: nn.Module) -> list[list[int]]:
        batch = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        parts = spread(
            model,
            batch,
            local_steps=4,
            outer=shoal.Outer(rule="average", lag=2),
            search_options=shoal.SearchOptions(bucket_bytes=(8,), least_part_bytes=1),
        )
        changed: dict[str, list[int]] = {"0.weight": [], "2.weight": []}
        for step in range(12):
            with shoal.global_weights(model):
                before = state(model)
            steps(*parts, [batch])
            with shoal.global_weights(model):
                for name, seen in changed.items():
                    if not torch.equal(state(model)[name], before[name]):
                        seen.append(step)
        return sorted(changed.values())

    assert on_each("ab", work)[0] == [[5, 9], [7, 11]]


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
    loaded = net()

    def work(comm: ThreadComm, model: nn.Module) -> None:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        steps(*spread(model, mine[0], outer=outer), mine)
        own = state(model)
        shoal.save(tmp_path / "saved", model=model)
        assert_same_bits([own, state(model)])

    on_each("ab", work)
    with using(ThreadComm()):
        shoal.load(tmp_path / "saved", model=loaded)
    assert difference(state(expected.models[0]), state(loaded)) <= 1e-10


def test_ranks_that_are_fed_the_same_are_told() -> None:
    batch = features(6, 4, steps=1)[0]

    def work(comm: ThreadComm, model: nn.Module) -> None:
        parts = spread(model, batch, local_steps=2)
        with pytest.raises(RanksDiffer, match="fed the same batch"):
            steps(*parts, [batch] * 2)

    on_each("ab", work)


@pytest.mark.slow
def test_a_codec_that_errs_too_much_is_given_up() -> None:
    """From then on all goes exactly, and ranks have the same bits all the time."""

    def work(comm: ThreadComm, model: nn.Module) -> list[State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=104)]
        parts = spread(
            model,
            mine[0],
            local_steps=1,
            outer=shoal.Outer(rule="average"),
            pins={"*": "replicate:direct+int8"},
            max_error=1e-9,
        )
        states = []
        for batch in mine:
            steps(*parts, [batch])
            states.append(state(model))
        assert not any(row.coded for row in shoal.codec_report(model).rows)
        return states

    for states in zip(*on_each("ab", work), strict=True):
        assert_same_bits(states)


@pytest.mark.slow
def test_what_codecs_lost_of_gradients_does_not_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of exact steps with a codec, loaded for local steps."""

    def work(comm: ThreadComm, model: nn.Module, local_steps: int | None) -> None:
        batch = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        pins = {"*": "replicate:direct+int8"}
        parts = spread(model, batch, local_steps=local_steps, pins=pins)
        if local_steps:
            shoal.load(tmp_path / "saved", model=model)
            assert not residuals(model)
            return
        steps(*parts, [batch])
        shoal.save(tmp_path / "saved", model=model)

    on_each("ab", partial(work, local_steps=None))
    with caplog.at_level(logging.WARNING, "shoal"):
        on_each("ab", partial(work, local_steps=2))
    assert "local steps have begun or ended" in caplog.text


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """A checkpoint whose model was exchanged for another one of the same names."""

    def work(comm: ThreadComm, model: nn.Module) -> None:
        spread(model, rows_of(features(6, 4, steps=1)[0], comm.rank, 2))
        kept = current().attached[model].running.attachments["local_steps"]
        others = kept.state()["outer"]
        others["3.weight"] = others.pop("0.weight")
        with pytest.raises(UsageError, match="another model") as caught:
            kept.load({"outer": others, "warmup_steps": 0})
        assert "3.weight" in str(caught.value)
        short = {"0.weight": {"momentum": torch.zeros(3)}}
        with pytest.raises(UsageError, match="another model"):
            kept.load({"outer": short, "warmup_steps": 0})

    on_each("ab", work)


def test_what_was_trained_is_given_back() -> None:
    """After unparallelize every rank has the weights that all have in common."""

    def work(comm: ThreadComm, model: nn.Module) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=5)]
        model, loss_fn, optimizer = spread(model, mine[0])
        steps(model, loss_fn, optimizer, mine)
        with shoal.global_weights(model):
            common = state(model)
        shoal.unparallelize(model)
        assert not hasattr(optimizer, "accumulate")
        return common, state(model)

    (common, first), (_, second) = on_each("ab", work)
    assert_same_bits([common, first, second])


def test_plan_says_it_and_is_taken_again() -> None:
    def trained(model: nn.Module, mine: list[Batch], **options: Any) -> tuple[shoal.Plan, State]:
        steps(*spread(model, mine[0], **options), mine)
        plan = shoal.plan_of(model)
        assert plan is not None
        assert "2 local steps, bmuf(lr=1, momentum=0.5)" in str(plan)
        return plan, state(model)

    def work(comm: ThreadComm, model: nn.Module) -> None:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=4)]
        plan, first = trained(model, mine, local_steps=2, outer=RULES["bmuf"])
        again = shoal.Plan.from_json(plan.to_json())
        _, second = trained(others[comm.rank], mine, local_steps=None, plan=again)
        assert_same_bits([first, second])

    others = [net(), net()]
    on_each("ab", work)


def test_auto_trains() -> None:
    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=3)]
        parts = spread(model, mine[0], local_steps="auto")
        plan = shoal.plan_of(model)
        assert plan is not None and plan.outer is not None
        assert 1 <= (plan.outer.lag or 0) <= plan.local_steps
        steps(*parts, mine)
        shoal.unparallelize(model)
        return state(model)

    assert_same_bits(on_each("ab", work))


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
    "a lag beyond H": (
        {"local_steps": 4, "outer": shoal.Outer(lag=5)},
        UsageError,
        "lag",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_every_rank(case: str) -> None:
    options, error, said = BAD[case]

    def work(comm: ThreadComm, model: nn.Module) -> str:
        batch = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with pytest.raises(Exception) as caught:
            spread(model, batch, **({"local_steps": None} | options))
        assert isinstance(caught.value, error), caught.value
        return str(caught.value)

    for message in on_each("ab", work):
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
        ({"quorum": 0}, "share of the ranks"),
        ({"quorum": 1.5}, "share of the ranks"),
        ({"quorum": "most"}, "share of the ranks"),
        ({"grace_s": -1.0}, "number of seconds"),
        ({"quorum": 0.75, "grace_s": float("inf")}, "number of seconds"),
        ({"quorum": 0.75, "lag": 1}, "together with a lag"),
        ({"quorum": 0.75, "islands": True}, "together with islands"),
        ({"quorum": 0.75, "grows": True}, "together with rounds that grow"),
    ],
)
def test_outer_rule_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shoal.Outer(**options)
