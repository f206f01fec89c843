"""What parallelize adds to an optimizer of parameters of which this rank has a part: it updates
that.

    optimizer.step()            the parameters are the parts for as long as the original runs,
                                inside its hooks
    optimizer.state_dict()      in one-process form: every rank's parts put together (a collective)
    optimizer.load_state_dict() takes that form, and keeps this rank's parts

Of tables that servers have, these are told to make the step, and have the state.

A part's update is the same part of the whole's update, or the layer would not have been cut
(profiling/updates.py). Guarded by tests/equivalence/test_cut.py and test_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.stage import Groups, Stage
from shoal.comm.tables import FarTable, Tables
from shoal.contracts.comm import Comm
from shoal.core.pieces import local_gradient, set_local_gradient
from shoal.profiling.updates import attributes, settings
from shoal.profiling.updates import part_of as state_of_part
from shoal.runtime.owners import norm
from shoal.tensors.cut import Cut, OverRanks, cut_of, is_cut, opened, part_of


def cut_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Those of its parameters of which this rank has a part."""
    return [p for group in optimizer.param_groups for p in group["params"] if is_cut(p)]


def far_tables(
    parameters: Iterable[nn.Parameter], tables: Tables | None = None
) -> dict[nn.Parameter, FarTable]:
    """Those that are tables at servers, of every model or of the one that has these."""
    cuts = {parameter: cut_of(parameter) for parameter in parameters if is_cut(parameter)}
    far = {
        parameter: its_cut for parameter, its_cut in cuts.items() if isinstance(its_cut, FarTable)
    }
    return {
        parameter: table
        for parameter, table in far.items()
        if tables is None or table in tables.all
    }


def norms_of_parts(parameters: list[nn.Parameter], order: float) -> list[Tensor]:
    """The norm of every rank's parts of those parameters' gradients, in rank order (a collective);
    no tables'.
    """
    by_comm: dict[Comm, list[Tensor]] = {}
    for parameter in parameters:
        if not isinstance(cut_of(parameter), OverRanks):
            continue
        gradient = local_gradient(parameter)
        here = by_comm.setdefault(cut_of(parameter).comm, [])
        if gradient is not None and gradient.numel():
            here.append(gradient)
    norms: list[Tensor] = []
    for comm, gradients in by_comm.items():
        mine = norm(gradients, order)
        everyone = [torch.empty_like(mine) for _ in range(comm.size)]
        comm.all_gather(everyone, mine)
        norms += everyone
    return norms


@final
class CutOptimizer:
    """The methods that take the place of the optimizer's own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._open = ExitStack()

    def check_sent(self) -> None:
        """Nothing of it is ever this rank's own."""

    def open(self) -> None:
        """Let cut parameters be the parts, with gradients that lie as they do, which fused
        optimizers take for granted.

        A gradient that somebody has looked at is a view of the whole one, and may lie otherwise.
        """
        parameters = cut_parameters(self._optimizer)
        for parameter in parameters:
            gradient, part = local_gradient(parameter), part_of(parameter)
            if gradient is not None and gradient.stride() != part.stride():
                self._open.callback(set_local_gradient, parameter, gradient)
                set_local_gradient(parameter, torch.empty_like(part).copy_(gradient))
        self._open.enter_context(opened(parameters))

    def close(self) -> None:
        """Let them be wholes again."""
        self._open.close()

    def state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state in one-process form, on every rank."""
        state = self._optimizer.state
        parts: dict[Tensor, Any] = {
            p: state[p] for p in cut_parameters(self._optimizer) if p in state
        }
        state.update({p: _whole(cut_of(p), part_of(p), its) for p, its in parts.items()})
        try:
            return original()
        finally:
            state.update(parts)

    def load_state_dict(self, original: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        """Take a state in one-process form."""
        original(state_dict)
        self.take_state()

    def take_state(self) -> None:
        """Keep the parts of what the optimizer holds for wholes."""
        state = self._optimizer.state
        for parameter in cut_parameters(self._optimizer):
            if parameter in state:
                its_cut = cut_of(parameter)
                state[parameter] = state_of_part(state[parameter], its_cut.like, its_cut.part)


@final
class _Hidden:
    """Gradients taken away, so that the original leaves their parameters alone."""

    def __init__(self) -> None:
        self._gradients: dict[nn.Parameter, Tensor | None] = {}

    def open(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take them away."""
        for parameter in parameters:
            self._gradients[parameter] = local_gradient(parameter)
            set_local_gradient(parameter, None)

    def close(self) -> None:
        """Give them back."""
        while self._gradients:
            set_local_gradient(*self._gradients.popitem())


@final
class TableOptimizer:
    """The methods that take the place of an optimizer's own where some of its parameters are tables
    at servers.
    """

    def __init__(self, optimizer: Optimizer, number: int, tables: Tables) -> None:
        self._optimizer, self._number = optimizer, number  # among the model's optimizers
        self._of_model = tables  # an optimizer may have several models
        self._hidden = _Hidden()

    def check_sent(self) -> None:
        """Gradients are always with the servers."""

    def open(self) -> None:
        """Have the servers make the step."""
        now = attributes(self._optimizer)
        for group in self._optimizer.param_groups:
            for table in far_tables(group["params"], self._of_model).values():
                table.step(self._number, settings(group), now)
        mark(self._optimizer, self._tables())
        self._hidden.open(self._tables())

    def close(self) -> None:
        """Let the tables have their gradients again."""
        self._hidden.close()

    def state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state in one-process form."""
        states = {
            parameter: table.state(self._number) for parameter, table in self._tables().items()
        }
        with shown(self._optimizer, states):
            return original()

    def load_state_dict(self, original: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        """Take a state in one-process form."""
        original(state_dict)
        for parameter, table in self._tables().items():
            table.take_state(self._number, self._optimizer.state.pop(parameter, {}))
        mark(self._optimizer, self._tables())

    def take_state(self) -> None:
        """Give the servers what the optimizer holds of tables."""
        for parameter, table in self._tables().items():
            if self._optimizer.state.get(parameter):
                table.take_state(self._number, self._optimizer.state.pop(parameter))

    def _tables(self) -> dict[nn.Parameter, FarTable]:
        return far_tables(
            (p for group in self._optimizer.param_groups for p in group["params"]), self._of_model
        )


def mark(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Show that these have a state: where there is none at all torch.distributed.checkpoint makes a
    step of its own.
    """
    for parameter in parameters:
        optimizer.state.setdefault(parameter, {})


@contextmanager
def shown(optimizer: Optimizer, states: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Let an optimizer show the states that others hold of some parameters, beside what was put
    there by somebody.
    """
    here = {parameter: optimizer.state.pop(parameter, None) for parameter in states}
    both = {parameter: {**(here[parameter] or {}), **state} for parameter, state in states.items()}
    optimizer.state.update({parameter: state for parameter, state in both.items() if state})
    try:
        yield
    finally:
        for parameter, own in here.items():
            optimizer.state.pop(parameter, None)
            if own is not None:
                optimizer.state[parameter] = own


def groups_at_tail(stage: Stage, optimizer: Optimizer) -> Groups:
    """An optimizer's groups: the settings, and the names of those parameters that tail hosts
    have.
    """
    names = stage.names
    return [
        (settings(group), [names[p] for p in group["params"] if p in names])
        for group in optimizer.param_groups
    ]


@final
class StageOptimizer:
    """The methods that take the place of an optimizer's own where tail hosts run the end of a
    model.
    """

    def __init__(self, optimizer: Optimizer, number: int, stage: Stage) -> None:
        self._optimizer, self._number, self._stage = optimizer, number, stage
        self._hidden = _Hidden()

    def check_sent(self) -> None:
        """Gradients are always with the tail."""

    def open(self) -> None:
        """Have the tail make the step."""
        self._stage.step(
            self._number, groups_at_tail(self._stage, self._optimizer), attributes(self._optimizer)
        )
        mark(self._optimizer, self._held())
        self._hidden.open(self._held())

    def close(self) -> None:
        """Let the tail's parameters have their gradients again."""
        self._hidden.close()

    def state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state in one-process form."""
        states = self._stage.call(
            "state", self._number, groups_at_tail(self._stage, self._optimizer)
        )
        with shown(self._optimizer, {p: states.get(name, {}) for p, name in self._held().items()}):
            return original()

    def load_state_dict(self, original: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        """Take a state in one-process form."""
        original(state_dict)
        self._give()
        mark(self._optimizer, self._held())

    def take_state(self) -> None:
        """Give the tail what the optimizer holds of its parameters, if anything."""
        if any(self._optimizer.state.get(parameter) for parameter in self._held()):
            self._give()

    def _give(self) -> None:
        states = {
            name: self._optimizer.state.pop(parameter, {})
            for parameter, name in self._held().items()
        }
        groups = groups_at_tail(self._stage, self._optimizer)
        self._stage.call(
            "take_state", self._number, groups, [states if self._stage.hosts.speaks else {}]
        )

    def _held(self) -> dict[nn.Parameter, str]:
        names = self._stage.names
        return {
            p: names[p]
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p in names
        }


def _whole(its_cut: Cut, part: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A part's state with the whole of every tensor of its shape."""
    return {
        name: its_cut.whole(value)
        if isinstance(value, Tensor) and value.shape == part.shape
        else value
        for name, value in state.items()
    }
