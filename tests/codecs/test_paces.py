"""What codecs take is measured of large pieces and of small ones, alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
from torch import Tensor

from shoal.codecs import paces
from shoal.codecs.coded_exchange import read_exchange
from shoal.codecs.paces import probe_codings
from shoal.codecs.runs import RUN
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.codec import Codec, State
from shoal.contracts.exchange import Bucket
from shoal.core.cost import CodingPace
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.registry import registered

CPU = torch.device("cpu")
OWN_S, VALUE_S, READ_S = 0.004, 4e-8, 0.001  # of the codec below


class Clock:
    """Stands still but for what is done."""

    now_s = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now_s


@final
@dataclass(frozen=True)
class Slow(Codec):
    """Takes so long for a piece, and for each of its values; to read, for a piece alone."""

    name: ClassVar[str] = "slow"
    in_runs: ClassVar[bool] = True

    def nbytes(self, numel: int, itemsize: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, state: State) -> Tensor:
        Clock.now_s += OWN_S + VALUE_S * len(values)
        return values.clone().view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        Clock.now_s += READ_S
        into.copy_(code.view(into.dtype))


def test_ranks_have_the_same_paces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces, "_SECONDS", dict.fromkeys(paces._SECONDS, 1e-3))

    def work(comm: ThreadComm) -> dict[str, CodingPace]:
        return probe_codings(comm, ["bfloat16", "low_rank"], CPU)

    one, other = run(2, work)
    assert one == other
    assert {"bfloat16", "low_rank"} == one.keys()
    assert one["low_rank"].terms_s + one["low_rank"].terms_piece_s > 0
    assert one["low_rank"] != one["bfloat16"]


def test_what_a_piece_takes_is_told_from_what_its_values_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paces, "time", Clock)
    with registered(Slow):
        (found,) = run(1, lambda comm: probe_codings(comm, ["slow"], CPU)["slow"])
    # to know what is lost, a code is read as it is made
    assert found.encode_piece_s == pytest.approx(OWN_S + READ_S)
    assert found.encode_s == pytest.approx(VALUE_S)
    assert found.decode_piece_s == pytest.approx(READ_S)
    assert found.decode_s == pytest.approx(0.0, abs=1e-12)


def test_pieces_are_priced() -> None:
    """By hand: slices of a run and a half, and of a tenth of one."""
    codings = {"int8": CodingPace(0.0, 0.0, encode_piece_s=3.0, decode_piece_s=5.0)}
    codings["low_rank"] = CodingPace(terms_s=0.0, sums_s=0.0, terms_piece_s=7.0, sums_piece_s=9.0)
    hosts = Topology(("one", "other"))
    cluster = Cluster(hosts, Link(0.0, 1e6), codings=codings)
    bucket = Bucket(RUN * 16 // 10, 4, (RUN * 15 // 10, RUN // 10))
    there, back = read_exchange("direct+int8").coding_s(bucket, cluster, 2)
    assert there == (2 + 1) * 3.0 - 1 * 3.0 + 2 * 5.0
    assert back == 2 * 3.0 + 3 * 5.0
    matrices = Bucket(2 * 1000 * 20, 4, shapes=((1000, 20), (1000, 20)))
    summed = read_exchange("allreduce+low_rank")
    assert summed.coding_s(matrices, cluster, 2) == (2 * 7.0, 2 * 9.0)
