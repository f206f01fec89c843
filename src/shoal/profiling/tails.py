"""Finds the ends of a model that can run on other hosts: all their outputs go to the loss.

An end is a module with the very tensor that the model returns as its output (`classifier`), or the
last children of an nn.Sequential with that output (4 to 6 of `classifier`). One forward, in which
every module is watched, finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.sample import Sample, tensors_in
from shoal.core.errors import UsageError
from shoal.core.facts import Excerpt, Facts, LayerProfile, ModelProfile
from shoal.core.pieces import cut_sizes
from shoal.profiling.products import ProductFacts
from shoal.remote.channel import wire_bytes
from shoal.remote.stage_output import in_micro_batches
from shoal.remote.tail_hosts import (
    MicroBatch,
    backward_message,
    forward_message,
    has_hooks,
    loss_message,
    modes,
    modules_of,
    parameters_of,
)
from shoal.remote.tail_messages import TailStep
from shoal.remote.wire import Data, written

# calls of every module by name: positional arguments, keyword arguments, output
Calls = dict[str, list[tuple[tuple[Any, ...], Any, Any]]]
_OF_CODECS = torch.float32, torch.float64
# relative difference that is allowed, because sums of other lengths may differ in float16
_WITHIN = 1e-3
_CUT = (
    "in micro-batches what comes before it gives something else (batch normalisation, or rows that "
    "are not the first "
    "dimension); micro_batches=1 does not cut the batch"
)
_NONE = "no module that has it puts out what the model returns"


@dataclass(frozen=True)
class Tail:
    """An end of the model that feeds the loss only, with a rank's bytes and seconds."""

    # modules that are called in turn, each with the output of the one before
    modules: tuple[str, ...]
    layers: tuple[str, ...]
    micro_batches: int
    sent_bytes: float  # bytes to the tail's host: activations, targets, and messages around them
    received_bytes: float  # bytes from the tail's host
    body_forward_s: float = 0.0  # seconds of the modules before it
    body_backward_s: float = 0.0
    forward_s: float = 0.0  # seconds of the tail itself and the loss
    backward_s: float = 0.0
    pass_s: float = 0.0  # the part of the last two that does not shrink with the number of rows
    # the part of the bytes, both ways, that a codec may shrink: activations and their gradients
    activation_bytes: float = 0.0
    gradient_bytes: float = 0.0
    itemsize: int = 4  # bytes of one number among them


@dataclass(frozen=True)
class TailFacts(Facts):
    """The smallest end of the model that has a layer, or why there is none."""

    tail: Tail | None = None
    reason: str = ""

    @classmethod
    def of_ranks(cls, ranks: Sequence[TailFacts]) -> TailFacts:
        return ranks[0]  # counts are the same on all ranks, and times come from the whole profile

    def in_profile(self, profile: ModelProfile) -> TailFacts:
        if self.tail is None:
            return self
        layers = [profile.layer(name) for name in self.tail.layers]
        before_s = min(layer.needed_s for layer in layers)
        ready_s = max(layer.ready_s for layer in layers)
        tail = replace(
            self.tail,
            body_forward_s=before_s,
            body_backward_s=max(0.0, profile.backward_s - ready_s),
            forward_s=max(0.0, profile.forward_s - before_s),
            backward_s=ready_s,
            # the products of the output, and of the gradients of input and weight
            pass_s=3 * sum(layer.measured(ProductFacts).fixed_s for layer in layers),
        )
        return replace(self, tail=tail)

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> TailFacts:
        return TailFacts()


def tail_of(layers: Iterable[LayerProfile]) -> Tail | None:
    """Return the largest end of the model that one of these layers is in."""
    tails = [tail for layer in layers if (tail := layer.measured(TailFacts).tail)]
    return max(tails, key=lambda tail: len(tail.layers), default=None)


@final
class TailProbe(Probe):
    """Finds the end of the model that a layer is in, if there are hosts that may run it."""

    def measure(self, layer: Layer, trial: Trial) -> TailFacts:
        tails = trial.once(Tails.find)
        return TailFacts(tails.found.get(layer.name), tails.reasons.get(layer.name, ""))


@dataclass(frozen=True)
class Tails:
    """The smallest end of the model around each layer, by its name, or why there is none."""

    found: Mapping[str, Tail]
    reasons: Mapping[str, str]

    @classmethod
    def find(cls, trial: Trial) -> Tails:
        """Run the sample forward, and watch all modules."""
        sample, layers, micro_batches = trial.sample, trial.layers, trial.micro_batches
        if micro_batches is None:
            return cls({}, {})
        if reason := _unfit_form(sample):
            return cls({}, {layer.name: reason for layer in layers})
        own = [buffer.clone() for buffer in _buffers_of(sample.loss_fn)]
        with _noted_calls(sample.model) as calls:
            loss = sample.loss().detach()
        output = calls[""][-1][2]
        reason = _unfit_loss(sample, output)
        if not all(map(torch.equal, _buffers_of(sample.loss_fn), own)):
            reason = "the loss changes its buffers, which tail hosts would not bring to agree"
        if reason:
            return cls({}, {layer.name: reason for layer in layers})
        found: dict[str, Tail] = {}
        reasons = {layer.name: _NONE for layer in layers}
        ends = sorted(_ends(sample.model, calls, output), key=len)
        differing = _differing(sample, {modules[0] for modules in ends}, micro_batches)
        for modules in ends:
            inside = [sample.model.get_submodule(name) for name in modules]
            ended = [
                layer.name
                for layer in layers
                if any(layer.module in module.modules() for module in inside)
            ]
            reason = _unfit(sample, inside, [calls[name] for name in modules])
            for name in ended:
                if reason or modules[0] in differing:
                    reasons[name] = reason or _CUT
                elif name not in found:
                    first_input = calls[modules[0]][0][0][0]
                    nbytes = _bytes(sample, inside, first_input, loss, micro_batches)
                    coded = first_input.nbytes * (first_input.dtype in _OF_CODECS)
                    found[name] = Tail(
                        modules,
                        tuple(ended),
                        micro_batches,
                        *nbytes,
                        activation_bytes=coded,
                        gradient_bytes=coded * first_input.requires_grad,
                        itemsize=first_input.itemsize,
                    )
        return cls(
            found, {name: "" if name in found else reason for name, reason in reasons.items()}
        )


def _buffers_of(loss_fn: Any) -> list[Tensor]:
    return list(loss_fn.buffers()) if isinstance(loss_fn, nn.Module) else []


@contextmanager
def _noted_calls(model: nn.Module) -> Iterator[Calls]:
    """Note every call of every module inside."""
    calls: Calls = {}

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.setdefault(name, []).append((args, kwargs, output))

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(leave(name), with_kwargs=True).remove)
        yield calls


def _unfit_form(sample: Sample) -> str:
    """Return why the loss cannot move with the model's end, as the sample's form shows, or ''."""
    if sample.compute_loss is not None:
        return "compute_loss calls the model itself, so its loss cannot go with the model's end"
    if sample.loss_fn is None:
        return "there is no loss_fn that could go with it: the model returns its own loss"
    return ""


def _unfit_loss(sample: Sample, output: Any) -> str:
    """Return why the loss cannot be computed on another host, or ''."""
    assert sample.loss_fn is not None
    if not isinstance(output, Tensor):
        return "the model's output is not one tensor"
    try:
        written(Data(sample.y))
    except UsageError as error:
        return f"the target has {error.got} in it, which cannot be sent to tail hosts"
    leaf = output.detach().requires_grad_()
    nodes, seen = [sample.loss_fn(leaf, sample.y).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if getattr(node, "variable", leaf) is not leaf:
                return "the loss reads parameters itself"
            nodes += [earlier for earlier, _ in node.next_functions]
    return ""


def _differing(sample: Sample, first: Set[str], micro_batches: int) -> set[str]:
    """Name the modules with inputs that would differ if the batch were cut, as evaluation shows."""
    if micro_batches == 1:
        return set()
    if any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        for module in sample.model.modules()
    ):
        return set(first)
    training = [(module, module.training) for module in sample.model.modules()]

    def inputs_of(x: Any) -> dict[str, Tensor]:
        with torch.no_grad(), _noted_calls(sample.model) as calls:
            replace(sample, x=x).output()
        return {name: calls[name][0][0][0] for name in first}

    try:
        sample.model.eval()
        whole = inputs_of(sample.x)
        parts = [
            inputs_of(piece) for piece in in_micro_batches(sample.x, _rows(sample), micro_batches)
        ]
    except Exception:  # the model may not take a part of the batch
        return set(first)
    finally:
        for module, was in training:
            module.training = was
    return {name for name in first if not close(whole[name], [part[name] for part in parts])}


def close(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether a tensor is the concatenation of these parts."""
    if len({part.shape[1:] for part in parts if part.dim()}) != 1 or not all(
        part.dim() for part in parts
    ):
        return False
    joined = torch.cat(list(parts))
    return joined.shape == whole.shape and torch.allclose(
        joined.double(), whole.double(), rtol=_WITHIN, atol=_WITHIN
    )


def _ends(model: nn.Module, calls: Calls, output: Any) -> Iterator[tuple[str, ...]]:
    """Yield the modules of every end, by name, in the order of their calls."""
    takers = [
        name
        for name, own in calls.items()
        if any(arg is output for args, _, _ in own for arg in args)
    ]
    for name, module in model.named_modules():
        if [returned is output for _, _, returned in calls.get(name, ())] != [True]:
            continue
        children = (
            [f"{name}.{child}".lstrip(".") for child in module._modules]
            if type(module) is nn.Sequential
            else []
        )
        for end in ((name,), *(tuple(children[start:]) for start in range(1, len(children)))):
            inside = tuple(f"{member}." for member in end)
            # a dropout with probability 0 returns its input
            within = all(f"{taker}.".startswith(inside) for taker in takers)
            if within and end != ("",) and all(member in calls for member in end):
                yield end


def _unfit(sample: Sample, modules: Sequence[nn.Module], calls: Sequence[Any]) -> str:
    """Return why these modules, which end the model, cannot run on another host, or ''."""
    for calls_of_one in calls:
        if (
            len(calls_of_one) != 1
            or calls_of_one[0][1]
            or len(calls_of_one[0][0]) != 1
            or not isinstance(calls_of_one[0][0][0], Tensor)
        ):
            return "a module of the model's end is not called once and with one tensor"
    if any(has_hooks(inner) for module in modules for inner in module.modules()):
        return "a module of the model's end has hooks, which would not be called here"
    if any(True for module in modules for _ in module.buffers()):
        return "the model's end has buffers, such as the statistics of batch normalisation"
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    within = {inner for module in modules for inner in module.modules()}
    for module in sample.model.modules():
        if module not in within and any(id(p) in inside for p in module.parameters(recurse=False)):
            return "the model's end has a parameter that is tied to one before it"
    (first_input,), put_out = calls[0][0][0], calls[-1][0][2]
    rows = _rows(sample)
    if not first_input.dim() or not put_out.dim() or len(first_input) % rows or len(put_out) % rows:
        return "the model's end does not have the batch's rows in its first dimension"
    if any(
        parameter.device.type != "cpu" for module in modules for parameter in module.parameters()
    ):
        return "tail hosts have CPUs only"
    return ""


def _rows(sample: Sample) -> int:
    return next((len(tensor) for tensor in tensors_in(sample.x) if tensor.dim()), 1)


def _bytes(
    sample: Sample,
    modules: Sequence[nn.Module],
    first_input: Tensor,
    loss: Tensor,
    micro_batches: int,
) -> tuple[float, float]:
    """Return the bytes that a worker sends to the model's end in a step, and receives from it."""
    every = modules_of(modules, sample.loss_fn)
    parameters = list(
        parameters_of({str(number): module for number, module in enumerate(modules)}).values()
    )
    sizes = cut_sizes(_rows(sample), micro_batches)
    per_row = len(first_input) // sum(sizes)
    activations = [
        torch.empty(size * per_row, *first_input.shape[1:], dtype=first_input.dtype, device="meta")
        if size
        else None
        for size in sizes
    ]
    messages: list[Any] = [
        forward_message(
            activation, None if index else modes(every, parameters), MicroBatch(index=index)
        )
        for index, activation in enumerate(activations)
    ]
    messages.append(loss_message((sample.y,), {}))
    messages.append(
        backward_message([True] * len(parameters), [True] * len(parameters), 1.0, {0: loss})
    )
    messages.append(TailStep(0, None))
    back = first_input.nbytes if first_input.requires_grad else 0
    return float(sum(map(wire_bytes, messages))), float(back + wire_bytes(loss))
