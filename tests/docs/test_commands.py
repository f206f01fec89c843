"""The commands that pages show are run as they stand there, but for what a reader fills in.

`R` counts hosts and `HOST` is the first one's address: here all are this machine. `make demo` and
`make lab` are what the Makefile has for them. Ports are free ones, so that tests run side by side.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, commands

from free_ports import free_port
from shoal_tools.launch.lab import Lab

# tests/tools/commands/test_doctor.py and test_run_script.py, and tests/tools/elastic run these
NEEDS_OTHER_HOSTS = ("--peer", "shoal run --hosts a", "shoal rendezvous", "shoal agent")
TAKES_HOURS = "--cases 2000"
FEWER = ("--cases 1000", "--cases 20")  # ten minutes of a core otherwise
RUNS_THESE_TESTS = "$(PYTEST)"  # the words that begin such a line of the Makefile
NEEDS_A_CLUSTER = "spark://"  # tests/tools/spark runs these
# of these pages say that they end at about 98 % or more
PROMISED = {
    "shoal train examples/digits.py --ranks 2",
    "shoal lab --hosts 4 --rate 200mbit -- shoal train examples/digits.py --epochs 24",
}
# what files come from that other commands take: a checkpoint, and a profile
MADE_BY = {
    "--weights run": "shoal train examples/digits.py --checkpoint run --epochs 1",
    "shoal report run.json": "shoal train examples/digits.py --epochs 1 --report run.json",
    "--from profile.json": "shoal plan examples/digits.py --save-profile profile.json",
}
PROGRAMS = {
    "shoal": ["-m", "shoal"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}


def in_makefile(target: str) -> str:
    """The command with which a target of the Makefile ends."""
    rule = re.search(rf"(?ms)^{target}:.*?\n\t(?P<lines>.*?)\n\n", (ROOT / "Makefile").read_text())
    assert rule
    return rule["lines"].splitlines()[-1].strip().replace("$(BIN)", ".venv/bin")


def shown() -> set[str]:
    """The commands of all pages, `make` ones as the Makefile has them, each once."""
    found = {
        command
        for page in PAGES
        for command in commands(page)
        if not any(words in command for words in NEEDS_OTHER_HOSTS)
        and TAKES_HOURS not in command
        and NEEDS_A_CLUSTER not in command
    }
    plain = {command for command in found if not command.startswith("make ")}
    made = {in_makefile(command.removeprefix("make ")) for command in found - plain}
    made = {command for command in made if not command.startswith(RUNS_THESE_TESTS)}
    return {command.replace(".venv/bin/", "") for command in plain | made}


def as_run(command: str) -> list[str]:
    """A command, or the one that a lab runs, with this interpreter's in place of the reader's."""
    words = shlex.split(command)
    starts = {0, *(place + 1 for place, word in enumerate(words) if word == "--")}
    return [
        part
        for place, word in enumerate(words)
        for part in ([sys.executable, *PROGRAMS[word]] if place in starts else [word])
    ]


def on_each_host(command: str) -> list[str]:
    """The command as it is given on each host."""
    if "--master-addr HOST" in command:
        meeting = f"--master-addr 127.0.0.1 --master-port {free_port()}"
        command = command.replace("--master-addr HOST", meeting)
    hosts = re.search(r"--nnodes (\d+)", command)
    command = command.replace(*FEWER)
    return [
        command.replace("--node-rank R", f"--node-rank {rank}")
        for rank in range(int(hosts[1]) if hosts else 1)
    ]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", sorted(shown()), ids=str)
def test_a_command_that_is_shown_runs(command: str, tmp_path: Path) -> None:
    if "shoal lab" in command and (lacks := Lab().missing()):
        pytest.skip(lacks)
    for folder in ("examples", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if "torchrun" in command and "--nnodes" not in command:
        environment["PET_MASTER_PORT"] = str(free_port())
    for taken, making in MADE_BY.items():
        if taken in command:
            subprocess.run(as_run(making), cwd=tmp_path, env=environment, check=True)
    running = [
        subprocess.Popen(
            as_run(each),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each in on_each_host(command)
    ]
    try:
        for process in running:
            said, _ = process.communicate()
            assert process.returncode == 0, said
            if command in PROMISED:
                assert accuracy(said) >= 98, said
    finally:
        for process in running:
            process.kill()


def accuracy(said: str) -> float:
    """The last test accuracy that a training run printed, in percent."""
    return float(re.findall(r"test accuracy ([\d.]+)%", said)[-1])


def test_what_a_page_says_is_what_is_run() -> None:
    assert shown() >= PROMISED
    assert {shlex.split(command)[0] for command in shown()} <= PROGRAMS.keys()
    assert in_makefile("test").startswith(RUNS_THESE_TESTS)
    assert as_run("shoal plan a.py")[1:] == ["-m", "shoal", "plan", "a.py"]
    assert as_run("torchrun -m shoal doctor")[-3:] == ["-m", "shoal", "doctor"]
    assert as_run("shoal lab -- python a.py")[-2:] == [sys.executable, "a.py"]
    assert [each[-1] for each in on_each_host("torchrun --nnodes 2 --node-rank R")] == ["0", "1"]
    assert accuracy("test accuracy 3.10%\ntest accuracy 98.90%") == 98.9
