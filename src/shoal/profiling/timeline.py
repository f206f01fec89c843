"""One training step, watched: when gradients come, and how long layers take each way.

            enter A leave A    enter B  leave B   loss    dB arrives   dA arrives     end
    forward ───┤ A's   ├──────────┤ B's    ├───────┼─────────┤ B's         ├ A's       ┤ backward

Forward time is a layer's own, without the layers inside it. In backward a layer's time begins when
the gradient of its output arrives, and ends when the next layer's gradient arrives. So the work
between two layers (an activation, a pooling) counts for the earlier layer. Everything is read from
the same steps, so that order and times agree with each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.contracts.probe import Layer, MeasuredLayer, MeasuredStep
from shoal.contracts.sample import Sample, tensors_in
from shoal.profiling.processor import page_faults

Mark = Any  # a moment: seconds on a CPU, an event on CUDA
NOBODY = ""
# the fewest runs of quick work, the fewest of long work, the most runs, and seconds that are enough
_FEWEST, _FEWEST_LONG, _MOST, _ENOUGH_S = 3, 2, 25, 0.05
# share of the time in which a thread has a core alone; seconds to average over if it has not
_ALONE, _SHARED_S = 0.9, 0.06


class DeviceClock:
    """Takes moments without waiting for the device, and tells the seconds between them later."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"

    @property
    def is_of_processor(self) -> bool:
        """Return whether the main thread computes, and no device of its own."""
        return self._device.type == "cpu"

    def mark(self) -> Mark:
        """Take the moment in the device's work."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # the tensors' device, which may not be the current one
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds from one moment to another."""
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def usual(self, work: Callable[[], object], warm: bool = False) -> float:
        """Measure the seconds of `work`: the median of some runs after a warm-up.

        On a CPU, `warm` work, with its data in caches, needs no warm-up.

        If other processes take the core for a part of the time, a short run has all of such a part
        in it, or nothing. Then the result is a mean, over enough turns to be like the mean in a
        step.
        """
        began_s, busy_s = time.perf_counter(), time.thread_time()
        seconds = [self._time(work)]
        times = self._times(seconds[0])
        if self._cuda or not warm:
            began_s, busy_s = time.perf_counter(), time.thread_time()
            seconds.clear()
        seconds += [self._time(work) for _ in range(times - len(seconds))]
        passed_s, busy_s = time.perf_counter() - began_s, time.thread_time() - busy_s
        if self._cuda or busy_s > _ALONE * passed_s:
            return median(seconds)
        while time.perf_counter() - began_s < _SHARED_S:
            seconds.append(self._time(work))
        return fmean(seconds)

    def _times(self, one_s: float) -> int:
        """Return the number of runs for work of this length."""
        if one_s > _ENOUGH_S:
            return _FEWEST_LONG
        return max(_FEWEST, min(int(_ENOUGH_S / max(one_s, 1e-9)), _MOST))

    def _time(self, work: Callable[[], object]) -> float:
        start = self.mark()
        work()
        return self.seconds(start, self.mark())


def watch_step(
    sample: Sample,
    layers: Sequence[Layer],
    clock: DeviceClock,
    forward_ended: Callable[[], None] | None = None,
) -> MeasuredStep:
    """Watch one forward and backward; gradients are left in `.grad`, hooks are removed.

    `forward_ended` is called between the two.
    """
    watch = _Watch(clock)
    with ExitStack() as hooks:
        for layer in layers:
            watch.attach(layer, hooks)
        start = clock.mark()
        loss = sample.loss()
        if forward_ended is not None:
            forward_ended()
        watch.in_backward = True
        middle, faults = clock.mark(), page_faults()
        sample.backward(loss)
        end, faults = clock.mark(), page_faults() - faults
    forward_s = _bill(watch.forward_log, middle, clock)
    backward_s = _bill(watch.backward_log, end, clock)
    return MeasuredStep(
        layers={
            layer.name: MeasuredLayer(
                calls=watch.calls[layer.name],
                calls_vary=False,
                input_elements=watch.input_elements[layer.name],
                output_elements=watch.output_elements[layer.name],
                input_grad=layer.name in watch.input_grad,
                needed_s=clock.seconds(start, watch.entered[layer.name])
                if layer.name in watch.entered
                else 0.0,
                forward_s=forward_s[layer.name],
                backward_s=backward_s[layer.name],
            )
            for layer in layers
        },
        ready_s={name: clock.seconds(middle, mark) for name, mark in watch.ready.items()},
        forward_s=clock.seconds(start, middle),
        backward_s=clock.seconds(middle, end),
        page_faults=faults,
        sparse=frozenset(watch.sparse),
        again=frozenset(watch.again),
    )


def usual(steps: Sequence[MeasuredStep], warm: MeasuredStep) -> MeasuredStep:
    """Return the median of each time over steps of one model. Counts are the last step's.

    Of the warm-up step before, only the number of calls counts.
    """
    last, used = steps[-1], {name for step in steps for name in step.ready_s}
    return MeasuredStep(
        layers={
            name: replace(
                watched,
                calls_vary=len({step.layers[name].calls for step in (warm, *steps)}) > 1,
                needed_s=median(step.layers[name].needed_s for step in steps),
                forward_s=median(step.layers[name].forward_s for step in steps),
                backward_s=median(step.layers[name].backward_s for step in steps),
            )
            for name, watched in last.layers.items()
        },
        ready_s={
            name: median(step.ready_s[name] for step in steps if name in step.ready_s)
            for name in used
        },
        forward_s=median(step.forward_s for step in steps),
        backward_s=median(step.backward_s for step in steps),
        page_faults=median(step.page_faults for step in steps),
        sparse=frozenset.union(*(step.sparse for step in steps)),
        again=frozenset.union(warm.again, *(step.again for step in steps)),
    )


class _Watch:
    """Times that hooks note. Each log entry is a moment and the layer that begins then."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        # hooks of forward run in backward, too, if activation checkpointing repeats forward
        self.in_backward = False
        self.running = [NOBODY]
        # outputs that wait for a gradient, by the innermost layer's name
        self.hooked = WeakTensorKeyDictionary()
        self.forward_log: list[tuple[Mark, str]] = []
        self.backward_log: list[tuple[Mark, str]] = []
        self.entered: dict[str, Mark] = {}  # moment of the first call
        self.ready: dict[str, Mark] = {}
        self.calls: dict[str, int] = defaultdict(int)
        self.input_elements: dict[str, int] = defaultdict(int)
        self.output_elements: dict[str, int] = defaultdict(int)
        self.input_grad: set[str] = set()
        self.sparse: set[str] = set()
        self.again: set[str] = set()

    def attach(self, layer: Layer, hooks: ExitStack) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.in_backward:
                self.running.append(layer.name)
                mark = self.clock.mark()
                self.entered.setdefault(layer.name, mark)
                self.forward_log.append((mark, layer.name))
                inputs = list(tensors_in((args, kwargs)))
                self.input_elements[layer.name] += sum(tensor.numel() for tensor in inputs)
                if not inputs or any(tensor.requires_grad for tensor in inputs):
                    self.input_grad.add(layer.name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            outputs = list(tensors_in(output))
            for tensor in outputs:
                if tensor.requires_grad and tensor not in self.hooked:
                    self.hooked[tensor] = layer.name
                    # remove the hook, because a parameter may be the output itself, and outlives
                    # the step
                    hooks.callback(tensor.register_hook(arrive).remove)
            if not self.in_backward:
                self.calls[layer.name] += 1
                self.output_elements[layer.name] += sum(tensor.numel() for tensor in outputs)
                self.running.pop()
                self.forward_log.append((self.clock.mark(), self.running[-1]))

        def arrive(gradient: Tensor) -> None:
            self.backward_log.append((self.clock.mark(), layer.name))

        hooks.callback(layer.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        hooks.callback(layer.module.register_forward_hook(leave).remove)
        for name, parameter in layer.parameters.items():
            hooks.callback(
                parameter.register_post_accumulate_grad_hook(self._note_ready(name)).remove
            )

    def _note_ready(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            # a gradient may come in several parts: the last one counts
            if self.ready.pop(name, None) is not None:
                self.again.add(name)
            self.ready[name] = self.clock.mark()
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                self.sparse.add(name)

        return note


def _bill(log: Sequence[tuple[Mark, str]], end: Mark, clock: DeviceClock) -> dict[str, float]:
    """Count the seconds until the next entry for each entry's layer."""
    seconds: dict[str, float] = defaultdict(float)
    for (start, name), (stop, _) in pairwise([*log, (end, NOBODY)]):
        seconds[name] += clock.seconds(start, stop)
    return seconds
