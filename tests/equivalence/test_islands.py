"""Islands: ranks of one host step together, as one rank on all their rows; hosts come together.

ranks     shoal: a letter is the host of a rank
plain     one process with a model for each host (locally.py)
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from locally import (
    ROUND,
    RULES,
    STEPS,
    Grouped,
    adamw,
    going_on,
    islands_of,
    net,
    on_each,
    on_hosts,
    on_ranks,
    plain,
    sgd,
    shares,
    spread,
    steps,
    train,
    with_norm,
)
from one_process import assert_same_bits, difference, features, rows_of, state
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.launcher import Job
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using
from shoal_tools.launch.local import Local
from shoal_tools.testing.byte_counts import TracedComm


def assert_islands(rule: str, hosts: str, **how: Any) -> None:
    batches, outer = features(6, 4, steps=STEPS), replace(RULES[rule], islands=True)
    expected = plain(net, sgd, outer, len(hosts), batches, hosts=hosts, uneven=True)
    own, common = on_ranks(net, sgd, outer, len(hosts), batches, hosts=hosts, uneven=True, **how)
    assert_same_bits(common)
    islands = islands_of(hosts)
    for model, island in zip(expected.models, islands, strict=True):
        assert_same_bits([own[rank] for rank in island])
        assert difference(state(model), own[island[0]]) <= 1e-10
    if len(islands) > 1:
        assert difference(own[islands[0][0]], own[islands[1][0]]) > 1e-3, "hosts have met too often"


_QUICK = {("nesterov", "aabb"), ("bmuf", "aab"), ("slowmo", "abab")}


@pytest.mark.parametrize(
    ("rule", "hosts"),
    [
        pytest.param(rule, hosts, marks=[] if (rule, hosts) in _QUICK else pytest.mark.slow)
        for rule in RULES
        for hosts in ("aa", "ab", "aab", "aabb", "abab", "abbb")
    ],
)
def test_an_island_is_one_rank(rule: str, hosts: str) -> None:
    assert_islands(rule, hosts)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "ring", "hierarchical"])
def test_any_exchange_of_two_halves_brings_hosts_together(exchange: str) -> None:
    assert_islands("nesterov", "aabb", pins={"*": f"replicate:{exchange}"})


def test_between_rounds_nothing_leaves_a_host_and_in_one_it_sends_weights_once() -> None:
    batches, hosts, nets = features(6, 4, steps=2 * ROUND), "aabb", [net() for _ in "aabb"]

    def work(comm: ThreadComm) -> list[int]:
        traced, left = TracedComm(comm), []
        mine = [rows_of(batch, comm.rank, 4, True) for batch in batches]
        with using(traced, on_hosts(hosts)):
            parts = spread(nets[comm.rank], mine[0], pins={"*": "replicate:hierarchical"})
            for batch in mine:
                begun = traced.counts.bytes_leaving
                steps(*parts, [batch])
                left.append(traced.counts.bytes_leaving - begun)
        return left

    first, second, *_ = run(4, work, timeout_s=20, hosts=hosts)
    of_host = [one + other for one, other in zip(first, second, strict=True)]
    weights = 8 * sum(p.numel() for p in nets[0].parameters())
    for step, sent in enumerate(of_host):
        if step % ROUND < ROUND - 1:
            assert sent == 0, step
        else:  # and what ranks tell of their rows, for each of two layers at most
            assert weights < sent <= weights + 2 * 144, step


def test_buffers_agree_in_each_step_inside_and_in_each_round_across() -> None:
    batches, hosts = features(6, 4, steps=STEPS), "aab"
    outer = shoal.Outer(rule="average")  # islands by default
    models = [copy.deepcopy(with_norm()) for _ in hosts]
    optimizers = [sgd(model.parameters()) for model in models]
    expected = Grouped(models, optimizers, outer, ROUND, groups=islands_of(hosts))
    for batch in batches:
        expected.step(shares(batch, hosts, islands=False))
    got = [copy.deepcopy(with_norm()) for _ in hosts]
    train(hosts, got, batches, outer=outer)
    for model, other in zip(expected.models, got, strict=True):
        assert difference(state(model), state(other)) <= 1e-10
    for island in islands_of(hosts):
        assert_same_bits([state(got[rank]) for rank in island])


@pytest.mark.parametrize(
    ("hosts", "islands", "are_on"),
    [
        ("aab", None, True),
        pytest.param("aab", False, False, marks=pytest.mark.slow),
        pytest.param("aa", None, False, marks=pytest.mark.slow),
        pytest.param("aa", True, True, marks=pytest.mark.slow),
        pytest.param("ab", True, False, marks=pytest.mark.slow),
    ],
)
def test_islands_are_the_default_where_of_several_hosts_one_has_several_ranks(
    hosts: str, islands: bool | None, are_on: bool
) -> None:
    """In the middle of a round those who step together have the same weights."""

    def look(model: nn.Module, _: Any) -> tuple[bool | None, Tensor]:
        plan = shoal.plan_of(model)
        assert plan is not None and plan.outer is not None
        assert ("islands=True" in str(plan)) is are_on
        return plan.outer.islands, state(model)["0.weight"]

    seen = train(
        hosts,
        [net() for _ in hosts],
        features(6, 4, steps=2),
        outer=shoal.Outer(islands=islands),
        each=look,
    )
    (first_are_on, first), (_, second) = seen[0][-1], seen[1][-1]
    assert first_are_on is are_on
    assert torch.equal(first, second) is are_on


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("aab", "ab"),
        pytest.param("abb", "aabb", marks=pytest.mark.slow),
        pytest.param("aabb", "abb", marks=pytest.mark.slow),
        pytest.param("ab", "abab", marks=pytest.mark.slow),
    ],
)
def test_goes_on_on_other_hosts(first: str, second: str, tmp_path: Path) -> None:
    """A checkpoint has the mean of the islands' moments, whatever their sizes."""
    batches, outer = features(6, 4, steps=STEPS), replace(RULES["nesterov"], islands=True)
    before, after = batches[:7], batches[7:] + batches[:4]  # saved within a round
    workers = plain(net, adamw, outer, len(first), before, uneven=True, hosts=first)
    expected = going_on(workers, len(islands_of(second)), adamw)
    for batch in after:
        expected.step(shares(batch, second, islands=True))
    how: dict[str, Any] = {"make": adamw, "outer": outer}
    train(first, [net() for _ in first], before, saves=tmp_path / "saved", **how)
    got = [net() for _ in second]
    train(second, got, after, loads=tmp_path / "saved", **how)
    for model, island in zip(expected.models, islands_of(second), strict=True):
        for rank in island:
            assert difference(state(model), state(got[rank])) <= 1e-10


@pytest.mark.slow
def test_weights_that_cross_as_codes_are_the_same_inside() -> None:
    batches, hosts = features(6, 4, steps=12), "aabb"
    outer = shoal.Outer(rule="average")
    exact, _ = on_ranks(net, sgd, outer, 4, batches, hosts=hosts)
    coded = {"pins": {"*": "replicate:hierarchical+int8"}}
    own, common = on_ranks(net, sgd, outer, 4, batches, hosts=hosts, **coded)
    assert_same_bits([*own, *common])  # 12 steps end a round
    assert 0 < difference(exact[0], own[0]) < 5e-2


@pytest.mark.slow
def test_steps_inside_go_on_while_weights_are_under_way() -> None:
    hosts = "aab"
    outer = shoal.Outer(rule="average", lag=2)
    models = [net() for _ in hosts]
    seen = train(hosts, models, features(6, 4, steps=11), outer=outer, each=lambda m, _: state(m))
    for first, second, other in zip(*seen, strict=True):
        assert_same_bits([first, second])
        assert difference(first, other) > 1e-6


def test_ranks_of_an_island_that_are_fed_the_same_are_told_at_once() -> None:
    batch = features(6, 4, steps=1)[0]

    def work(comm: ThreadComm, model: nn.Module) -> None:
        model, _, _ = spread(model, batch, outer=shoal.Outer(islands=True))
        with pytest.raises(RanksDiffer, match="fed the same batch"):
            model(batch[0])

    on_each("aa", work)


@pytest.mark.parametrize("islands", ["host", 2, 1.0])
def test_islands_are_true_or_false(islands: Any) -> None:
    with pytest.raises(UsageError, match="islands is True or False"):
        shoal.Outer(islands=islands)


PROCESS = """
import os
import sys

rank = int(os.environ["RANK"])
os.environ["SHOAL_HOST"] = "abab"[rank]

import torch
from torch.nn import functional as F

import shoal

shoal.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
x, y = torch.randn(4 + rank, 6) + rank, torch.arange(4 + rank) % 4
model, loss_fn, optimizer = shoal.parallelize(
    model,
    F.cross_entropy,
    optimizer,
    sample=(x, y),
    local_steps=3,
    outer=shoal.Outer(warmup_steps=2),
)
seen = []
for _ in range(7):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    seen.append({name: value.clone() for name, value in model.state_dict().items()})
shoal.unparallelize(model)
torch.save(seen, f"{sys.argv[1]}/{rank}")
"""


@pytest.mark.slow
def test_processes_of_interleaved_hosts(tmp_path: Path) -> None:
    """Two exact steps, then rounds of three: who has the same weights behind which step."""
    script = tmp_path / "train.py"
    script.write_text(PROCESS)
    assert Local().launch(Job((sys.executable, str(script), str(tmp_path)), 4)).exit_code == 0
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(4)]
    for step in range(7):
        seen = [of_rank[step] for of_rank in ranks]
        assert_same_bits([seen[0], seen[2]])
        assert_same_bits([seen[1], seen[3]])
        is_together = step in (0, 1, 4)
        assert torch.equal(seen[0]["0.weight"], seen[1]["0.weight"]) is is_together, step
