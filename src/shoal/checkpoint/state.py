"""state.json: everything in a checkpoint except the elements of its tensors.

    format, version    of the checkpoint, in every version
    crc32              of `state`, written as JSON without spaces
    state              objects · random · models · features · step · files · written_by

Version 2 has states of features. Version 1 is written if no feature keeps any, so that earlier
releases read it. They wrote version 1 with `residuals` and `outer`, which `before_features` maps.
`random` is a list in the order of the ranks. All other values are whole, and the same for any
number of ranks. Guarded by tests/front/test_save_and_load.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import STATE, write_text
from shoal.checkpoint.state_form import as_count, check_state, unique
from shoal.checkpoint.tensors import Checksums, checksum
from shoal.core.errors import UsageError

FORMAT, VERSION = "shoal checkpoint", 2


@dataclass(frozen=True)
class State:
    """The contents of state.json. Values are as checkpoint/tree.py encodes them."""

    objects: dict[str, Any]  # states by the keyword of each object
    # states of the ranks that trained, in their order; one if all ranks have the same
    random: Any = None
    # parallelised models, by keyword: ranks, usual_rows, plan
    models: dict[str, Any] = field(default_factory=dict)
    features: Any = None  # states by the feature's name, then by the way to a model
    # losses of codecs in the form of version 1
    residuals: dict[str, Any] = field(default_factory=dict)
    # states of outer rules in the form of version 1
    outer: dict[str, Any] = field(default_factory=dict)
    step: int | None = None  # number of steps, if the caller counts them
    files: dict[str, Checksums] = field(default_factory=dict)
    # classes of optimizers and schedulers, by the way to them; earlier releases lack them
    classes: dict[str, str] = field(default_factory=dict)
    written_by: dict[str, str] = field(default_factory=dict)  # versions of the software

    def text(self) -> str:
        """Return the text of the file."""
        state = asdict(self)
        document = {
            "format": FORMAT,
            "version": VERSION if self.features else 1,  # earlier releases read the rest
            "crc32": checksum(_packed(state)),
            "state": state,
        }
        return json.dumps(document, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write the file, durably."""
        write_text(folder / STATE, self.text())  # save 14


def _packed(state: Any) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode()


def parsed(text: bytes, where: str) -> State:
    """Return the contents of a state.json from its text.

    Args:
        text: the whole text.
        where: the checkpoint, for messages.

    Raises:
        UsageError: the text is no state.json, is corrupted, or has a newer format.
    """
    try:
        document = json.loads(text, object_pairs_hook=unique)
        name, version = document["format"], as_count(document["version"], "version")
        crc, state = document["crc32"], document["state"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise corrupted(where, f"{type(error).__name__}: {error}"[:400]) from error
    if name != FORMAT or version > VERSION:
        raise UsageError(
            "the checkpoint is of a newer format than this release of Shoal reads",
            where=where,
            got=f"{name}, version {version}",
            expected=f"{FORMAT}, version {VERSION} at most",
            do="install the release that wrote it: "
            + str(state.get("written_by", {}) if isinstance(state, dict) else ""),
        )
    try:
        if crc != checksum(_packed(state)):
            raise ValueError("another checksum than that of what was written")
        check_state(state, [known.name for known in fields(State)])
    except (ValueError, RecursionError) as error:
        raise corrupted(where, str(error)[:400]) from error
    known = {known_field.name for known_field in fields(State)}
    return State(**{key: value for key, value in state.items() if key in known})


def before_features(
    models: Mapping[str, Any], owed: Mapping[str, Any], outer: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Convert states of version 1 to the features' form: by name, then by the way to a model.

    Args:
        models: models that were parallelised.
        owed: residuals of codecs.
        outer: states of outer rules and sums of periods, by parameter.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, known in models.items():
        is_local = bool(known.get("plan", {}).get("local_steps"))
        if sums := owed.get(path):
            found.setdefault("residuals", {})[path] = {"sums": sums, "local": is_local}
        states = outer.get(path, {})
        kept = {name: state for name, state in states.items() if "accumulated" in state}
        if kept:
            found.setdefault("update_every", {})[path] = kept
        if is_local:
            found.setdefault("local_steps", {})[path] = {
                "outer": {name: states[name] for name in states if name not in kept},
                # without a count all exact steps have been made
                "warmup_steps": known.get("warmup_steps"),
            }
    return found


def corrupted(where: str, got: str) -> UsageError:
    """Return the error about a state.json that Shoal has not written in this form.

    Args:
        where: the checkpoint.
        got: the fault in it.
    """
    return UsageError(
        "state.json of the checkpoint is corrupted",
        where=where,
        got=got,
        do="load another checkpoint, and look at the disk",
    )
