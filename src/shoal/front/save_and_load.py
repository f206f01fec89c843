"""`save` and `load`: a checkpoint that any number of ranks can go on from, under any plan.

    1  take     every rank takes part; rank 0 gets all of it
    2  write    rank 0 writes it, whole or not at all                (checkpoint/snapshot.py)
    3  read     each rank that sees the files checks and reads them; other ranks receive them
    4  put      values go into the objects, once all are checked; then the random state is restored

Guarded by tests/front/test_save_and_load.py and test_corrupted_state.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.checkpoint import randomness
from shoal.checkpoint.fetched import fetched
from shoal.checkpoint.folder import FEATURES, RANDOM, check_names
from shoal.checkpoint.snapshot import Saved, Snapshot
from shoal.checkpoint.state import State, before_features
from shoal.checkpoint.store import Store, place_of, readable, writable, writable_where
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.contracts.feature import DROPPED, Feature
from shoal.contracts.state_dicts import unlike_tensors
from shoal.contracts.versions import versions
from shoal.core.errors import UsageError
from shoal.core.registry import of
from shoal.front.stages import LOGGER
from shoal.front.state_checks import check_class, class_of
from shoal.front.stateful import (
    Loading,
    Modules,
    load_all,
    loadings,
    members,
    modules_of,
    state_of,
)
from shoal.front.unlike_states import numbers_of, warn_of_unlike
from shoal.optim.part import Keeping
from shoal.session.pending_model import pending_of
from shoal.session.session import Attached, current, found, ranks

_RESIDUALS, _OUTER = "codec-residuals", "outer-state"  # files of releases before features
_OPENING = "shoal.save: where to write"
_READING = "shoal.load: reading the checkpoint"
_WRITING = "shoal.save: writing the checkpoint"


def save(path: str | Path, /, **objects: Any) -> None:
    """Write a checkpoint. All ranks call this, and the checkpoint is there when the call returns.

    It is a folder with safetensors of whole tensors under one process's names, and state.json with
    everything else. It is there whole or not at all, even if the process is killed. It takes the
    place of an older checkpoint of that name. Rank 0 writes it.

    Args:
        path: the folder. It may be relative. Its parents are made. "s3://bucket/run" is a folder in
            a store that fsspec reaches.
        objects: objects under names of your own: everything with a `state_dict` and
            `load_state_dict` (model, optimizer, scheduler, scaler, the loader that `shoal.shard`
            gave, averaged weights), lists and dicts of such objects, and plain data. You may save
            before or after `parallelize`.

    Random states, and the plan, are saved too.

    Raises:
        UsageError: the checkpoint cannot be written, or an object is of none of these kinds.
        WorldError: a rank was lost.

    Examples:
        >>> import shoal, torch, tempfile
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> folder = tempfile.mkdtemp() + "/saved"
        >>> shoal.save(folder, model=model, epoch=3)
        >>> shoal.load(folder, model=model, epoch=0)
        {'epoch': 3}
    """
    comm = ranks()
    place = agreed(comm, lambda: checked_path(path, "shoal.save", objects), _OPENING)
    snapshot = Snapshot(keeps=comm.rank == 0)  # save 1
    with saving(objects):
        state = taken(snapshot, objects, comm)

        def write() -> None:
            if comm.rank:
                return
            with writing(str(place)), writable(place) as folder:
                snapshot.write(folder, state)

        agreed(comm, write, _WRITING)  # save 11


def load(path: str | Path, /, **objects: Any) -> dict[str, Any]:
    """Go on from a checkpoint. All ranks call this.

    Any number of ranks may have saved it, under any plan. Each rank that sees the files reads them,
    and compares each tensor's checksum. Ranks that do not see the files receive them. Everything is
    checked before any object changes.

    Args:
        path: the path that `save` was given.
        objects: objects under the names of the save, made as they were then. You may load before or
            after `parallelize`. An object that you leave out is not loaded. Plain data, such as
            `epoch=0`, is returned.

    If an optimizer is among them, the random state is restored too.

    Returns:
        The plain data that you asked for, by name.

    Raises:
        UsageError: there is no such checkpoint, a file of it is corrupted, it is of a newer format,
            or of other objects. A corrupted tensor is named.
        WorldError: a rank was lost.

    Examples:
        >>> import shoal, torch, tempfile
        >>> _ = shoal.init()
        >>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp() + "/saved"
        >>> shoal.save(folder, model=model, best=0.5)
        >>> shoal.load(folder, model=model)
        {}
    """
    comm = ranks()
    with readable(comm, path) as folder:
        return restored(fetched(comm, folder, objects), objects, comm)


def checked_path(path: Any, call: str, objects: Mapping[str, Any]) -> Path | Store:
    """Return the path that a call was given, once it and the names of objects are checked."""
    if not objects:
        raise UsageError(
            "nothing is given to save", do="give objects by name: model=model, optimizer=optimizer"
        )
    check_names(objects)
    return place_of(path, call)


def taken(
    snapshot: Snapshot,
    objects: Mapping[str, Any],
    comm: Comm,
    step: int | None = None,
    *,
    keeping: Keeping | None = None,
) -> State:
    """Take everything to save, within `saving` (a collective). `keeping` is as for `state_of`."""
    check_names(objects)  # `Checkpoints.step` may have new ones
    modules = modules_of(objects)
    forms = {}
    for keyword, value in objects.items():  # save 3
        optimizer = isinstance(value, Optimizer)
        forms[keyword] = snapshot.encode(
            keyword, state_of(value, modules, keeping=keeping), strip="state/" if optimizer else ""
        )
    # no warnings for generations in memory, which would repeat them
    is_in_memory = keeping is not None and keeping.owned
    states = _random_states(objects, forms, comm, warns=not is_in_memory)  # save 9
    features: dict[str, dict[str, Any]] = {}  # states by feature name, then by the way to a model
    for path, attached in _attached_models(objects):
        for name, attachment in attached.running.attachments.items():
            if (state := attachment.state()) is not None:  # save 10
                features.setdefault(name, {})[path] = state
    software = versions()
    return State(
        objects=forms,
        random=snapshot.encode(RANDOM, states),
        models=_describe_models(objects),
        features=snapshot.encode(FEATURES, features) if features else None,
        step=step,
        classes={path: name for path, value in members(objects) if (name := class_of(value))},
        written_by={"shoal": software.shoal, "torch": software.torch},
    )


def is_whole(objects: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint would have all that models have learned, as on every rank."""
    return all(
        attachment.is_whole()
        for attached in _models_of(objects)
        for attachment in attached.running.attachments.values()
    )


@contextmanager
def saving(objects: Mapping[str, Any]) -> Iterator[None]:
    """Have models and optimizers hold the values for a checkpoint, in the context (a collective).

    Each feature of a model does its part, as `Attachment.saving` says. A model takes part if it or
    its optimizer is saved, and also if its workers run ahead, because all these must stand still
    together.
    """
    with ExitStack() as stack:
        for attached in _models_of(objects):
            for attachment in attached.running.attachments.values():
                stack.enter_context(attachment.saving())  # save 2
        yield


def _random_states(
    objects: Mapping[str, Any], forms: Mapping[str, Any], comm: Comm, *, warns: bool
) -> list[Any]:
    """Gather the ranks' random states: one if all are alike. Warn of objects in unlike states."""
    drawn, numbers = randomness.drawn(), numbers_of(objects, forms)
    told = comm.gather_objects((drawn, numbers), "shoal.save: random states")
    if warns and comm.rank == 0 and all(attached.plan.in_step for attached in _models_of(objects)):
        warn_of_unlike([of_rank for _, of_rank in told])
    states = [state for state, _ in told]
    alike = all(randomness.is_alike(states[0], state) for state in states)
    return states[:1] if alike else states


def _models_of(objects: Mapping[str, Any]) -> Iterator[Attached]:
    """Yield the parallelised models that a checkpoint of these objects concerns."""
    session, saved = found(), [value for _, value in members(objects)]
    if session is None:
        return
    models = [model for _, model in _models(objects)]
    for model, attached in session.attached.items():
        trained_by = session.optimizers.get(model, ())
        is_saved = any(model is other for other in models)
        if is_saved or attached.plan.runs_ahead or any(o is v for o in trained_by for v in saved):
            yield attached


def _describe_models(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the parallelised models among objects, without their state."""
    return {
        path: {
            "ranks": attached.plan.ranks,
            "usual_rows": attached.running.weigher.usual,
            "plan": json.loads(attached.plan.to_json()),
        }
        for path, attached in _attached_models(objects)
    }


def _attached_models(objects: Mapping[str, Any]) -> Iterator[tuple[str, Attached]]:
    """Yield the parallelised models among objects, with the ways to them."""
    for path, model in _models(objects):
        if (attached := current().attached.get(model)) is not None:
            yield path, attached


def _go_on(known: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Weigh rows as before if as many ranks go on, because otherwise the last bit may differ."""
    for path, model in _models(objects):
        usual, ranks = (known.get(path, {}).get(name) for name in ("usual_rows", "ranks"))
        if usual is None:
            continue
        session = current()
        session.usual_rows[model] = {ranks: usual}
        attached = session.attached.get(model)
        if attached is not None and ranks == session.comm.size:
            attached.running.weigher.go_on(usual)


def _models(objects: Mapping[str, Any]) -> Modules:
    """Return the modules among objects, if there is a session that may have parallelised them."""
    return modules_of(objects) if found() is not None else []


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Turn an error of the file system inside the context into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            "the checkpoint cannot be written",
            where=where,
            got=f"{type(error).__name__}: {error}",
            do=writable_where(where),
        ) from error


@torch.no_grad()
def restored(saved: Saved, objects: Mapping[str, Any], comm: Comm) -> dict[str, Any]:
    """Put saved values into objects, and return the plain data (a collective)."""

    read = agreed(comm, lambda: _read_parts(saved, objects, comm), _READING)
    for _, attached in _attached_models(objects):
        attached.engine.settle()
    load_all(comm, read.loadings)
    if read.random is not None:
        randomness.restore(read.random, comm.rank, comm.size)
    _go_on(saved.state.models, objects)
    by_path = dict(_attached_models(objects))
    for path, model in _models(objects):
        attachments = by_path[path].running.attachments if path in by_path else {}
        for name, attachment in attachments.items():
            attachment.load(read.features.get(name, {}).get(path))
        if (pending := pending_of(model)) is not None:  # its plan comes later
            pending.loaded = {name: of.get(path) for name, of in read.features.items()}
            continue
        dropped = [name for name in read.features if name not in attachments]
        _warn_of_dropped(path, dropped, read.features, comm)
    return read.plain


@dataclass(frozen=True)
class _ReadParts:
    """Everything that a load takes from a checkpoint, checked.

    Args:
        loadings: the objects with their states.
        plain: plain data that the caller asked for.
        random: the ranks' random states, if an optimizer is among the objects.
        features: states of features by their names, then by the way to a model.
    """

    loadings: Sequence[Loading]
    plain: dict[str, Any]
    random: Sequence[Any] | None
    features: Mapping[str, Mapping[str, Any]]


def _read_parts(saved: Saved, objects: Mapping[str, Any], comm: Comm) -> _ReadParts:
    """Read all that objects ask for, and check that it fits. Nothing changes yet."""
    unknown = [keyword for keyword in objects if keyword not in saved.state.objects]
    if unknown:
        raise UsageError(
            f"the checkpoint has nothing under {', '.join(unknown)}",
            where=str(saved.folder),
            got="it has " + ", ".join(saved.state.objects),
            do="give what was saved, under the same names",
        )
    modules, found_members = modules_of(objects), list(members(objects))
    for path, member in found_members:
        check_class(member, saved.state.classes.get(path, ""), path)
    read = {keyword: saved.value(keyword) for keyword in objects}
    have_state = [keyword for keyword, value in objects.items() if any(members(value))]
    wanted = [
        loading
        for keyword in have_state
        for loading in loadings(objects[keyword], read[keyword], modules, keyword)
    ]
    random = None
    if any(isinstance(member, Optimizer) for _, member in found_members):
        random = saved.decode(RANDOM, saved.state.random)
        if problem := randomness.problem(random):
            raise saved.corrupted_error(f"random: {problem}")
    features = _features(saved)
    for path, attached in _attached_models(objects):
        for name, attachment in attached.running.attachments.items():
            state = features.get(name, {}).get(path)
            if state is not None and (problem := attachment.problem(state)):
                raise saved.corrupted_error(f"the state of {name}, {path}: {problem}")
    plain = {keyword: value for keyword, value in read.items() if keyword not in have_state}
    return _ReadParts(wanted, plain, random, features)


def _features(saved: Saved) -> dict[str, dict[str, Any]]:
    """Return the saved states of features, by their names, then by the way to a model."""
    if saved.state.features is not None:
        kept: dict[str, dict[str, Any]] = saved.decode(FEATURES, saved.state.features)
        if not isinstance(kept, dict) or not all(isinstance(of, dict) for of in kept.values()):
            raise saved.corrupted_error("features: no states by the way to a model")
        return kept
    # version 1: earlier releases wrote states in another form
    owed = saved.decode(_RESIDUALS, saved.state.residuals)
    outer = saved.decode(_OUTER, saved.state.outer)
    for name, by_path in ((_RESIDUALS, owed), (_OUTER, outer)):
        unlike = [unlike_tensors(states) for states in by_path.values()]
        if problem := next(filter(None, unlike), ""):
            raise saved.corrupted_error(f"{name}: {problem}")
    return before_features(saved.state.models, owed, outer)


def _warn_of_dropped(
    path: str, names: Sequence[str], features: Mapping[str, Mapping[str, Any]], comm: Comm
) -> None:
    """Warn on rank 0 of a model's saved states that no feature goes on with here."""
    kinds = of(Feature)
    for name in names:
        state = features[name].get(path)
        if state is None or comm.rank > 0:
            continue
        if line := kinds[name].dropped(state) if name in kinds else DROPPED.format(name):
            LOGGER.warning("%s: %s", path, line)
