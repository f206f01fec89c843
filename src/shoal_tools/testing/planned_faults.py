"""Faults as data: the same list gives the same faults in every run.

    faults = Faults("rank 1, step 5, backward, kill", rank, model=model)
    for step in range(8):
        faults.at(step, "forward")          # does nothing unless a fault is due
        …

    FaultyComm(comm, [Delay(rank=1, seconds=0.05, every=3), Kill(rank=2, at=17)])

A `Fault` strikes a rank at a place of its program; `KINDS` has a function for each kind. The faults
of a `FaultyComm` strike its messages. Sends and receives of a rank are its *operations*, numbered
from 1 over all its channels in the order they are posted. Collectives are made of such operations.
Failures as data: torchft, `fail_at(rank, step)`. Tests and benchmarks use this. Guarded by
tests/tools/testing/test_planned_faults.py; the outcome of each kind: tests/faults/.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import sleep
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from shoal.comm.threads import DONE
from shoal.contracts.comm import Comm, Pending
from shoal.core.errors import LabError, UsageError
from shoal_tools.testing.comm_wrapper import Around

PHASES = ("set-up", "forward", "backward", "step", "save", "end")
SLOW_S = 1.0  # delay of a slow disk, for each file
_SHARE = 10  # a link at a tenth has one such part of its rate


@dataclass(frozen=True)
class Delay:
    """Every `every`-th operation of `rank` starts `seconds` late, and blocks its caller."""

    rank: int
    seconds: float
    every: int = 1


@dataclass(frozen=True)
class RandomDelay:
    """Every operation starts late, by a random time up to `seconds`, from `seed` and the rank."""

    seconds: float
    seed: int = 0


@dataclass(frozen=True)
class Slow:
    """Messages to and from `rank` pass at so many bytes a second, one at a time."""

    rank: int
    bytes_per_s: float


@dataclass(frozen=True)
class Kill:
    """`rank` dies at its `at`-th operation: this and all later ones raise `Killed`."""

    rank: int
    at: int


@dataclass(frozen=True)
class Drop:
    """The cable is pulled: messages that `rank` sends from its `at`-th operation on never arrive.

    A single message cannot be lost: a connection keeps the order, and holds back later messages
    too.
    """

    rank: int
    at: int


NetworkFault = Delay | RandomDelay | Slow | Kill | Drop


class Killed(RuntimeError):
    """An error that a `Kill` raises on its rank."""


class Planted(Exception):
    """An error that a fault of kind "exception" raises on its rank."""


@dataclass
class _RankFaults:
    """Faults of one rank, and counts for all its channels."""

    faults: list[NetworkFault]
    random: random.Random
    operations: int = 0
    lock: Lock = field(default_factory=Lock)


@final
class FaultyComm(Around):
    """`inner` and its channels with `faults`; each rank may get the whole list."""

    def __init__(
        self, inner: Comm, faults: Sequence[NetworkFault], state: _RankFaults | None = None
    ) -> None:
        super().__init__(inner)
        if state is None:
            own = [f for f in faults if isinstance(f, RandomDelay) or f.rank == inner.rank]
            seeds = [f.seed for f in own if isinstance(f, RandomDelay)]
            state = _RankFaults(own, random.Random(f"{seeds} rank {self.rank}"))
        self._state = state

    def suffer(self, *faults: NetworkFault) -> None:
        """Add faults from now on, on all channels and groups."""
        with self._state.lock:
            self._state.faults += faults

    @property
    def operations(self) -> int:
        """Number of operations so far, over all channels."""
        return self._state.operations

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Suffer, then send."""
        dropped = self._suffer(tensor.nbytes)
        return DONE if dropped else self.inner.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Suffer, then receive."""
        self._suffer(tensor.nbytes)
        return self.inner.receive(tensor, source)

    def channel(self, name: str, *, idle: bool = False) -> FaultyComm:
        """Return a channel with the same faults. Its operations count on from this one's."""
        return FaultyComm(self.inner.channel(name, idle=idle), (), self._state)

    def group(self, ranks: Sequence[int]) -> FaultyComm:
        """Return a group of ranks with the same faults. Its operations count on from this one's."""
        return FaultyComm(self.inner.group(ranks), (), self._state)

    def _suffer(self, nbytes: int) -> bool:
        """Apply the faults of the next operation; return whether a message sent now is lost."""
        late_s, dropped = 0.0, False
        with self._state.lock:
            self._state.operations += 1
            number = self._state.operations
            for fault in self._state.faults:
                match fault:
                    case Kill(at=at) if number >= at:
                        raise Killed(f"rank {self.rank} was killed at operation {at}")
                    case Drop(at=at) if number >= at:
                        dropped = True
                    case Delay(seconds=seconds, every=every) if number % every == 0:
                        late_s += seconds
                    case Slow(bytes_per_s=bytes_per_s):
                        late_s += nbytes / bytes_per_s
                    case RandomDelay(seconds=seconds):
                        late_s += self._state.random.uniform(0, seconds)
        if late_s:
            sleep(late_s)
        return dropped


@dataclass(frozen=True)
class Fault:
    """A fault of a rank at a place of its program. `faults_of` reads the text that `str` gives.

    Args:
        rank: the rank that it strikes.
        step: from 0; at "set-up" it is 0.
        phase: one of `PHASES` of the step; the fault strikes before it. "end" is after the step.
        kind: one of `KINDS`.
    """

    rank: int
    step: int
    phase: str
    kind: str

    def __post_init__(self) -> None:
        for what, got, known in (("phase", self.phase, PHASES), ("kind", self.kind, KINDS)):
            if got not in known:
                raise UsageError(
                    f"there is no such {what} of a fault",
                    got=repr(got),
                    expected=", ".join(known),
                )

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}, {self.phase}, {self.kind}"


def faults_of(text: str) -> tuple[Fault, ...]:
    """Read faults in the form that `str` gives, with semicolons between them.

    Examples:
        >>> faults_of("rank 1, step 5, backward, kill; rank 0, step 7, save, full disk")[0]
        Fault(rank=1, step=5, phase='backward', kind='kill')
    """
    found = []
    for one in filter(None, map(str.strip, text.split(";"))):
        matched = re.fullmatch(r"rank (\d+), step (\d+), ([^,]+), ([^,]+)", one)
        if matched is None:
            raise UsageError(
                "this is no fault", got=repr(one), expected="rank 1, step 5, backward, kill"
            )
        rank, step, phase, kind = matched.groups()
        found.append(Fault(int(rank), int(step), phase, kind))
    return tuple(found)


@dataclass
class Victim:
    """Things that a fault may act on.

    Args:
        comm: of a rank that is a thread, on which it can die or lose its link alone. A process dies
            itself; its link is its host's in the lab.
        model: the model in which a value is corrupted.
        bytes_per_s: the assumed rate of a thread's link.
    """

    comm: FaultyComm | None = None
    model: nn.Module | None = None
    bytes_per_s: float = 1e8
    mend: list[Callable[[], None]] = field(default_factory=list)  # end the faults that last


@final
class Faults:
    """A rank's faults: each strikes once, as its place is reached.

    faults: faults of all ranks, as objects or as text.
    rank: this rank.
    victim: the things that faults may act on; by default this process.
    marks: a folder that notes the faults that have struck, for a rank that starts again.

    Examples:
        >>> faults = Faults("rank 0, step 2, forward, exception", rank=0)
        >>> faults.at(1, "forward")
        >>> faults.at(2, "forward")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shoal_tools.testing.planned_faults.Planted: rank 0, step 2, forward, exception
    """

    def __init__(
        self,
        faults: str | Sequence[Fault],
        rank: int,
        victim: Victim | None = None,
        marks: Path | None = None,
    ) -> None:
        faults = faults_of(faults) if isinstance(faults, str) else faults
        self._victim = Victim() if victim is None else victim
        self._left = [
            fault
            for fault in faults
            if fault.rank == rank and not (marks and (marks / str(fault)).exists())
        ]
        self._marks = marks

    def at(self, step: int, phase: str) -> None:
        """Strike the faults of this place, once it is reached."""
        for fault in [f for f in self._left if (f.step, f.phase) == (step, phase)]:
            self._left.remove(fault)
            if self._marks is not None:
                (self._marks / str(fault)).touch()
            strike(fault.kind, self._victim, str(fault))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the faults that last."""
        while self._victim.mend:
            self._victim.mend.pop()()


def strike(kind: str, victim: Victim, about: str = "") -> None:
    """Strike now, and print the time."""
    print("fault at", time.time(), flush=True)
    KINDS[kind](victim, about)


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Change one bit of an element without a new version, as a fault in memory does."""
    at, within = divmod(bit, 8)
    own = tensor.data.view(-1).view(torch.uint8)
    own[element * tensor.element_size() + at] ^= 1 << within


def _exit(victim: Victim, about: str) -> None:
    raise SystemExit(0)


def _raise(victim: Victim, about: str) -> None:
    raise Planted(about)


def _kill(victim: Victim, about: str) -> None:
    if victim.comm is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    victim.comm.suffer(Kill(victim.comm.rank, victim.comm.operations + 1))
    raise Killed(about)


def _stop(victim: Victim, about: str) -> None:
    if victim.comm is not None:
        raise UsageError("a thread cannot be stopped alone", do="let ranks be processes")
    os.kill(os.getpid(), signal.SIGSTOP)


def _pull(victim: Victim, about: str) -> None:
    """Pull the cable."""
    if victim.comm is not None:
        victim.comm.suffer(Drop(victim.comm.rank, victim.comm.operations + 1))
        return
    (own, device), _ = _ends()
    _tool("ip", "-n", own, "link", "set", device, "down")


def _slow_down(victim: Victim, about: str) -> None:
    """Reduce the link to a tenth, both ways."""
    if victim.comm is not None:
        victim.comm.suffer(Slow(victim.comm.rank, victim.bytes_per_s / _SHARE))
        return
    for namespace, device in _ends():
        queues = json.loads(_tool("tc", "-n", namespace, "-j", "qdisc", "show", "dev", device))
        shaped = [queue for queue in queues if queue["kind"] == "tbf"]
        if not shaped:
            raise LabError("this link has no rate of which there is a tenth", do="give --rate")
        (queue,) = shaped
        place = ["root"] if queue.get("root") else ["parent", queue["parent"]]
        options = queue["options"]
        limits = {
            "rate": f"{options['rate'] * 8 // _SHARE}bit",
            "burst": str(options["burst"]),
            "latency": f"{options['lat']}us",
        }
        words = [word for limit in limits.items() for word in limit]
        place += ["handle", queue["handle"], "tbf", *words]
        _tool("tc", "-n", namespace, "qdisc", "change", "dev", device, *place)


def _corrupt(victim: Victim, about: str) -> None:
    """Flip the highest bit of a mantissa, in the middle of the largest parameter."""
    if victim.model is None:
        raise UsageError("there is no value to corrupt", do="give the victim's model")
    weight = max(victim.model.parameters(), key=Tensor.numel)
    flip(weight, weight.numel() // 2, -round(math.log2(torch.finfo(weight.dtype).eps)) - 1)


def _fill_disk(victim: Victim, about: str) -> None:
    """Make no file reach the disk. NFS too reports this only when a file is flushed."""

    def fsync(file: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _put_fsync(victim, fsync)


def _slow_disk(victim: Victim, about: str) -> None:
    """Make every file take `SLOW_S` to reach the disk."""
    flush = os.fsync

    def fsync(file: Any) -> None:
        sleep(SLOW_S)
        flush(file)

    _put_fsync(victim, fsync)


def _put_fsync(victim: Victim, fsync: Callable[[Any], None]) -> None:
    """Replace `os.fsync`, which every file of a checkpoint passes, for the whole process."""
    before = os.fsync

    victim.mend.append(lambda: vars(os).update(fsync=before))
    vars(os).update(fsync=fsync)


# A function for each kind of fault; its text names the fault.
KINDS: Mapping[str, Callable[[Victim, str], None]] = {
    "exit": _exit,
    "kill": _kill,  # SIGKILL: a process that dies
    "stop": _stop,  # SIGSTOP: a process that hangs
    "exception": _raise,  # an error that the program does not catch
    "link down": _pull,
    "link at a tenth": _slow_down,
    "corrupted value": _corrupt,
    "full disk": _fill_disk,
    "slow disk": _slow_disk,
}


def _ends() -> tuple[tuple[str, str], tuple[str, str]]:
    """Return namespace and device of both ends of this host's link, which must be the lab's."""
    own = _tool("ip", "netns", "identify").strip()
    lab, _, host = own.rpartition("-")
    if not re.fullmatch(r"shoal-\d+-\d+", lab):
        raise LabError(
            "only a link of the lab may be changed",
            got=f"network namespace {own or 'of the machine'}",
            do="run this in: shoal lab",
        )
    return (own, "eth0"), (f"{lab}-switch", host)


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
