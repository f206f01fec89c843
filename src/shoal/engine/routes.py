"""Routes: which lane each transfer takes, there and back, and what is under way on it.

    to peers        transfer i of its kind takes lane i mod L. On a GPU all that is NCCL's takes the
                    first: NCCL's communicators, called in another order on each rank, may wait for
                    one another
    inside          what the ranks of one host exchange by themselves has lanes of its own, as it
                    must not wait behind what crosses a slow link
    to servers      over lanes that they are on
    from servers    over others: what goes there and what comes back do not share a link

The order of messages in a channel is the order in which its lane is given work. All of it is given
by the main thread or in backward, in the same order on every rank, whatever the lanes' threads do.
A transfer whose sums stay with their owners is not waited for in backward. What follows it comes
behind it (`later`), and whoever needs it waits (`settle`).
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
from shoal.engine.common import Common
from shoal.engine.lanes import Errand, Lane


@final
class Routes:
    """The lanes of one parallelised model.

    Args:
        transfers: all that go over them.
        lanes: channels among the workers, each for a lane.
        served: channels among all ranks, for transfers that servers take part in.
        back: channels for these transfers' way back; without any they come back as they went.
        device: where the model is, if that computes in streams.
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
        self._warned = False  # of a NaN, which is said once
        self.step = 0  # backwards that have sent: where messages say that something happened
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
        # the last errand of each transfer that is not waited for
        self._last: dict[Transfer, Errand] = {}
        self._changing_last = RLock()  # a checkpoint's thread may wait for parameters, too
        self._recorder: Recorder | None = None
        self._waits: dict[str, float] = {}  # seconds of the main thread, by what it waited for
        # what ranks have in common, and the transfer that takes its marks along
        self._told: tuple[Common, Transfer] | None = None

    @property
    def among_workers(self) -> Lane | None:
        """The first lane that only workers are on, if there is one."""
        return next((lane for lane in self.going if lane not in self.served), None)

    def take(
        self, transfers: Iterable[Transfer], inside: bool, instead: Iterable[Transfer]
    ) -> None:
        """Have transfers go from here on, `inside` an island or among all workers.

        Args:
            transfers: that need no servers.
            inside: by the lanes inside the island.
            instead: of these, which have come back and are forgotten.
        """
        for gone in instead:
            self._there.pop(gone, None)
            self._back.pop(gone, None)
        self._told = None
        lanes = self._inside if inside else [lane for lane in self.going if lane not in self.served]
        for transfer, lane in zip(transfers, cycle(lanes), strict=False):
            self._there[transfer] = self._back[transfer] = lane

    def compare(self, common: Common, transfers: Sequence[Transfer]) -> bool:
        """From here on one of these transfers tells what ranks have in common, if any can."""
        able = [transfer for transfer in transfers if transfer.tells]
        first = [transfer for transfer in able if not isinstance(transfer, OwnedTransfer)]
        teller = next(iter(first or able), None)
        self._told = None if teller is None else (common, teller)
        return teller is not None

    def mark(self, transfer: Transfer) -> Mark | None:
        """What goes with this transfer of the running round."""
        if self._told is None or transfer is not self._told[1]:
            return None
        return self._told[0].mark(f"backward {self.step}")

    def send(self, transfer: Transfer) -> Errand:
        """Have a transfer's lane run it. It has been packed, and nothing of it is under way."""
        purpose = f"exchange {transfer.label}"
        errand = self._there[transfer].run(transfer.run, purpose)  # gradient 7
        if isinstance(transfer, OwnedTransfer):
            with self._changing_last:
                self._last[transfer] = errand
        return errand

    def exchange(self, transfer: Transfer) -> None:
        """The same, behind all that its lanes have to do for it."""
        self._behind(transfer, self._there[transfer], transfer.run, f"exchange {transfer.label}")

    def later(self, transfer: Transfer, work: Callable[[Comm], None], purpose: str) -> Errand:
        """Have a transfer's lane do this work on its way back, behind all that it has to do.

        The same calls in order on every rank.
        """
        return self._behind(transfer, self._back[transfer], work, f"{purpose} {transfer.label}")

    def beside(
        self, transfer: Transfer, work: Callable[[Comm], None], purpose: str, back: bool
    ) -> Errand:
        """Have the lane of a transfer's way there, or `back`, do this work beside the transfer."""
        return (self._back if back else self._there)[transfer].run(work, purpose)

    def _behind(
        self, transfer: Transfer, lane: Lane, work: Callable[[Comm], None], purpose: str
    ) -> Errand:
        with self._changing_last:
            before = self._last.get(transfer)

            def behind(comm: Comm) -> None:
                if before is not None:
                    before.result()  # another lane may be at it; if it fails, so does this
                work(comm)

            errand = self._last[transfer] = lane.run(behind, purpose)
        return errand

    def settle(self, transfer: Transfer) -> None:
        """Wait until the lanes are done with a transfer; an error there is raised here."""
        errand = self._last.get(transfer)
        if errand is None:
            return
        # an error here comes again at the next look
        self.wait(errand, transfer, f"wait for {errand.purpose}")
        with self._changing_last:
            if self._last.get(transfer) is errand:
                del self._last[transfer]

    def wait(self, errand: Errand, transfer: Transfer, purpose: str = "") -> None:
        """Wait for an errand of a transfer, and note it as `purpose` if that is given."""
        begin_s = perf_counter()
        errand.wait(f"step {self.step}, {errand.purpose}")
        seconds = perf_counter() - begin_s
        self._waits[transfer.label] = self._waits.get(transfer.label, 0.0) + seconds
        if purpose:
            self.note(purpose, begin_s)

    def waited_s(self) -> float:
        """Seconds that the main thread has waited for transfers."""
        return sum(self._waits.values())

    def waits(self) -> dict[str, float]:
        """The same by what a transfer is called."""
        return dict(self._waits)

    def is_busy(self, transfer: Transfer) -> bool:
        """Whether a lane has something to do with a transfer that nobody has waited for."""
        return transfer in self._last

    def check(self) -> None:
        """Raise the error of a transfer that has ended with one and that nobody has waited for."""
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
        """Raise the verdict on this job if there is one: this step may wait for nobody."""
        if self._comm is not None:
            self._comm.hear(again=again)

    def reached(self, where: str) -> None:
        """Say how far this rank is, for the messages of others that wait for it."""
        for lane in self.lanes[:1]:  # they share one comm's word
            lane.reached(where)

    def record(self, recorder: Recorder | None) -> None:
        """Note from here on what the lanes do, or no longer."""
        self._recorder = recorder
        for lane in self.lanes:
            lane.recorder = recorder

    def note(self, purpose: str, begin_s: float) -> None:
        """Note what the main thread has just done, which began at `begin_s`."""
        if self._recorder is not None:
            self._recorder.note(purpose, MAIN, begin_s)

    def close(self) -> None:
        """End the lanes' threads and give back their channels."""
        for lane in self.lanes:
            lane.close()
