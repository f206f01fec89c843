"""Parameters on hosts that hold layers and bring no rows: these hosts make the step.

Guarded by tests/equivalence/test_stage.py and tests/pipeline/test_holding.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.part import Part, States, hidden
from shoal.profiling.updates import attributes, settings
from shoal.remote.far_parameters import FarParameters
from shoal.remote.station_messages import Groups, HeldGroup
from shoal.remote.wire import Data


@final
class FarPart(Part):
    """Parameters of one such host.

    Args:
        optimizer: the user's optimizer.
        number: its place among the model's optimizers.
        far: the parameters of the host.
    """

    def __init__(self, optimizer: Optimizer, number: int, far: FarParameters) -> None:
        super().__init__(optimizer)
        self._number, self._far = number, far
        self._hidden = ExitStack()

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self._far.names

    def open(self) -> None:
        """Let the host make the step."""
        held = self.parameters()
        self.absorb(held)
        self._far.step(self._number, self._groups(), attributes(self.optimizer))
        self.mark(held)
        self._hidden.enter_context(hidden(held))  # step 7

    def close(self) -> None:
        self._hidden.close()

    def norms(self, order: float) -> list[Tensor]:
        if not self.parameters():
            return []
        return [self._far.norm(self._number, self._groups(), order).double()]

    def scale(self, factor: Tensor) -> None:
        if self.parameters():
            self._far.scale(self._number, self._groups(), factor)
            self._far.entered()  # gradients that were seen before are old now

    def whole_state(self) -> States:
        states = self._far.state(self._number, self._groups())
        return {p: states.get(self._far.names[p], {}) for p in self.parameters()}

    def take_state(self) -> None:
        names, held = self._far.names, self.parameters()
        states = {names[p]: self.optimizer.state.pop(p, {}) for p in held}
        self._far.take_state(self._number, self._groups(), states)
        self.mark(held)

    def _groups(self) -> Groups:
        """Return the optimizer's groups: settings, and names of the parameters on the host."""
        names = self._far.names
        return tuple(
            HeldGroup(Data(settings(group)), tuple(names[p] for p in group["params"] if p in names))
            for group in self.optimizer.param_groups
        )
