"""A plan is made anew where measured facts choose otherwise, and training goes on as in one
process.

What was measured is put in by hand: ranks are threads, whose times say nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from one_process import (
    Batch,
    State,
    adamw,
    assert_same_bits,
    built,
    difference,
    features,
    on_threads,
    plain,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.codecs.carrier_memory import coded_carriers
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PeerLost, PlanError, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.outcome import Spending
from shoal.core.plan import Choice, Plan
from shoal.front import replan
from shoal.front.replan import EpochEnds
from shoal.front.session_start import using
from shoal.profiling.identity import model_digest, trainable_layers
from shoal.session.session import Session, current
from shoal_tools.commands.run_record import History

T = TypeVar("T")
RANKS, WIDTH, CLASSES = 2, 64, 3
FAST = Link(latency_s=1e-6, bytes_per_s=1e12)
WAITS = Spending(steps=20, compute_s=1e-3, waiting_s=1.0, optimizer_s=1e-4)
SLOWER = FAST.bytes_per_s, 1e7
BATCHES = features(WIDTH, CLASSES, steps=6)


def net() -> nn.Module:
    """Of layers whose factors are far smaller than they are."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )


MODEL = built(net)


def plain_plan(model: nn.Module = MODEL) -> Plan:
    """All layers as under DDP: on a slow link any other plan is better."""
    layers = tuple(
        Choice(layer.name, "replicate", "allreduce") for layer in trainable_layers(model)
    )
    return Plan(RANKS, model_digest(model), layers, 1 << 20, 3)


def cluster(ranks: int = RANKS) -> Cluster:
    return Cluster(Topology(tuple(f"h{rank}" for rank in range(ranks))), FAST)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[float, float] | None], None]:
    """Has ranks wait for exchanges, and sets what links carried, and carry now."""

    def carry(rates: tuple[float, float] | None) -> None:
        monkeypatch.setattr(replan, "spending", lambda attached: WAITS)
        monkeypatch.setattr(replan, "links_now", lambda session, attached: rates)

    return carry


Links = Callable[[tuple[float, float] | None], None]


@dataclass
class Rank:
    """A rank, its copy of a model whose plan may be made anew, and its rows of all batches."""

    session: Session
    model: nn.Module
    optimizer: Any
    batches: list[Batch]

    @property
    def attached(self) -> Any:
        """The model under its present plan."""
        return self.session.attached[self.model]

    def train(self, begin: int = 0, end: int | None = None) -> None:
        """Make the steps from one on, up to another."""
        plain(self.model, F.cross_entropy, self.optimizer, self.batches[begin:end])


def on_ranks(work: Callable[[Rank], T], start: nn.Module = MODEL, **how: Any) -> list[T]:
    """What `work` returns of ranks that have parallelised a model."""

    def prepared(comm: ThreadComm) -> T:
        model = copy.deepcopy(start)
        optimizer = adamw(model.parameters())
        own = [rows_of(batch, comm.rank, RANKS) for batch in BATCHES]
        options = {"plan": plain_plan(start), "replan": True} | how
        with using(comm, cluster()) as session:
            shoal.parallelize(model, F.cross_entropy, optimizer, sample=own[0], **options)
            return work(Rank(session, model, optimizer, own))

    return on_threads(RANKS, prepared)


def choices(model: nn.Module) -> tuple[Choice, ...]:
    plan = shoal.plan_of(model)
    assert plan is not None
    return plan.choices


def in_one_process(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adamw) -> State:
    model = copy.deepcopy(MODEL)
    plain(model, F.cross_entropy, optimizer(model.parameters()), BATCHES)
    return state(model)


def counted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def of_batch(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_batch(model: nn.Module, loss: Any, optimizer: Optimizer, batches: list[Batch]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


LOSSES: dict[str, dict[str, Any]] = {
    "function": {"loss_fn": F.cross_entropy},
    "module": {"loss_fn": nn.CrossEntropyLoss(), "count": lambda output, y: len(y)},
    "counted": {"loss_fn": counted, "count": lambda output, y: len(y)},
    "compute_loss": {"loss_fn": None, "compute_loss": of_batch},
}


@pytest.mark.parametrize(
    ("kind", "uneven"),
    [("function", False), ("module", True), ("counted", True), ("compute_loss", True)],
)
def test_another_plan_in_mid_training_changes_no_result_and_no_object(
    kind: str, uneven: bool, links: Links
) -> None:
    links(SLOWER)
    how = LOSSES[kind]

    def work(comm: ThreadComm) -> State:
        model, loss_fn = copy.deepcopy(MODEL), copy.deepcopy(how["loss_fn"])
        optimizer = adamw(model.parameters())
        own = [rows_of(batch, comm.rank, RANKS, uneven) for batch in BATCHES]
        rest = {name: value for name, value in how.items() if name != "loss_fn"}
        with using(comm, cluster()):
            _, loss, _ = shoal.parallelize(
                model, loss_fn, optimizer, sample=own[0], plan=plain_plan(), replan=True, **rest
            )
            train = by_batch if loss_fn is None else plain
            train(model, loss, optimizer, own[:3])
            before, groups = choices(model), list(map(id, optimizer.param_groups))
            parameters = list(map(id, model.parameters()))
            assert shoal.replan(model)
            assert choices(model) != before
            assert list(map(id, model.parameters())) == parameters
            assert list(map(id, optimizer.param_groups)) == groups
            train(model, loss, optimizer, own[3:])
            shoal.unparallelize(model)
        assert not [name for name in vars(model) if "shoal" in name]
        return state(model)

    got = on_threads(RANKS, work)
    assert_same_bits(got)
    assert difference(in_one_process(), got[0]) <= 1e-10


@pytest.mark.parametrize("rates", [None, (1e9, 0.95e9)], ids=["as measured", "hardly slower"])
def test_facts_that_choose_no_other_plan_change_nothing(
    rates: tuple[float, float] | None, links: Links
) -> None:
    links(rates)

    def work(rank: Rank) -> None:
        rank.train(end=3)
        before = rank.attached
        assert not shoal.replan(rank.model)
        assert rank.attached is before
        rank.train(3)

    on_ranks(work, plan="auto")


def test_it_is_made_anew_as_an_epoch_of_a_sharded_loader_ends(links: Links) -> None:
    links(SLOWER)
    whole = TensorDataset(torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES]))
    rows = len(BATCHES[0][0])

    def epochs(model: nn.Module, optimizer: Optimizer, loader: Any, seen: list[Any]) -> None:
        for _ in range(3):
            plain(model, F.cross_entropy, optimizer, loader)
            with torch.no_grad():
                list(loader)  # a look at all of it, which is no epoch
            seen.append(shoal.plan_of(model))

    def work(comm: ThreadComm) -> tuple[State, list[Any]]:
        model, seen = copy.deepcopy(MODEL), list[Any]()
        optimizer = adamw(model.parameters())
        with using(comm, cluster()):
            loader = shoal.shard(DataLoader(whole, batch_size=rows), batch="global")
            sample = next(iter(loader))
            shoal.parallelize(
                model, F.cross_entropy, optimizer, sample=sample, plan=plain_plan(), replan=True
            )
            seen.append(shoal.plan_of(model))
            epochs(model, optimizer, loader, seen)
            return state(model), seen

    (got, seen), (other, _) = on_threads(RANKS, work)
    assert seen[0].choices != seen[1].choices
    alone = copy.deepcopy(MODEL)
    with using(ThreadComm()):
        optimizer = adamw(alone.parameters())
        shoal.parallelize(alone, F.cross_entropy, optimizer, replan=True)
        epochs(alone, optimizer, DataLoader(whole, batch_size=rows), [])
        assert not shoal.replan(alone)
    assert_same_bits([got, other])
    assert difference(state(alone), got) <= 1e-10


def test_buffers_that_each_rank_keeps_stay_its_own(links: Links) -> None:
    links(SLOWER)
    normed = built(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), net()))

    def work(rank: Rank) -> State:
        rank.train()
        before = state(rank.model)
        assert shoal.replan(rank.model)
        after = state(rank.model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return after

    one, other = on_ranks(work, normed, buffers="local")
    assert not torch.equal(one["1.running_mean"], other["1.running_mean"])


def test_a_rank_that_cannot_follow_another_plan_keeps_all_at_the_present_one(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    links(SLOWER)
    why_not = {1: "module 0 is compiled"}
    monkeypatch.setattr(replan, "_why_not", lambda *_: why_not.get(current().comm.rank, ""))

    def work(rank: Rank) -> None:
        before = rank.attached
        assert not shoal.replan(rank.model)
        assert rank.attached is before

    on_ranks(work, plan="auto")


def test_gradients_that_were_not_sent_keep_the_plan(links: Links) -> None:
    links(SLOWER)

    def work(rank: Rank) -> None:
        model, (x, y) = rank.model, rank.batches[0]
        with rank.optimizer.accumulate():
            F.cross_entropy(model(x), y).backward()
        assert not shoal.replan(model)
        loss = F.cross_entropy(model(x), y)
        assert not shoal.replan(model)  # nor between forward and backward
        loss.backward()
        assert shoal.replan(model)

    on_ranks(work)


@pytest.mark.parametrize("cut", [False, True])
def test_parameters_that_were_frozen_since_keep_the_plan(cut: bool, links: Links) -> None:
    links(SLOWER)
    way = Choice("0", "sliced", "direct")
    plan = plain_plan()
    if cut:
        plan = replace(plan, choices=(way, *plan.choices[1:]))

    def work(rank: Rank) -> None:
        rank.train(end=3)
        before, layer = rank.attached, rank.model.get_submodule("0")
        layer.requires_grad_(False)
        assert not shoal.replan(rank.model)
        assert rank.attached is before
        layer.requires_grad_(True)
        assert shoal.replan(rank.model)
        rank.train(3)

    on_ranks(work, plan=plan)


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_an_epoch_that_ends_where_no_gradients_are_made(
    how: Callable[[], Any], links: Links
) -> None:
    links(SLOWER)

    def work(rank: Rank) -> State:
        rank.train(end=3)
        with how():
            assert shoal.replan(rank.model)
        rank.train(3)
        shoal.unparallelize(rank.model)
        return state(rank.model)

    got = on_ranks(work)
    assert_same_bits(got)
    assert difference(in_one_process(), got[0]) <= 1e-10


def test_codecs_that_were_given_up_stay_so(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    links(SLOWER)
    coded = tuple(replace(c, exchange="direct+int8") for c in plain_plan().choices)
    other = replace(plain_plan(), choices=tuple(replace(c, strategy="sliced") for c in coded))
    monkeypatch.setattr(replan, "_better", lambda *_: other)

    def work(rank: Rank) -> None:
        rank.train(end=3)
        for carrier in coded_carriers(rank.attached.engine.transfers):
            carrier.give_up([name for name in carrier.bucket.numels if name == "0.weight"])
        assert shoal.replan(rank.model)
        carriers = list(coded_carriers(rank.attached.engine.transfers))
        kept = [name for carrier in carriers for name in carrier.given_up]
        assert kept == ["0.weight"]
        assert all(carrier.exact == bool(carrier.given_up) for carrier in carriers)
        rank.train(3)

    on_ranks(work, plan=replace(plain_plan(), choices=coded))


def test_a_run_is_recorded_under_the_plan_that_it_follows(links: Links) -> None:
    links(SLOWER)

    def work(rank: Rank) -> None:
        history = History(rank.model)
        history.begin(len(rank.batches))
        for number in range(len(rank.batches)):
            if number == 4:
                assert shoal.replan(rank.model)
            history.step_begins()
            rank.train(number, number + 1)
            history.on_step_end(1.0, 0.0)
        history.close()
        (track, *_) = history.tracks(rank.session.comm)
        assert sum("backward" in event.what for event in track.events) == 3, track.events

    on_ranks(work)


def test_a_model_that_is_parallelised_twice_is_made_anew_once_an_epoch() -> None:
    with using(ThreadComm()) as session:
        ends, models = EpochEnds(session), [copy.deepcopy(MODEL) for _ in range(2)]
        for model in (*models, *models):
            ends.add(model)
        assert [listed() for listed in ends._models] == models


def test_steps_that_were_not_measured_choose_nothing() -> None:
    def work(rank: Rank) -> None:
        rank.train(end=1)
        assert not shoal.replan(rank.model)

    on_ranks(work, plan="auto")


def test_a_rank_that_fails_half_way_ends_the_others(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    links(SLOWER)
    follow, lost = replan.follow, []

    def broken(session: Any, *others: Any) -> Any:
        if session.comm.rank == 1:
            raise RuntimeError("no memory is left")
        return follow(session, *others)

    def work(rank: Rank) -> None:
        try:
            shoal.replan(rank.model)
        except PeerLost as error:
            lost.append(error.rank)
            raise

    monkeypatch.setattr(replan, "follow", broken)
    with pytest.raises(RuntimeError, match="no memory is left"):
        on_ranks(work)
    assert lost == [1]


def test_who_did_not_ask_for_it_is_told() -> None:
    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = adamw(model.parameters())
        own = rows_of(BATCHES[0], comm.rank, RANKS)
        with using(comm, cluster()):
            with pytest.raises(UsageError, match="not parallelised"):
                shoal.replan(model)
            shoal.parallelize(model, F.cross_entropy, optimizer, sample=own)
            with pytest.raises(UsageError, match="replan=True"):
                shoal.replan(model)

    on_threads(RANKS, work)


@pytest.mark.parametrize(
    ("how", "servers", "said"),
    [
        ({"local_steps": 2}, 0, "leave out replan, or local_steps"),
        ({"update_every": {"0": 2}}, 0, "leave out replan, or update_every"),
        ({}, 1, "start without servers, or leave out replan"),
        ({"replan": "yes"}, 0, "replan is True or False"),
    ],
)
def test_it_is_refused_before_anything_is_measured(
    how: dict[str, Any], servers: int, said: str
) -> None:
    def work(comm: ThreadComm) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = adamw(model.parameters())
        own = rows_of(BATCHES[0], comm.rank, RANKS)
        hosts = ("server",) * servers
        with using(comm, Cluster(cluster().topology, FAST, servers=hosts)) as session:
            with pytest.raises(UsageError, match=said) as caught:
                shoal.parallelize(
                    model, F.cross_entropy, optimizer, sample=own, **({"replan": True} | how)
                )
            assert isinstance(caught.value, PlanError) or said.startswith("replan is")
            assert not session.attached

    on_threads(RANKS, work, servers)
