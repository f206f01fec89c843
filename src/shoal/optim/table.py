"""Parameters that are tables at servers, which make the step and have the state.

Guarded by tests/equivalence/test_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.part import Part, States, hidden
from shoal.profiling.updates import attributes, settings
from shoal.remote.tables import FarTable, Tables
from shoal.tensors.cut import cut_of, is_cut


@final
class TablePart(Part):
    """The tables of one model.

    Args:
        optimizer: the user's optimizer.
        number: its place among the model's optimizers.
        tables: the way to the servers that have the tables.
    """

    def __init__(self, optimizer: Optimizer, number: int, tables: Tables) -> None:
        super().__init__(optimizer)
        self._number, self._tables = number, tables
        self._hidden = ExitStack()

    def has(self, parameter: nn.Parameter) -> bool:
        return is_cut(parameter) and cut_of(parameter) in self._tables.all

    def open(self) -> None:
        """Let the servers make the step."""
        held = self.parameters()
        self.absorb(held)
        attributes_now = attributes(self.optimizer)
        for group in self.optimizer.param_groups:
            for _, table in self._tables_among(group["params"]):
                table.step(self._number, settings(group), attributes_now)
        self.mark(held)
        self._hidden.enter_context(hidden(held))  # step 7

    def close(self) -> None:
        self._hidden.close()

    def norms(self, order: float) -> list[Tensor]:
        tables = self._tables_among(self.parameters())
        return [norm for _, table in tables for norm in table.norms(order)]

    def scale(self, factor: Tensor) -> None:
        for _, table in self._tables_among(self.parameters()):
            table.scale(factor)

    def whole_state(self) -> States:
        tables = self._tables_among(self.parameters())
        return {parameter: table.state(self._number) for parameter, table in tables}

    def take_state(self) -> None:
        tables = self._tables_among(self.parameters())
        for parameter, table in tables:
            table.take_state(self._number, self.optimizer.state.pop(parameter, {}))
        self.mark(parameter for parameter, _ in tables)

    def _tables_among(
        self, parameters: Iterable[nn.Parameter]
    ) -> list[tuple[nn.Parameter, FarTable]]:
        """Return this model's tables among some parameters, each with its table."""
        cuts = [(parameter, cut_of(parameter)) for parameter in parameters if self.has(parameter)]
        return [(parameter, cut) for parameter, cut in cuts if isinstance(cut, FarTable)]
