"""Figures from an earlier start of the same job: its links, the times of its model, and its plan.

    1  key      all that the figures depend on, of every rank
    2  read     rank 0 looks into its cache folder, and gives the figures to the other ranks
    3  check    a few messages, and the step to warm up: they are measured if they have changed
    4  write    rank 0 keeps new figures

Only rank 0 reads and writes, so hosts may share a home folder. Prices are kept, and no permissions:
each start sees on its sample how the model treats rows, and the terms of its loss.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import msgspec
import torch
from torch import nn

from shoal.contracts.comm import Comm
from shoal.contracts.sample import tensors_in
from shoal.contracts.versions import versions
from shoal.core import cache_folder
from shoal.core.cores import bound_cores, given_cores, quota_cores
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.known_figures import KnownFigures
from shoal.core.plan import Plan
from shoal.front.stages import Stages
from shoal.planner.experience import experiences, prefer
from shoal.planner.options import known
from shoal.planner.plan_details import plan_for
from shoal.planner.simpler_plans import strategies_of
from shoal.profiling.identity import model_digest
from shoal.profiling.profile_file import Measured
from shoal.session.job import TrainingJob

_PURPOSE = "parallelize: what is known"
_MODEL, _LINKS, _PLAN = "model", "links", "plan"


@final
class KnownModel:
    """The times of a model, as an earlier start has measured them (collective).

    Args:
        comm: the ranks.
        key: all that they depend on: the same on every rank.
    """

    def __init__(self, comm: Comm, key: str) -> None:
        self._comm, self._key = comm, key
        self._say = Stages(speaks=comm.rank == 0).say
        self._written, self._before = "", list[dict[str, Any]]()
        text = "" if cache_folder.folder() is None else "[]"
        if comm.rank == 0:
            entry = cache_folder.read(_MODEL, key, list[dict[str, Any]], self._say)
            if entry is not None and len(entry.value) == comm.size:
                self._before, self._written = entry.value, entry.written
                text = json.dumps(entry.value)
        text = comm.gather_objects(text, _PURPOSE)[0]
        self._keeps = bool(text)  # rank 0's folder is the one that counts
        figures = json.loads(text) if text else []
        self.known = KnownFigures(figures[comm.rank] if figures else None)

    def keep(self) -> None:
        """Keep new figures, or say that all were known (a collective)."""
        if not self._keeps:
            return
        own = json.dumps(self.known.figures) if self.known.has_measured else ""
        ranks = self._comm.gather_objects(own, _PURPOSE)
        if self._comm.rank:
            return
        if self._before and not any(ranks):
            self._say(
                f"the model's times are known from {_day(self._written)}, so one step is enough: "
                "SHOAL_CACHE=off has them measured"
            )
            return
        if self._before:
            self._say("the model's times are no longer as they were, so they were measured again")
        before = self._before or [{}] * self._comm.size
        figures = [json.loads(new) if new else old for new, old in zip(ranks, before, strict=True)]
        cache_folder.write(_MODEL, self._key, figures, self._say)


def key_of_model(job: TrainingJob, sample: Any, comm: Comm, how: Any) -> str:
    """Return all that the times of a model depend on (a collective).

    Args:
        job: the model, its loss and its optimizers.
        sample: one batch.
        comm: the ranks.
        how: further parts, as plain data.
    """
    own = {
        "sample": [f"{tuple(t.shape)} {t.dtype} {t.device.type}" for t in tensors_in(sample)],
        **_processor(),
    }
    ranks = comm.gather_objects(json.dumps(own), _PURPOSE)
    return json.dumps(
        {
            **_versions(comm),
            "model": model_digest(job.model),
            "code": _digest(sorted(_code_of(type(m)) for m in job.model.modules())),
            "loss": _code_of(job.compute_loss or job.loss_fn),
            "optimizers": [_optimizer(optimizer) for optimizer in job.optimizers],
            "training": [name for name, m in job.model.named_modules() if not m.training],
            "autocast": [
                str(torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device)
            ],
            "precision": torch.get_float32_matmul_precision(),
            "how": how,
            "ranks": ranks,
        }
    )


def known_cluster(comm: Comm, key: str) -> Cluster | None:
    """Return the links as an earlier start has measured them, on every rank (a collective)."""
    text = ""
    if comm.rank == 0:
        say = Stages(speaks=True).say
        entry = cache_folder.read(_LINKS, key, Cluster, say)
        if entry is not None and entry.value.topology == comm.topology:
            say(
                f"links are known from {_day(entry.written)}, so a few messages are enough: "
                "SHOAL_CACHE=off has them measured"
            )
            text = msgspec.json.encode(entry.value, enc_hook=dict).decode()
    text = comm.gather_objects(text, _PURPOSE)[0]
    return msgspec.json.decode(text, type=Cluster) if text else None


def keep_cluster(comm: Comm, key: str, cluster: Cluster) -> None:
    """Keep measured links, on rank 0."""
    if comm.rank == 0:
        cache_folder.write(_LINKS, key, cluster, Stages(speaks=True).say)


def key_of_links(comm: Comm, device: torch.device) -> str:
    """Return all that links and paces depend on (a collective).

    Args:
        comm: the ranks.
        device: of the buckets.
    """
    ranks = comm.gather_objects(json.dumps({"device": _name_of(device), **_processor()}), _PURPOSE)
    return json.dumps({**_versions(comm), "ranks": ranks})


def known_plan(profile: ModelProfile, cluster: Cluster, among: Mapping[str, Any]) -> Plan:
    """Return the plan that was found before from the same figures, or search for one.

    Args:
        profile: the model.
        cluster: the ranks.
        among: constraints and options of the search, as `plan_for` takes them.
    """
    if cache_folder.folder() is None:
        return plan_for(profile, cluster, **among)
    said = Stages(speaks=True).say
    key = json.dumps([versions().shoal, profile.digest, cluster.topology.hosts, repr(among)])
    figures = _digest([Measured(profile, cluster).to_json()])
    entry = cache_folder.read(_PLAN, key, dict[str, str], said)
    if entry is not None and entry.value.get("figures") == figures:
        try:
            return Plan.from_json(entry.value.get("plan", ""))
        except PlanError as error:  # a user has edited the file
            said(f"a plan cannot be taken from {cache_folder.path_of(_PLAN, key)} ({error.what})")
    plan = plan_for(profile, cluster, **among)
    if Plan.from_json(plan.to_json()) == plan:
        cache_folder.write(_PLAN, key, {"figures": figures, "plan": plan.to_json()}, said)
    return plan


def learn_plan(
    best: Plan, profile: ModelProfile, cluster: Cluster, among: Mapping[str, Any], resumes: bool
) -> Plan:
    """Return the plan to take by the steps of earlier runs of this job.

    Args:
        best: the plan that is predicted to be the fastest.
        profile: the model.
        cluster: the ranks.
        among: constraints and options of the search, as `plan_for` takes them.
        resumes: whether the model goes on from a checkpoint.
    """

    def search(kinds: Sequence[str]) -> Plan:
        strategies = strategies_of(kinds, known(among["strategies"]))
        return known_plan(profile, cluster, {**among, "strategies": strategies})

    say = Stages(speaks=True).say
    earlier = experiences(profile, cluster.topology, say)
    plan, why = prefer(best, earlier, search, resumes=resumes)
    say(why)
    return plan


def _versions(comm: Comm) -> dict[str, Any]:
    software = versions()
    return {"shoal": software.shoal, "torch": software.torch, "hosts": comm.topology.hosts}


def _processor() -> dict[str, Any]:
    return {
        "processor": versions().processor,
        "cores": [round(min(n, 1e6), 2) for n in (given_cores(), bound_cores(), quota_cores())],
        "threads": torch.get_num_threads(),
    }


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return a class and the options that decide how it computes."""
    told = {k: v for k, v in optimizer.defaults.items() if isinstance(v, bool | None)}
    return f"{type(optimizer).__qualname__} {told} {len(optimizer.param_groups)}"


def _code_of(thing: Any) -> str:
    """Return a digest of the code of a function, or of a class's own functions."""
    function = getattr(thing, "__wrapped__", thing)
    if isinstance(function, nn.Module):
        function = type(function)
    codes = [*_codes(function)]
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {_digest(codes)}"


def _codes(thing: Any) -> Iterator[str]:
    functions = vars(thing).values() if isinstance(thing, type) else [thing]
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if isinstance(code, types.CodeType):
            yield from _of_code(code)


def _of_code(code: types.CodeType) -> Iterator[str]:
    """Return the instructions and constants of a function and its inner functions."""
    yield code.co_code.hex()
    for constant in code.co_consts:
        if isinstance(constant, frozenset):  # its order is another one in each process
            yield repr(sorted(map(repr, constant)))
        elif not isinstance(constant, types.CodeType):
            yield repr(constant)
    yield repr(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _of_code(inner)


def _digest(texts: Any) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


def _day(written: str) -> str:
    return written.replace("T", " ").replace("+00:00", " UTC")
