"""Generations in the hosts' memory, for `Checkpoints(in_memory_every=k)`: their times and cost.

    each k steps   all ranks, if none still copies: a copy into files in this host's memory
    a thread       copies pieces to the next host, and counts the generation once all have it
    a restart      the newest complete generation, from whichever hosts have its parts

The training thread pays for the copy, and for two short messages among the ranks.
Guarded by tests/front/test_in_memory.py.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import torch

from shoal.checkpoint.generations import Generations, Kept, TakenSnapshot
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.parts import Spread
from shoal.checkpoint.recovery import Newest, Recovery
from shoal.checkpoint.run import RunFolder
from shoal.checkpoint.snapshot import Saved, Snapshot
from shoal.checkpoint.writer_thread import Background
from shoal.comm.agreement import agreed
from shoal.comm.rendezvous import memory_folder
from shoal.contracts.comm import Comm
from shoal.core.facts import Link
from shoal.core.no_operation import nothing
from shoal.front.save_and_load import saving, taken
from shoal.front.stages import LOGGER, Stages
from shoal.optim.part import Keeping
from shoal.session.session import found

_OPENING = "shoal.Checkpoints: opening the hosts' memory"
_ENDING = "shoal.Checkpoints: the last snapshot in memory"
_SPREAD = 0.7  # pieces are copied in this share of the time to the next generation
_OF_LINK = 10.0  # and over at most so many times as long as the link alone would take
_TRIED_BYTES = 1 << 23  # a copy of so many tells how fast memory is


@dataclass(frozen=True)
class MemoryCost:
    """Cost of the last generation that counts, on one rank.

    Args:
        step: the step of the snapshot.
        kept_bytes: bytes in this host's memory of one generation, this rank's share.
        sent_bytes: bytes that this rank sends to the next host.
        predicted_copy_s: seconds of the training thread, by the pace of this host's memory.
        copy_s: the same, as measured. It includes the wait for owners' updates.
        predicted_link_s: seconds of this rank's link, if it did nothing else; None if no link has
            been measured.
        sent_s: seconds in which the background thread has sent it.

    Examples:
        >>> from shoal.front.in_memory import MemoryCost
        >>> MemoryCost(20, 4_000_000, 1_000_000, 0.001, 0.0012, 0.008, 1.3).sent_bytes
        1000000
    """

    step: int
    kept_bytes: int
    sent_bytes: int
    predicted_copy_s: float
    copy_s: float
    predicted_link_s: float | None
    sent_s: float

    def line(self) -> str:
        """Say it in a line."""
        link = "" if self.predicted_link_s is None else f", link {self.predicted_link_s:.3f} s"
        return (
            f"snapshot of step {self.step} in memory: {self.kept_bytes / 1e6:,.1f} MB kept, "
            f"{self.sent_bytes / 1e6:,.1f} MB sent to the next host; predicted: copy "
            f"{self.predicted_copy_s:.3f} s{link}; measured: copy {self.copy_s:.3f} s, sent beside "
            f"training within {self.sent_s:.2f} s"
        )


@dataclass(frozen=True)
class FoundGeneration:
    """A generation to go on from.

    Args:
        recovery: brings it.
        newest: the generation, and the ranks that have its parts.
        comm: all ranks.
    """

    recovery: Recovery
    newest: Newest
    comm: Comm

    @property
    def step(self) -> int:
        """Steps that the run had made."""
        return self.newest.generation.step

    def saved(self) -> Saved:
        """Return it as a checkpoint (a collective)."""
        return self.recovery.saved(self.newest)

    def words(self) -> str:
        """Say which it is, and where its parts were."""
        hosts = self.comm.topology.hosts
        having = {hosts[rank] for ranks in self.newest.holders.values() for rank in ranks}
        return f"the snapshot of step {self.step} in the memory of {', '.join(sorted(having))}"


@final
class InMemory:
    """Takes generations, and goes on from them.

    Args:
        comm: all ranks.
        run: folder of the run's checkpoints.
        every: steps from one generation to the next.
    """

    def __init__(self, comm: Comm, run: RunFolder, every: int) -> None:
        self._comm, self._every = comm, every
        self._is_first = comm.topology.local_ranks[comm.rank] == 0
        host = comm.topology.hosts[comm.rank]
        self._memory = HostMemory(Path(memory_folder()), _address_of(run), host)
        agreed(comm, self._memory.lock if self._is_first else nothing, _OPENING)
        try:
            self._runs = self._known_runs(run)
        except BaseException:
            self._memory.unlock(ended=False)
            raise
        self._channel = comm.channel("snapshots in memory")
        self._generations = Generations(self._channel, self._memory, self._runs[0])
        self._background = Background(self._note_failure)
        self._number: int | None = None  # the next generation's; None before any was looked for
        self._next = every
        self._since: tuple[int, float] | None = None  # the first step since the last generation
        self._problem = ""  # the background thread sets it, and ranks agree on it later
        self._link: Link | None = None  # unknown until it is measured
        self._has_warned = False
        self.cost: MemoryCost | None = None

    def _known_runs(self, run: RunFolder) -> list[str]:
        """Return the ids of the run that ranks see, the one to use first; write it down."""
        comm = self._comm
        own = agreed(comm, run.read_id if self._sees(run) else _no_id, _OPENING)
        fresh = secrets.token_hex(16)
        told = comm.gather_objects((own, fresh), _OPENING)
        runs = [*dict.fromkeys(own for own, _ in told if own)] or [told[0][1]]
        if self._is_first:
            for folder in self._memory.remove_leftovers():
                LOGGER.info("removed what a job that has ended had left in %s", folder)
            on_disk = own == runs[0]
            if not on_disk and self._sees(run):
                try:
                    run.write_id(runs[0])
                    on_disk = True
                except OSError as error:
                    LOGGER.info("this host does not keep the run's id on its disk: %s", error)
            self._memory.note_run(runs[0], on_disk=on_disk)
        return runs

    def _sees(self, run: RunFolder) -> bool:
        return self._comm.rank == 0 or (self._is_first and "://" not in run.where(""))

    def is_due(self, step: int) -> bool:
        """Return whether it is time for a generation, as on every rank; called each step."""
        if self._since is None:
            self._since = step, time.perf_counter()
        return step >= self._next

    def newest(self, above: int, run: RunFolder) -> FoundGeneration | None:
        """Return the newest complete generation of more than `above` steps (a collective).

        There is none if a user has gone back to an earlier checkpoint on the disk.
        """
        own = agreed(self._comm, run.has_gone_back if self._sees(run) else _no, _OPENING)
        if any(self._comm.gather_objects(own, _OPENING)):
            above = sys.maxsize
        recovery = Recovery(self._comm, self._memory, self._runs)
        newest = recovery.newest(above)
        self._number = recovery.last_number + 1
        return None if newest is None else FoundGeneration(recovery, newest, self._comm)

    def goes_on(self, step: int, found_one: FoundGeneration | None) -> None:
        """Go on after a step. Later generations are dropped, because the run has left them.

        If it goes on from a generation, the next step makes a new one, because hosts may have lost
        theirs.
        """
        if self._is_first:
            self._drop(step)
        self._next = step + (self._every if found_one is None else 1)

    def _drop(self, above: int) -> None:
        for slot in self._memory.slots():
            Recovery.drop(slot, above)

    @property
    def state(self) -> str:
        """The state that ranks tell each other when a generation is due."""
        return "busy" if self._background.is_busy else "off" if self._problem else "ready"

    def decided(self, states: Sequence[str], objects: Mapping[str, Any], step: int) -> None:
        """Take a snapshot if all ranks are ready (a collective)."""
        if "busy" in states:
            self._generations.hurries.set()
            self._next = step + max(1, self._every // 4)
            if self._comm.rank == 0 and not self._has_warned:
                self._has_warned = True
                LOGGER.warning(
                    "a snapshot in memory takes longer than %d steps, so the next one comes later. "
                    "Give a greater in_memory_every",
                    self._every,
                )
        elif "off" in states:
            self._stop()
        else:
            self.take(objects, step)

    def _stop(self) -> None:
        """Take no more snapshots, as all ranks have agreed."""
        self._next = sys.maxsize
        if self.cost is None and self._number is not None:
            self._generations.remove(self._number - 1)
        self._generations.forget()

    def commit(self, objects: Mapping[str, Any], step: int) -> bool:
        """Take a snapshot now, and return whether it counts on all ranks (a collective)."""
        self.settle()
        if self._next < sys.maxsize and not self._problem:
            self.take(objects, step)
            self.settle()
        own = self.cost is not None and self.cost.step == step and not self._problem
        return all(self._comm.gather_objects(own, _ENDING))

    def take(self, objects: Mapping[str, Any], step: int) -> None:
        """Take a snapshot, and begin to copy it (a collective)."""
        began_s = time.perf_counter()
        if self._number is None and self._is_first:
            self._drop(-1)
        number = self._number or 0
        self._number = number + 1
        self._background.wait()
        session = found()
        if session is not None and session.cluster is not None:
            self._link = session.cluster.link
        snapshot = Snapshot(keeps=self._is_first)
        with saving(objects):
            keeping = Keeping(Spread, owned=True)
            state = taken(snapshot, objects, self._comm, step, keeping=keeping)
            mine = self._generations.take(number, snapshot, state)
        mine.kept.copy_s = time.perf_counter() - began_s
        within_s = self._within_s(mine, step, began_s)
        self._next, self._since = step + self._every, None
        self._generations.hurries.clear()
        self._background.start(partial(self._finish, mine, within_s), alone=self._comm.size == 1)

    def _within_s(self, mine: TakenSnapshot, step: int, now_s: float) -> float:
        """Return the seconds over which pieces are copied, so that training has most of the link.

        A generation that counts sooner loses fewer steps, so a tenth of the link is taken.
        """
        if self._since is None or self._since[0] == step:
            return 0.0
        before, before_s = self._since
        within_s = _SPREAD * self._every * (now_s - before_s) / (step - before)
        if self._link is not None and mine.own is not None:
            within_s = min(within_s, _OF_LINK * len(mine.own.memory) / self._link.bytes_per_s)
        return within_s

    def _finish(self, mine: TakenSnapshot, within_s: float) -> None:
        kept = self._generations.finish(mine, within_s)
        if kept.problem:
            self._problem = kept.problem
            if self._comm.rank == 0:
                LOGGER.warning(
                    "no more snapshots in memory, and checkpoints on the disk go on: %s",
                    kept.problem,
                )
            return
        is_first = self.cost is None
        self.cost = self._cost_of(mine.generation.step, kept)
        Stages(speaks=self._comm.rank == 0 and is_first).say(self.cost.line())

    def _cost_of(self, step: int, kept: Kept) -> MemoryCost:
        link_s = None if self._link is None else kept.sent_bytes / self._link.bytes_per_s
        own_s = kept.copied_bytes * _copy_s_per_byte()
        return MemoryCost(
            step, kept.kept_bytes, kept.sent_bytes, own_s, kept.copy_s, link_s, kept.sent_s
        )

    def _note_failure(self, error: BaseException) -> None:
        LOGGER.error("a snapshot in memory was not finished, and the one before stays: %s", error)

    def settle(self) -> None:
        """Wait for the generation that is being copied (a collective)."""
        self._generations.hurries.set()
        agreed(self._comm, self._background.wait, _ENDING)

    def close(self, *, ended: bool) -> None:
        """Give the memory back.

        Args:
            ended: the run has ended in order, on all ranks. If not, its generations stay, because
                the run may go on from them.
        """
        self._generations.hurries.set()
        self._background.wait(broken=not ended)
        self._generations.forget()
        self._memory.unlock(ended=ended)
        if not self._background.is_busy:
            self._channel.close()


def _address_of(run: RunFolder) -> str:
    address = run.where("")
    return address if "://" in address else os.path.abspath(address)


def _no_id() -> str:
    return ""


def _no() -> bool:
    return False


@cache
def _copy_s_per_byte() -> float:
    """Measure how long this host takes to copy a byte."""
    source = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device="cpu")
    target = source.clone()
    times = []
    for _ in range(3):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began_s)
    return min(times) / _TRIED_BYTES
