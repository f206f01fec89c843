"""What ranks must have in common, as they train: who differs is named at the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

WAYS = ["replicate:ring", "sliced", "factor", "row"]
ROWS = torch.arange(24 * 6, dtype=torch.float64).reshape(24, 6).sin()
Loader = DataLoader[Any]


class Script:
    """A training script on one rank."""

    def __init__(self, comm: ThreadComm, way: str, sampler: Any = None) -> None:
        self.rank = comm.rank
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        self.model.double()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        first, second = self.model[:2].parameters(), self.model[2:].parameters()
        self.optimizer = torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.02}])
        dataset = TensorDataset(ROWS, torch.arange(24) % 3)
        # a generator of its own, as these ranks are threads, which share torch's
        drawn = RandomSampler(dataset, generator=torch.Generator())
        self.loader: Loader = shoal.shard(DataLoader(dataset, 3, sampler=sampler or drawn))
        self.loss_fn = nn.CrossEntropyLoss()
        sample = next(iter(self.loader))
        exact = {"0": way, "2": way, "3": "replicate" if way == "factor" else way}
        shoal.parallelize(self.model, self.loss_fn, self.optimizer, sample=sample, pins=exact)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss_fn(self.model(x), y).backward()
        self.optimizer.step()

    def epoch(self) -> None:
        for x, y in self.loader:
            self.step(x, y)


def on_ranks(ranks: int, way: str, script: Callable[[Script], Any], **made: Any) -> list[Any]:
    def work(comm: ThreadComm) -> Any:
        hosts = tuple(f"h{rank}" for rank in range(comm.size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            given = {name: make(comm.rank) for name, make in made.items()}
            return script(Script(comm, way, **given))

    return run(ranks, work, timeout_s=20)


def lower_rate(script: Script) -> None:
    script.optimizer.param_groups[1]["lr"] = 0.01


def other_betas(script: Script) -> None:
    script.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def a_setting_of_its_own(script: Script) -> None:
    script.optimizer.param_groups[0]["label"] = "mine"


def rate_as_tensor(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


CHANGES: dict[Callable[[Script], None], str] = {
    lower_rate: r"AdamW.param_groups\[1\]\['lr'\](?s:.)*rank {r}: 0.01(?s:.)*as on rank 0: 0.02",
    other_betas: r"AdamW.param_groups\[0\]\['betas'\](?s:.)*0.8",
    a_setting_of_its_own: r"'label'\](?s:.)*mine(?s:.)*not there",
    rate_as_tensor: r"AdamW.param_groups\[0\]\['lr'\](?s:.)*0.5",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_settings_that_come_to_differ(
    ranks: int, way: str, change: Callable[[Script], None]
) -> None:
    odd = ranks - 1

    def script(script: Script) -> None:
        script.epoch()
        if script.rank == odd:
            change(script)
        says = CHANGES[change].replace("{r}", str(odd))
        with pytest.raises(RanksDiffer, match=rf"rank {odd} and rank 0(?s:.)*{says}") as error:
            for _ in range(2):
                script.step(ROWS[:3] + script.rank, torch.arange(3))
            script.model(ROWS)
        assert error.value.rank == odd

    on_ranks(ranks, way, script)


@pytest.mark.parametrize("way", WAYS)
def test_schedulers_that_differ_are_named_as_rates_do(way: str) -> None:
    def script(script: Script) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 2, gamma=0.5)
        if script.rank == 1:  # as if it alone had gone on from a checkpoint
            scheduler.last_epoch = 1
        says = r"\['lr'\](?s:.)*StepLR.last_epoch is \d(?s:.)*StepLR.last_epoch is \d"
        with pytest.raises(RanksDiffer, match=says):
            for _ in range(4):
                script.step(ROWS[:3] + script.rank, torch.arange(3))
                scheduler.step()
            script.model(ROWS)

    on_ranks(2, way, script)


def unlike_scale(rank: int) -> GradScaler:
    return GradScaler("cpu", init_scale=32.0 if rank else 64.0)


def nearly_growing(rank: int) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 7 * rank})
    return scaler


def alike(rank: int) -> GradScaler:
    return GradScaler("cpu", init_scale=64.0, growth_interval=2)


# elsewhere to look for infinite gradients is a call that all ranks make
BY_THEMSELVES = pytest.mark.parametrize("way", ["replicate:ring", "factor"])
SCALERS = {
    unlike_scale: r"GradScaler of AdamW: scale(?s:.)*rank 1: 32.0(?s:.)*on rank 0: 64.0(?s:.)*load",
    nearly_growing: r"GradScaler of AdamW: growth_tracker(?s:.)*rank 1: (7|8).0",
}


def scaled_steps(script: Script, scaler: GradScaler | None) -> None:
    for _ in range(4):
        script.optimizer.zero_grad()
        loss = script.loss_fn(script.model(ROWS[:3] + script.rank), torch.arange(3))
        if scaler is None:
            loss.backward()
            script.optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(script.optimizer)
        scaler.step(script.optimizer)
        scaler.update()
    script.model(ROWS)


@pytest.mark.parametrize("made", SCALERS)
@pytest.mark.parametrize("way", WAYS)
def test_scalers_that_differ(way: str, made: Callable[[int], GradScaler]) -> None:
    def script(script: Script) -> None:
        with pytest.raises(RanksDiffer, match=SCALERS[made]):
            scaled_steps(script, made(script.rank))

    on_ranks(2, way, script)


@pytest.mark.parametrize("odd", [GradScaler("cpu", enabled=False), None], ids=["disabled", "none"])
@BY_THEMSELVES
def test_a_rank_without_a_scaler(way: str, odd: GradScaler | None) -> None:
    def script(script: Script) -> None:
        says = r"GradScaler of AdamW: (?s:.)*rank 1: (1.0|\(not there\))"
        with pytest.raises(RanksDiffer, match=says):
            scaled_steps(script, odd if script.rank else alike(0))

    on_ranks(2, way, script)


@pytest.mark.parametrize("change", [lower_rate, None])
@pytest.mark.parametrize("way", ["replicate:direct", "sliced"])
def test_what_no_bucket_tells_is_compared_now_and_then(
    way: str, change: Callable[[Script], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("replicate", "sliced"):  # as on a GPU
        monkeypatch.setattr(f"shoal.strategies.{room}.can_tell", lambda flat, ranks: False)
    monkeypatch.setattr("shoal.engine.common_state._EVERY", 5)

    def script(script: Script) -> None:
        def steps() -> None:
            for _ in range(5):
                script.step(ROWS[:3] + script.rank, torch.arange(3))

        with pytest.raises(RanksDiffer, match="scale" if change is None else r"\['lr'\]"):
            if change is None:
                scaled_steps(script, unlike_scale(script.rank))
            steps()
            if script.rank == 1 and change is not None:
                change(script)
            steps()
            steps()

    on_ranks(2, way, script)


@pytest.mark.parametrize("way", WAYS)
def test_scalers_that_are_alike_are_nothing(way: str) -> None:
    on_ranks(2, way, lambda script: scaled_steps(script, alike(script.rank)))


@pytest.mark.parametrize("way", WAYS)
def test_settings_that_change_alike_are_nothing(way: str) -> None:
    def script(script: Script) -> list[Tensor]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.9)
        for _ in range(2):
            script.epoch()
            scheduler.step()
            other_betas(script)
        script.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        script.epoch()
        script.optimizer.param_groups[0]["lr"].mul_(0.5)
        script.epoch()
        return [p.detach().clone() for p in script.model.parameters()]

    first, second = on_ranks(2, way, script)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_sets_another_epoch(way: str) -> None:
    def script(script: Script) -> None:
        script.epoch()
        if script.rank == 1:
            script.loader.sampler.set_epoch(7)  # type: ignore[attr-defined]
        with pytest.raises(RanksDiffer, match=r"epoch of the sharded loader(?s:.)*rank 1: 7"):
            script.epoch()

    on_ranks(2, way, script)


def one_batch_more(script: Script) -> None:
    batches = iter(script.loader)
    if script.rank == 1:
        next(batches)
    for x, y in batches:
        script.step(x, y)
    script.model(ROWS)  # waits for what owners send


def another_position(script: Script) -> None:
    script.step(*next(iter(script.loader)))
    if script.rank == 1:
        script.loader.load_state_dict(script.loader.state_dict())  # type: ignore[attr-defined]
    script.epoch()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_takes_one_batch_more(way: str) -> None:
    def script(script: Script) -> None:
        script.epoch()
        with pytest.raises(
            RanksDiffer, match=r"the position in (?s:.)*rank 1: 1\d rows(?s:.)*taken"
        ):
            one_batch_more(script)

    on_ranks(2, way, script)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_loads_a_position_alone(way: str) -> None:
    def script(script: Script) -> None:
        with pytest.raises(RanksDiffer, match=r"rank 1(?s:.)*(the epoch of|the position in)"):
            another_position(script)

    on_ranks(2, way, script)


class OwnSource(Sampler[int]):
    """Draws from a random source that `shard` does not know."""

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Any:
        return iter(torch.randperm(24, generator=self.source).tolist())

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_with_a_random_source_of_its_own(way: str) -> None:
    def script(script: Script) -> None:
        with pytest.raises(RanksDiffer, match=r"the order of its rows(?s:.)*the same seed"):
            script.epoch()

    on_ranks(2, way, script, sampler=OwnSource)
    on_ranks(2, way, Script.epoch, sampler=lambda rank: OwnSource(3))


@pytest.mark.parametrize("way", WAYS)
def test_peeks_of_one_rank_are_nothing(way: str) -> None:
    def script(script: Script) -> None:
        for _ in range(2):
            for number, (x, y) in enumerate(script.loader):
                if script.rank == 1 and number != 1:
                    next(iter(script.loader))
                if script.rank == 0 and number == 0:
                    list(script.loader)
                script.step(x, y)
            if script.rank == 0:
                list(script.loader)

    on_ranks(2, way, script)


def loaded(script: Script) -> None:
    script.model.load_state_dict({n: p * 2 for n, p in script.model.state_dict().items()})


def a_layer_anew(script: Script) -> None:
    nn.init.zeros_(script.model[3].weight)  # type: ignore[arg-type]


def one_number(script: Script) -> None:
    with torch.no_grad():
        script.model[3].bias[1] += 1  # type: ignore[index, operator]


WHOLE = ["replicate:allreduce", "sliced", "factor"]


@pytest.mark.parametrize("change", [loaded, a_layer_anew, one_number])
@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_that_one_rank_changes(
    ranks: int, way: str, change: Callable[[Script], None]
) -> None:
    def script(script: Script) -> None:
        script.epoch()
        if script.rank == 0:
            change(script)
        with pytest.raises(RanksDiffer, match=r"rank 0 and rank \d have come(?s:.)*parameter"):
            for _ in range(2):
                script.step(ROWS[:3] + script.rank, torch.arange(3))
            script.model(ROWS)

    on_ranks(ranks, way, script)


@pytest.mark.parametrize("way", WHOLE)
def test_weights_that_all_ranks_load_are_nothing(way: str) -> None:
    def script(script: Script) -> None:
        script.epoch()
        loaded(script)
        script.epoch()

    on_ranks(2, way, script)


@pytest.mark.parametrize("way", ["replicate:direct", "factor"])
def test_weights_that_one_rank_changes_and_puts_back_are_nothing(way: str) -> None:
    def script(script: Script) -> list[Tensor]:
        for _ in range(3):
            script.epoch()
            if script.rank == 0:  # as to evaluate with averages
                kept = copy.deepcopy(script.model.state_dict())
                loaded(script)
                script.model.load_state_dict(kept)
        script.epoch()
        return [p.detach().clone() for p in script.model.parameters()]

    first, second = on_ranks(2, way, script)
    assert all(map(torch.equal, first, second))
