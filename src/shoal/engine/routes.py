"""Routes: the lane of each transfer, there and back, and the transfers under way on it.

    to peers        transfer i of its kind takes lane i mod L. On a GPU all transfers by NCCL take
                    the first lane, because NCCL's communicators may wait for one another if ranks
                    call them in different orders
    inside          exchanges among the ranks of one host have lanes of their own, because they must
                    not wait for exchanges over a slow link
    to servers      over lanes that servers share
    from servers    over other lanes, so that the two directions do not share a link

The order of messages in a channel is the order in which its lane gets work. All work comes from the
main thread or from backward, in the same order on every rank, whatever the lanes' threads do.
Backward does not wait for a transfer that leaves its sums with their owners. Later work on it is
queued after it (`later`), and a thread that needs it waits (`settle`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from operator import attrgetter
from threading import RLock
from time import perf_counter
from typing import final

import torch

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark, OwnedTransfer, Transfer
from shoal.core.trace import MAIN, Recorder
from shoal.engine.common_state import Common
from shoal.engine.lanes import Errand, Lane


@final
class Routes:
    """Lanes of one parallelised model.

    Args:
        transfers: all transfers that go over them.
        lanes: channels among the workers, one for each lane.
        served: channels among all ranks, for transfers that servers take part in.
        back: channels for these transfers' way back; without any they come back over the same
            lanes.
        device: the model's device, if it computes in streams.
        inside: channels among the ranks of an island, for transfers that only these take part in.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        lanes: Sequence[Comm],
        served: Sequence[Comm] = (),
        back: Sequence[Comm] = (),
        device: torch.device | None = None,
        inside: Sequence[Comm] = (),
    ) -> None:
        self.device = device
        self._comm = next(iter((*lanes, *served)), None)
        self._warned = False  # whether a NaN was reported, which happens once
        # number of backwards that have sent; messages name it as the place of an event
        self.step = 0
        among_workers = [Lane(comm, f"lane {number}", device) for number, comm in enumerate(lanes)]
        from_servers = [
            Lane(comm, f"lane {number} from servers", device) for number, comm in enumerate(back)
        ]
        self.served = [
            Lane(comm, f"server lane {number}", device) for number, comm in enumerate(served)
        ]
        self.going = among_workers + self.served
        self._inside = [
            Lane(comm, f"lane {number} inside", device) for number, comm in enumerate(inside)
        ]
        self.lanes = self.going + from_servers + self._inside
        by_nccl = {t for t in transfers if t.native} if device is not None else set()
        rest = among_workers[1:] if by_nccl and len(among_workers) > 1 else among_workers
        ways = {False: cycle(rest), True: cycle(self.served)}
        self._there = {
            t: among_workers[0] if t in by_nccl else next(ways[t.served]) for t in transfers
        }
        self._back = self._there | dict(
            zip(filter(attrgetter("served"), transfers), cycle(from_servers), strict=False)
        )
        # last job of each transfer without a wait for it
        self._last: dict[Transfer, Errand] = {}
        self._changing_last = RLock()  # a checkpoint's thread may wait for parameters, too
        self._recorder: Recorder | None = None
        self._waits: dict[str, float] = {}  # seconds that the main thread has waited, by transfer
        # the state that ranks must have in common, and the transfer that carries its marks
        self._told: tuple[Common, Transfer] | None = None

    @property
    def among_workers(self) -> Lane | None:
        """The first lane that only workers share, if there is one."""
        return next((lane for lane in self.going if lane not in self.served), None)

    def take(
        self, transfers: Iterable[Transfer], inside: bool, instead: Iterable[Transfer]
    ) -> None:
        """Let transfers go from now on, `inside` an island or among all workers.

        Args:
            transfers: transfers that need no servers.
            inside: whether they take the lanes inside the island.
            instead: transfers to forget in their place, which have come back.
        """
        for gone in instead:
            self._there.pop(gone, None)
            self._back.pop(gone, None)
        self._told = None
        lanes = self._inside if inside else [lane for lane in self.going if lane not in self.served]
        for transfer, lane in zip(transfers, cycle(lanes), strict=False):
            self._there[transfer] = self._back[transfer] = lane

    def compare(self, common: Common, transfers: Sequence[Transfer]) -> bool:
        """Let one of these transfers carry the marks of the common state from now on, if any
        can.
        """
        able = [transfer for transfer in transfers if transfer.tells]
        first = [transfer for transfer in able if not isinstance(transfer, OwnedTransfer)]
        teller = next(iter(first or able), None)
        self._told = None if teller is None else (common, teller)
        return teller is not None

    def mark(self, transfer: Transfer) -> Mark | None:
        """Return the mark that goes with this transfer in the running round."""
        if self._told is None or transfer is not self._told[1]:
            return None
        return self._told[0].mark(f"backward {self.step}")

    def send(self, transfer: Transfer) -> Errand:
        """Let a transfer's lane run it. It has been packed, and nothing of it is under way."""
        purpose = f"exchange {transfer.label}"
        errand = self._there[transfer].run(transfer.run, purpose)  # gradient 7
        if isinstance(transfer, OwnedTransfer):
            with self._changing_last:
                self._last[transfer] = errand
        return errand

    def exchange(self, transfer: Transfer) -> None:
        """Run a transfer after all work that its lanes already have for it."""
        self._behind(transfer, self._there[transfer], transfer.run, f"exchange {transfer.label}")

    def later(self, transfer: Transfer, work: Callable[[Comm], None], purpose: str) -> Errand:
        """Let a transfer's lane do this work on its way back, after all work that it has.

        Every rank makes the same calls in the same order.
        """
        return self._behind(transfer, self._back[transfer], work, f"{purpose} {transfer.label}")

    def beside(
        self, transfer: Transfer, work: Callable[[Comm], None], purpose: str, back: bool
    ) -> Errand:
        """Let a lane of a transfer, its way there or `back`, do this work independently of the
        transfer.
        """
        return (self._back if back else self._there)[transfer].run(work, purpose)

    def _behind(
        self, transfer: Transfer, lane: Lane, work: Callable[[Comm], None], purpose: str
    ) -> Errand:
        with self._changing_last:
            before = self._last.get(transfer)

            def behind(comm: Comm) -> None:
                if before is not None:
                    # another lane may be working on it; if that fails, so does this
                    before.result()
                work(comm)

            errand = self._last[transfer] = lane.run(behind, purpose)
        return errand

    def settle(self, transfer: Transfer) -> None:
        """Wait until the lanes are done with a transfer. An error there is raised here."""
        errand = self._last.get(transfer)
        if errand is None:
            return
        # an error here comes again at the next look
        self.wait(errand, transfer, f"wait for {errand.purpose}")
        with self._changing_last:
            if self._last.get(transfer) is errand:
                del self._last[transfer]

    def wait(self, errand: Errand, transfer: Transfer, purpose: str = "") -> None:
        """Wait for a job of a transfer, and note the wait as `purpose` if that is given."""
        begin_s = perf_counter()
        errand.wait(f"step {self.step}, {errand.purpose}")
        seconds = perf_counter() - begin_s
        self._waits[transfer.label] = self._waits.get(transfer.label, 0.0) + seconds
        if purpose:
            self.note(purpose, begin_s)

    def waited_s(self) -> float:
        """Return the seconds that the main thread has waited for transfers."""
        return sum(self._waits.values())

    def waits(self) -> dict[str, float]:
        """Return the same seconds by transfer label."""
        return dict(self._waits)

    def is_busy(self, transfer: Transfer) -> bool:
        """Return whether a lane still has work on a transfer without a wait for it."""
        return transfer in self._last

    def check(self) -> None:
        """Raise the error of a transfer that has failed without a wait for it."""
        for transfer, errand in list(self._last.items()):
            if errand.failed():
                self.settle(transfer)

    def warn_of_nan(self, parameter: str) -> None:
        """Warn, once, that this rank's own gradient of a parameter has NaN."""
        if self._warned or self._comm is None:
            return
        self._warned = True
        rank, host = self._comm.rank, self._comm.topology.hosts[self._comm.rank]
        warnings.warn(
            f"the gradient of {parameter} has NaN on rank {rank} (host {host}), backward "
            f"{self.step}, before any exchange: after it all ranks have NaN. Look at that rank's "
            "batch, or clip and skip on all ranks alike",
            stacklevel=2,
        )

    def hear(self, *, again: bool = True) -> None:
        """Raise the verdict on this job if there is one, because this step may contain no wait."""
        if self._comm is not None:
            self._comm.hear(again=again)

    def reached(self, where: str) -> None:
        """Report this rank's position, for messages of other ranks that wait for it."""
        for lane in self.lanes[:1]:  # all lanes share one journal, so telling one is enough
            lane.reached(where)

    def record(self, recorder: Recorder | None) -> None:
        """Record the work of the lanes from now on, or stop recording with None."""
        self._recorder = recorder
        for lane in self.lanes:
            lane.recorder = recorder

    def note(self, purpose: str, begin_s: float) -> None:
        """Record work of the main thread that began at `begin_s` and ends now."""
        if self._recorder is not None:
            self._recorder.note(purpose, MAIN, begin_s)

    def close(self) -> None:
        """End the lanes' threads and close their channels."""
        for lane in self.lanes:
            lane.close()
