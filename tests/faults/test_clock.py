"""A jump of the wall clock changes nothing: no limit, beat, period or signature reads it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.contracts.launcher import Job
from shoal_tools.launch.local import Local

LIBRARY = Path(shoal.__file__).parent
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
FOR_PEOPLE = {
    ("comm/roll_call.py", "strftime"),  # the time of day that a process came, in messages
    # the age of files that nobody holds, whose times are those of this clock
    ("checkpoint/host_memory.py", "time"),
    ("core/cache_folder.py", "now"),  # the day that a kept file was written
}

# the wall clock of a process, and of torch in it, so many seconds ahead as a file says; the kernel
# knows nothing of that, so it must not be ahead while gloo lets the kernel wait, as at the end
SHIM = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) {
    long seconds = 0;
    const char *path = getenv("CLOCK");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec; now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
"""

TRAIN = """
import hashlib, os, sys, time
from pathlib import Path
import torch, shoal
from torch.utils.data import DataLoader, TensorDataset

rank = shoal.init().rank
torch.manual_seed(0)
model, loss_fn = torch.nn.Linear(8, 4), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
rows = TensorDataset(torch.randn(128, 8), torch.randint(0, 4, (128,)))
loader = shoal.shard(DataLoader(rows, 4, shuffle=True, num_workers=1))
shoal.parallelize(
    model, loss_fn, optimizer, sample=(torch.randn(4, 8) + rank, torch.zeros(4, dtype=torch.long)),
    pins={"*": "replicate:direct"}, **eval(os.environ["OPTIONS"]),
)
objects = {"model": model, "optimizer": optimizer, "loader": loader}
jumps = {8: 86400, 16: 400000000, 24: -86400}
with shoal.Checkpoints(os.environ["FOLDER"], every_s=1.0, keep=50, **objects) as checkpoints:
    began, first = time.monotonic(), time.time()
    for x, y in (batch for _ in range(2) for batch in loader):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        checkpoints.step()
        time.sleep(0.1)
        if rank == 0 and checkpoints.steps in jumps:
            Path(os.environ["CLOCK"]).write_text(str(jumps[checkpoints.steps]))
away = time.time() - first - (time.monotonic() - began)
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"steps {checkpoints.steps}, weights {hashlib.md5(bits).hexdigest()}, away {away:.0f} s")
"""


def wall_reads(path: Path) -> Iterator[str]:
    """The calls in a file that read the wall clock."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in WALL.get(of, ()):
                yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (name.name for name in node.names if name.name in WALL["time"])


def test_the_library_reads_the_wall_clock_for_people_only() -> None:
    found = {
        (str(path.relative_to(LIBRARY)), call)
        for path in LIBRARY.rglob("*.py")
        for call in wall_reads(path)
    }
    assert found == FOR_PEOPLE


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("options", "fewest"), [("{}", 3), ("{'local_steps': 5}", 2)])
def test_a_job_goes_on_as_the_clock_jumps(
    options: str, fewest: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a day ahead, twelve years ahead, and a day back, on both ranks at once."""
    (tmp_path / "clock.c").write_text(SHIM)
    shim = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "clock.c"], check=True)
    said: dict[str, set[str]] = {}
    for clock in ("jumps", "goes on"):
        folder = tmp_path / clock
        environment = {"FOLDER": str(folder), "OPTIONS": options, "CLOCK": str(tmp_path / "jump")}
        if clock == "jumps":
            environment["LD_PRELOAD"] = str(shim)
        result = Local().launch(Job((sys.executable, "-c", TRAIN), 2, environment))
        printed = capfd.readouterr()
        assert result.exit_codes == (0, 0), printed.err
        assert "shoal: a " not in printed.err  # such as: a peer was lost
        said[clock] = {line.partition("steps ")[2] for line in printed.out.splitlines()}
        # in some four seconds; on local steps a checkpoint waits for the end of a round
        assert fewest <= len(list(folder.glob("step-*"))) <= 20
    ends = {clock: [line.rsplit(" ", 2)[1] for line in lines] for clock, lines in said.items()}
    assert all(abs(int(away)) > 80000 for away in ends["jumps"])
    assert all(abs(int(away)) < 5 for away in ends["goes on"])
    weights = {c: {line.partition(", away")[0] for line in lines} for c, lines in said.items()}
    assert weights["jumps"] == weights["goes on"]
