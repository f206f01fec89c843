"""Old names of modules that have moved, mostly to `shoal_tools`. Imports and pickles work by them.

The tools (command line, doctor, launchers, lab, Spark, report page, simulate, fault injection) use
the library, and the library does not use them. This file and `__main__.py` are its only two doors
to them, and neither opens until you ask for a tool.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

NEW_NAMES = {
    "shoal.cli": "shoal_tools.cli",
    "shoal.comm.around": "shoal_tools.testing.comm_wrapper",
    "shoal.comm.faulty": "shoal_tools.testing.planned_faults",
    "shoal.comm.traced": "shoal_tools.testing.byte_counts",
    "shoal.commands": "shoal_tools.commands",
    "shoal.commands.ddp_hooks": "shoal_tools.contenders.ddp_hooks",
    "shoal.commands.peers": "shoal_tools.contenders.peers",
    "shoal.doctor": "shoal_tools.doctor",
    "shoal.integrations.spark": "shoal_tools.spark",
    "shoal.integrations.spark.trained": "shoal_tools.spark.trained_model",
    "shoal.launch": "shoal_tools.launch",
    "shoal.launch.rendezvous": "shoal.comm.rendezvous",
    "shoal.planner.simulate": "shoal_tools.simulate",
    "shoal.report": "shoal_tools.report",
    "shoal.report.errors": "shoal.front.errors",
    "shoal.report.stages": "shoal.front.stages",
    "shoal.report.text": "shoal.front.text",
    "shoal_tools.spark.trained": "shoal_tools.spark.trained_model",
}


def new_name(name: str) -> str | None:
    """Return today's name of a module that has moved; None for any other module."""
    prefix, rest = name, ""
    while prefix not in NEW_NAMES:
        prefix, dot, last = prefix.rpartition(".")
        if not dot:
            return None
        rest = f".{last}{rest}"
    return NEW_NAMES[prefix] + rest


@final
class _Finder(MetaPathFinder, Loader):
    """Finder of moved modules by their old names. Both names are the same module object."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(name)
        return None if new is None else ModuleSpec(name, self, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has put the old name's spec on the module
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def install() -> None:
    """Let old names be imported. A second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # it goes first, else the finder of files would read a moved package's files a second time
        sys.meta_path.insert(0, _Finder())
