"""Timetable: the listeners of the engine's events, and the transfers that go on them.

    1  told        listeners first, in the order in which they came
    2  published   wait for transfers that were sent `lag` events ago, and publish them
    3  sent        pack and send the transfers that go now
    4  waited for  wait for transfers without a lag, and publish them

Each step follows the plan's order, on the main thread, at an event that all ranks have alike. So
the order of work in a lane is the same on every rank: by event, and within an event in the plan's
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

from shoal.contracts.cadence import Event
from shoal.contracts.transfer import Round, Transfer
from shoal.engine.lanes import Errand
from shoal.engine.routes import Routes


@final
class Timetable:
    """Actions on each event, except for transfers that go as their gradients land."""

    def __init__(self, transfers: Sequence[Transfer], routes: Routes) -> None:
        self._routes = routes
        self._listeners: dict[Event, list[Callable[[], None]]] = {event: [] for event in Event}
        self._transfers = {
            event: [transfer for transfer in transfers if transfer.cadence.on is event]
            for event in Event
        }
        self._counts: Counter[Event] = Counter()
        # transfers under way, and the number of the event at which they are published
        self._under_way: dict[Transfer, tuple[Errand, int]] = {}

    def listen(self, event: Event, listener: Callable[[], None]) -> None:
        """Register a function to call whenever that event happens."""
        self._listeners[event].append(listener)

    def waits_for(self, *events: Event) -> bool:
        """Return whether there is anything to do on any of these events."""
        return any(self._listeners[event] or self._transfers[event] for event in events)

    def on_event(self, event: Event, backward: Round) -> None:
        """Handle an event: tell listeners, and publish and send the transfers that are due."""
        for listener in self._listeners[event]:  # 1
            listener()
        transfers = self._transfers[event]
        if not transfers:
            return
        number = self._counts[event]
        self._counts[event] += 1
        self._publish(transfers, number)  # 2
        for transfer in transfers:  # 3
            if transfer.cadence.goes(number):
                transfer.pack(backward)
                due = number + transfer.cadence.lag
                self._under_way[transfer] = self._routes.send(transfer), due
        self._publish(transfers, number)  # 4

    def wait(self) -> None:
        """Wait for all transfers under way, without publishing them."""
        for transfer, (errand, _) in self._under_way.items():
            self._routes.wait(errand, transfer, f"wait for {errand.purpose}")

    def settle(self) -> None:
        """Wait for all transfers under way, and publish them (on every rank alike)."""
        for transfer, (errand, _) in list(self._under_way.items()):
            self._routes.wait(errand, transfer, f"wait for {errand.purpose}")
            transfer.publish()
            del self._under_way[transfer]

    def _publish(self, transfers: Sequence[Transfer], number: int) -> None:
        for transfer in transfers:
            errand, due = self._under_way.get(transfer, (None, 0))
            if errand is not None and due <= number:  # it may be due earlier, if that event failed
                self._routes.wait(errand, transfer, f"wait for {errand.purpose}")
                transfer.publish()
                del self._under_way[transfer]
