"""Probe: measures facts about every layer for strategies.

A strategy lists its probes. A profile is made of all their facts, the same on every rank.

    1  called     sees every call of a layer, in one forward that all probes share
    2  measure    measures a layer, once its usual step is known; all ranks are at the same probe
    3  of_ranks   makes the ranks' facts one (core/facts.py)

The cost is the work of the probes. A forward that several of them need runs once (`Trial.once`).
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
from shoal.core.known_figures import KnownFigures

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """Module and the trainable parameters that it owns, by their dotted names in the model."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class MeasuredLayer:
    """Calls and seconds of one layer in a measured step."""

    calls: int
    calls_vary: bool  # the number of calls differs between steps
    input_elements: int  # elements of the inputs of all calls
    output_elements: int
    input_grad: bool  # one of its inputs takes a gradient
    needed_s: float  # seconds from the start of forward to its first call
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredStep:
    """Measured step: layers by name, and the seconds of backward until each gradient came."""

    layers: dict[str, MeasuredLayer]
    ready_s: dict[str, float]
    forward_s: float
    backward_s: float
    page_faults: float = 0.0  # page faults in backward
    sparse: frozenset[str] = frozenset()  # parameters with sparse tensors as gradients
    again: frozenset[str] = frozenset()  # parameters that got several gradients in one backward

    @property
    def total_s(self) -> float:
        """Seconds of forward, loss and backward."""
        return self.forward_s + self.backward_s

    def times(self, factor: float) -> MeasuredStep:
        """Return the step with all its times multiplied by a factor."""
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
    """Model on one sample, as a rank measures it: its usual step, and the means for probes to run
    it.

    The model is in training mode, without gradients. A probe's changes to it are undone.
    """

    sample: Sample
    layers: tuple[Layer, ...]
    optimizers: tuple[Optimizer, ...]
    ranks: int
    row_parts: int | None  # parts of a rank's batch in a pipeline; None: the planner may choose
    step: MeasuredStep  # the median of some measured steps
    read: frozenset[str]  # parameters that functions of PyTorch were seen to read in forward
    known: KnownFigures = field(default_factory=KnownFigures)  # figures of an earlier start
    # modules without parameters of their own that hold parameters of layers; the step measures
    # them, too
    tied: tuple[Layer, ...] = ()
    # modules that use a layer's weight without holding it, with the layer
    borrowed: Mapping[str, str] = field(default_factory=dict)
    _found: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, find: Callable[[Trial], T]) -> T:
        """Return the result of `find` for this trial.

        It is called once, even if many probes ask.
        """
        if find not in self._found:
            self._found[find] = find(self)
        found: T = self._found[find]
        return found


class Probe(ABC):
    """Measurement of each layer for strategies. Every rank has its own object for each profile.

    It sends nothing: `Facts.of_ranks` joins the facts of all ranks. A `UsageError` that it raises
    on one rank stops all of them.
    """

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """Look at one call of a layer, in the forward that all probes share.

        Args:
            layer: the layer that was called.
            args, kwargs: its arguments, which it may have changed in place.
            output: the value that it returned.
        """
        return

    @abstractmethod
    def measure(self, layer: Layer, trial: Trial) -> Facts:
        """Return the facts of one layer, as this rank measures them."""
