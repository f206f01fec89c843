"""Start of the ranks that a command runs on: the launcher, the hosts, and the ranks' roles."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from shoal.comm import rendezvous
from shoal.contracts.launcher import Job, Launcher
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS_HERE
from shoal.core.registry import named

# options with paths that ranks write to
_WRITTEN = ("--checkpoint", "--save-plan", "--report", "--json")
_PATHS = (*_WRITTEN, "--plan", "--file")


def _there(
    context: click.Context, option: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Raise UsageError if a file to send does not exist. Ranks receive it, and do not check."""
    for path in paths if not rendezvous.is_rank() else ():
        if not path.is_file():
            raise UsageError(
                f"{option.opts[0]} names no file that is here", got=str(path), do="check the path"
            )
    return paths


_OPTIONS = [
    click.option(
        "--launcher",
        metavar="NAME",
        help="What starts the ranks: local (by default), torchrun, ssh, spark, or your own.",
    ),
    click.option(
        "--master",
        default="",
        metavar="URL",
        help="Where a cluster is, as spark://host:7077; the hosts for ssh, as a,b:2.",
    ),
    click.option(
        "--servers",
        default=0,
        metavar="N",
        type=click.IntRange(0, MOST_RANKS_HERE),
        help='Start more ranks, as servers (strategy "server").',
    ),
    click.option(
        "--tail",
        default=0,
        metavar="N",
        type=click.IntRange(0, MOST_RANKS_HERE),
        help='Start more ranks, for the end of the model (strategy "pipeline").',
    ),
    click.option(
        "--ranks-per-host",
        type=click.IntRange(1, MOST_RANKS_HERE),
        help="Insist that so many ranks share each host.",
    ),
    click.option(
        "--file",
        "files",
        multiple=True,
        metavar="PATH",
        type=click.Path(path_type=Path),
        callback=_there,
        help="Send this to hosts with other disks, into the recipe's folder there: what the recipe "
        "imports, say.",
    ),
]


@dataclass(frozen=True)
class Launching:
    """The launcher, the hosts and the roles of ranks, as the command line gives them."""

    launcher: str | None = None
    master: str = ""
    servers: int = 0
    tail: int = 0
    ranks_per_host: int | None = None
    files: tuple[Path, ...] = ()  # files that ranks on other hosts need

    @property
    def is_asked(self) -> bool:
        """Whether ranks are started even if their number is not given."""
        return replace(self, files=()) != Launching()


def launching(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for starting ranks, as one argument `by`."""

    @functools.wraps(function)
    def command(
        launcher: str | None,
        master: str,
        servers: int,
        tail: int,
        ranks_per_host: int | None,
        files: tuple[Path, ...],
        **others: Any,
    ) -> None:
        by = Launching(launcher, master, servers, tail, ranks_per_host, files)
        function(by=by, **others)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def distributed(workers: int | None, by: Launching | None = None) -> None:
    """Start this very command on ranks and exit. Return if this process is a rank or needs none."""
    by = by or Launching()
    if rendezvous.is_rank() or not (by.is_asked or (workers is not None and workers > 1)):
        return
    name = "local" if by.launcher is None else by.launcher
    launcher = named(Launcher, name)
    if (lacks := launcher.missing()) is not None:
        do = "install that, or name another one"
        raise UsageError(f"the launcher {name!r} cannot be used here", got=lacks, do=do)
    others = by.servers + by.tail
    workers = workers or max(1, launcher.room(by.master) - others)
    job = Job(
        (sys.executable, "-m", "shoal", *_as_elsewhere(sys.argv[1:], by.files)),
        workers + others,
        servers=by.servers,
        tail=by.tail,
        ranks_per_host=by.ranks_per_host,
        master=by.master,
        files=by.files,
        first_speaks=True,
    )
    sys.exit(launcher.launch(job).exit_code)


def _as_elsewhere(words: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return the command's words for ranks that may run in another folder.

    Files that are sent get the paths that they are sent under. Files to write get whole paths.
    """
    split = [
        part
        for word in words
        for part in (word.split("=", 1) if word.partition("=")[0] in _PATHS else [word])
    ]
    sent = {path: str(path) for path in files}
    return [
        os.path.abspath(word) if before in _WRITTEN else sent.get(Path(word), word)
        for before, word in zip(("", *split), split, strict=False)
    ]
