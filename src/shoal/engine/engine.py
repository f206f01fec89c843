"""Engine: gradients travel while backward still runs.

It owns order and errors. The work itself (`Transfer.run`) is straight-line and blocking, on lanes.

    1, 5, 12  round.py       one backward that sends: opened as it enters the model, closed with all
                             gradients published
    7         routes.py      the lane of each transfer, and the transfers under way
              timetable.py   other actions on the engine's events: listeners, and transfers that go
                             by a cadence of their own

The numbers come from docs/ideas/walk-gradient.md, which follows one gradient all the way.

After `loss.backward()` every `.grad` is the global one: clipping, scalers, accumulation and reading
need nothing else. Backward does not wait for a transfer that leaves its sums with their owners. In
low memory, backward waits before it fills another bucket for owners, as long as two for each lane
are not summed yet.

Every rank sends the same messages in the same order in each channel. Gradients go in the plan's
order, whichever land first. A transfer with a cadence goes at an event. Both are the same on every
rank, because every rank makes the same calls: forward, backward, optimizer.step(). Guarded by
tests/engine/test_engine.py (order under random delays, errors, no thread left) and
tests/contracts/test_cadence.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from shoal.contracts.cadence import Event
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Rounds, Transfer
from shoal.core.buckets import Buckets
from shoal.core.errors import UsageError
from shoal.core.no_operation import nothing
from shoal.core.trace import Recorder
from shoal.engine.common_state import Common
from shoal.engine.round import BackwardRound
from shoal.engine.routes import Routes
from shoal.engine.time_spent import Spent
from shoal.engine.timetable import Timetable
from shoal.engine.weights import Weight


@final
class Engine(Rounds):
    """Engine that runs the transfers of one parallelised model, each by its cadence."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        lanes: Sequence[Comm],
        served: Sequence[Comm] = (),
        back: Sequence[Comm] = (),
        buckets: Buckets | None = None,
        device: torch.device | None = None,
        main: Sequence[Comm] = (),
        inside: Sequence[Comm] = (),
    ) -> None:
        """Start the lanes, and connect the transfers.

        Args:
            transfers: the transfers, in the order in which they are sent.
            lanes: channels among the workers, one for each lane.
            served: channels among all ranks, for transfers that servers take part in.
            back: channels for these transfers' way back; without any they come back over the same
                lanes.
            buckets: the memory of the transfers' buckets.
            device: the model's device, if it computes in streams.
            main: channels on which the main thread itself waits, in forward or backward.
            inside: channels among the ranks of an island, one for each lane.
        """
        self.transfers = tuple(transfers)
        self.buckets = buckets or Buckets()
        self.routes = Routes(self.transfers, lanes, served, back, device, inside)
        self._main = tuple(main)
        self.spent = Spent(self.waited_s)
        self._timetable = Timetable(self.transfers, self.routes)
        self._landing = tuple(
            transfer for transfer in transfers if transfer.cadence.on is Event.GRADIENTS_LANDED
        )
        # periods of layers that do not apply gradients in each step
        self.periods = tuple(dict.fromkeys(t.period for t in self._landing if t.period))
        self._accumulating = 0  # number of nested contexts
        self._before_accumulating: Callable[[], None] = nothing
        # hooks on parameters that weigh their gradients, by accumulator
        self.hooks: dict[Any, RemovableHandle] = {}
        self._round = self._next_round()
        self.listen(Event.FORWARD_ENTERED, self.spent.forward)
        self.listen(Event.BACKWARD_ENDED, self.spent.backward)
        for transfer in self.transfers:
            transfer.connect(self)

    def _next_round(self, latest: Weight | None = None) -> BackwardRound:
        landing = self._landing
        if self.periods:
            landing = tuple(t for t in landing if t.period is None or t.period.is_due)
        return BackwardRound(
            landing,
            self.routes,
            self.buckets,
            self._main,
            bool(self._accumulating),
            latest,
        )

    def take(self, landing: Sequence[Transfer], *, inside: bool = False) -> None:
        """Exchange gradients by other transfers from now on. Call it between two backwards, on all
        ranks.

        Args:
            landing: transfers that go as their gradients land. They replace all earlier ones, which
                are released.
            inside: whether only the ranks of an island take part.
        """
        before, self._landing = self._landing, tuple(landing)
        for transfer in before:
            transfer.release()
        self.transfers = (*landing, *(t for t in self.transfers if t not in before))
        self.routes.take(landing, inside, before)
        self._round.take(self._landing)
        for transfer in landing:
            transfer.connect(self)

    def current(self) -> BackwardRound:
        backward = self._round  # gradient 3
        if backward.accumulating:
            if self.periods:
                self._check_cleared(landed=1)
            backward.unsent = True
        elif backward.running() is None:
            # backward came in by another way than the model's output, or the last one never ended
            self.begin(landed=1)
        return backward

    def begin(self, landed: int = 0) -> BackwardRound:
        """Open a round for the running backward. It is called as backward enters the model, for
        each output.

        Args:
            landed: number of gradients that are there already.

        Raises:
            UsageError: a gradient that was applied at the end of a period was not cleared.
            WorldError: the backward before this one ended half-way, so the ranks no longer agree on
                the gradients that were sent.
        """
        if self.periods:
            self._check_cleared(landed)
        self.on_event(Event.BACKWARD_ENTERED)
        backward = self._round
        if backward.accumulating:
            backward.unsent = True
        else:
            backward.open(self._note_opening, self._finish)
        return backward

    def _note_opening(self) -> None:
        self.on_event(Event.ROUND_OPENED)

    @torch.no_grad()
    def _finish(self) -> None:
        ended = self._round
        ended.finish()
        if self.periods:
            self._keep(ended)
        self.routes.step += 1
        self._round = self._next_round(ended.latest)
        self._timetable.on_event(Event.BACKWARD_ENDED, ended)
        self.routes.reached(f"after backward {self.routes.step - 1}")

    def _check_cleared(self, landed: int) -> None:
        """Refuse to keep a period's gradient as one of the next period.

        A gradient that has landed already may be in a `.grad` that was filled with zeros.
        """
        names = [name for period in self.periods for name in period.list_old_gradients()]
        if len(names) > landed:
            raise _uncleared_error(f"parameter {', '.join(names[:3])}")

    def _keep(self, ended: BackwardRound) -> None:
        """Keep the gradients that are not due, and begin a new period for the others."""
        for transfer in self._landing:
            is_kept = transfer.period is not None and not transfer.period.is_due
            if is_kept and isinstance(transfer, OwnedTransfer) and transfer.held:
                raise _uncleared_error(transfer.label)
        for period in self.periods:
            if period.is_due:
                period.end()
            else:
                period.keep(ended.share)

    def called(self, weight: Weight, asks: bool) -> None:
        """Note that the model is called, and that its gradients are to be weighed
        (BackwardRound.called).
        """
        self._round.called(weight, asks)

    def weighs(self, call: Weight | None = None) -> float | None:
        return self.current().weighs(call)

    @property
    def goes_along(self) -> bool:
        """Whether a share is expected to go with the gradients of the next backward."""
        return self._round.goes_along

    @property
    def latest(self) -> Weight | None:
        """Weight of the model's last call."""
        return self._round.latest

    @latest.setter
    def latest(self, weight: Weight) -> None:
        self._round.latest = weight

    def compare(self, common: Common) -> bool:
        """Let ranks compare their common state in each backward, if a transfer can carry marks."""
        return self.routes.compare(common, [t for t in self._landing if t.period is None])

    def renew(self) -> None:
        """Apply periods that a checkpoint has set: the next backward sends the gradients that are
        due.

        Call it between a step and the next forward.
        """
        self._round = self._next_round(self._round.latest)

    def release_weighing(self) -> None:
        """Stop weighing the gradients of parameters."""
        for hook in self.hooks.values():
            hook.remove()
        self.hooks.clear()

    def release(self) -> None:
        """Remove all hooks from parameters: the collector cannot find objects that autograd
        holds.
        """
        self.release_weighing()
        for transfer in self.transfers:
            transfer.release()

    def waited_s(self) -> float:
        """Return the seconds that the main thread has waited for transfers, and for rows of cut
        layers.
        """
        return self.routes.waited_s() + sum(comm.waited_s for comm in self._main)

    def listen(self, event: Event, listener: Callable[[], None]) -> None:
        """Register a function to call whenever that event happens, before transfers go on it."""
        self._timetable.listen(event, listener)

    @property
    def follows_steps(self) -> bool:
        """Whether any transfer or listener follows an optimizer's steps."""
        return self._timetable.waits_for(Event.STEP_BEGUN, Event.STEP_ENDED)

    def on_event(self, event: Event) -> None:
        """Handle an event. Called on the main thread or in backward, alike on every rank."""
        self._timetable.on_event(event, self._round)

    def wait(self) -> None:
        """Wait for transfers with a cadence of their own, without publishing them."""
        self._timetable.wait()

    def settle(self) -> None:
        """Wait for transfers with a cadence of their own, and publish them (on every rank
        alike).
        """
        self._timetable.settle()

    @contextmanager
    def recording(self, recorder: Recorder | None = None) -> Iterator[Recorder]:
        """Record the work of the lanes and the main thread inside, by default in a new recorder."""
        recorder = Recorder() if recorder is None else recorder
        self._record(recorder)
        try:
            yield recorder
        finally:
            self._record(None)

    def _record(self, recorder: Recorder | None) -> None:
        self.routes.record(recorder)
        for comm in self._main:
            comm.recorder = recorder

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on this rank.

        The next backward outside sends them with its own.
        """
        self._accumulate(+1)
        try:
            yield
        finally:
            self._accumulate(-1)

    def before_accumulating(self, call: Callable[[], None]) -> None:
        """Register a function to call before gradients are kept on this rank."""
        self._before_accumulating = call

    def _accumulate(self, deeper: int) -> None:
        self._before_accumulating()
        self._accumulating += deeper
        self._round.accumulating = bool(self._accumulating)

    def check_sent(self) -> None:
        """Raise UsageError if gradients that were never sent would be taken for global ones."""
        if self._round.unsent:
            raise UsageError(
                "gradients that were accumulated on this rank have not been sent",
                do="do the last backward before optimizer.step() outside optimizer.accumulate()",
            )

    def begin_step(self) -> None:
        """Note that a step begins: gradients after it do not belong to calls before it.

        Raises UsageError as `check_sent`, and WorldError if a rank is known to be gone.
        """
        self.routes.hear()
        self.check_sent()
        self._round.latest = None
        self.spent.on_step_begin()

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are kept on this rank, or are going to be."""
        return self._round.accumulating or self._round.unsent

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are kept until their period ends."""
        return any(period.steps for period in self.periods)

    @property
    def is_open(self) -> bool:
        """Whether a round is open: a backward runs, or has ended with an error."""
        return self._round.is_open

    def close(self) -> None:
        """End the lanes' threads and close their channels."""
        self.routes.close()


def _uncleared_error(where: str) -> UsageError:
    return UsageError(
        "a gradient of a layer with an update period was not cleared since it was applied",
        where=where,
        do="call optimizer.zero_grad() behind each step; to accumulate, do all backwards but the "
        "last inside optimizer.accumulate()",
    )
