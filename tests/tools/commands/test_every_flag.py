"""Every flag of the command line with texts that are none: taken on purpose, or refused in words.

The flags are found in the commands, so a new one is tried as well. Whatever would do the work is
replaced: a text that gets there is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner

from command_line import RECIPE, prepare
from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.front.recipe import load
from shoal_tools.cli import main
from shoal_tools.commands import options as of_commands
from shoal_tools.commands import worker
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.processes import check_here
from shoal_tools.launch.ssh import Ssh

pytestmark = pytest.mark.quick
TEXTS = ("nan", "inf", "-1", "0", "3", "1.5", "1e300", "x", "", "[]", "9" * 40, "²")
DONE = 77
PATH = {"nan", "inf", "-1", "0", "3", "1.5", "1e300", "x", "[]", "9" * 40, "²"}  # names of files
# texts that a flag takes, by command and flag or by flag; a flag that is not here takes none
TAKEN: dict[str, set[str]] = {
    "--check-every": {"0", "3"},
    "--checkpoint": PATH,
    "--cores": {"3", "1.5"},
    "--cores-per-rank": {"3", "1.5"},
    "--epochs": {"3"},
    "--first": {"0", "3"},
    "--grace": {"0", "3", "1.5"},
    "--hosts": {"3"},
    "--json": PATH,
    "--latency-us": {"0", "3", "1.5"},
    "--lost-after": {"3"},
    "--layers": {*PATH, ""},  # looked for when the model is there
    "--local-steps": {"3"},
    "--memory-limit": {"3", "1.5"},
    "--micro-batches": {"3"},
    "--oversubscription": {"3", "1.5"},
    "--plan": {*PATH, ""},  # read when the model is there
    "--peer": PATH,
    "--port": {"3"},
    "--ranks": {"3"},
    "--ranks-per-host": {"3"},
    "--rounds": {"3"},
    "--save": PATH,
    "--save-plan": PATH,
    "--save-profile": PATH,
    "--servers": {"0", "3"},
    "--staleness": {"0", "3"},
    "--steps": {"3"},
    "--straggler": {"0"},
    "--tail": {"0", "3"},
    "--trace": PATH,
    "--wait": {"0", "3", "1.5"},
    "--wait-for": {"0", "3", "1.5"},
    "--weights": PATH,
    "--within": {"0", "3", "1.5"},
    "--warmup-steps": {"0", "3"},
    "--workers": {"3"},
    "agent --address": {*PATH, ""},  # of a network, as other hosts see it
    "agent --max": {"3"},
    "agent --max-restarts": {"0", "3"},
    "agent --min": {"3"},
    "agent --nproc-per-node": {"3"},
    "agent --rendezvous": PATH - {"[]"},  # a name of a host, looked up when the agent calls
    "rendezvous --address": {*PATH, ""},  # likewise
    "rendezvous --port": {"0", "3"},
    "run --chdir": {*PATH, ""},  # looked at on the hosts, as the three below
    "run --file": {*PATH, ""},
    "run --hosts": PATH - {"-1", "[]", "²"},
    "run --hosts-file": set(),  # none is there
    "run --master-addr": {*PATH, ""},
    "run --master-port": {"0", "3"},
    "run --max-restarts": {"0", "3"},
    "run --nnodes": {""},
    "run --python": {*PATH, ""},
    "run --ssh": {*PATH, ""},
    # looked up when ranks are started
    "--launcher": {*PATH, ""},
    "--master": {*PATH, ""},
    "lab --congestion": {*PATH, ""},  # compared with the kernel's own list
}
# what stands before the flag
WORDS: dict[str, tuple[str, ...]] = {
    "features": (RECIPE, "--layers", "0", "-o", "out.parquet"),
    "report": ("run.json",),
    "probe": (),
    "doctor": (),
    "plan": (RECIPE, "--ranks", "3"),
    "lab": (),
    "run": ("--hosts", "localhost"),
    "rendezvous": (),
    "agent": ("--rendezvous", "there:1"),
    "run --hosts-file": (),
    "--outer": (RECIPE, "--local-steps", "4"),
    "--warmup-steps": (RECIPE, "--local-steps", "4"),
}


AFTER: dict[str, tuple[str, ...]] = {"lab": ("true",), "run": (RECIPE,), "agent": (RECIPE,)}


def flags() -> list[tuple[str, str]]:
    """Each flag that takes a text, with a command that has it: shared ones once."""
    found: dict[Any, tuple[str, str]] = {}
    for name, command in main.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                key = parameter.opts[0], parameter.help, str(parameter.type)
                found.setdefault(key, (name, parameter.opts[0]))
    return list(found.values())


def done(*args: Any, **kwargs: Any) -> NoReturn:
    raise click.exceptions.Exit(DONE)


@pytest.fixture(autouse=True)
def nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare(monkeypatch)
    monkeypatch.chdir(tmp_path)
    recipe = load(Path(RECIPE))
    for module in ("options", "features", "test", "script_model"):
        monkeypatch.setattr(f"shoal_tools.commands.{module}.load", lambda path: recipe)
    monkeypatch.setattr(of_commands, "distributed", lambda *args: None)
    for module in ("probe", "test", "features"):
        monkeypatch.setattr(f"shoal_tools.commands.{module}.distributed", done)
    for work in ("train", "plan", "check", "measured"):
        if hasattr(worker, work):
            monkeypatch.setattr(worker, work, done)
    for work in ("simulate.foreseen", "bench.init", "doctor.examine", "report.load"):
        monkeypatch.setattr(f"shoal_tools.commands.{work}", done)
    for place in ("among_peers", "alone", "among_ranks"):
        monkeypatch.setattr(f"shoal_tools.commands.doctor.meet.{place}", done)
    for work in ("agent.MeetingPlace", "agent.Agent"):
        monkeypatch.setattr(f"shoal_tools.commands.{work}", done)
    monkeypatch.setattr(Lab, "missing", lambda self: None)
    monkeypatch.setattr(Lab, "launch", done)
    monkeypatch.setattr(Ssh, "missing", lambda self: None)
    monkeypatch.setattr(Ssh, "launch", done)


@pytest.mark.parametrize(("command", "flag"), flags())
def test_a_flag_takes_a_text_or_refuses_it_in_words(command: str, flag: str) -> None:
    taken = TAKEN.get(f"{command} {flag}", TAKEN.get(flag, set()))
    own = WORDS.get(command, (RECIPE,))
    before = WORDS.get(f"{command} {flag}", WORDS.get(flag, own))
    after = AFTER.get(command, ())
    for text in TEXTS:
        said = CliRunner().invoke(main, [command, *before, flag, text, *after])
        shown = f"{command} {flag} {text!r}: {said.output}"
        assert said.exit_code == (DONE if text in taken else 2), shown
        assert "Traceback" not in said.output
        assert text in taken or flag in said.output or text in said.output, shown


REFUSED: dict[str, tuple[list[str], str]] = {
    "a report of another format": (["train", RECIPE, "--report", "x.pdf"], "--report x.html"),
    "a page of another format": (["report", "run.json", "-o", "x.pdf"], "ends in .html"),
    "a table of another format": (
        ["features", RECIPE, "--layers", "0", "-o", "x.csv"],
        "x.parquet",
    ),
    "two outputs in one file": (
        ["train", RECIPE, "--json", "a.json", "--report", "./a.json"],
        "would write over each other",
    ),
    "one number of hosts twice": (["simulate", RECIPE, "--hosts", "1,1,1"], "names 1 twice"),
    "a latency of ages": (["simulate", RECIPE, "--latency-us", "1e300"], "not in the range"),
    "hardly a core": (["simulate", RECIPE, "--cores-per-rank", "1e-300"], "not in the range"),
    "switches that let nothing through": (
        ["simulate", RECIPE, "--oversubscription", "1e308"],
        "not in the range",
    ),
    "a link of any rate": (["simulate", RECIPE, "--rate", "9" * 18 + "gbit"], "a million gbit"),
    "no peer": (["doctor", "--peer", ""], "--peer HOST"),
    "no peer in a list": (["doctor", "--peer", " , "], "--peer HOST"),
    "a file that is nowhere": (["train", RECIPE, "--file", "/nonexistent"], "/nonexistent"),
    "a rate without ranks": (["plan", RECIPE, "--rate", "1gbit"], "add --ranks"),
    "hosts without ranks": (["plan", RECIPE, "--ranks-per-host", "3"], "add --ranks"),
    "ages between checkpoints": (["train", RECIPE, "--every", "9" * 18 + "h"], "is no time"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_that_cannot_be_meant_is_refused(case: str) -> None:
    words, says = REFUSED[case]
    said = CliRunner().invoke(main, words)
    assert said.exit_code == 2 and says in said.output, said.output


def test_ranges_of_hosts_may_meet() -> None:
    said = CliRunner().invoke(main, ["simulate", RECIPE, "--hosts", "1..8,8..32"])
    assert said.exit_code == DONE, said.output


def test_every_list_is_of_flags_that_there_are() -> None:
    known = {flag for _, flag in flags()} | {f"{command} {flag}" for command, flag in flags()}
    assert TAKEN.keys() <= known


def test_a_host_has_no_more_ranks_than_there_are() -> None:
    with pytest.raises(UsageError, match="start --ranks 3, or leave"):
        check_here(Job(("true",), ranks=1, ranks_per_host=3))
