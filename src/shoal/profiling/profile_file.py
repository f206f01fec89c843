"""A profile as a file: the model as measured, and the ranks and links that measured it.

With it a plan is made, or simulated, without the model and without a network.

    {"format": 1, "written_by": …, "profile": {…}, "cluster": {…} or null,
     "facts": {"fc": {"ProductFacts": {…}, …}, …}}

Layers' facts stand by the name of their kind, because a strategy of your own may add kinds. Guarded
by tests/profiling/test_profile_file.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.contracts.strategy import Strategy
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Facts, Link, ModelProfile, Topology
from shoal.core.registry import of
from shoal.core.regular_files import read_text

FORMAT = 1
_REDO = "make it anew: shoal plan RECIPE --save-profile FILE"


@dataclass(frozen=True)
class Measured:
    """A model's profile, and the ranks that it was measured on with their links.

    A lone process has no links; its cluster has one rank.

    Examples:
        >>> from shoal.core.facts import Link, Topology
        >>> cluster = Cluster(Topology(("one", "other")), Link(1e-4, 125e6))
        >>> profile = ModelProfile((), 0.01, 0.02, 0.001, digest="")
        >>> Measured.from_json(Measured(profile, cluster).to_json()) == Measured(profile, cluster)
        True
    """

    profile: ModelProfile
    cluster: Cluster

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        bare = tuple(replace(layer, facts=()) for layer in self.profile.layers)
        facts = {
            layer.name: {type(found).__name__: found for found in layer.facts}
            for layer in self.profile.layers
        }
        whole = {
            "format": FORMAT,
            "written_by": "shoal.profile",
            "profile": replace(self.profile, layers=bare),
            "cluster": self.cluster if self.cluster.size > 1 else None,
            "cores_per_rank": self.cluster.cores_per_rank,
            "facts": facts,
        }
        text = msgspec.json.encode(whole, enc_hook=dict)
        return msgspec.json.format(text, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the profile") -> Measured:
        """Read the text that `to_json` wrote.

        Raises:
            UsageError: the text is no profile, or one of another format.
        """
        try:
            form = msgspec.json.decode(text, type=_ProfileFile)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _unread(source, str(error)) from error
        if form.format != FORMAT:
            raise _unread(source, f"format {form.format}", f"format {FORMAT}")
        layers = tuple(
            replace(layer, facts=tuple(_facts(form.facts.get(layer.name, {}), layer.name, source)))
            for layer in form.profile.layers
        )
        return cls(
            replace(form.profile, layers=layers), form.cluster or _alone(form.cores_per_rank)
        )

    def save(self, path: str | Path) -> None:
        """Write the profile to a file (UsageError if the file cannot be written)."""
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the profile cannot be saved as {path}", got=str(error), do="give another path"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Measured:
        """Read the file that `save` wrote (UsageError if the file is missing or no profile)."""
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the profile {path} cannot be read", got=str(error), do="check the path"
            ) from None
        return cls.from_json(text, source=str(path))


class _ProfileFile(msgspec.Struct):
    """Fields of the file."""

    format: int
    profile: ModelProfile
    cluster: Cluster | None
    cores_per_rank: float
    facts: dict[str, dict[str, dict[str, Any]]]
    written_by: str = ""


def _alone(cores: float) -> Cluster:
    return Cluster(Topology(("here",)), Link(0.0, math.inf), cores)


def _facts(rows: Mapping[str, Mapping[str, Any]], layer: str, source: str) -> list[Facts]:
    """Return one layer's facts, of kinds that some strategy measures."""
    of(Strategy)  # import the modules of all strategies
    kinds = {kind.__name__: kind for kind in Facts.__subclasses__()}
    if unknown := sorted(rows.keys() - kinds.keys()):
        raise _unread(
            source,
            f"{', '.join(unknown)} of layer {layer}",
            f"facts that a strategy here measures: {', '.join(sorted(kinds))}",
        )
    try:
        return [msgspec.convert(row, kinds[name]) for name, row in rows.items()]
    except msgspec.MsgspecError as error:
        raise _unread(source, f"{error}, in the facts of layer {layer}") from error


def _unread(source: str, got: str, expected: str = "") -> UsageError:
    return UsageError(f"{source} is no profile", got=got, expected=expected, do=_REDO)
