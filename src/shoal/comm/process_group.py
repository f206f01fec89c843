"""Ranks as processes: a Comm over torch.distributed (gloo, and NCCL where CUDA is there).

The one file that knows torch.distributed's names. Every channel is a process group of its own. Whole buckets go through
the library's all_reduce; everything else is point-to-point, which on gloo is faster than its own reduce_scatter and
all_gather. Joining costs one store connection and a roll call that names who is missing.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from shoal.comm.heartbeat import Heartbeat
from shoal.core.contracts import Comm
from shoal.core.errors import DeadlinePassed, MissingRank, PeerLost, ShoalError, UsageError


@final
class _Work:
    """A torch.distributed work handle, which may be None for a rank outside the group."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


@final
class ProcessGroupComm(Comm):
    """A channel over one torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, heartbeat: Heartbeat | None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._timeout_s = timeout_s
        self._heartbeat = heartbeat

    def send(self, tensor: Tensor, to: int) -> _Work:
        return _Work(dist.isend(tensor, group=self._group, group_dst=to))

    def receive(self, tensor: Tensor, source: int) -> _Work:
        return _Work(dist.irecv(tensor, group=self._group, group_src=source))

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=root)

    def channel(self, name: str) -> ProcessGroupComm:
        ranks = dist.get_process_group_ranks(self._group)
        timeout = datetime.timedelta(seconds=self._timeout_s)
        group = dist.new_group(ranks, timeout=timeout, group_desc=f"shoal-{name}")
        assert isinstance(group, dist.ProcessGroup)
        return ProcessGroupComm(group, self._timeout_s, self._heartbeat)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self.diagnose(error, "set-up") from error
        return values

    def close(self) -> None:
        if dist.is_initialized() and self._group is not dist.group.WORLD:
            dist.destroy_process_group(self._group)

    def check(self, where: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.check(where)

    def diagnose(self, error: BaseException, where: str) -> BaseException:
        if isinstance(error, ShoalError) or not isinstance(error, RuntimeError) or self._heartbeat is None:
            return error
        lost = self._heartbeat.verdict(where)
        if lost is not None:
            return lost
        absent = self._heartbeat.behind()
        if "imed out" in str(error):
            names = ", ".join(f"rank {r} ({what})" for r, what in absent.items()) or "none is behind by its own word"
            return DeadlinePassed(
                f"an exchange did not end within {self._timeout_s:g} s",
                where=where,
                got=f"absent: {names}",
                do="let every rank do the same forward and backward calls, or raise init(timeout_s=…)",
            )
        return PeerLost("an exchange broke, though every rank still lives", where=where, got=str(error)[:300])


def join(timeout_s: float, start_timeout_s: float, host: str) -> ProcessGroupComm:
    """Join the ranks that torchrun's environment variables describe.

    A process group that the caller has already set up is used as it is.

    Raises:
        MissingRank: not every rank came within `start_timeout_s`; it names them.
        UsageError: an environment variable is missing or not a number.
    """
    if dist.is_initialized():
        return ProcessGroupComm(_world(), timeout_s, heartbeat=None)
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")
    held_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = datetime.timedelta(seconds=start_timeout_s)
    try:
        store = TCPStore(
            address, port, is_master=rank == 0 and not held_by_launcher, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, dist.DistError) as error:
        raise MissingRank(
            f"the store at {address}:{port} could not be reached within {start_timeout_s:g} s",
            where=f"rank {rank} of {size}, host {host}",
            got=str(error).splitlines()[0][:200],
            do="start every rank, rank 0 first where no launcher holds the store; check MASTER_ADDR and MASTER_PORT",
            rank=0,
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    scope = PrefixStore(f"shoal/{attempt}", store)
    _call_roll(scope, rank, size, host, start_timeout_s)
    device = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group_timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(device, store=scope, rank=rank, world_size=size, timeout=group_timeout)
    return ProcessGroupComm(_world(), timeout_s, Heartbeat(scope, rank, size, host))


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _call_roll(store: Store, rank: int, size: int, host: str, timeout_s: float) -> None:
    """Wait until every rank has come; after `timeout_s` say which have not."""
    store.set(f"here/{rank}", host)
    deadline = time.monotonic() + timeout_s
    keys = {r: f"here/{r}" for r in range(size)}
    while missing := [r for r, key in keys.items() if not store.check([key])]:
        if time.monotonic() > deadline:
            raise MissingRank(
                f"{len(missing)} of {size} ranks did not start within {timeout_s:g} s: "
                + ", ".join(f"rank {r}" for r in missing),
                where=f"rank {rank}, host {host}",
                do="see what those ranks printed; start them, or raise init(start_timeout_s=…)",
                rank=missing[0],
            )
        time.sleep(0.05)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise UsageError(
            f"the environment variable {name} is not set to a number",
            got=repr(text),
            do="start with torchrun, `shoal lab` or `shoal train --workers N`, which set it",
        )
    return int(text)
