"""Parameters that ranks or servers own in pieces: each owner updates its own pieces, on lanes.

step              4  settings are captured
                  5  servers are told
                  6  updates are sent off, and the parameters leave their groups
state_dict        the owners' pieces are put together (a collective)
load_state_dict   each owner keeps its pieces

Guarded by tests/equivalence/test_owners.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.extents import Owned
from shoal.contracts.attendance import Attendance, Wanted
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer
from shoal.engine.lanes import Errand
from shoal.optim.owners import Owners, norms_of, scale
from shoal.optim.part import Keeping, Part, States
from shoal.optim.update import PieceUpdate, state_of_pieces, steps_of
from shoal.profiling.updates import attributes, like, settings
from shoal.remote.verbs import Aspect, MakeStep, Read, Write
from shoal.remote.wire import Data


@final
class OwnedStates:
    """The states of the pieces that this rank owns. They outlive the model and its optimizer.

    Args:
        own: one function for each transfer, which returns the states of this rank's pieces.
    """

    def __init__(self, own: Sequence[Callable[[], list[Any]]]) -> None:
        self._own = own
        self._updates: dict[int, list[Event]] = {}  # updates of the last two steps, by number

    def note_sent(self, steps: int, errands: Sequence[Errand]) -> None:
        """Note the updates of a step, by the number of steps after it."""
        last = dict([*self._updates.items()][-1:])
        self._updates = {**last, steps: [errand.ended for errand in errands]}

    def gather(self, comm: Comm, steps: int) -> list[list[Any]]:
        """Return every rank's states for each transfer, after so many steps.

        A collective, on any thread. Further steps may have begun: their updates wait for gradients
        of a rank that is here.
        """
        for number, updates in [*self._updates.items()]:
            for ended in updates if number <= steps else ():
                ended.wait()
        return [comm.gather_objects(own(), "optimizer.state_dict()") for own in self._own]


@final
class OwnedPart(Part):
    """The parameters of one model that have owners.

    Args:
        optimizer: the user's optimizer.
        number: its place among the model's optimizers.
        owners: the model's owners.
    """

    def __init__(self, optimizer: Optimizer, number: int, owners: Owners) -> None:
        super().__init__(optimizer)
        self._number, self._owners = number, owners
        self._updates = {
            transfer: PieceUpdate(like(optimizer), transfer) for transfer in owners.transfers
        }
        self.attendance: Attendance | None = None  # it is asked before the state is read
        self._backwards = 0  # backwards that were sent before the last step
        self.states = OwnedStates([update.own_states() for update in self._updates.values()])
        # groups that a step has taken parameters out of, with all the parameters they had
        self._taken: list[tuple[dict[str, Any], list[nn.Parameter]]] = []

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self._owners

    def open(self) -> None:
        """Send the updates to lanes, and take the parameters out of their groups."""
        self._backwards = self._owners.backwards
        if self.attendance is not None:
            self.attendance.step_begins()
        groups = self.optimizer.param_groups
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"] if self.has(p)}
        self.absorb(group_of)
        self._send_off(group_of)
        self._taken = [(group, group["params"]) for group in groups]
        for group, parameters in self._taken:
            group["params"] = [p for p in parameters if p not in group_of]

    def close(self) -> None:
        """Put the parameters back into their groups."""
        for group, parameters in self._taken:
            group["params"] = parameters
        self._taken = []
        if self.attendance is not None:
            self.attendance.step_ends()

    def norms(self, order: float) -> list[Tensor]:
        """Return the norms of gradients on every rank, and of gradients at their owners."""
        owned = self._owners.norms(self.parameters(), order)
        return [*norms_of(self.local_gradients(), order), *owned]

    def scale(self, factor: Tensor) -> None:
        scale(self.local_gradients(), factor)
        self._owners.scale(self.parameters(), factor)

    def whole_state(self) -> States:
        self._owners.settle()
        if self.attendance is not None:
            purpose = "optimizer.state_dict(): state that owners have"
            is_behind_step = self._backwards == self._owners.backwards
            wanted = Wanted.OWNED if is_behind_step else Wanted.CHANGING
            if self.attendance.numbers((), purpose, wanted) is None:
                joined: States = {}
                of_transfers = self.attendance.state(self.states)
                for update, of_ranks in zip(self._updates.values(), of_transfers, strict=True):
                    update.join_states(joined, of_ranks)
                return {parameter: joined.get(parameter, {}) for parameter in self.parameters()}
        self._owners.tell(Read(Aspect.STATE, self._number))
        whole: States = {}
        for transfer, update in self._updates.items():
            gather = partial(update.gather_state, whole)
            self._owners.together(transfer, gather, "optimizer.state_dict(): state of")
        return {parameter: whole.get(parameter, {}) for parameter in self.parameters()}

    def kept_state(self, keeping: Keeping) -> States:
        if not keeping.owned or self._owners.served:
            return self.whole_state()
        self._owners.settle()
        kept: States = {}
        for transfer, update in self._updates.items():
            for piece, state in zip(transfer.pieces, update.own_states()(), strict=True):
                for name, (value, _) in state.items():
                    values = kept.setdefault(piece.parameter, {})
                    values.setdefault(name, Owned()).add(piece, value)
        # without an empty entry, a parameter without pieces here would fetch its state from its
        # owners
        return {parameter: kept.get(parameter, {}) for parameter in self.parameters()}

    def take_state(self) -> None:
        self._owners.settle()
        state = self.optimizer.state
        self._owners.tell(self._state_for)
        for transfer, update in self._updates.items():
            update.take_state(state_of_pieces(transfer, self._owners.rank, state))
        with_state = [parameter for parameter in self.parameters() if parameter in state]
        for parameter in with_state:
            del state[parameter]
        self.mark(with_state)

    def state_bytes(self) -> int:
        self._owners.settle()
        return sum(update.state_bytes() for update in self._updates.values())

    def _state_for(self, server: int) -> Write:
        """What a server is to take of `optimizer.state`."""
        state = self.optimizer.state
        of_transfers = [
            state_of_pieces(transfer, server, state) for transfer in self._owners.served
        ]
        return Write(Aspect.STATE, Data(of_transfers), self._number)

    def _send_off(self, group_of: Mapping[nn.Parameter, int]) -> None:
        """Let lanes and servers update parameters with gradients, in forward's order."""
        # step 4
        captured = [settings(group) for group in self.optimizer.param_groups]
        attributes_now = attributes(self.optimizer)
        leaving = self._leaving(group_of)
        updated = [parameter for _, parameters in leaving for parameter in parameters]
        self._owners.tell_changes(set(updated))
        numbers = {transfer: number for number, transfer in enumerate(self._owners.served)}
        if served := [transfer for transfer, _ in leaving if transfer in numbers]:

            def step_for(server: int) -> MakeStep:
                pieces = {
                    numbers[transfer]: steps_of(transfer, group_of, server) for transfer in served
                }
                return MakeStep(self._number, Data(captured), Data(attributes_now), pieces)

            self._owners.tell(step_for)  # step 5  # order 1
        self.mark(p for p in updated if p not in self._entries)  # absorb has seen the others
        errands: list[Errand] = []
        for transfer, parameters in leaving:
            steps = steps_of(transfer, group_of, self._owners.rank)
            update = self._updates[transfer]
            work = update.work(steps, captured, attributes_now, set(parameters))
            errands.append(self._owners.send_off(transfer, parameters, work))  # step 6
        if self.attendance is not None:
            self.states.note_sent(self.attendance.steps + 1, errands)

    def _leaving(
        self, group_of: Mapping[nn.Parameter, int]
    ) -> Sequence[tuple[OwnedTransfer, Sequence[nn.Parameter]]]:
        """Return the transfers that have a gradient, with their parameters that are in a group."""
        leaving = []
        for transfer in self._owners.returning:
            parameters = [p for p in transfer.parameters if p in group_of]
            if any(map(self._owners.has_gradient, parameters)):
                self._updates[transfer].check_strides()
                leaving.append((transfer, parameters))
        return leaving
