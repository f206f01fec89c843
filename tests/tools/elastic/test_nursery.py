"""A nursery: forks run scripts as Python does, and end with the codes that it gives."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import lives

from shoal_tools.elastic import nursery
from shoal_tools.elastic.nursery import Nursery

pytestmark = [pytest.mark.quick, pytest.mark.processes, pytest.mark.timeout(120)]

SCRIPTS = {
    "ends": ("print(__name__, __file__, sys.argv[1:], os.environ['RANK'])", 0),
    "a number": ("sys.exit(75)", 75),
    "a text": ("sys.exit('no data')", 1),
    "an error": ("def work():\n    raise ValueError('of mine')\nwork()", 1),
    "a signal": ("os.kill(os.getpid(), 9)", -9),
    "an exit handler": ("import atexit\natexit.register(print, 'last', flush=True)", 0),
    "a thread": ("import threading\nthreading.Timer(0.1, print, ['late']).start()", 0),
    "a pickle": ("import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))", 0),
    "a module beside it": ("import beside", 0),
    "no such name": ("nothing_of_that_name", 1),
}


@pytest.fixture(scope="module")
def made() -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nursery, "_warm_up", lambda: None)  # a second, of which nothing here hangs
        own = Nursery()
    yield own
    own.close()


def ended(made: Nursery, pid: int) -> int:
    until_s = time.monotonic() + 60
    while (code := made.code(pid)) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return code


def started(made: Nursery, *command: str) -> int:
    own, theirs = socket.socketpair()
    with own, theirs:
        pid = made.start(command, {"RANK": "3"}, theirs.fileno())
    assert pid is not None
    return pid


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_ends_as_with_python(name: str, made: Nursery, tmp_path: Path) -> None:
    text, code = SCRIPTS[name]
    script, out = tmp_path / "script.py", tmp_path / "out"
    (tmp_path / "beside.py").write_text("")
    head = f"import os, sys\nsys.stdout = sys.stderr = open({str(out)!r}, 'w', buffering=1)\n"
    script.write_text(f"{head}{text}\n")
    assert ended(made, started(made, str(script), "--epochs", "2")) == code
    printed = out.read_text()
    expected = {
        "ends": f"__main__ {script} ['--epochs', '2'] 3\n",
        "a text": "no data\n",
        "an exit handler": "last\n",
        "a thread": "late\n",
    }
    if name in expected:
        assert printed == expected[name]
    if "err" in name or "such" in name:
        assert str(script) in printed and "nursery.py" not in printed
    if name == "an error":
        assert "in work" in printed and printed.endswith("ValueError: of mine\n")


def test_a_module_runs_as_with_python(made: Nursery) -> None:
    assert ended(made, started(made, "-m", "this_is_no_module")) == 1
    assert ended(made, started(made, "-m", "timeit", "-n", "1", "-r", "1", "pass")) == 0


def test_ranks_die_with_the_nursery(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(60)\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nursery, "_warm_up", lambda: None)
        own = Nursery()
    pid = started(own, str(script))
    assert lives(str(pid))
    os.kill(own._pid, signal.SIGKILL)
    until_s = time.monotonic() + 20
    while lives(str(pid)):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert own.code(pid) == -signal.SIGKILL
    assert own.start((str(script),), {}, sys.stderr.fileno()) is None
    own.close()
