"""The calls and classes between a bucket and the network: docs/lab/structure.md has the drawing."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.codecs.coded_exchange import Coded, read_exchange
from shoal.comm.blocking_calls import OWN, Aside
from shoal.comm.threads import ThreadComm, run
from shoal.comm.torch_calls import Inside, WorkHandle
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Coding, Exchange, LiveBucket, SplitExchange
from shoal.core import registry
from shoal.core.cost import Traffic
from shoal.core.errors import PlanError
from shoal.core.facts import Topology
from shoal.exchange.direct import Direct


def test_an_exchange_stands_at_most_two_classes_above_its_contract() -> None:
    for kind in registry.of(Exchange).values():
        between = [base for base in kind.__mro__ if issubclass(base, Exchange)]
        assert len(between) <= 3, between


def test_a_lane_waits_for_a_message_by_three_calls() -> None:
    heartbeat: Any = SimpleNamespace(busy=set(), journal=SimpleNamespace(messages=0))
    inside = Inside(heartbeat, 1.0, Aside(), None)
    calls: list[str] = []

    def wait() -> None:
        calls.extend(frame.name for frame in traceback.extract_stack())

    def lane() -> None:
        WorkHandle(SimpleNamespace(wait=wait), inside).wait()  # type: ignore[arg-type]

    thread = threading.Thread(target=lane, name=f"{OWN}lane")
    thread.start()
    thread.join()
    assert calls[calls.index("lane") + 1 :] == ["wait", "run", "done", "wait"]
    assert heartbeat.journal.messages == 1
    assert not heartbeat.busy


def test_another_thread_waits_on_one_of_the_librarys() -> None:
    heartbeat: Any = SimpleNamespace(busy=set(), journal=SimpleNamespace(messages=0))
    inside = Inside(heartbeat, 1.0, Aside(), None)
    assert inside.run(lambda: threading.current_thread().name) == f"{OWN}aside"


@dataclass(frozen=True)
class Mail(SplitExchange):
    """The messages of `direct`, each waited for before the next."""

    name = "mail"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        return Direct().traffic(bucket, topology)

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        Direct().reduce_scatter(slices, comm)

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        Direct().all_gather(slices, comm)


@dataclass(frozen=True)
class CodedMail(Mail):
    """The same, and it takes codecs."""

    name = "coded_mail"

    def reduce_codes(self, coding: Coding, comm: Comm) -> None:
        sends = [comm.send(coding.message(r), r) for r in comm.others]
        coming: dict[int, Tensor] = {}
        for r in comm.others:
            coming[r] = coding.landing(comm.rank)
            comm.receive(coming[r], r).wait()
        coding.add(comm.rank, (coming.get(r) for r in range(comm.size)))
        comm.finish(sends)


def test_an_exchange_takes_codecs_if_it_writes_reduce_codes() -> None:
    with registry.registered(Mail), registry.registered(CodedMail):
        assert isinstance(read_exchange("coded_mail+int8"), Coded)
        with pytest.raises(PlanError, match="takes no codec") as refused:
            read_exchange("mail+int8")
    assert "coded_mail" in str(refused.value)
    able = {name for name, kind in registry.of(Exchange).items() if _takes_codecs(kind)}
    assert able == {"direct", "ring", "hierarchical"}


def _takes_codecs(kind: type[Exchange]) -> bool:
    return issubclass(kind, SplitExchange) and kind.takes_codecs()


def test_codes_by_such_an_exchange_sum_as_by_direct() -> None:
    def summed(comm: ThreadComm, way: Exchange) -> Tensor:
        flat = torch.linspace(-1, 1, 96, device="cpu") * (comm.rank + 1)
        carrier = way.carrier(LiveBucket.even(flat, {"weight": 96}, comm.size))
        for _ in range(2):
            carrier.reduce(comm)
            carrier.gather(comm)
        return flat

    with registry.registered(CodedMail):
        ways = [read_exchange(f"{name}+int8") for name in ("coded_mail", "direct")]
    one, other = (run(3, lambda comm, way=way: summed(comm, way)) for way in ways)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
