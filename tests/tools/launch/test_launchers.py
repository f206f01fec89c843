"""What every launcher promises, whichever way it starts its ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from shoal.contracts.launcher import Job, Launcher
from shoal.core.errors import UsageError
from shoal.core.registry import named, of

pytestmark = pytest.mark.quick

# Each rank says where it stands, and leaves a process behind that has moved to a session of its
# own.
PLACE = """
set -u  # an unset variable is an error
: $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $SHOAL_HOST $OMP_NUM_THREADS
echo $RANK $WORLD_SIZE $GREETING >"$OUT/place$RANK"
setsid sh -c 'echo $$ >"$OUT/pid$RANK"; exec sleep 600' &
while test ! -s "$OUT/pid$RANK"; do sleep 0.02; done
"""
# Rank 1 fails first; rank 0 fails when it has seen that.
ONE_LATER = """
test $RANK = 1 && { touch "$OUT/failing"; exit 3; }
while test ! -e "$OUT/failing"; do sleep 0.02; done
sleep 0.5
exit 4
"""


MARKS = {
    "lab": pytest.mark.lab,
    "spark": [pytest.mark.spark, pytest.mark.slow],
    "ssh": pytest.mark.slow,
}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in of(Launcher)])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    launcher: Launcher = named(Launcher, request.param)
    if reason := launcher.missing():
        pytest.skip(reason)
    return launcher


def alive(pid_file: Path) -> bool:
    status = Path("/proc", pid_file.read_text().strip(), "status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.processes
def test_ranks_know_their_place_and_leave_nothing(launcher: Launcher, tmp_path: Path) -> None:
    result = launcher.launch(
        Job(("sh", "-c", PLACE), 2, {"GREETING": "hello", "OUT": str(tmp_path)})
    )
    assert (result.exit_codes, result.first_failure, result.exit_code) == ((0, 0), None, 0)
    assert [(tmp_path / f"place{rank}").read_text() for rank in (0, 1)] == [
        "0 2 hello\n",
        "1 2 hello\n",
    ]
    assert not any(alive(tmp_path / f"pid{rank}") for rank in (0, 1))


@pytest.mark.processes
def test_the_first_failure_in_time_is_the_verdict(launcher: Launcher, tmp_path: Path) -> None:
    result = launcher.launch(Job(("sh", "-c", ONE_LATER), 2, {"OUT": str(tmp_path)}))
    assert (result.first_failure, result.exit_code) == (1, 3)


@pytest.mark.processes
def test_a_rank_that_dies_takes_the_others_with_it(launcher: Launcher) -> None:
    began = time.monotonic()
    result = launcher.launch(
        Job(("sh", "-c", "test $RANK = 1 && kill -9 $$; exec sleep 600"), 2, grace_s=0.2)
    )
    assert (result.exit_codes, result.first_failure) == ((143, 137), 1)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("command", "ranks", "named_in_error"),
    [
        ((), 2, "no command"),
        (("no-such-program",), 2, "no-such-program"),
        ((sys.executable,), 0, "ranks=0"),
    ],
)
def test_a_job_that_cannot_start_is_refused(
    launcher: Launcher, command: tuple[str, ...], ranks: int, named_in_error: str
) -> None:
    with pytest.raises(UsageError, match=named_in_error):
        launcher.launch(Job(command, ranks))
