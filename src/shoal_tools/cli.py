"""The command line: it parses, calls and prints. `shoal COMMAND --help` explains the commands.

A command on a recipe runs on the ranks of its session (from torchrun's environment variables, as
under `shoal lab`). Or it starts `--ranks N` of them on this machine, each with the same command.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from shoal.comm.other_launchers import adopt
from shoal.comm.rendezvous import is_rank
from shoal.contracts.launcher import MARK
from shoal.core.errors import ShoalError, UsageError
from shoal.front.errors import exit_of_recipe, foreign, whole
from shoal.session.session import leave, world
from shoal_tools.commands.agent import agent, rendezvous
from shoal_tools.commands.bench import bench
from shoal_tools.commands.check import check
from shoal_tools.commands.doctor import doctor
from shoal_tools.commands.features import features
from shoal_tools.commands.lab import lab
from shoal_tools.commands.plan import plan
from shoal_tools.commands.probe import cache, probe
from shoal_tools.commands.report import report
from shoal_tools.commands.run_script import run
from shoal_tools.commands.simulate import simulate
from shoal_tools.commands.test import test
from shoal_tools.commands.train import train


class _Reporting(click.Group):
    """Prints errors without Shoal's own frames, tells the other ranks, and exits with 1.

    The exit code is 2 for an error that the caller can fix, and 130 after Ctrl-C. An error of the
    recipe's own comes with its traceback from where Shoal called it. With SHOAL_TRACEBACK=1 all
    frames of every error come first.
    """

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # the reader, such as `head`, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except ShoalError as error:
            self._show_frames(context, error)
            leave(error)
            usage = isinstance(error, UsageError)
            click.echo(f"shoal: {error.what if usage and _follows() else error}", err=True)
            sys.exit(2 if usage else 1)
        except KeyboardInterrupt as error:
            self._show_frames(context, error)
            if not (is_rank() or MARK in os.environ):  # the launcher says it once
                click.echo("shoal: ended by Ctrl-C", err=True)
            sys.exit(128 + signal.SIGINT)
        except SystemExit as error:
            if (said := exit_of_recipe(error)) is None:
                raise
            self._show_frames(context, error)
            leave(error)
            click.echo(f"shoal: {said}", err=True)
            sys.exit(2)
        except Exception as error:
            self._show_frames(context, error)
            leave(error)
            click.echo(f"shoal: {foreign(error)}", err=True)
            sys.exit(1)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; say which is near if there is none."""
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(context), n=1)
            if not near or "mean" in error.message:
                raise
            said = f"{error.message} Did you mean {near[0]!r}?"
            raise click.UsageError(said, ctx=context) from None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in groups, each with its whole first sentence."""
        for title, commands in _GROUPS.items():
            rows = [(str(each.name), each.get_short_help_str(_WHOLE)) for each in commands]
            with formatter.section(title):
                formatter.write_dl(rows)

    @staticmethod
    def _show_frames(context: click.Context, error: BaseException) -> None:
        if context.params["traceback"]:
            click.echo(whole(error), err=True)


def _follows() -> bool:
    """Return whether rank 0 of the same session prints all errors that the caller can fix."""
    try:
        return world().rank > 0
    except UsageError:
        return False


@click.group(cls=_Reporting, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
@click.option(
    "--traceback",
    is_flag=True,
    envvar="SHOAL_TRACEBACK",
    show_envvar=True,
    help="Show all frames of an error, before its message.",
)
def main(traceback: bool) -> None:
    """Shoal trains PyTorch models on several machines joined by ordinary networks, and says why."""
    with suppress(UsageError):  # a command that has ranks reports it
        adopt()


_WHOLE = 1000  # longest sentence about a command, in characters, so that none is cut
_GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Train": (train, run, test, features),
    "Hosts that come and go": (rendezvous, agent),
    "Plan and compare": (plan, simulate, check, bench, report),
    "Look at hosts and links": (doctor, probe, cache, lab),
}
for _commands in _GROUPS.values():
    for _command in _commands:
        main.add_command(_command)


if __name__ == "__main__":
    main()
