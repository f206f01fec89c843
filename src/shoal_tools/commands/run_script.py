"""`shoal run`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_COUNTED, MOST_SECONDS
from shoal_tools.commands.options import LOST_AFTER, WAIT_FOR, Finite
from shoal_tools.elastic.ssh_crews import SshCrews
from shoal_tools.launch.agent import membership
from shoal_tools.launch.host_list import SshHost, hosts_in, hosts_in_file
from shoal_tools.launch.ssh import PORT, Ssh

_LONG = f"{PORT}; a free one on this machine alone"


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--hosts", default="", metavar="LIST", help="As a,b or user@c:2, a host for each.")
@click.option(
    "--hosts-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A host a line, with slots=N for several ranks.",
)
@click.option(
    "--nnodes",
    default="",
    metavar="N",
    help="All hosts by default; MIN:MAX lets hosts leave and come.",
)
@click.option(
    "--max-restarts",
    "restarts",
    default=0,
    show_default=True,
    type=click.IntRange(0, MOST_COUNTED),
    help="How often ranks start again after a failure.",
)
@WAIT_FOR
@LOST_AFTER
@click.option("--env", "env", multiple=True, metavar="NAME", help="Send it too; or NAME=VALUE.")
@click.option("--chdir", default="", metavar="FOLDER", help="Work there; by default as here.")
@click.option("--python", default="", metavar="PATH", help="The hosts' Python; by default as here.")
@click.option("--send", is_flag=True, help="Copy the script to hosts that have another, or none.")
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="With --send: copy this too; else: it must be the same there.",
)
@click.option("--master-addr", default="", metavar="HOST", help="The first host, for the others.")
@click.option(
    "--master-port", type=click.IntRange(0, 65535), help=f"Where ranks meet; by default {_LONG}."
)
@click.option(
    "--ssh", default="ssh", show_default=True, help="The program, with options of its own."
)
@click.option(
    "--grace",
    "grace_s",
    default=15.0,
    show_default=True,
    type=Finite(0, MOST_SECONDS),
    help="Seconds for ranks to save and end, after Ctrl-C or once one has failed.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def run(script: tuple[str, ...], hosts: str, hosts_file: Path | None, **wanted: Any) -> None:
    """Run SCRIPT on several hosts, started from here by ssh.

    Before anything starts, all hosts are checked. Ctrl-C ends all ranks on all of them.

    For instance: shoal run --hosts a,b train.py --epochs 3
    """
    sys.exit(launch_script(script, _read_hosts(hosts, hosts_file), **wanted))


def launch_script(
    script: tuple[str, ...],
    hosts: tuple[SshHost, ...],
    *,
    module: bool,
    files: tuple[Path, ...],
    send: bool,
    env: tuple[str, ...],
    **options: Any,
) -> int:
    """Start the script on the hosts, and return the exit code.

    Args:
        script: its path, or the module's name, and its arguments.
        hosts: in the order of their ranks.
        module: whether it is a module.
        files: further files that hosts need.
        send: whether files are copied there; otherwise they must be there.
        env: names of variables to send, or NAME=VALUE.
        options: the other options of the command line, by name.
    """
    needed = (*map(str, files), *(() if module else script[:1]))
    if send:
        _check_files(needed)
    members = membership(options["nnodes"], len(hosts), options["restarts"])
    launcher = Ssh(
        python=options["python"],
        folder=options["chdir"],
        same=() if send else needed,
        modules=script[:1] if module else (),
        restarts=members.restarts,
        address=options["master_addr"],
        port=options["master_port"],
        ssh=_words(options["ssh"]),
    )
    if (lacks := launcher.missing()) is not None:
        raise UsageError("ranks cannot be started from here", got=lacks, do="install that")
    command = (sys.executable, *(("-m",) if module else ()), *script)
    ranks = sum(host.slots for host in hosts)
    job = Job(
        command,
        ranks,
        _list_variables(env),
        grace_s=options["grace_s"],
        master=",".join(host.word for host in hosts),
        files=tuple(map(Path, needed)) if send else (),
    )
    if members.is_elastic:
        waits = options["wait_s"], options["lost_after_s"]
        return SshCrews(launcher, members, *waits).launch(job)
    return launcher.launch(job).exit_code


def _read_hosts(hosts: str, file: Path | None) -> tuple[SshHost, ...]:
    if bool(hosts) == (file is not None):
        raise UsageError(
            "say which hosts, in one way",
            got="both --hosts and --hosts-file" if hosts else "neither --hosts nor --hosts-file",
            do="give --hosts a,b or --hosts-file FILE; this machine is localhost",
        )
    return hosts_in_file(file) if file is not None else hosts_in(hosts)


def _check_files(paths: Iterable[str]) -> None:
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(
                "there is no such file here, so it cannot be sent", got=path, do="check the path"
            )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text)) or ("ssh",)
    except ValueError as error:
        raise UsageError(
            "--ssh is no command", got=f"{text!r}: {error}", do="write it as for a shell"
        ) from None


def _list_variables(names: Iterable[str]) -> dict[str, str]:
    """Return the variables that `--env` names."""
    found = {}
    for word in names:
        name, given, text = word.partition("=")
        if not given and name not in os.environ:
            raise UsageError(
                f"--env names a variable that is not set: {name}",
                do=f"set it, give --env {name}=VALUE, or leave it out",
            )
        found[name] = text if given else os.environ[name]
    return found
