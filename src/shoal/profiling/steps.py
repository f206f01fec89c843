"""Measures the training step of a model: one to warm up, and then some in a row.

A start that knows the step from an earlier one only warms up: see `_KnownStep`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.contracts.probe import Layer, MeasuredStep, Probe
from shoal.contracts.sample import Sample
from shoal.core.errors import SampleError
from shoal.core.known_figures import KnownFigures
from shoal.profiling.moving_state import Changes
from shoal.profiling.terms import Outputs
from shoal.profiling.timeline import DeviceClock, usual, watch_step
from shoal.profiling.untraced_runs import drop_gradients
from shoal.profiling.usage import Readers

_CHECKING = "parallelize: trying the sample"
# the fewest measured steps after the warm-up, and seconds that are enough for more: first if these
# steps agree, then if they do not
_AT_FIRST, _AT_MOST = (2, 0.5), (3, 2.0)
_AGREE = 0.1  # steps that agree differ by so much
_MOST = 200  # measured steps
_TURN_S = 0.03  # seconds in which all ranks that share cores have had their turns
_BUDGET_S = 20.0  # seconds for more than one step
# limit on how many times as long, or as short, a warm-up step may be as the one of an earlier start
_ALIKE = 1.7


@dataclass(frozen=True)
class _KnownStep:
    """The seconds of a rank's step, from an earlier start.

    Args:
        warm_s: processor seconds of the main thread in the step to warm up, which show at the next
            start that nothing has changed. Load on the machine does not change them. 0 on a GPU.
        layers: by name, whether its calls vary from step to step, and its `needed_s`, `forward_s`
            and `backward_s`.
    """

    warm_s: float
    layers: dict[str, tuple[bool, float, float, float]]
    ready_s: dict[str, float]
    forward_s: float
    backward_s: float
    page_faults: float

    @classmethod
    def from_measurement(cls, step: MeasuredStep, warm_s: float) -> _KnownStep:
        layers = {
            name: (layer.calls_vary, layer.needed_s, layer.forward_s, layer.backward_s)
            for name, layer in step.layers.items()
        }
        seconds = step.forward_s, step.backward_s
        return cls(warm_s, layers, step.ready_s, *seconds, step.page_faults)

    def fits(self, warm: MeasuredStep, warm_s: float) -> bool:
        """Return whether a step to warm up is like that of the earlier start."""
        same = (
            self.layers.keys() == warm.layers.keys() and self.ready_s.keys() == warm.ready_s.keys()
        )
        if not same or not self.warm_s or not warm_s:
            return same
        return 1 / _ALIKE <= warm_s / self.warm_s <= _ALIKE

    def seconds_of(self, warm: MeasuredStep) -> MeasuredStep:
        """Return the step to warm up, with these seconds."""
        layers = {}
        for name, layer in warm.layers.items():
            vary, needed_s, forward_s, backward_s = self.layers[name]
            layers[name] = replace(
                layer,
                calls_vary=vary,
                needed_s=needed_s,
                forward_s=forward_s,
                backward_s=backward_s,
            )
        return replace(
            warm,
            layers=layers,
            ready_s=self.ready_s,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            page_faults=self.page_faults,
        )


@dataclass(frozen=True)
class Watching:
    """The objects that look on in the step to warm up.

    Args:
        probes: they see each call of a layer.
        changes: state that forward changes.
        outputs: outputs of the model.
    """

    probes: Sequence[Probe]
    changes: Changes
    outputs: Outputs


def measured_step(
    sample: Sample, layers: Sequence[Layer], watching: Watching, comm: Comm, known: KnownFigures
) -> tuple[Readers, MeasuredStep]:
    """Warm up while probes look on, then measure some steps in a row, as in training.

    Where the step is known from an earlier start, and the one to warm up is like that of then, no
    more are measured.
    """
    clock, start = _clock_of(layers), time.perf_counter()

    def warm_up() -> tuple[Readers, MeasuredStep, float]:
        began_s = time.thread_time()
        readers, step = _warm_up(sample, layers, watching, clock)
        return readers, step, time.thread_time() - began_s if clock.is_of_processor else 0.0

    readers, warm, warm_s = agreed(comm, warm_up, _CHECKING, SampleError)
    earlier = known.get("step", _KnownStep)
    fits = earlier is not None and earlier.fits(warm, warm_s)
    if all(comm.gather_objects(fits, "measuring the model: what is known")):
        assert earlier is not None
        drop_gradients(list(sample.model.parameters()))
        return readers, earlier.seconds_of(warm)
    known.forget()
    # probes go forward once more
    left_s = _BUDGET_S - (time.perf_counter() - start) - warm.forward_s
    step = _measured(sample, layers, comm, warm, left_s)
    known.put("step", _KnownStep.from_measurement(step, warm_s))
    return readers, step


def _clock_of(layers: Sequence[Layer]) -> DeviceClock:
    """Return the clock of the device that computes, if not all of the model is on the CPU."""
    devices = (p.device for layer in layers for p in layer.parameters.values())
    others = (device for device in devices if device.type != "cpu")
    return DeviceClock(next(others, torch.device("cpu")))


def _warm_up(
    sample: Sample, layers: Sequence[Layer], watching: Watching, clock: DeviceClock
) -> tuple[Readers, MeasuredStep]:
    """Do a step in which all look on.

    Raises:
        SampleError: the loss does not depend on the model.
    """
    with ExitStack() as looking_on:
        readers = looking_on.enter_context(Readers(sample.model, layers).watching())
        looking_on.enter_context(_seen_by(watching.probes, layers))

        def forward_ended() -> None:
            looking_on.close()  # backward may go forward again (checkpointing)
            watching.changes.on_forward_end()

        step = watch_step(watching.outputs.kept_of(sample), layers, clock, forward_ended)
    if not step.ready_s:
        raise SampleError(
            "the loss does not depend on any trainable parameter of the model",
            do="compute it of what the model gives: the one that parallelize is given, and "
            "hands to compute_loss",
        )
    watching.changes.on_backward_end()
    return readers, step


def _measured(
    sample: Sample, layers: Sequence[Layer], comm: Comm, warm: MeasuredStep, left_s: float
) -> MeasuredStep:
    """Measure some steps in a row, and return the usual one.

    If ranks share cores, one step is long in forward and short in backward, and the next the other
    way round: so each rank's times are medians. In training all ranks wait in every step for the
    slowest one, which takes longer than any rank's median. So the medians are stretched to the
    slowest times. Two steps are enough if they agree. If not, more follow.

    Ranks begin each step together, as they do in training: a rank that is done early leaves its
    core to the other ranks. If three ranks on two cores did not begin together, one would have a
    core for itself, and the others would never seem faster than on half a core.

    Steps that are over before the kernel has given every rank its turn are taken by the dozen: one
    that was interrupted is ten times as long, and a rank that waits leaves the core to others.
    """
    parameters, clock = list(sample.model.parameters()), _clock_of(layers)

    def measure() -> MeasuredStep:
        drop_gradients(parameters)
        return watch_step(sample, layers, clock)

    steps = [measure()]
    each_s = min(step.total_s for step in (warm, *steps))
    turn = math.ceil(_TURN_S / max(comm.gather_objects(each_s, "measuring the model: one step")))
    for fewest, enough_s in _AT_FIRST, _AT_MOST:
        affordable = min(max(fewest, int(enough_s / each_s)), int(left_s / each_s), _MOST)
        told = comm.gather_objects(affordable, "measuring the model: number of steps")
        _measure_on(steps, max(1, min(told)), measure, turn, comm)
        typical = usual(steps, warm)
        ranks: list[list[float]] = comm.gather_objects(
            [typical.total_s, *(step.total_s for step in steps)],
            "measuring the model: seconds of steps",
        )
        usual_s = max(total_s for total_s, *_ in ranks)
        slowest = _slowest([own for _, *own in ranks], turn)
        if _agree(slowest) or len(steps) == _MOST:
            break
    drop_gradients(parameters)
    return typical.times(max(1.0, median(slowest) / usual_s))


@contextmanager
def _seen_by(probes: Sequence[Probe], layers: Sequence[Layer]) -> Iterator[None]:
    """Let probes see every call of a layer inside."""

    def tell(probe: Probe, layer: Layer) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with torch._C.DisableTorchFunction():  # a probe does not use a weight
                probe.called(layer, args, kwargs, output)

        return hook

    with ExitStack() as hooks:
        for probe in probes:
            for layer in layers if type(probe).called is not Probe.called else ():
                hook = layer.module.register_forward_hook(tell(probe, layer), with_kwargs=True)
                hooks.callback(hook.remove)
        yield


def _measure_on(
    steps: list[MeasuredStep],
    number: int,
    measure: Callable[[], MeasuredStep],
    turn: int,
    comm: Comm,
) -> None:
    """Measure until there are so many steps; ranks begin each turn together."""
    for index in range(len(steps), number):
        if index % turn == 0:
            _meet(comm)
        steps.append(measure())


def _slowest(ranks: Sequence[Sequence[float]], turn: int) -> list[float]:
    """Return a step's seconds on its slowest rank, over as many steps as make a turn."""
    count = len(ranks[0])
    size = min(count, turn)
    groups = [range(i, i + size) for i in range(0, count - size + 1, size)]
    return [max(sum(own[i] for i in group) for own in ranks) / size for group in groups]


def _agree(seconds: Sequence[float]) -> bool:
    """Return whether each third of the steps says the same as the others; of two, each half."""
    parts = min(3, len(seconds))
    if parts < 2:
        return False
    size = len(seconds) // parts
    medians = [median(seconds[i * size : (i + 1) * size]) for i in range(parts)]
    return max(medians) <= (1 + _AGREE) * min(medians)


def _meet(comm: Comm) -> None:
    """Go on when every rank is here, so that all measure the same thing at the same time."""
    comm.gather_objects(None, "measuring the model: start together")
