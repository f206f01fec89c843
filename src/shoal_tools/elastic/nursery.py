"""A process that has imported PyTorch and Shoal, and forks a rank whenever its agent asks.

    agent    ->  JSON of a command and an environment, with a socket for the rank
    nursery  ->  pid of the rank · exit code of a rank

Why here: to start Python and import PyTorch takes two to four seconds of a processor, each time
that hosts come or go. A fork takes 20 ms, and shares the memory. The nursery is itself a fork of
the agent, made before that has any thread. It runs no line of the script, and never uses a device.

Cost: one process, which sleeps. Ranks die with it, and it dies with the agent, by the kernel.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, final

import torch

from shoal.comm.rendezvous import agent_variable
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.feature import Feature
from shoal.contracts.strategy import Strategy
from shoal.core.numbers import whole
from shoal.core.registry import of

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05  # how often it looks for ranks that have ended
_MOST_BYTES = 1 << 20  # length of an order
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Nursery:
    """The agent's side. Make it before the process has threads."""

    def __init__(self) -> None:
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            self._own.close()
            _die_with(parent)
            os.setsid()
            _serve(theirs)
        theirs.close()
        self._codes: dict[int, int] = {}
        self._is_open = True

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], number: int
    ) -> int | None:
        """Start a rank, which has the open file of that number too; return its pid.

        None means that the nursery has ended.
        """
        order = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self._own, [order], [number])
            while "pid" not in (said := json.loads(self._own.recv(_MOST_BYTES))):
                self._codes[said["ended"]] = said["code"]
        except (OSError, ValueError):
            self._is_open = False
            return None
        return int(said["pid"])

    def code(self, pid: int) -> int | None:
        """Return the exit code of a rank, -N for signal N; None while it runs."""
        with suppress(OSError):
            while self._is_open and select.select([self._own], [], [], 0)[0]:
                text = self._own.recv(_MOST_BYTES)
                if not text:
                    self._is_open = False
                    break
                said = json.loads(text)
                self._codes[said["ended"]] = said["code"]
        return self._codes.get(pid, None if self._is_open else -signal.SIGKILL)

    def close(self) -> None:
        """End it, with all ranks."""
        self._own.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(agent: socket.socket) -> None:
    """Fork ranks until the agent ends; a rank runs its script here, and ends its process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _warm_up()
    while True:
        if not select.select([agent], [], [], _LOOK_S)[0]:
            _tell_end(agent)
            continue
        try:
            order, numbers, _, _ = socket.recv_fds(agent, _MOST_BYTES, 1)
        except OSError:
            order, numbers = b"", []
        if not order:
            os._exit(0)
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            agent.close()
            _become_rank(parent, numbers[0], json.loads(order))
        os.close(numbers[0])
        agent.send(json.dumps({"pid": pid}).encode())


def _warm_up() -> None:
    """Import everything that a rank's first optimizer and first plan would import."""
    import_module("torch._dynamo")
    contracts: tuple[Any, ...] = (Strategy, Exchange, Codec, Feature)
    for contract in contracts:
        of(contract)


def _tell_end(agent: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            agent.send(json.dumps({"ended": ended[0], "code": code}).encode())


def _become_rank(parent: int, number: int, order: Mapping[str, Any]) -> None:
    """Be a rank, in a process that was forked just now."""
    os.setsid()
    _die_with(parent)
    for each in _SIGNALS:
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    os.environ.update({**order["environment"], **agent_variable(number)})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)  # PYTHONUNBUFFERED came too late
    if threads := whole(os.environ.get("OMP_NUM_THREADS", "")):
        torch.set_num_threads(threads)  # the variable came too late, too
    if "numpy" in sys.modules:  # else all forks draw the same numbers
        sys.modules["numpy"].random.seed()
    _end(_run(order["command"]))


def _run(command: list[str]) -> int:
    """Run a script, or a module, as Python does; return its exit code."""
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(command)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        error.__traceback__ = frames
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error, frames)
        return 1
    return 0


def _run_script(command: list[str]) -> None:
    path = command[0]
    sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(path))
    program = types.ModuleType("__main__")
    program.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, program.__dict__)


def _end(code: int) -> None:
    """End this process as Python does, but for the frames below it, which are the agent's."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = code or 1
    os._exit(code & 0xFF)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
