"""Finds state that training changes differently on each rank, and how ranks come to agree on it.

    1  changed    the first step of the profile, or all of them, changed its value
    2  differs    its bits differ between ranks, or would if the rows did. State that is alike on
                  all ranks stays as it is: SyncBatchNorm's statistics, a counter, weights that
                  follow others
    3  is read    two steps with other values in its place have another loss or other gradients:
                  then all ranks take rank 0's value. State that is only written, such as running
                  statistics, is averaged

If two equal steps give unlike results, step 3 sees nothing, and ranks take rank 0's value. The cost
is some steps, but nothing if no state changes, or only torch's own running statistics do. Guarded
by tests/equivalence/test_moving.py.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.contracts.batch import mapped
from shoal.contracts.comm import Comm
from shoal.contracts.sample import Sample
from shoal.contracts.state import TensorSlot, states
from shoal.core.errors import SampleError, UsageError
from shoal.core.facts import MovingState
from shoal.core.random_state import RANDOM_STATE
from shoal.profiling.identity import content
from shoal.profiling.traces import Traces
from shoal.profiling.untraced_runs import drop_gradients
from shoal.tensors.sync_norm import Synchronised

Ways = str | Mapping[str, str]  # the user's choice for all buffers, or by name
_WAYS = ("first", "mean", "local")
_AGREE, _LOCAL = "agree", "local"
_CHECKING = "parallelize: looking for state that training changes"
_FAILED = "failed: "
_DISTURBANCES = 3
_BUDGET_S = 20.0  # seconds for all tries, each of two steps
_NORMS = ("running_mean", "running_var")


@final
class Changes:
    """The values of the model's state before the model was run."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.states = states(model, loss_fn)
        self._before = {
            name: (tensor, tensor.detach().clone())
            for name, state in self.states.items()
            if (tensor := state.tensor) is not None
        }
        self._between: dict[str, Tensor] = {}
        # changed by the first step: a position in a ring buffer returns to its first value
        self._once: set[str] = set()
        self.in_backward = False
        # trained weights may be large, so their version tells of a change
        self._weights = {
            name: (parameter, parameter._version)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not parameter.is_inference()
        }

    def on_forward_end(self) -> None:
        """Note the state that forward has changed, before backward of the same step begins."""
        self._between = {
            name: tensor.detach().clone()
            for name in self.changed()
            if (tensor := self.states[name].tensor) is not None
        }

    def on_backward_end(self) -> None:
        """Note the state that the step has changed, and whether backward has changed it again."""
        self._once.update(self.changed())
        self.in_backward = any(
            (now := self.states[name].tensor) is None or not _same(now, before)
            for name, before in self._between.items()
        )
        self._between.clear()

    def changed(self) -> list[str]:
        """Name the state that has another value now, or had one after the first step."""
        return [
            name
            for name, before in self._before.items()
            if name in self._once or self._is_changed(name, *before)
        ]

    def _is_changed(self, name: str, tensor: Tensor, value: Tensor) -> bool:
        now = self.states[name].tensor
        return now is not None and (now is not tensor or not _same(now, value))

    def before(self, name: str) -> Tensor:
        """Return the value from before the model was run."""
        return self._before[name][1]

    def keeps_form(self, name: str) -> bool:
        """Return whether its shape and type are as before. If not, it is a cache, and stays."""
        (_, before), now = self._before[name], self.states[name].tensor
        forms = [
            (tensor.shape, tensor.dtype, tensor.layout is torch.strided)
            for tensor in (before, now)
            if tensor is not None
        ]
        return len(set(forms)) == 1 == forms[0][2] and len(forms) == 2

    def weights(self) -> dict[str, str]:
        """Return digests of the trained weights that forward or backward has changed, by name."""
        return {
            name: _digest([parameter])
            for name, (parameter, version) in self._weights.items()
            if parameter._version != version
        }


def moving(
    sample: Sample, changes: Changes, comm: Comm, step_s: float, ways: Ways = _AGREE
) -> tuple[MovingState, ...]:
    """Find the state that ranks must agree on (a collective, after some steps of the sample).

    Args:
        sample: the sample that was run.
        changes: the state from before the run.
        comm: the ranks.
        step_s: seconds of a step.
        ways: the user's choice for buffers, which overrides trials.

    Returns:
        The state with the way to agree, the same on every rank.

    Raises:
        SampleError: forward changes trained weights, differently on each rank.
    """
    told = comm.gather_objects((changes.changed(), changes.weights(), step_s), _CHECKING)
    slowest_s = max(seconds for *_, seconds in told)
    _check_weights([weights for _, weights, _ in told], sample.model)
    asked = _user_choices(ways, list(changes.states))
    changed = {name for names, *_ in told for name in names} - asked.keys()
    names = [name for name in changes.states if name in changed]
    found: dict[str, str] = {}
    if names and ways != _LOCAL:
        unlike = _unlike(names, sample, changes, comm)
        tries = int(_BUDGET_S / (2 * max(slowest_s, 1e-9)))
        found = _choose_ways(sample, changes.states, unlike, comm, tries)
    found |= {name: way for name, way in asked.items() if way != _LOCAL}
    return _describe(changes, found, comm) if found else ()


def left_local(changes: Changes, comm: Comm, ways: Ways) -> tuple[str, ...]:
    """Name the changed state that the user keeps local to each rank."""
    said = {ways} if isinstance(ways, str) else set(ways.values())
    if _LOCAL not in said:
        return ()
    names = list(changes.states)
    asked = dict.fromkeys(names, ways) if isinstance(ways, str) else _user_choices(ways, names)
    told = comm.gather_objects(changes.changed(), _CHECKING)
    changed = {name for own in told for name in own}
    return tuple(name for name in names if name in changed and asked.get(name) == _LOCAL)


def check_ways(ways: Any, model: nn.Module, loss_fn: Any) -> None:
    """Refuse a choice for buffers that is not known, or that fits no buffer (UsageError)."""
    if ways in (_AGREE, _LOCAL):
        return
    if not isinstance(ways, Mapping) or not all(way in _WAYS for way in ways.values()):
        raise UsageError(
            "buffers is not known",
            got=repr(ways)[:200],
            expected=f'"{_AGREE}", "{_LOCAL}", or by name or glob one of {", ".join(_WAYS)}',
            do='give for instance buffers={"*.center": "first"}',
        )
    known = states(model, loss_fn)
    for name, way in _user_choices(ways, list(known)).items():
        tensor = known[name].tensor
        if way == "mean" and tensor is not None and not tensor.is_floating_point():
            raise UsageError(
                f"buffer {name} has no floating-point numbers, so there is no mean of it",
                got=str(tensor.dtype),
                do=f'give buffers={{"{name}": "first"}}',
            )
    for pattern in ways:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise UsageError(
                "buffers names one that neither the model nor the loss has",
                got=repr(pattern)[:200],
                expected=", ".join(list(known)[:5]) or "there are none",
                do="give a dotted name of model.named_buffers(), or a glob",
            )


def _user_choices(ways: Ways, names: Iterable[str]) -> dict[str, str]:
    """Return the user's choice by name. Exact names win over patterns, later ones over earlier."""
    if isinstance(ways, str):
        return {}
    by_glob = {n: way for pattern, way in ways.items() for n in names if fnmatchcase(n, pattern)}
    return by_glob | {name: way for name, way in ways.items() if name in by_glob}


def _check_weights(ranks: Sequence[Mapping[str, str]], model: nn.Module) -> None:
    if len(ranks) == 1:
        return
    bounded = {
        f"{path}.weight".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
        and module.weight.requires_grad
    }
    for name in sorted(bounded.union(*ranks)):
        if name in bounded or len({weights.get(name) for weights in ranks}) > 1:
            raise SampleError(
                f"forward changes the trained weight {name}, on each rank otherwise, and nobody "
                "sends that",
                where=name,
                expected="weights that the optimizer changes alone, or forward alike on all ranks",
                do="change it behind optimizer.step(), on every rank alike, for instance in place "
                "of nn.Embedding(max_norm=m) by weight.renorm_(2, 0, m) under torch.no_grad()",
            )


def _unlike(names: Sequence[str], sample: Sample, changes: Changes, comm: Comm) -> list[str]:
    """Name the changed state that differs between ranks, or would if the rows did."""
    known = changes.states
    names = [name for name in names if not _known_alike(known[name])]
    own = [_digest_of(known[name]) if changes.keeps_form(name) else "" for name in names]
    ranks = comm.gather_objects(own, _CHECKING)
    kept = {name: set(d) for name, *d in zip(names, *ranks, strict=True) if "" not in d}
    unlike = {name for name, d in kept.items() if len(d) > 1 or _is_torchs_own(known[name])}
    if len(unlike) < len(kept):
        told = comm.gather_objects(_follows_rows(sample, changes, list(kept)), _CHECKING)
        unlike.update(*told)
    # take all changed state of a module if one differs: a queue, and the position in it
    modules = {known[name].module() for name in unlike}
    return [name for name in kept if known[name].module() in modules]


def _follows_rows(sample: Sample, changes: Changes, names: Sequence[str]) -> list[str]:
    """Name the state that ends differently after a step in which every row is the first one."""
    start = Traces(sample.model, sample.function)
    values = {name: (changes.states[name], changes.before(name)) for name in names}
    alike = replace(sample, x=_rows_alike(sample.x), y=_rows_alike(sample.y))
    found = []
    for batch in (sample, alike):
        outcome = _outcome(batch, start, values, steps=1)
        found.append({name: _digest_of(changes.states[name]) for name in names})
    start.put_back()
    failed = outcome.startswith(_FAILED)
    return [] if failed else [name for name in names if found[0][name] != found[1][name]]


def _rows_alike(batch: Any) -> Any:
    return mapped(batch, lambda t: t[:1].expand_as(t).clone() if t.dim() and len(t) else t)


def _known_alike(state: TensorSlot) -> bool:
    """Return whether its kind alone shows that all ranks have the same."""
    module = state.module()
    return isinstance(module, nn.SyncBatchNorm | Synchronised) or (
        isinstance(module, _NormBase) and state.leaf == "num_batches_tracked"
    )


def _choose_ways(
    sample: Sample, known: Mapping[str, TensorSlot], names: Sequence[str], comm: Comm, tries: int
) -> dict[str, str]:
    """Choose for each of these the way to agree."""
    ways = {name: "mean" if _is_torchs_own(known[name]) else "first" for name in names}
    to_try = [name for name in names if ways[name] == "first" and _is_float(known[name])]
    if to_try:
        written = _find_only_writes(sample, known, to_try, comm, tries)
        read = {known[name].module() for name in to_try if name not in written}
        for name in written:
            module = known[name].module()
            # all state of a module agrees one way, because a scale may follow from extremes
            if module is not None and not read.intersection(module.modules()):
                ways[name] = "mean"
    return ways


def _is_torchs_own(state: TensorSlot) -> bool:
    """Return whether it is a running statistic of a torch norm, which training does not read."""
    module = state.module()
    forward = getattr(type(module), "forward", None)
    return (
        isinstance(module, _NormBase)
        and state.leaf in _NORMS
        and str(getattr(forward, "__module__", "")).startswith("torch.nn.modules.")
    )


def _is_float(state: TensorSlot) -> bool:
    tensor = state.tensor
    return tensor is not None and tensor.is_floating_point()


def _find_only_writes(
    sample: Sample, known: Mapping[str, TensorSlot], names: Sequence[str], comm: Comm, tries: int
) -> set[str]:
    """Name the state that does not influence training on any rank, found by so many tries."""
    if tries < 2 + _DISTURBANCES:
        return set()
    start = Traces(sample.model, sample.function)
    usual = [_outcome(sample, start, {}) for _ in range(2)]

    def is_read(tried: Sequence[str]) -> bool:
        own = any(
            _outcome(sample, start, _disturb(known, tried, number)) != usual[0]
            for number in range(_DISTURBANCES)
        )
        return any(comm.gather_objects(own, _CHECKING))

    repeats = all(comm.gather_objects(usual[0] == usual[1], _CHECKING))
    try:
        if not repeats:
            return set()
        if not is_read(names):
            return set(names)
        if len(names) == 1 or 2 + _DISTURBANCES * (1 + len(names)) > tries:
            return set()
        return {name for name in names if not is_read([name])}
    finally:
        start.put_back()


def _outcome(
    sample: Sample, start: Traces, values: Mapping[str, tuple[TensorSlot, Tensor]], steps: int = 2
) -> str:
    """Return a digest of the results of some steps with these values, or of their error."""
    digest = hashlib.blake2b(digest_size=16)
    trained = [p for p in sample.model.parameters() if p.requires_grad]
    with RANDOM_STATE:  # ranks that are threads draw from one random state
        start.put_back()
        with torch.no_grad():
            for state, value in values.values():
                if (tensor := state.tensor) is not None:
                    tensor.data.copy_(value)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            for _ in range(steps):
                drop_gradients(trained)
                loss = sample.loss()
                sample.backward(loss)
                gradients = [p.grad for p in trained if p.grad is not None]
                digest.update(_digest([loss, *gradients]).encode())
        except Exception as error:
            return f"{_FAILED}{type(error).__name__}: {error}"
        finally:
            drop_gradients(trained)
    return digest.hexdigest()


def _disturb(
    known: Mapping[str, TensorSlot], names: Sequence[str], number: int
) -> dict[str, tuple[TensorSlot, Tensor]]:
    """Return other values to put in: far above, far below, and at random."""
    values = {}
    generator = torch.Generator().manual_seed(number)
    for name in names:
        tensor = known[name].tensor
        if tensor is None or not tensor.numel():
            continue
        finite = torch.nan_to_num(tensor.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
        scale = 1 + 2 * finite.abs().max()
        noise = torch.randn(finite.shape, generator=generator, dtype=torch.float64, device="cpu")
        shift = (1.0, -1.0, noise.to(finite.device))[number]
        values[name] = (known[name], finite + scale * shift)
    return values


def _describe(changes: Changes, found: Mapping[str, str], comm: Comm) -> tuple[MovingState, ...]:
    """Describe the state that is to agree, in the order of the model."""
    in_backward = any(comm.gather_objects(changes.in_backward, _CHECKING))
    described = []
    for name, state in changes.states.items():
        tensor = state.tensor
        if name in found and tensor is not None and tensor.numel():
            size = tensor.element_size()
            if found[name] == "mean":
                size = 8 if tensor.dtype is torch.float64 else 4
            described.append(MovingState(name, tensor.numel(), size, found[name], in_backward))
    return tuple(described)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    if a.layout is not torch.strided:
        return bool(content(a) == content(b))
    return torch.equal(a, b) or bool(content(a) == content(b))


def _digest_of(state: TensorSlot) -> str:
    tensor = state.tensor
    return "" if tensor is None else _digest([tensor])


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(content(tensor))
    return digest.hexdigest()
