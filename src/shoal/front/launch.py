"""Ranks of a notebook: processes of this machine that are forked from it.

    fork     a function in the notebook's own cells then needs no pickle
    store    in the notebook's process. It outlives every rank, and has the verdict
    result   a rank's own, by a pipe

Why threads matter: a forked process has one thread, and none of its parent's pool. If PyTorch has
computed here with several threads, a rank that uses several may wait for ever. So a process that
may be lost tries it first. If it is lost, ranks use one thread.

Cost: a process a rank. They share memory with the notebook until they write to it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import secrets
import signal
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch

from shoal.comm import rendezvous
from shoal.contracts.launcher import MARK, TOKEN
from shoal.core.cores import bound_cores, quota_cores
from shoal.core.errors import PeerLost, UsageError, WorldError
from shoal.core.numbers import MOST_RANKS_HERE, check_whole
from shoal.session.session import found, leave

T = TypeVar("T")

_HERE = "127.0.0.1"
_GRACE_S = 15.0  # time for the other ranks to say why, once one has failed
_KILL_AFTER_S = 3.0
_TRIED_S = 5.0  # how long a first computation in a forked process may take
_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


class _RankTraceback(Exception):
    """The traceback of a rank, as text: the cause of the error that it raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class _RankEnd:
    """The end of one rank: its value, or its error with the traceback."""

    value: Any = None
    error: BaseException | None = None
    said: str = ""
    trace: str = ""


def launch(fn: Callable[..., T], num_ranks: int, args: Sequence[Any] = ()) -> list[T]:
    """Run a function once a rank, on processes of this machine, and return the results.

    It is for notebooks: the function may stand in a cell. It calls `shoal.init()`, and may do all
    that a script may. Nothing is left of the ranks afterwards, even after an interrupt.

    Args:
        fn: is called as `fn(*args)` on every rank.
        num_ranks: how many.
        args: the same for every rank.

    Returns:
        Each rank's result, in the order of ranks. Tensors of a GPU must be moved to the host.

    Raises:
        UsageError: this process has used CUDA, has called `shoal.init()`, or is itself a rank.
        PeerLost: a rank was killed.
        Exception: the error of the rank that failed first, caused by that rank's traceback.

    Examples:
        >>> import shoal
        >>> shoal.launch(lambda word: f"{word} {shoal.init().rank}", 2, ("rank",))
        ['rank 0', 'rank 1']
    """
    check_whole("num_ranks is a number of ranks", num_ranks, 1, MOST_RANKS_HERE, do="give 2, say")
    _check_here()
    threads = max(1, int(min(bound_cores(), quota_cores()) // num_ranks))
    if threads > 1 and not _threads_work(threads):
        logging.getLogger("shoal").warning(
            f"shoal: torch has computed in this process, so each rank computes with 1 thread, and "
            f"not with {threads}. In a fresh kernel it would have them"
        )
        threads = 1
    pipes = [_FORK.Pipe() for _ in range(num_ranks)]
    ranks = [
        _FORK.Process(target=_rank, args=(fn, args, pipes, number, threads))
        for number in range(num_ranks)
    ]
    ours = [pipe for pipe, _ in pipes]
    try:
        _start(ranks)
        for _, theirs in pipes:
            theirs.close()
        ended, failed = _run(ranks, ours, threads)
        if failed is not None:
            raise _error(failed, ended)
        return [end.value for end in ended]
    finally:
        _end(ranks)
        for pipe in ours:
            pipe.close()


def _run(
    ranks: Sequence[ForkProcess], pipes: Sequence[Connection], threads: int
) -> tuple[list[_RankEnd], int | None]:
    """Let the ranks meet and work; return how each ended, and the one that failed first.

    The store is of this call alone, because later ranks would inherit one that an error keeps.
    """
    job, token, size = uuid.uuid4().hex, secrets.token_hex(16), len(ranks)
    store = rendezvous.new_store(_HERE)  # after the fork, as its thread is not forked
    for number, pipe in enumerate(pipes):
        meeting = rendezvous.variables(_HERE, store.port, number, size, number, size)
        own = {TOKEN: token, MARK: job, "GLOO_SOCKET_IFNAME": "lo"}
        pipe.send({**meeting, **own, "OMP_NUM_THREADS": str(threads)})
    ended, first = _ends(ranks, pipes)
    verdict = rendezvous.agreed(store, token, job) if first is not None else None
    blamed = verdict[1] if verdict else None
    return ended, first if blamed is None or not ended[blamed].said else blamed


def _check_here() -> None:
    """Refuse where forked ranks cannot work."""
    if rendezvous.is_rank():
        raise UsageError(
            "this process is a rank already, and shoal.launch starts ranks",
            got=f"RANK={os.environ['RANK']}",
            do="call the function itself, or start the script without torchrun, srun or mpirun",
        )
    if found() is not None:
        raise UsageError(
            "shoal.init() was called in this process, and ranks are forked from it",
            do="restart the kernel, and call shoal.init() only in the function that is launched",
        )
    if torch.cuda.is_initialized():
        raise UsageError(
            "CUDA is in use in this process, and a process that is forked from it cannot use CUDA",
            do="restart the kernel, and use the GPU only in the function that is launched",
        )


def _threads_work(threads: int) -> bool:
    """Return whether a forked process computes with several threads, in a trial that may fail."""

    def compute() -> None:
        torch.set_num_threads(threads)
        torch.ones(1 << 20, device="cpu").add_(1.0).sum()

    (tried,) = processes = [_FORK.Process(target=compute)]
    _start(processes)
    tried.join(_TRIED_S)
    ended_well = tried.exitcode == 0
    tried.kill()
    tried.join()
    return ended_well


def _start(processes: Sequence[ForkProcess]) -> None:
    with warnings.catch_warnings():  # Python 3.12 warns of threads: see above
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()


def _rank(
    fn: Callable[..., Any],
    args: Sequence[Any],
    pipes: Sequence[tuple[Connection, Connection]],
    number: int,
    threads: int,
) -> None:
    """Be one rank, in its own process."""
    os.setsid()  # Ctrl-C reaches the notebook alone, which ends the ranks
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe = pipes[number][1]
    for other in {side for both in pipes for side in both} - {pipe}:
        other.close()
    gc.freeze()  # collecting the notebook's objects may join threads that are not here
    variables: Mapping[str, str] = pipe.recv()
    os.environ.update(variables)
    torch.set_num_threads(threads)
    try:
        end = pickle.dumps(_RankEnd(fn(*args)))
    except SystemExit as error:  # also `Served`, of a server
        end = pickle.dumps(_RankEnd() if not error.code else _failure(error))
    except BaseException as error:
        leave(error)
        end = pickle.dumps(_failure(error))
    pipe.send_bytes(end)


def _failure(error: BaseException) -> _RankEnd:
    said = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any kind: the error is another program's
        return _RankEnd(None, None, said, trace)
    return _RankEnd(None, error, said, trace)


def _ends(
    ranks: Sequence[ForkProcess], pipes: Sequence[Connection]
) -> tuple[list[_RankEnd], int | None]:
    """Wait for all ranks; return how each ended, and the first one that failed."""
    ended: dict[int, _RankEnd] = {}
    first, deadline = None, float("inf")
    left: dict[Any, int] = {rank.sentinel: number for number, rank in enumerate(ranks)}
    left.update({pipe: number for number, pipe in enumerate(pipes)})
    while left and time.monotonic() < deadline:
        for ready in wait(list(left), 0.2):
            number = left.pop(ready)
            if number not in ended:
                try:
                    has_told = pipes[number].poll()  # a rank's own child may keep its pipe open
                    data = pipes[number].recv_bytes() if has_told else b""
                except (EOFError, OSError):
                    data = b""
                ended[number] = pickle.loads(data) if data else _killed_end(ranks[number])
            if first is None and number in ended and ended[number].said:
                first, deadline = number, time.monotonic() + _GRACE_S
    return [ended.get(number, _RankEnd()) for number in range(len(ranks))], first


def _killed_end(rank: ForkProcess) -> _RankEnd:
    rank.join()
    code = rank.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
    return _RankEnd(said=how)


def _error(rank: int, ended: Sequence[_RankEnd]) -> BaseException:
    """Return the error of a rank, with its traceback for a cause."""
    end = ended[rank]
    if not end.trace:
        return PeerLost(
            f"rank {rank} {end.said}",
            do="see what it printed last; a machine that is short of memory kills processes",
            rank=rank,
        )
    error = end.error
    if not isinstance(error, Exception):
        error = WorldError(f"rank {rank} failed: {end.said}", rank=rank)
    error.__cause__ = _RankTraceback(end.trace)
    error.add_note(f"It was raised on rank {rank} of {len(ended)}.")
    return error


def _end(ranks: Sequence[ForkProcess]) -> None:
    """End all that is left of the ranks, with the processes that they have started."""
    groups = [rank.pid for rank in ranks if rank.pid is not None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _KILL_AFTER_S
        for group in groups:
            _send(group, number)
        for rank in ranks:
            if rank.pid is not None:
                if number == signal.SIGKILL:
                    rank.kill()  # it may have no group of its own yet
                rank.join(max(0.0, deadline - time.monotonic()))
    while any(_send(group, 0) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.01)


def _send(group: int, number: int) -> bool:
    """Send a signal to a process group; say whether anything is left of it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's by now
        return False
    return True
