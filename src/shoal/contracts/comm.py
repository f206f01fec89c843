"""Comm: messages among ranks, the only door to the network."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.contracts.attendance import Attendance, MainWait
from shoal.core.errors import RanksDiffer, ShoalError
from shoal.core.facts import Topology
from shoal.core.pieces import cut
from shoal.core.trace import MAIN, Recorder

T = TypeVar("T")
# ranks that one sends to: many senders at once overrun the queue of a receiver's link
_AT_ONCE = 3
_USUAL = ("training", "backward", "exchange", "step", "update", "row counts")
WORDS = 64  # bytes in which ranks tell each other their work


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until the tensor may be used again. Raises WorldError when the peer is lost or the
        deadline passed.
        """


class ChannelJournal:
    """Notes of this rank's work on one channel, in the order that all ranks of it have.

    They cost next to nothing, and send nothing. The notes of all ranks show which rank waits in
    vain, and errors name the work of each. This class notes nothing, as a lone rank needs none.
    """

    def begins(self, purpose: str) -> None:
        """Note that this rank begins a piece of work that all ranks of the channel do together.

        Messages from here on are for that purpose, said in the same words on every rank.
        """
        return

    def queued(self, purpose: str, number: int | None = None) -> int:
        """Note a piece of work that a lane has still to do: its number, for `runs` and `check`.

        Args:
            purpose: the work in words.
            number: the same on every rank, and more than the last; by default one more.
        """
        return 0

    def runs(self, number: int, purpose: str) -> None:
        """Note that the lane has come to that piece of work."""
        return

    def expects(self, seconds: float) -> None:
        """Note how long work on this channel is planned to take.

        Far beyond it is an error, once all ranks have begun.
        """
        return

    def may_answer(self, answer: Callable[[], None] | None, up_to: int = 0) -> None:
        """Have `answer` called where others wait for work that this rank has not begun.

        It is called once, on the main thread, as that waits for something.

        Args:
            answer: says that this rank brings nothing.
            up_to: the greatest number on the channel of which that is certain.
        """
        return

    def may_attend(self, attend: Callable[[int, MainWait], None] | None) -> None:
        """Have `attend` called while others wait at a number that this rank has not begun.

        It is called again and again, on any thread, with the number, and whether the main thread
        waits on another channel. No rank is said to wait in vain for a channel that has such a
        function.
        """
        return

    def is_waiting(self) -> bool:
        """Return whether the main thread waits for other ranks."""
        return False


class Comm(ABC):
    """Messages among `size` ranks, of which this is `rank`; `topology` has their hosts.

    Within one channel, messages between two ranks arrive in the order they were sent; concurrent
    users each take a channel of their own. Tensors are contiguous. The collectives here are built
    from point-to-point messages, so that counting messages counts everything. An implementation
    replaces them if it has better ones of its own.
    """

    rank: int
    size: int
    topology: Topology
    timeout_s: float | None  # how long a receive waits; None: for ever
    recorder: Recorder | None = None  # notes the waits of the main thread, if it is set
    attendance: Attendance | None = None  # asked before parts are read over the channel
    journal: ChannelJournal = ChannelJournal()  # notes of this rank's work on the channel
    waited_s: float = 0.0  # seconds, for messages from every rank to every other

    @property
    def workers(self) -> int:
        """Number of ranks that train: 0 … workers − 1. Servers or a tail come after them."""
        return self.topology.workers

    @property
    def others(self) -> list[int]:
        """The other ranks, next neighbour first, so that not all begin with rank 0's link."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending; `tensor` must not change until the wait returns."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start receiving into `tensor`."""

    def send_in_turn(self, messages: Iterable[tuple[int, Sequence[Tensor]]]) -> list[Pending]:
        """Start sending these tensors to each rank, in order; the last ones are still under way.

        Only `_AT_ONCE` ranks are sent to at a time, so one's own receives must have begun. With
        servers it is all at once: else every worker would begin with the same ones, and the others
        would have nothing to do.
        """
        at_once = _AT_ONCE if self.workers == self.size else self.size
        under_way: list[list[Pending]] = []
        for index, (to, tensors) in enumerate(messages):
            if index >= at_once:
                self.finish(under_way[index - at_once])
            under_way.append([self.send(tensor, to) for tensor in tensors])
        return [sending for to_one in under_way[-at_once:] for sending in to_one]

    def finish(self, pending: Sequence[Pending]) -> None:
        """Wait for all of them."""
        for operation in pending:
            operation.wait()

    def beside(self, call: Callable[[], T]) -> T:
        """Make a call that sends and receives, so that it cannot keep this thread for ever.

        Its waits are as quick as in the library's own threads.
        """
        return call()

    @abstractmethod
    def channel(self, name: str, *, idle: bool = False) -> Comm:
        """A channel among the same ranks; every rank makes its channels in the same order.

        On an `idle` one nothing may come for as long as the job lasts: this rank's receives have
        no deadline. Only threads of the library's own wait there.
        """

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Comm:
        """Return a channel among these ranks only, which alone call this. There they count from 0.

        Ranks are given in ascending order.

        Ranks of one group have made as many channels and groups before it as each other.
        """

    @abstractmethod
    def gather_objects(self, value: Any, purpose: str, *kinds: type) -> list[Any]:
        """Every rank's `value`, by rank, on every rank: not for the hot path.

        Messages say that it is for `purpose`, the same words on every rank.

        It is plain data (contracts/plain.py). A rank reads only dataclasses that its own value has,
        and `kinds`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the channel's connections and threads."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks in place (ring), with the same bits on all; a rank sends 2·n·(P−1)/P."""
        flat, left, right = (
            tensor.view(-1),
            (self.rank - 1) % self.size,
            (self.rank + 1) % self.size,
        )
        slices = cut(flat, self.size)
        # reduce-scatter: slice r ends summed on rank r − 1 … then all-gather
        for step in range(self.size - 1):
            outgoing, incoming = (
                slices[(self.rank - step) % self.size],
                slices[(self.rank - step - 1) % self.size],
            )
            received = torch.empty_like(incoming)
            self.finish([self.receive(received, left), self.send(outgoing, right)])
            incoming.add_(received)
        for step in range(self.size - 1):
            outgoing, incoming = (
                slices[(self.rank - step + 1) % self.size],
                slices[(self.rank - step) % self.size],
            )
            self.finish([self.receive(incoming, left), self.send(outgoing, right)])

    def carries(self, device: torch.device) -> bool:
        """Whether collectives take tensors of that device as they are (itself a collective).

        Otherwise these go by way of the host.
        """
        return device.type == "cpu"

    def reduce_scatter(self, slices: Sequence[Tensor]) -> None:
        """Sum every rank's `slices[r]` into rank r's, in place. Other slices may be overwritten."""
        own = slices[self.rank]
        coming = [own if r == self.rank else torch.empty_like(own) for r in range(self.size)]
        self.all_to_all(coming, slices)
        for rank in self.others:
            own.add_(coming[rank])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Give every rank each rank's tensor; `outputs[r]` has the size of rank r's."""
        self.all_to_all(outputs, [tensor] * self.size)

    def numbers(self, numbers: Sequence[int], purpose: str) -> list[int]:
        """Tell rank r `numbers[r]`, and return the number that each rank told this one.

        80 bytes to every other rank.

        Raises:
            RanksDiffer: another rank is about something else than `purpose`.
        """
        digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
        words = torch.frombuffer(bytearray(digest + label(purpose)), dtype=torch.int64)
        self.journal.begins(purpose)
        told = [torch.empty(1 + len(words), dtype=torch.int64, device="cpu") for _ in numbers]
        self.all_to_all(
            told, [torch.cat([torch.tensor([number], device="cpu"), words]) for number in numbers]
        )
        for rank, theirs in enumerate(told):
            if not torch.equal(theirs[1:], words):
                raise self.unlike(rank, read_label(theirs[2:].numpy().tobytes()), purpose)
        return [int(theirs[0]) for theirs in told]

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Give every rank r `inputs[r]`, and get its tensor into `outputs[r]`, unless empty."""
        self.start_all_to_all(outputs, inputs)()

    def start_all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start `all_to_all`, and return a call that waits for its end. Inputs must not change."""
        pending = [self.receive(outputs[r], r) for r in self.others if outputs[r].numel()]
        pending += [self.send(inputs[r], r) for r in self.others if inputs[r].numel()]
        if outputs[self.rank] is not inputs[self.rank]:
            outputs[self.rank].copy_(inputs[self.rank])

        def finish() -> None:
            begin_s = perf_counter()
            self.finish(pending)
            self.waited_s += perf_counter() - begin_s
            if self.recorder is not None:
                self.recorder.note("messages from every rank to every other", MAIN, begin_s)

        return finish

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor to every rank."""
        if self.rank == root:
            self.finish([self.send(tensor, r) for r in self.others])
        else:
            self.receive(tensor, root).wait()

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent. The program may have closed all connections."""
        return True

    def reached(self, where: str) -> None:
        """Say how far this rank is, for the messages of others that wait for it. Costs nothing."""
        return

    def check(self, where: str, number: int | None = None) -> None:
        """Raise an error if this rank waits in vain. A waiting rank calls this now and then.

        Args:
            where: the thing that this rank waits for, in words for messages.
            number: number of that work on this channel; by default the last that it has begun.

        Raises:
            WorldError: a peer is known to be gone.
            RanksDiffer: ranks wait for one another in vain.
        """
        return

    def hear(self, *, again: bool = True) -> None:
        """Raise the verdict on this job if there is one. Costs a look at a flag: nothing is sent.

        Steps that wait for nobody call it, since they would go on alone until the next exchange.

        Args:
            again: raise it also if this rank's program was told before.

        Raises:
            WorldError: a peer is known to be gone.
            RanksDiffer: ranks wait for one another in vain.
        """
        return

    def unlike(self, rank: int, theirs: str, own: str) -> ShoalError:
        """Return the error for a rank at other work, `theirs` ("": its message has no name)."""
        at = {rank: theirs or "an exchange that carries no name", self.rank: own}
        odd, other = (rank, self.rank) if is_usual(own) else (self.rank, rank)
        return RanksDiffer(
            f"rank {odd} does something else than rank {other}: rank {odd} is at {at[odd]}, "
            f"rank {other}: {at[other]}",
            got="; ".join(f"rank {number}: {purpose}" for number, purpose in at.items()),
            do="where layers are cut or in a pipeline, train and read gradients and outputs on "
            "every rank alike. A rank may evaluate alone under torch.no_grad(), and read "
            "state_dict() alone behind optimizer.step(). Or let no layer be cut: "
            'strategies=["replicate", "factor"]',
            rank=rank,
        )

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this rank ends, done or for an error. Nothing follows."""
        return

    def diagnose(self, error: BaseException, where: str) -> BaseException:
        """Return the error for a raw failure of this channel. It names the lost or absent rank."""
        return error


def label(purpose: str) -> bytes:
    """Return a rank's work in `WORDS` bytes, for a rank that may be at other work."""
    return purpose.encode()[:WORDS].ljust(WORDS)


def is_usual(purpose: str) -> bool:
    """Return whether work belongs to an ordinary step. Other work is likelier to be the cause."""
    return purpose.startswith(_USUAL)


def read_label(words: bytes) -> str:
    """Return another rank's work, if these bytes are a label."""
    text = words.decode(errors="replace").strip()
    return text if text.isascii() and text.isprintable() else ""
