"""The far end of a connection to a host: looks at the host, then runs one agent and ends with it.

The launcher sends this file through ssh to the host's own Python, so it imports nothing but the
standard library, and says clearly if the host lacks something. It reads orders from its standard
input, one JSON object a line, and writes frames, `kind length\\n` and then the bytes:

    look     tells of the job's needs                m   a message, JSON
    reach    tries the first host's port             o   lines of ranks
    start    runs the agent                          e   the same on standard error
    signal   is passed on to the agent               a   messages of an agent that speaks
    tell     a message for an agent that speaks
    beat     the launcher is alive

Where the input ends, or nothing comes for a while, or nobody reads, the launcher is gone, and the
agent and its ranks are ended. So no way of losing the connection leaves an orphan.

Guarded by tests/tools/launch/test_host_end.py. Cost: one sleeping process a host.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.util
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

HELLO = b"shoal host 1\n"  # comes after all that the shell's own files print
SILENT_S = 60.0  # a launcher that is silent for so long is gone
_IDLE_S = 600.0  # the same before anything is started, while other hosts are looked at
REACH_S = 10.0
_KILL_AFTER_S = 3.0
_END = "SHOAL_END"  # the variable that all of this host's processes have, and no other's
_KEPT = 1 << 16  # bytes of the agent's own lines that are kept
# Variables of ranks that the user has not set. Lines come at once, and PyTorch writes no C++ frames
# for a connection that broke: Shoal says which peer was lost.
POLITE = {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_FOLDER = "shoal-job-"  # the first part of a job's folder's name
_YOUNG_S = 60.0  # a folder of this age may not be locked yet

# Runs a rank, its lines into pipes of its own, and leaves its exit code in a file. Torchrun's
# SIGTERM reaches the whole group, and the shell outlives it (trap) to write the code.
RANK_SCRIPT = """
trap : TERM INT
own=$TORCHELASTIC_RESTART_COUNT.$RANK
export SHOAL_BLAMED="$SHOAL_END/blamed.$own"
setpriv --pdeathsig KILL "$@" >"$SHOAL_END/$LOCAL_RANK.out" 2>"$SHOAL_END/$LOCAL_RANK.err"
code=$?
echo $code >"$SHOAL_END/code.$own" && mv "$SHOAL_END/code.$own" "$SHOAL_END/exit.$own"
exit $code
"""


# Runs an agent whose ranks have its own output.
AGENT_SCRIPT = 'exec "$@" >"$SHOAL_END/0.out" 2>"$SHOAL_END/0.err"'


class FarEnd:
    """One host's side of the connection."""

    def __init__(self, orders: int = 0, frames: int = 1) -> None:
        self._orders, self._frames = orders, frames
        self._rest = b""
        self._heard_s, self.silent_s = time.monotonic(), SILENT_S
        self._is_stuck = False  # nothing reads frames
        self._listener: socket.socket | None = None

    def run(self) -> None:
        """Obey orders until the input ends, or an agent has run."""
        while (order := self._next()) is not None:
            if "look" in order:
                self.say(facts=self._look(order["look"]))
            elif "reach" in order:
                self.say(reached=_reach(*order["reach"]))
            elif "start" in order:
                self.stop_listening()
                with job_folder() as folder:
                    _HostAgent(self, folder, order["start"]).run()
                return

    def say(self, **message: Any) -> None:
        """Send one message to the launcher."""
        self.write(b"m", json.dumps(message).encode())

    def write(self, kind: bytes, data: bytes) -> None:
        """Send one frame. A launcher that has ended is noticed where orders are read."""
        frame = b"%s %d\n%s" % (kind, len(data), data)
        with suppress(BrokenPipeError):
            while frame and not self._is_stuck:
                if select.select([], [self._frames], [], self.silent_s)[1]:
                    part = frame[: select.PIPE_BUF]  # so much does not block
                    frame = frame[os.write(self._frames, part) :]
                else:
                    self._is_stuck = True

    def heard(self) -> list[dict[str, Any]] | None:
        """Read the orders that have come; None where the launcher is gone."""
        data = os.read(self._orders, 1 << 16)
        if not data:
            return None
        self._heard_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    @property
    def is_alone(self) -> bool:
        """Whether the launcher is gone: it was silent for too long, or reads nothing."""
        return self._is_stuck or time.monotonic() > self._heard_s + self.silent_s

    def stop_listening(self) -> None:
        """Free the port that the other hosts have tried, if this host has it."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # an accept in a thread keeps it bound else
            self._listener.close()
            self._listener = None

    @property
    def orders(self) -> int:
        """The descriptor that orders come from."""
        return self._orders

    def _next(self) -> dict[str, Any] | None:
        while select.select([self._orders], [], [], _IDLE_S)[0]:
            orders = self.heard()
            if orders is None:
                return None
            for order in orders:
                if "beat" not in order:
                    return order
        return None

    def _look(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Say which of a job's needs this host has."""
        facts: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3]))}
        facts["machine"] = _machine()
        facts["lacks"] = [tool for tool in ("sh", "setpriv") if shutil.which(tool) is None]
        try:
            for path, text in wanted["send"].items():
                _place(Path(wanted["chdir"], path), base64.b64decode(text))
            os.chdir(wanted["chdir"])
        except OSError as error:
            return {**facts, "folder": str(error)}
        sys.path[:0] = [os.getcwd(), *wanted["path"]]
        for package in ("torch", "shoal"):
            facts[package] = _release(package)
        facts["files"] = {path: _digest(Path(path)) for path in wanted["files"]}
        facts["modules"] = {name: _is_there(name) for name in wanted["modules"]}
        facts["program"] = shutil.which(wanted["program"]) or ""
        if wanted["listen"] is not None:
            facts.update(self._listen(*wanted["listen"]))
        return facts

    def _listen(self, port: int, proof: str) -> dict[str, Any]:
        """Listen where ranks will meet, so that the other hosts can try to reach it."""
        try:
            if socket.has_dualstack_ipv6():
                place, both = ("::", port), True
                listener = socket.create_server(place, family=socket.AF_INET6, dualstack_ipv6=both)
            else:
                listener = socket.create_server(("", port))
        except OSError as error:
            return {"taken": error.strerror or str(error)}
        self._listener = listener

        def answer() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:  # it is closed
                    return
                with suppress(OSError), caller:
                    caller.sendall(proof.encode())

        threading.Thread(target=answer, daemon=True).start()
        return {"port": listener.getsockname()[1]}


class _HostAgent:
    """One agent with its ranks, from its start to an end that leaves nothing."""

    def __init__(self, end: FarEnd, folder: Path, order: dict[str, Any]) -> None:
        self._end, self._folder, self._grace_s = end, folder, order["grace_s"]
        end.silent_s = order["silent_s"]
        self._selector = selectors.DefaultSelector()
        self._told: set[str] = set()  # files of exit codes that the launcher has heard of
        self._kill_s: float | None = None
        self._own_lines = b""
        self._pipes: list[_RankPipe] = []
        for rank in range(order["slots"]):
            for name, kind in ((f"{rank}.out", b"o"), (f"{rank}.err", b"e")):
                self._pipes.append(_RankPipe(folder / name, kind, end.write))
        left = marked(order["replaces"]) if "replaces" in order else []
        for pid in left:  # processes of an earlier connection
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._line, theirs = socket.socketpair()
        threads = max(1, len(os.sched_getaffinity(0)) // order["slots"])
        polite = {**POLITE, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *order["command"]],
            env={**polite, **os.environ, **order["environment"], _END: str(folder)},
            stdin=theirs.fileno() if order.get("speaks") else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()

    def run(self) -> None:
        """Pass lines, signals and exit codes on until the agent has ended."""
        done = os.pidfd_open(self._process.pid)
        assert self._process.stdout is not None
        self._watch(self._end.orders, self._obey)
        self._watch(self._process.stdout.fileno(), self._keep)
        self._watch(self._line.fileno(), self._hear_agent)
        self._watch(done, lambda: None)
        for pipe in self._pipes:
            self._watch(pipe.reader, pipe.pass_on)
        while self._process.poll() is None:
            for key, _ in self._selector.select(timeout=0.1):
                key.data()
            self._tell_exits()
            if self._end.is_alone:
                self._leave()
            if self._kill_s is not None and time.monotonic() > self._kill_s:
                self._kill()
        self._kill()
        self._tell_exits()
        for pipe in self._pipes:
            pipe.close()
        code = self._process.wait()
        lines = self._own_lines.decode(errors="replace")
        self._end.say(ended=code if code >= 0 else 128 - code, lines=lines)

    def _watch(self, descriptor: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def _obey(self) -> None:
        orders = self._end.heard()
        if orders is None:
            self._selector.unregister(self._end.orders)
            self._leave()
            return
        for order in orders:
            if "signal" in order:
                self._pass_on(order["signal"])
            elif "tell" in order:
                with suppress(OSError):  # the agent has ended
                    self._line.sendall(order["tell"].encode() + b"\n")

    def _leave(self) -> None:
        """End in order, because the launcher is gone."""
        if self._kill_s is None:
            self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._kill()
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        if self._kill_s is None:
            self._kill_s = time.monotonic() + self._grace_s

    def _kill(self) -> None:
        """Kill the agent, and all that it has started here, until nothing is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        give_up = time.monotonic() + _KILL_AFTER_S
        while (left := marked(f"{_END}={self._folder}")) and time.monotonic() < give_up:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _keep(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        self._own_lines = (self._own_lines + data)[-_KEPT:]
        if not data:
            self._selector.unregister(self._process.stdout.fileno())

    def _hear_agent(self) -> None:
        data = b""
        with suppress(OSError):
            data = self._line.recv(1 << 16)
        if data:
            self._end.write(b"a", data)
        else:
            self._selector.unregister(self._line.fileno())

    def _tell_exits(self) -> None:
        """Tell of each rank that has ended since the last time."""
        for path in sorted(self._folder.glob("exit.*"), key=lambda path: path.stat().st_mtime_ns):
            if path.name not in self._told:
                self._told.add(path.name)
                _, attempt, rank = path.name.split(".")
                said = self._folder / f"blamed.{attempt}.{rank}"
                blamed = int(said.read_text() or rank) if said.exists() else int(rank)
                code = int(path.read_text())
                self._end.say(rank=int(rank), attempt=int(attempt), code=code, blamed=blamed)


class _RankPipe:
    """A pipe for lines of ranks: whole lines pass, and states of a bar as they come."""

    def __init__(self, path: Path, kind: bytes, write: Callable[[bytes, bytes], None]) -> None:
        os.mkfifo(path)
        self._kind, self._write, self._rest = kind, write, b""
        self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._writer = os.open(path, os.O_WRONLY)  # a rank that ends does not end the pipe

    def pass_on(self) -> None:
        """Send the whole lines that have come."""
        with suppress(BlockingIOError):
            data = self._rest + os.read(self.reader, 1 << 16)
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._rest = data[whole:]
            if whole:
                self._write(self._kind, data[:whole])

    def close(self) -> None:
        """Send the rest, as the ranks are gone."""
        os.close(self._writer)
        with suppress(BlockingIOError):
            while data := os.read(self.reader, 1 << 16):
                self._rest += data
        if self._rest:
            self._write(self._kind, self._rest.rstrip(b"\n") + b"\n")
        os.close(self.reader)


def _reach(address: str, port: int, proof: str) -> dict[str, str]:
    """Try to reach the first host's port; say by which address of this host, or why not."""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connection:
            said = b""
            while len(said) < len(proof) and (data := connection.recv(len(proof))):
                said += data
            if said.decode(errors="replace") != proof:
                return {"problem": "another program answers there"}
            return {"by": connection.getsockname()[0]}
    except OSError as error:
        return {"problem": str(error.strerror or error)}


def _place(path: Path, data: bytes) -> None:
    """Write a file that was sent, unless it is there already."""
    if _digest(path) != hashlib.sha256(data).hexdigest():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _digest(path: Path) -> str:
    """Return the file's digest, or '' where there is none to read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _release(package: str) -> str:
    """Return the release that Python would import; '' for none."""
    if not _is_there(package):
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it runs from its sources
        return "unknown"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def job_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a folder for a job's own files, and remove it at the end.

    A process that is killed, or its host, leaves its folder. The next one of the same user removes
    it. A lock, which ends with its process, tells which folders are in use.

    Args:
        parent: folder for all of them; the system's temporary one by default.
    """
    top = parent or tempfile.gettempdir()
    for left in Path(top).glob(f"{_FOLDER}*"):
        with suppress(OSError):  # it is in use, another user's, no folder, or gone
            _remove_left(left)
    folder = tempfile.mkdtemp(prefix=_FOLDER, dir=top)
    lock = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: no process can remove it there either
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(folder: Path) -> None:
    """Remove a folder that no process uses. OSError if one does, or if it is another user's."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(number)
        if state.st_uid == os.getuid() and time.time() - state.st_mtime > _YOUNG_S:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(number)


def _machine() -> str:
    """Return a name of this machine's network: equal for two names of one host."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def marked(setting: str) -> list[int]:
    """List processes of this machine that have this in their environment, as NAME=value."""
    wanted, found = setting.encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended, or it is another user's
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the end of the input ends all; to be ignored would pass on to ranks
        signal.signal(number, lambda *_: None)
    os.write(1, HELLO)
    FarEnd().run()


if __name__ == "__main__":
    main()
