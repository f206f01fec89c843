"""`Checkpoints`: a run that is saved now and then during training, and goes on by itself.

    step     count; at steps that ranks have agreed on, decide together whether a checkpoint is due
    take     all ranks, at once: copies into memory that is used again
    write    a thread of rank 0 (of each host's first rank, if `local`), while training goes on

A checkpoint costs the training thread the copy. Guarded by tests/front/test_checkpoints.py.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, final

from torch import nn

from shoal.checkpoint.clock import CheckpointClock
from shoal.checkpoint.fetched import fetched, newest
from shoal.checkpoint.parts import Bringing, Spread
from shoal.checkpoint.run import name_of, run_at, step_of
from shoal.checkpoint.snapshot import Copies, Saved, Snapshot
from shoal.checkpoint.state import State
from shoal.checkpoint.store import Store
from shoal.checkpoint.writer_thread import Background
from shoal.comm.agreement import agreed
from shoal.comm.rendezvous import crew, has_agent, is_asked_to_end
from shoal.contracts.comm import Comm
from shoal.contracts.launcher import CREW_ENDED
from shoal.core.errors import UsageError
from shoal.core.no_operation import nothing
from shoal.core.numbers import MOST_SECONDS, check_whole, is_count, is_positive
from shoal.front.in_memory import InMemory, MemoryCost
from shoal.front.plan_queries import plan_of
from shoal.front.save_and_load import checked_path, is_whole, restored, saving, taken, writing
from shoal.front.stages import LOGGER, Stages
from shoal.front.stateful import members
from shoal.optim.part import Keeping
from shoal.session.session import ranks

_DECIDING = "shoal.Checkpoints.step: whether a checkpoint is due"
_OPENING = "shoal.Checkpoints: opening the folder"
_BRINGING = "shoal.Checkpoints: bringing the newest checkpoint"
_ENDING = "shoal.Checkpoints: the last checkpoint"
_SOON_S = 1.0  # seconds in which a signal is noticed
_LATE = 1 / 60  # share of the time between two checkpoints


@final
class CrewChanges(SystemExit):
    """This rank has written a checkpoint and ends, because hosts come or go.

    `Checkpoints.step` raises it under `shoal agent`, which starts the script again among the hosts
    that are there then. It is a SystemExit: a script that does not catch it ends.
    """

    def __init__(self) -> None:
        super().__init__(CREW_ENDED)


@final
class Checkpoints:
    """Saves a run now and then, during training, and goes on with it after a restart.

    All ranks make it, and call its methods, alike. Rank 0 writes, and its clock decides. A write
    that fails is logged, and tried again when the next one is due. The last one raises. With local
    steps, checkpoints that are due wait for the end of a round.

    Args:
        folder: a folder of this run alone. It is made if it is missing. "s3://bucket/run" is a
            folder in a store that fsspec reaches.
        every_s: seconds from one checkpoint to the next; a sixtieth more if steps slow down.
        keep: number of checkpoints to keep. Older ones are removed.
        local: if True, each host has its own folder under that path, and writes all of it. If
            False, the hosts share one folder, or rank 0's host alone has it.
        signals: if True, SIGTERM and SIGINT (Ctrl-C) cause a checkpoint, and then `step` returns
            True. A second signal acts as always.
        in_memory_every: steps from one generation in the hosts' memory to the next, for instance
            20. A generation is a snapshot in the form of a checkpoint, in which each rank's pieces
            stand with their offsets. It is in /dev/shm, and the next host's /dev/shm has copies of
            the pieces. So it outlives any one host. If None, there are checkpoints on the disk
            alone.
        objects: as for `shoal.save`. Plain data are the values at the start. `step(epoch=2)` gives
            new values.

    Raises:
        UsageError: another job writes into the folder, or this job may not, or a host's memory
            cannot keep snapshots.

    Source: docs/reference/checkpoint-format.md describes both forms.

    Examples:
        >>> import shoal, torch, tempfile
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> with shoal.Checkpoints(tempfile.mkdtemp(), model=model, epoch=0) as checkpoints:
        ...     first = checkpoints.resume()["epoch"]
        ...     for epoch in range(first, 3):
        ...         _ = checkpoints.step(epoch=epoch + 1)
        >>> checkpoints.steps
        3
        >>> options = {"every_s": 600, "in_memory_every": 20}
        >>> with shoal.Checkpoints(tempfile.mkdtemp(), **options, model=model) as checkpoints:
        ...     checkpoints.commit()  # a generation now: 80 bytes of weights, and what files need
        ...     checkpoints.memory_cost.sent_bytes  # to the next host: there is none
        0
    """

    def __init__(
        self,
        folder: str | Path,
        /,
        *,
        every_s: float = 600.0,
        keep: int = 3,
        local: bool = False,
        signals: bool = False,
        in_memory_every: int | None = None,
        **objects: Any,
    ) -> None:
        self._comm, self._objects, self._keep, self._local = ranks(), dict(objects), keep, local

        def checked() -> Path | Store:
            _check(every_s, keep)
            _check_flags(local=local, signals=signals)
            _check_in_memory(in_memory_every, objects)
            place = checked_path(folder, "shoal.Checkpoints", objects)
            _check_shared(place, local=local)
            return place

        self._run = run_at(agreed(self._comm, checked, _OPENING))
        self._copies = Copies()
        self._clock = CheckpointClock(
            every_s, _SOON_S if signals or has_agent() else max(_SOON_S, _LATE * every_s)
        )
        self._background = Background(self._note_failure)
        first = self._comm.topology.local_ranks
        self._writers = [r for r in range(self._comm.size) if not (first[r] if local else r)]
        self._channel: Comm | None = None  # channel for parts of tensors, if there are any
        self.steps = 0  # number of steps that the run has made, including steps before a restart
        self._decides = 1  # the step at which ranks decide next
        self._has_ended = False  # a signal has asked for it
        agreed(self._comm, self._run.lock if self._writes else nothing, _OPENING)
        self._memory = self._opened_memory(in_memory_every)
        self._signals = _Signals()
        if signals:
            self._signals.note()

    def _opened_memory(self, every: int | None) -> InMemory | None:
        try:
            return None if every is None else InMemory(self._comm, self._run, every)
        except BaseException:
            self._run.unlock()
            raise

    @property
    def memory_cost(self) -> MemoryCost | None:
        """The cost of the newest generation in the hosts' memory; None before the first."""
        return None if self._memory is None else self._memory.cost

    @property
    def _writes(self) -> bool:
        """Return whether this process writes checkpoints."""
        return self._comm.rank in self._writers

    def resume(self) -> dict[str, Any]:
        """Go on from the newest checkpoint that is complete (a collective).

        If hosts have folders of their own, it is the checkpoint with the most steps on any of them,
        and hosts that do not see it receive it. A generation in the hosts' memory with as many
        steps, or more, takes its place.

        Returns:
            The plain data in it, or the values at the start if there is no checkpoint yet.

        Raises:
            UsageError: as for `shoal.load`.
        """
        plain = {k: v for k, v in self._objects.items() if not any(members(v))}
        agreed(self._comm, nothing if self._comm.rank else self._run.bring, _BRINGING)
        try:
            if (found := self._newest()) is None:
                self._warn_if_begun_before()
                return plain
            saved, words = found
            values = restored(saved, self._objects, self._comm)
        finally:
            self._run.sweep()
        self._objects |= values
        self.steps = saved.state.step or 0
        self._decides = self.steps + 1
        self._clock.next_decision(self.steps)
        Stages(speaks=self._comm.rank == 0).say(f"goes on from {words}")
        return values

    def _newest(self) -> tuple[Saved, str] | None:
        """Return the newest checkpoint, in memory or on the disk, and words about it."""
        known, memory = newest(self._comm, self._run.folder), self._memory
        on_disk = -1 if known is None else step_of(known[0].name) or 0
        if memory is not None:
            in_memory = memory.newest(on_disk - 1, self._run)
            memory.goes_on(max(0, on_disk) if in_memory is None else in_memory.step, in_memory)
            if in_memory is not None:
                return in_memory.saved(), in_memory.words()
        if known is None:
            return None
        path, words = known
        words = words.replace(str(path), self._run.where(path.name))
        return fetched(self._comm, path, self._objects), words

    def _warn_if_begun_before(self) -> None:
        """Warn if an earlier crew may have had checkpoints that no host sees now."""
        own = crew()
        if own is not None and own[1] > 1 and self._comm.rank == 0:
            LOGGER.warning(
                "no host sees a checkpoint, so the run begins anew. If there was one, it was on a "
                "host that is gone: give Checkpoints(local=True), or a folder that all hosts see"
            )

    def step(self, **values: Any) -> bool:
        """Count a step, and save if it is time. Call it after `optimizer.step()`.

        Args:
            values: new values of the plain data to save, such as `epoch=2`.

        Returns:
            Whether a signal has asked this run to end. If True, a checkpoint is written: leave the
            loop. Later calls count no steps, and return True again.

        Raises:
            CrewChanges: under `shoal agent`, hosts come or go. A checkpoint is written, and the
                script ends here, to be started again.
        """
        if self._has_ended:
            return True
        self.steps += 1
        self._objects |= values
        memory = self._memory
        in_memory = memory is not None and memory.is_due(self.steps)
        if (self.steps < self._decides and not in_memory) or not is_whole(self._objects):
            return False
        own = (
            self._clock.is_due,
            self._clock.next_decision(self.steps),
            self._background.is_busy,
            self._signals.received or is_asked_to_end(),
            memory.state if memory is not None and in_memory else "",
        )
        told = self._comm.gather_objects(own, _DECIDING)
        due, decisions, busy, ends, states = zip(*told, strict=True)
        self._decides = decisions[0]
        if any(ends):
            if has_agent():
                self.commit()
                raise CrewChanges
            self.save()
            self._has_ended = True
            return True
        if memory is not None and in_memory:
            memory.decided(states, self._objects, self.steps)
        if due[0] and not any(busy):
            self._start()
        return False

    def save(self, *, wait: bool = True, **values: Any) -> None:
        """Save now (a collective).

        Args:
            wait: whether to wait until it is written. If False, it is written during training.
            values: as for `step`.

        Raises:
            UsageError: it cannot be written.
        """
        self._objects |= values
        self._start()
        if wait:
            self._settle()

    def commit(self, **values: Any) -> None:
        """Save now as fast as possible, and wait until the state is safe (a collective).

        With `in_memory_every` this makes a generation in the hosts' memory, otherwise a checkpoint
        on the disk.

        Args:
            values: as for `step`.

        Raises:
            UsageError: it cannot be written.
        """
        self._objects |= values
        if self._memory is None or not self._memory.commit(self._objects, self.steps):
            self.save()

    def close(self) -> None:
        """Wait for the checkpoint that is being written (a collective).

        Raises:
            UsageError: the last checkpoint could not be written.
            WorldError: a rank was lost meanwhile.
        """
        self._signals.restore()
        has_ended = False
        try:
            if self._memory is not None:
                self._memory.settle()
            self._settle()
            has_ended = True
        finally:
            self._end_memory(ended=has_ended)
            self._run.unlock()
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._signals.restore()
        self._background.wait(broken=True)  # ranks may have parted: no collective
        self._end_memory(ended=False)
        self._run.unlock()

    def _end_memory(self, *, ended: bool) -> None:
        if self._memory is not None:
            self._memory.close(ended=ended)
        self._memory = None

    def _start(self) -> None:
        """Take a snapshot, and begin to write it."""
        began_s = time.perf_counter()
        self._background.wait()
        self._clock.saved()
        snapshot = Snapshot(self._copies, keeps=self._writes)
        with saving(self._objects):
            state = taken(snapshot, self._objects, self._comm, self.steps, keeping=Keeping(Spread))
        spreads = snapshot.in_order()
        if spreads and self._channel is None:  # every rank has the same condition here
            self._channel = self._comm.channel("checkpoints")
        bringing = None
        if self._channel is not None:
            bringing = Bringing(self._channel, self._writers, spreads)
        if self._writes or spreads:
            taken_s = time.perf_counter() - began_s
            work = partial(self._write, snapshot, state, bringing, taken_s)
            self._background.start(work, alone=not spreads)

    def _write(
        self, snapshot: Snapshot, state: State, bringing: Bringing | None, taken_s: float
    ) -> None:
        began_s = time.perf_counter()
        name = name_of(state.step or 0)
        path = self._run.folder / name
        with writing(self._run.where(name)):
            self._run.lock_again()
            snapshot.write(path, state, bringing)
            if not self._writes:
                return
            self._run.put_latest(name, self._keep)
        seconds = time.perf_counter() - began_s
        Stages(speaks=self._comm.rank == 0).say(
            f"checkpoint {name}: taken in {taken_s:.2f} s, written in {seconds:.1f} s"
        )

    def _note_failure(self, error: BaseException) -> None:
        LOGGER.error("a checkpoint was not written, and the older ones stay: %s", error)

    def _settle(self) -> None:
        agreed(self._comm, self._background.finish, _ENDING)


def _check(every_s: float, keep: int) -> None:
    if not is_positive(every_s, MOST_SECONDS):
        raise UsageError(
            "every_s is a number of seconds over 0", got=repr(every_s), do="give for instance 600.0"
        )
    if not is_count(keep) or keep < 1:
        raise UsageError(
            "keep is a number of checkpoints, at least 1", got=repr(keep), do="give for instance 3"
        )


def _check_shared(place: Path | Store, *, local: bool) -> None:
    if local and isinstance(place, Store):
        raise UsageError(
            "all hosts have one store", got=f"local=True and {place}", do="leave out local"
        )


def _check_in_memory(every: int | None, objects: Mapping[str, Any]) -> None:
    if every is not None:
        plans = [plan_of(each) for each in objects.values() if isinstance(each, nn.Module)]
        if any(plan and plan.outer and plan.outer.quorum is not None for plan in plans):
            raise UsageError(
                "in_memory_every counts steps, and with a quorum ranks make unlike numbers of them",
                do="leave it out, and save at rounds: docs/guide/local-steps.md",
            )
        check_whole(
            "in_memory_every is a number of steps",
            every,
            1,
            do="give for instance 20, or leave it out",
        )


def _check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(
                f"{name} is True or False",
                got=repr(value)[:80],
                do=f"give {name}=True, or leave it out",
            )


@final
class _Signals:
    """Notes a signal to end the run. A second signal acts as it did before."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def note(self) -> None:
        """Begin to note signals, if this is the main thread: other threads cannot."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self.restore()

    def restore(self) -> None:
        """Let signals act as before."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
