"""Parameters on hosts that run the end of a model: these hosts make the step.

Guarded by tests/equivalence/test_stage.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.part import Part, States, hidden
from shoal.profiling.updates import attributes, settings
from shoal.remote.far_parameters import FarParameters
from shoal.remote.tail_messages import Groups, TailGroup
from shoal.remote.wire import Data


@final
class TailPart(Part):
    """The parameters of a model's end.

    Args:
        optimizer: the user's optimizer.
        number: its place among the model's optimizers.
        stage: the way to the hosts.
    """

    def __init__(self, optimizer: Optimizer, number: int, stage: FarParameters) -> None:
        super().__init__(optimizer)
        self._number, self._stage = number, stage
        self._hidden = ExitStack()

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self._stage.names

    def open(self) -> None:
        """Let the hosts make the step."""
        held = self.parameters()
        self.absorb(held)
        self._stage.step(self._number, self._groups(), attributes(self.optimizer))
        self.mark(held)
        self._hidden.enter_context(hidden(held))  # step 7

    def close(self) -> None:
        self._hidden.close()

    def norms(self, order: float) -> list[Tensor]:
        if not self.parameters():
            return []
        return [self._stage.norm(self._number, self._groups(), order).double()]

    def scale(self, factor: Tensor) -> None:
        if self.parameters():
            self._stage.scale(self._number, self._groups(), factor)
            self._stage.entered()  # gradients that were seen before are old now

    def whole_state(self) -> States:
        states = self._stage.state(self._number, self._groups())
        return {p: states.get(self._stage.names[p], {}) for p in self.parameters()}

    def take_state(self) -> None:
        names, held = self._stage.names, self.parameters()
        states = {names[p]: self.optimizer.state.pop(p, {}) for p in held}
        self._stage.take_state(self._number, self._groups(), states)
        self.mark(held)

    def _groups(self) -> Groups:
        """Return the optimizer's groups: settings, and names of the parameters on the hosts."""
        names = self._stage.names
        return tuple(
            TailGroup(Data(settings(group)), tuple(names[p] for p in group["params"] if p in names))
            for group in self.optimizer.param_groups
        )
