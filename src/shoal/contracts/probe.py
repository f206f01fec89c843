"""Probe: what a strategy wants to know of every layer, and how that is measured.

A strategy lists its probes. A profile is made of what all of them find, the same on every rank.

    1  called     every call of a layer, in one forward that all probes share
    2  measure    a layer, once its usual step is known; all ranks are at the same probe
    3  of_ranks   the ranks' facts become one (core/facts.py)

Costs what the probes do: a forward, where several need one, is shared by `Trial.once`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from shoal.contracts.sample import Sample
from shoal.core.facts import Facts
from shoal.core.known import KnownFigures

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """A module and the trainable parameters it owns, by their dotted names in the model."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class MeasuredLayer:
    """Calls and seconds of one layer in a measured step."""

    calls: int
    calls_vary: bool  # from step to step
    input_elements: int  # of all calls
    output_elements: int
    input_grad: bool  # something it was called with takes a gradient
    needed_s: float  # from the start of forward until it is first called
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: layers by name, and the seconds into backward until each gradient came."""

    layers: dict[str, MeasuredLayer]
    ready_s: dict[str, float]
    forward_s: float
    backward_s: float
    page_faults: float = 0.0  # in backward
    sparse: frozenset[str] = frozenset()  # parameters whose gradients are sparse tensors
    again: frozenset[str] = frozenset()  # parameters that got several gradients in one backward

    @property
    def total_s(self) -> float:
        """Seconds of forward, loss and backward."""
        return self.forward_s + self.backward_s

    def times(self, factor: float) -> MeasuredStep:
        """The same step, that many times as long."""
        return MeasuredStep(
            layers={
                name: replace(
                    watched,
                    needed_s=factor * watched.needed_s,
                    forward_s=factor * watched.forward_s,
                    backward_s=factor * watched.backward_s,
                )
                for name, watched in self.layers.items()
            },
            ready_s={name: factor * ready_s for name, ready_s in self.ready_s.items()},
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
            page_faults=self.page_faults,
            sparse=self.sparse,
            again=self.again,
        )


@dataclass(frozen=True)
class Trial:
    """A model on one sample, as a rank finds it: what it did, and what a probe may have it do.

    The model is in training, without gradients. Whatever a probe changes of it is put back.
    """

    sample: Sample
    layers: tuple[Layer, ...]
    optimizers: tuple[Optimizer, ...]
    ranks: int
    micro_batches: int | None  # that a batch is cut into, if tail hosts may run the model's end
    row_parts: int | None  # parts of a rank's batch in a pipeline; None: the planner may choose
    step: MeasuredStep  # the median of some
    read: frozenset[str]  # parameters that PyTorch's functions were seen to read in forward
    known: KnownFigures = field(default_factory=KnownFigures)  # figures of an earlier start
    # modules that hold parameters of layers and have none of their own; the step measures them, too
    tied: tuple[Layer, ...] = ()
    # uses of weights, by layer, in modules that do not hold them
    borrowed: Mapping[str, str] = field(default_factory=dict)
    _found: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, find: Callable[[Trial], T]) -> T:
        """What `find` finds in this trial; it is called once, however many probes ask."""
        if find not in self._found:
            self._found[find] = find(self)
        found: T = self._found[find]
        return found


class Probe(ABC):
    """Measures each layer for strategies. Every rank has an object of its own for each profile.

    It sends nothing: ranks hear of one another's facts by `Facts.of_ranks`. What it raises on one
    rank, a `UsageError`, stops all of them.
    """

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """Look at one call of a layer, in the forward that all probes share.

        Args:
            layer: that was called.
            args, kwargs: what it was called with, which it may have changed in place.
            output: what it returned.
        """
        return

    @abstractmethod
    def measure(self, layer: Layer, trial: Trial) -> Facts:
        """The facts of one layer, as this rank finds them."""
