"""The engine under delays, errors and misuse: order holds, errors are named, nothing is left
running.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
import traceback
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Round, Transfer
from shoal.core.errors import PeerLost, UsageError, WorldError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Plan
from shoal.engine.engine import Engine
from shoal.front.session_start import using
from shoal.optim.owners import Owners
from shoal.servers.servers import serve
from shoal.tensors.guarded_parameters import ComingParameter
from shoal_tools.testing.planned_faults import Delay, FaultyComm, Kill, Killed, RandomDelay


class Scripted(Transfer):
    """Notes what the engine does with it; its one parameter's hook makes it ready."""

    def __init__(
        self, name: str, parameter: nn.Parameter, log: list[str], error: Exception | None = None
    ) -> None:
        self.label, self._log, self._error = name, log, error
        self.ran, self.awaits = threading.Event(), threading.Event()
        self.awaits.set()
        parameter.register_post_accumulate_grad_hook(self._land)

    def _land(self, parameter: nn.Parameter) -> None:
        self.rounds.current().ready(self)

    def pack(self, backward: Round) -> None:
        assert self.awaits.wait(5)
        self._log.append(f"pack {self.label}")

    def run(self, comm: Comm) -> None:
        if self._error:
            raise self._error
        self._log.append(f"run {self.label}")
        self.ran.set()

    def publish(self) -> None:
        self._log.append(f"publish {self.label}")

    def kept(self) -> list[Tensor]:
        return []

    def release(self) -> None:
        pass


Trained = tuple[Plan, list[Tensor], int]


def scripted(order: str, **errors: Exception) -> tuple[Engine, list[Scripted], list[str], Tensor]:
    """Three parameters whose gradients come in the order c, b, a; transfers in the order given, on
    one lane.
    """
    log: list[str] = []
    parameters = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    transfers = [Scripted(name, parameters[name], log, errors.get(name)) for name in order]
    loss = ((parameters["a"].exp() * parameters["b"]).exp() * parameters["c"]).sum()
    return Engine(transfers, [ThreadComm()]), transfers, log, loss


def test_a_ready_transfer_waits_for_those_before_it() -> None:
    # c's gradient comes first, but b stands before it
    engine, (b, _, a), log, loss = scripted("bca")
    a.awaits = b.ran  # backward goes on only when b has run: it runs while backward does
    loss.backward()
    engine.close()
    assert [entry for entry in log if "pack" in entry] == ["pack b", "pack c", "pack a"]
    assert [entry for entry in log if "run" in entry] == ["run b", "run c", "run a"]
    assert [entry for entry in log if "publish" in entry] == ["publish b", "publish c", "publish a"]


def test_other_ranks_exchange_gradients_from_one_backward_to_the_next() -> None:
    log: list[str] = []
    among_all, inside = ThreadComm(), ThreadComm()

    class Noted(Scripted):
        def run(self, comm: Comm) -> None:
            super().run(comm)
            log.append("inside" if comm is inside else "among all")

        def release(self) -> None:
            log.append(f"release {self.label}")

    parameter = nn.Parameter(torch.ones(2))
    engine = Engine([Noted("first", parameter, log)], [among_all], inside=[inside])
    parameter.exp().sum().backward()
    second = Noted("second", parameter, log)
    engine.take([second], inside=True)
    parameter.exp().sum().backward()
    engine.take([])
    parameter.exp().sum().backward()
    engine.close()
    assert log == [
        *("pack first", "run first", "among all", "publish first", "release first"),
        *("pack second", "run second", "inside", "publish second", "release second"),
    ]
    assert engine.transfers == ()


class Streams:
    """Stand for a GPU's, all of them one, which notes what waits for which of its moments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
        self._log, self._moments = log, itertools.count()
        monkeypatch.setattr(torch, "Stream", lambda device: self)
        monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: None)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self)

    def record_event(self) -> str:
        """A moment."""
        return f"moment {next(self._moments)}"

    def wait_event(self, event: str) -> None:
        """What comes now waits for it."""
        self._log.append(f"wait for {event}")


@pytest.mark.parametrize(
    ("device", "lanes"), [(None, [0, 1, 2, 0]), (torch.device("cuda"), [1, 2, 1, 0])]
)
def test_on_a_gpu_what_is_nccls_goes_over_one_channel(
    device: torch.device | None, lanes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Streams(monkeypatch, [])
    channels = [ThreadComm() for _ in range(3)]
    transfers = [Scripted(name, nn.Parameter(torch.ones(2)), []) for name in "abcd"]
    transfers[3].native = True
    took: list[int] = []
    engine = Engine(transfers, channels, device=device)
    for transfer in transfers:
        transfer.run = lambda comm: took.append(channels.index(comm))  # type: ignore[method-assign, arg-type]
        engine.routes.exchange(transfer)
        engine.routes.settle(transfer)
    engine.close()
    assert took == lanes


def test_on_a_gpu_a_transfer_is_packed_behind_what_made_it_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which may have been on another stream than what makes the one before it ready, and so has it
    packed.
    """
    log: list[str] = []
    Streams(monkeypatch, log)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    transfers = [Scripted(name, p, log) for name, p in zip("ab", parameters, strict=True)]
    engine = Engine(transfers, [ThreadComm()], device=torch.device("cuda"))
    # the second's gradient comes before the first's
    (parameters[0].exp() * parameters[1]).sum().backward()
    engine.close()
    for before, transfer in (("wait for moment 1", "pack a"), ("wait for moment 0", "pack b")):
        assert log.index(before) < log.index(transfer)


class ScriptedAtServers(Scripted, OwnedTransfer):
    """Of what owners have it has nothing but the lane."""

    served = True
    follow = gradients = gather = slice_of = used = close_bucket = None  # type: ignore[assignment]


def test_what_comes_back_from_servers_holds_up_nothing_that_goes_to_them() -> None:
    first, second = transfers = [
        ScriptedAtServers(name, nn.Parameter(torch.ones(2)), []) for name in "ab"
    ]
    engine = Engine(transfers, [], [ThreadComm()], [ThreadComm()])
    may_end = threading.Event()
    engine.routes.exchange(first)
    engine.routes.later(first, lambda comm: may_end.wait(5) and None, "bring back")
    engine.routes.exchange(second)
    assert second.ran.wait(4), "it goes while the first comes back"
    may_end.set()
    engine.routes.settle(first)
    engine.routes.settle(second)
    engine.close()


def test_nothing_comes_back_before_it_is_there() -> None:
    log: list[str] = []
    transfer = ScriptedAtServers("a", nn.Parameter(torch.ones(2)), log)
    arrived, run = threading.Event(), transfer.run
    transfer.run = lambda comm: run(comm) if arrived.wait(5) else None  # type: ignore[method-assign]
    engine = Engine([transfer], [], [ThreadComm()], [ThreadComm()])
    engine.routes.exchange(transfer)
    engine.routes.later(transfer, lambda comm: log.append("back a"), "bring back")
    time.sleep(0.05)
    assert log == []
    arrived.set()
    engine.routes.settle(transfer)
    engine.close()
    assert log == ["run a", "back a"]


def test_a_parameter_is_on_its_way_again_whoever_looks_while_a_step_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look in another thread finds that the last values are there, and the next set off before it
    can say so.
    """
    parameter = nn.Parameter(torch.ones(2))
    transfer = ScriptedAtServers("a", parameter, [])
    transfer.parameters = (parameter,)
    engine = Engine([transfer], [], [ThreadComm()], [ThreadComm()])
    owners = Owners(engine, [transfer], 0)
    here, may_end, is_busy = threading.Event(), threading.Event(), engine.routes.is_busy

    def looks(transfer: Transfer) -> bool:
        busy = is_busy(transfer)
        here.set()
        time.sleep(0.2)
        return busy

    owners.send_off(transfer, [parameter], lambda comm: None)
    monkeypatch.setattr(engine.routes, "is_busy", looks)
    looking = threading.Thread(target=owners.arrive, args=(parameter,))
    looking.start()
    assert here.wait(4)
    owners.send_off(transfer, [parameter], lambda comm: may_end.wait(5) and None)
    looking.join()
    assert is_busy(transfer)
    assert isinstance(parameter, ComingParameter)
    may_end.set()
    engine.routes.settle(transfer)
    engine.close()


def test_a_transfer_that_failed_on_its_way_there_fails_on_its_way_back() -> None:
    transfer = ScriptedAtServers(
        "a", nn.Parameter(torch.ones(2)), [], RuntimeError("the wire is cut")
    )
    engine = Engine([transfer], [], [ThreadComm()], [ThreadComm()])
    engine.routes.exchange(transfer)
    engine.routes.later(
        transfer, lambda comm: pytest.fail("there is nothing to bring back"), "bring back"
    )
    with pytest.raises(RuntimeError, match="the wire is cut"):
        engine.routes.settle(transfer)
    engine.close()


def test_a_lane_error_is_raised_by_backward_and_the_next_one_is_refused() -> None:
    engine, _, _, loss = scripted("cba", b=RuntimeError("the wire is cut"))
    with pytest.raises(RuntimeError, match="the wire is cut"):
        loss.backward(retain_graph=True)
    with pytest.raises(WorldError, match="the backward before this one"):
        loss.backward()
    engine.close()


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    engine, _, _, loss = scripted("cba")
    loss.backward()
    engine.close()
    assert set(threading.enumerate()) <= before


def test_a_backward_after_the_session_is_refused() -> None:
    engine, _, _, loss = scripted("cba")
    engine.close()
    with pytest.raises(WorldError, match="has ended"):
        loss.backward()


def trained(
    comm: Comm,
    model: nn.Module,
    rows: Tensor,
    pins: dict[str, str],
    plan: Plan | None = None,
    memory: str = "fast",
) -> Trained:
    """Train a copy, by a plan or one made for the pins; the plan, the parameters it ends with, the
    peak of buckets.
    """
    mine = copy.deepcopy(model)
    with using(comm, Cluster(Topology(("host",) * comm.size), Link(1e-4, 1e8))) as session:
        optimizer, sample = torch.optim.SGD(mine.parameters(), 0.1), ((rows[0],), None)
        shoal.parallelize(
            mine,
            None,
            optimizer,
            sample=sample,
            plan=plan or "auto",
            pins=None if plan else pins,
            memory=memory,
        )
        for batch in rows:
            optimizer.zero_grad()
            mine(batch).backward()
            optimizer.step()
        peak = shoal.memory(mine).buckets_peak
        return session.attached[mine].plan, [p.detach() for p in mine.parameters()], peak


class Deep(nn.Module):
    """Many small layers, so that several transfers are on their way at once; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(6) for layer in (nn.Linear(40, 40), nn.Tanh()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(
    "pins", [{"*": "replicate:direct"}, {"layers.[048]": "factor", "layers.2": "replicate:tree"}]
)
def test_random_delays_do_not_change_a_bit(pins: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, rows = Deep(), torch.randn(3, 20, 5, 40)  # ranks, steps, rows a rank, width

    def calm(comm: ThreadComm) -> Trained:
        return trained(comm, model, rows[comm.rank], pins)

    plan, expected, _ = run(3, calm)[0]

    def delayed(comm: ThreadComm) -> Trained:
        return trained(
            FaultyComm(comm, [RandomDelay(0.003, seed=comm.rank)]),
            model,
            rows[comm.rank],
            pins,
            plan,
        )

    for _, parameters, _ in run(3, delayed):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def test_the_same_inputs_for_other_targets_are_trained_on() -> None:
    """As of one grid of points, with an image for each rank."""
    points, images = torch.randn(5, 40), torch.randn(2, 5, 40)

    def work(comm: ThreadComm) -> Tensor:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8), 1.0)):
            model, image = nn.Linear(40, 40), images[comm.rank]
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            shoal.parallelize(model, nn.functional.mse_loss, optimizer, sample=(points, image))
            nn.functional.mse_loss(model(points), image).backward()
            return model.weight.grad.clone()

    one, other = run(2, work)
    assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["sliced", "server"])
def test_parameters_without_elements_have_buckets_of_their_own(way: str) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = nn.Linear(7, 3), nn.Module()
            self.none.weight = nn.Parameter(torch.empty(3, 0))

        def forward(self, x: Tensor) -> Tensor:
            return (self.some(x) + x[:, :0] @ self.none.weight.t()).square().mean()

    served = int(way == "server")
    hosts = ("a", "b", "c")[: 2 + served]

    def work(comm: ThreadComm) -> Tensor | None:
        if comm.rank >= 2:
            serve(comm)
            return None
        model, x = Empty(), torch.full((2, 7), 1.0 + comm.rank)
        with using(comm, Cluster(Topology(hosts[:2]), Link(1e-4, 1e8), 1.0, servers=hosts[2:])):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            pins = {"none": f"{way}:direct", "some": "replicate"}
            shoal.parallelize(model, None, optimizer, sample=(x, None), pins=pins, memory="low")
            for _ in range(2):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            return model.some.weight.detach().clone()

    one, other = run(2 + served, work, timeout_s=20, hosts=hosts, servers=served)[:2]
    assert torch.equal(one, other)


def test_every_rank_fed_the_same_batch_is_told_to_shard() -> None:
    model, rows = Deep(), torch.randn(2, 5, 40)

    def work(comm: ThreadComm) -> Trained:
        return trained(comm, model, rows, {"*": "replicate"})

    with pytest.raises(UsageError, match="the same batch"):
        run(2, work)


MANY = {"*": "sliced:direct"}


def many_buckets(model: Deep, sample: Tensor, ranks: int) -> Plan:
    """A plan in which each of the six layers is a bucket, on one lane."""
    cluster = Cluster(Topology(("host",) * ranks), Link(1e-4, 1e8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = shoal.plan(model, None, optimizer, sample=((sample,), None), cluster=cluster, pins=MANY)
    return replace(made, bucket_bytes=1, lanes=1)


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_low_memory_has_backward_wait_for_room_on_a_slow_network(slow: int) -> None:
    torch.manual_seed(0)
    model, rows = Deep(), torch.randn(2, 5, 5, 40)  # ranks, steps, rows a rank, width
    plan = many_buckets(model, rows[0, 0], 2)

    def work(comm: ThreadComm, memory: str) -> Trained:
        late = FaultyComm(comm, [Delay(slow, 0.005)])
        return trained(late, model, rows[comm.rank], MANY, plan, memory)

    fast, low = (
        run(2, lambda comm, memory=memory: work(comm, memory)) for memory in ("fast", "low")
    )
    for (_, expected, whole), (_, parameters, peak) in zip(fast, low, strict=True):
        assert peak == whole // 6 * 2  # a lane's two of six
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


# operations of rank 1: in its first and in its second backward
@pytest.mark.parametrize("at", [12, pytest.param(60, marks=pytest.mark.slow), 66])
def test_a_rank_that_is_lost_while_another_waits_for_room_is_named(at: int) -> None:
    torch.manual_seed(0)
    model, rows = Deep(), torch.randn(3, 5, 5, 40)
    plan = many_buckets(model, rows[0, 0], 3)
    heard: dict[int, Exception] = {}

    def work(comm: ThreadComm) -> None:
        try:
            trained(
                FaultyComm(comm, [Delay(1, 0.02), Kill(1, at)]),
                model,
                rows[comm.rank],
                MANY,
                plan,
                "low",
            )
        except Exception as error:
            heard[comm.rank] = error
            raise

    with pytest.raises(Killed):
        run(3, work, timeout_s=20)
    for rank in (0, 2):
        error = heard[rank]
        assert isinstance(error, PeerLost) and error.rank == 1
        assert "make_room" in "".join(traceback.format_tb(error.__traceback__)), str(error)
