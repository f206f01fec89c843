"""A stranger who reaches every port of a job, from before its ranks start until they have ended.

Whatever listens in this process or below it is found within milliseconds. To the store he talks in
PyTorch's own way; to every other port he sends bytes. He runs beside the job, on threads.
"""

from __future__ import annotations

import datetime
import os
import pickle
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from torch.distributed import TCPStore

from shoal.contracts.store_values import Values
from shoal.core.open_files import raise_limit

_LISTENS = "0A"  # as /proc/net/tcp writes it
_HELLO_S = 0.2  # from one greeting of a port to the next


class Evil:
    """Leaves a mark where a pickle of it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.makedirs, (str(self.mark), 0o777, True)


def pickles(mark: Path) -> list[bytes]:
    """Pickles in the forms in which readers of such might look for them."""
    plain = [pickle.dumps(Evil(mark), protocol) for protocol in range(6)]
    lengths = [struct.pack("<q", len(text)) + text for text in plain]
    return plain + lengths + [struct.pack(">q", len(text)) + text for text in plain]


def bad_values(mark: Path) -> Iterator[bytes]:
    """Values of every kind that may be wrong, without end."""
    draw = random.Random(0)
    fixed = [
        b"",
        b"?",
        b"\x00" * 1000,
        b"null",
        b"{}",
        b"[" * 10_000,
        b'{"what": "rank 0 failed", "rank": 0}',
        b'{"count": 1e400, "at": "x"}',
        b"9" * 10_000,
        *pickles(mark),
    ]
    while True:
        yield from fixed
        yield draw.randbytes(draw.randrange(1, 200))
        yield bytes(16) + draw.choice(fixed)


class Stranger:
    """Does what he can to the ports of jobs that this process starts, inside `with`.

    Args:
        mark: a folder that comes to be where a pickle of his is read.
        values: how many bad values he puts in each key of the store.
        connections: how many he opens to each port, and leaves idle.
        token: signs his values, as somebody can who knows that a job has none; None to sign none.
    """

    def __init__(
        self, mark: Path, values: int = 0, connections: int = 0, token: str | None = None
    ) -> None:
        self.mark = mark
        self.written: Counter[str] = Counter()  # values, by key
        self.idle: Counter[int] = Counter()  # connections, by port
        self.greeted: Counter[int] = Counter()  # ports that are no store's
        self._values, self._connections, self._token = values, connections, token
        self._own = set(listening())
        self._stop = Event()
        self._threads: list[Thread] = []

    def __enter__(self) -> Stranger:
        raise_limit()
        self._begin(self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _begin(self, work: Callable[..., None], *arguments: int) -> None:
        thread = Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _look(self) -> None:
        """Find ports as they come; a launcher's turns out to be a store once it has ranks."""
        known: dict[int, bool] = dict.fromkeys(self._own, True)
        while not self._stop.wait(0.005):
            for port, is_store in listening().items():
                if port not in known:
                    self._begin(self._connect, port)
                if port not in known or is_store > known[port]:
                    known[port] = is_store
                    self._begin(self._write if is_store else self._greet, port)

    def _connect(self, port: int) -> None:
        """Connections that say nothing."""
        held = []
        with suppress(OSError):
            while len(held) < self._connections and not self._stop.is_set():
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                self.idle[port] += 1
        self._stop.wait()
        for connection in held:
            connection.close()

    def _greet(self, port: int) -> None:
        """Bytes, pickles among them, over connections that stay open."""
        texts = [*pickles(self.mark), b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 99]
        held = []
        while not self._stop.is_set():
            for text in texts:
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    held[-1].sendall(text)
                    self.greeted[port] += 1
            self._stop.wait(_HELLO_S)
            while len(held) > (0 if self._stop.is_set() else len(texts)):
                held.pop(0).close()

    def _write(self, port: int) -> None:
        """Bad values in each key, as keys come."""
        timeout, bad = datetime.timedelta(seconds=5), bad_values(self.mark)
        with suppress(RuntimeError):  # the job has ended
            store = TCPStore(
                "127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            while not self._stop.wait(0.001):
                for key in store.list_keys():
                    for _ in range(min(50, self._values - self.written[key])):
                        if self._token is None:
                            store.set(key, next(bad))
                        else:
                            scope, _, name = key.rpartition("/")
                            Values(store, self._token, scope).put(name, next(bad))
                        self.written[key] += 1


def listening() -> dict[int, bool]:
    """The ports at which this process listens, and those below it; of each whether it is a store.

    A store is what the environment of a rank names, or what this process itself holds.
    """
    found: dict[int, bool] = {}
    tree = below(os.getpid())
    stores = {stated(pid, "MASTER_PORT") for pid in tree}
    for pid in tree:
        with suppress(OSError, ValueError):
            sockets = set()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    sockets.add(os.readlink(descriptor))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    place, state, inode = (line.split()[column] for column in (1, 3, 9))
                    if state == _LISTENS and f"socket:[{inode}]" in sockets:
                        port = int(place.rpartition(":")[2], 16)
                        is_store = str(port) in stores or pid == os.getpid()
                        found[port] = found.get(port, False) or is_store
    return found


def below(pid: int) -> list[int]:
    """A process and all that it has started, and they."""
    found = [pid]
    for process in found:
        with suppress(OSError):
            for task in Path(f"/proc/{process}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def stated(pid: int, variable: str) -> str:
    """A variable in a process's environment; '' where it has none."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{variable}=".encode()):
                return entry.decode().partition("=")[2]
    return ""
