"""Flags of options and of features: which commands offer them, and how their values arrive."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from command_line import RECIPE
from shoal.core import registry
from shoal.features.staleness import Staleness
from shoal.front.options import Options
from shoal_tools.cli import main
from shoal_tools.commands import worker

OWN_FEATURE = """
    from dataclasses import dataclass
    from typing import ClassVar

    import shoal
    from shoal.contracts.feature import Feature
    from shoal.core.option import Flag, option

    @shoal.register
    @dataclass(frozen=True)
    class Patience(Feature):
        name: ClassVar[str] = "patience"
        steps: int = option(0, keyword="patience", flag=Flag("Steps to wait.", read=int))

    OPTIONS = {"patience": 3}
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options with which `shoal train` would train."""
    found: list[Options] = []
    monkeypatch.setattr(worker, "train", lambda recipe, options, _: found.append(options))
    return found


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget afterwards what a recipe registers."""
    monkeypatch.setattr(registry, "_registered", {})
    yield


def shown(command: str) -> set[str]:
    """All forms of all flags of a command."""
    parameters = main.commands[command].params
    return {
        form for parameter in parameters for form in (*parameter.opts, *parameter.secondary_opts)
    }


@pytest.mark.parametrize(
    ("words", "expected"), [([], ()), (["--staleness", "none"], (Staleness(None),))]
)
def test_a_flag_may_stand_for_none(words: list[str], expected: Any, asked: list[Options]) -> None:
    done = CliRunner().invoke(main, ["train", RECIPE, *words])
    assert done.exit_code == 0, done.output
    assert [options.features for options in asked] == [expected]


@pytest.mark.usefixtures("registered")
def test_a_recipe_sets_the_option_of_a_feature_of_its_own(
    asked: list[Options], tmp_path: Path
) -> None:
    path = tmp_path / "patient.py"
    path.write_text(Path(RECIPE).read_text() + textwrap.dedent(OWN_FEATURE))
    done = CliRunner().invoke(main, ["train", str(path)])
    assert done.exit_code == 0, done.output
    ((feature,),) = [options.features for options in asked]
    assert feature == type(feature)(steps=3) and feature.name == "patience"
    late = CliRunner().invoke(main, ["train", str(path), "--patience", "4"])
    assert late.exit_code == 2 and "No such option" in late.output
