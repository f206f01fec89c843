"""A rank's processes in a task, without Spark: what the driver is told, and what is left."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal_tools.launch.barrier import TaskSeat
from shoal_tools.launch.desk import ERR, EXIT, OUT, SIGNAL
from shoal_tools.launch.executor_rank import ExecutorRank
from shoal_tools.launch.task_holder import PYTHON, TaskOrder, _Reports

pytestmark = [pytest.mark.quick, pytest.mark.processes]


class Desk:
    """The connection to a driver; what comes from it is put into `coming`."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.coming: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send_bytes(self, message: bytes) -> None:
        self.told.append(message)

    def recv_bytes(self) -> bytes:
        if not (message := self.coming.get()):
            raise EOFError
        return message

    def of(self, kind: bytes) -> bytes:
        return b"".join(message[1:] for message in self.told if message[:1] == kind)


def held(folder: Path, *command: str, desk: Any = None, files: Any = None) -> tuple[int, Desk]:
    folder.mkdir()
    desk = desk or Desk()
    order = TaskOrder(command, {"SHOWN": "yes"}, files or {}, "/no/such/folder", ("", 0), "secret")
    place = TaskSeat(1, "b", "rank 1 on b", {"RANK": "1"})
    return _Reports(desk).run(order, ExecutorRank(place, folder)), desk


def test_lines_and_the_exit_code_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    leaves = "echo $RANK $SHOWN $SHOAL_TOKEN; echo no >&2; setsid sleep 600 & echo $! >pid; exit 3"
    code, desk = held(tmp_path / "a", "sh", "-c", leaves)
    assert (code, desk.of(OUT), desk.of(ERR)) == (3, b"1 yes secret\n", b"no\n")
    assert desk.told[-1] == EXIT + b"3"
    status = Path("/proc", (tmp_path / "a" / "pid").read_text().strip(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_files_come_along_and_python_is_that_of_the_executor(tmp_path: Path) -> None:
    files = {"there/says.py": b"import sys, beside; print(sys.executable)", "beside.py": b""}
    code, desk = held(tmp_path / "a", PYTHON, "there/says.py", files=files)
    assert (code, desk.of(OUT).decode().strip()) == (0, sys.executable)


def test_a_command_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, desk = held(tmp_path / "a", "/no/such/program")
    assert code == 127 and b"/no/such/program" in desk.of(ERR)
    monkeypatch.setattr(
        "shoal_tools.launch.executor_rank._dying_with_us", lambda words: words
    )  # no setpriv
    code, desk = held(tmp_path / "b", "/no/such/program")
    assert code == 127 and b"cannot be started" in desk.of(ERR)
    assert desk.told[-1] == EXIT + b"127"


@pytest.mark.parametrize(
    ("message", "code"), [(SIGNAL + b"15", 128 + signal.SIGTERM), (b"", 128 + signal.SIGKILL)]
)
def test_signals_of_the_driver_reach_the_rank_and_none_outlives_it(
    tmp_path: Path, message: bytes, code: int
) -> None:
    desk = Desk()

    def later() -> None:
        while OUT + b"here\n" not in desk.told:
            threading.Event().wait(0.01)
        desk.coming.put(message)

    threading.Thread(target=later, daemon=True).start()
    found, _ = held(tmp_path / "a", "sh", "-c", "echo here; exec sleep 600", desk=desk)
    assert found == code and desk.told[-1] == EXIT + str(128 - code).encode()
