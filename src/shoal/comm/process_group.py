"""Comm for ranks that are processes, over torch.distributed (gloo, and NCCL if there is CUDA).

This file and groups.py are the only ones that know torch.distributed's names. Every channel is a
process group of its own. Whole buckets go through the library's all_reduce. Everything else is
point-to-point, which on gloo is faster than its own reduce_scatter and all_gather. Ranks meet first
(meeting.py). If something breaks or takes too long, the verdict of the heartbeat is raised
(heartbeat.py), which also frees every thread that is blocked here.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from shoal.comm.blocking_calls import Aside
from shoal.comm.groups import made
from shoal.comm.heartbeat import Heartbeat, StoreHolder
from shoal.comm.meeting import INTERFACE, Roster, meet
from shoal.comm.patience import Patience
from shoal.comm.pulse import Pulse, PulseAddress, Pulses
from shoal.comm.signed_store import SignedStore
from shoal.comm.torch_calls import Inside, ReceiveViaHost, WorkHandle, is_timeout
from shoal.comm.wait_places import NO_PURPOSE, TaggedNotes
from shoal.contracts.comm import Comm, Pending, label, read_label
from shoal.contracts.launcher import Seat
from shoal.contracts.plain import packed, unpacked
from shoal.contracts.store_values import Values
from shoal.core.errors import RanksDiffer, ShoalError, WorldError
from shoal.core.facts import Topology
from shoal.core.host_copies import beside, to_host
from shoal.core.interfaces import is_loopback
from shoal.core.open_files import check_limit, raise_limit

T = TypeVar("T")
_SHORT = 1016  # bytes of what ranks tell each other that cross at once
_WAKE_TAG = 0x5E0A1  # of a message that nobody sends


@dataclass(frozen=True)
class _Membership:
    """Membership of this process in the job, which all of its channels share."""

    heartbeat: Heartbeat
    aside: Aside  # threads for calls that may block
    patience: Patience  # the time that an exchange may take


@final
class ProcessGroupComm(Comm):
    """Channel over one torch.distributed process group.

    Args:
        group: the process group.
        name: the channel's name, the same on every rank.
        topology: the hosts of the group's ranks.
        membership: this process's membership in the job.
        idle: whether the wait for a message has no limit.
    """

    timeout_s: float
    journal: TaggedNotes

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        topology: Topology,
        membership: _Membership,
        *,
        idle: bool = False,
    ) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.topology = topology
        self._group = group
        self._membership = membership
        self.timeout_s, self._heartbeat = membership.patience.longest_s, membership.heartbeat
        ranks = dist.get_process_group_ranks(group)
        self._record = self._heartbeat.journal.note_opening(name, ranks, numbered=not idle)
        has_tags = not idle and max(ranks) < self._heartbeat.workers  # others begin nothing
        self.journal = TaggedNotes(
            self._record,
            self._heartbeat.journal,
            has_tags=has_tags,
            has_limits=membership.patience.given_s is None,
        )
        self._inside = Inside(
            self._heartbeat, self.timeout_s, membership.aside, self._record, idle=idle
        )
        self._has_nccl: bool | None = None  # whether NCCL reaches every rank; None: not asked yet
        self._heartbeat.channels[id(self)] = self

    def send(self, tensor: Tensor, to: int) -> WorkHandle:
        # CUDA tensors go through the host: gloo sends none, and NCCL hangs if both sides receive
        # first
        at_host = to_host(tensor)
        # the group's own call: dist.isend looks up the group again, at twice the processor time
        with self._inside:  # gradient 10
            return WorkHandle(self._group.send([at_host], to, self.journal.tag), self._inside)

    def receive(self, tensor: Tensor, source: int) -> WorkHandle | ReceiveViaHost:
        received = tensor if tensor.device.type == "cpu" else beside(tensor)
        with self._inside:
            work = WorkHandle(self._group.recv([received], source, self.journal.tag), self._inside)
        return work if received is tensor else ReceiveViaHost(work, received, tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        carried = tensor if self.carries(tensor.device) else to_host(tensor)
        self._call(carried, partial(dist.all_reduce, carried, group=self._group))
        if carried is not tensor:
            tensor.copy_(carried, non_blocking=True)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        carried = tensor if self.carries(tensor.device) else to_host(tensor)
        self._call(carried, partial(dist.broadcast, carried, group=self._group, group_src=root))
        if carried is not tensor and self.rank != root:
            tensor.copy_(carried, non_blocking=True)

    def finish(self, pending: Sequence[Pending]) -> None:
        """Wait for all of them, in one call on another thread."""
        under_way = [each for each in pending if isinstance(each, WorkHandle | ReceiveViaHost)]
        if under_way:
            self._inside.run(lambda: [each.done() for each in under_way])
        for each in under_way:
            each.land()

    def beside(self, call: Callable[[], T]) -> T:
        return self._inside.beside(call)

    def carries(self, device: torch.device) -> bool:
        """Return whether collectives take tensors of that device as they are (itself a collective).

        Gloo takes tensors of the host. NCCL takes tensors of GPUs, if every rank has a GPU of its
        own.
        """
        if device.type != "cuda":
            return device.type == "cpu"
        if self._has_nccl is None:
            devices = self.gather_objects(_as_nccl_knows(device), "which GPU each rank has")
            self._has_nccl = None not in devices and len(set(devices)) == self.size
        return self._has_nccl

    def reduce_scatter(self, slices: Sequence[Tensor]) -> None:
        if self._by_nccl(slices):
            own, parts = slices[self.rank], list(slices)
            self._call(own, partial(dist.reduce_scatter, own, parts, group=self._group))
        else:
            super().reduce_scatter(slices)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        if self._by_nccl(outputs):
            self._call(tensor, partial(dist.all_gather, list(outputs), tensor, group=self._group))
        else:
            super().all_gather(outputs, tensor)

    def start_all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        if not self._by_nccl([*outputs, *inputs]):
            return super().start_all_to_all(outputs, inputs)
        with self._inside:
            work = dist.all_to_all(list(outputs), list(inputs), group=self._group, async_op=True)
        assert work is not None
        # this thread's stream waits for it, not the host
        return partial(self._call, inputs[0], work.wait)

    def _call(self, tensor: Tensor, call: Callable[[], object]) -> None:
        """Call the library. For the host's tensors, another thread does it, because gloo may block.

        NCCL only queues, on this thread's stream.
        """
        if tensor.device.type == "cpu":
            self._inside.run(call)
        else:
            with self._inside:
                call()

    def _by_nccl(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether NCCL takes these tensors, which are all on one device."""
        return tensors[0].device.type == "cuda" and self.carries(tensors[0].device)

    def channel(self, name: str, *, idle: bool = False) -> ProcessGroupComm:
        """Make a process group of its own (RanksDiffer if another rank makes another channel)."""
        # gathering also ensures that this does not wait for a rank that is gone already
        for rank, theirs in enumerate(self.gather_objects(name, "opening a channel")):
            if theirs != name:
                raise RanksDiffer(
                    f"rank {rank} opens channel {theirs!r} where rank {self.rank} opens {name!r}",
                    do="let every rank make the same calls in the same order",
                    rank=rank,
                )
        return self._among(name, range(self.size), idle=idle)

    def group(self, ranks: Sequence[int]) -> ProcessGroupComm:
        """Make a process group of these ranks."""
        return self._among(f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}", ranks)

    def _among(self, name: str, members: Sequence[int], *, idle: bool = False) -> ProcessGroupComm:
        everyone = dist.get_process_group_ranks(self._group)
        ranks = [everyone[member] for member in members]
        topology = self.topology if len(members) == self.size else self.topology.among(members)
        by_themselves = len(ranks) < dist.get_world_size()  # otherwise it needs every rank
        make = partial(
            dist.new_group,
            ranks,
            timeout=_seconds(self.timeout_s),
            backend=_backend(),
            group_desc=f"shoal-{name}",
            use_local_synchronization=by_themselves,
        )
        limit_s = self._membership.patience.connects_s
        group = made(make, self._heartbeat, self._inside, ranks, limit_s)
        return ProcessGroupComm(group, name, topology, self._membership, idle=idle)

    def gather_objects(self, value: Any, purpose: str, *kinds: type) -> list[Any]:
        parcel, records = packed(value, kinds)
        self.journal.begins(purpose)
        self.check("")
        parcels = self._gather_parcels(parcel, purpose)
        self.reached(self._heartbeat.at)
        return [self._read(rank, theirs, records) for rank, theirs in enumerate(parcels)]

    def _gather_parcels(self, parcel: Tensor, purpose: str) -> list[Tensor]:
        """Gather the parcels of all ranks. If one is long, a second exchange sends all, padded."""
        size = torch.tensor([len(parcel)], device="cpu").view(torch.uint8)
        words = torch.frombuffer(bytearray(label(purpose)), dtype=torch.uint8)
        front = parcel[:_SHORT]
        head = torch.cat([size, words, front, parcel.new_zeros(_SHORT - len(front))])
        heads = self._all_gather(head)
        begin = len(size) + len(words)
        for rank, theirs in enumerate(heads):
            if not torch.equal(theirs[len(size) : begin], words):
                text = read_label(theirs[len(size) : begin].numpy().tobytes())
                raise self.unlike(rank, text, purpose)
        longest = max(int(theirs[: len(size)].view(torch.int64)) for theirs in heads)
        if longest <= _SHORT:
            return [theirs[begin:] for theirs in heads]
        padding = parcel.new_zeros(longest - len(parcel))
        return self._all_gather(torch.cat([parcel, padding]))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        self._inside.run(partial(dist.all_gather, tensors, tensor, group=self._group))
        return tensors

    def _read(self, rank: int, parcel: Tensor, records: dict[str, type]) -> Any:
        try:
            return unpacked(parcel, records)
        except ValueError as error:
            raise RanksDiffer(
                f"rank {rank} tells something that rank {self.rank} cannot read",
                got=str(error),
                do="run the same script, and the same version of Shoal, on every rank",
                rank=rank,
            ) from error

    def close(self) -> None:
        # another of its users has closed it already
        if self._heartbeat.channels.pop(id(self), None) is None:
            return
        self._heartbeat.journal.closed(self._record)
        # A group of some ranks only is kept. Torch names groups by their number, and under a reused
        # name the next group would find this one's addresses in the store.
        if (
            dist.is_initialized()
            and self._group is not dist.group.WORLD
            and self.size == dist.get_world_size()
        ):
            dist.destroy_process_group(self._group)

    def reached(self, where: str) -> None:
        self._heartbeat.reached(where)

    def numbers(self, numbers: Sequence[int], purpose: str) -> list[int]:
        with self.journal.saying_purpose():
            told = super().numbers(numbers, purpose)
        self.journal.tag = self.journal.tag_of(purpose)
        return told

    @property
    def is_open(self) -> bool:
        """Whether the program has left torch.distributed's groups open."""
        is_kept = id(self) in self._heartbeat.channels
        return (
            is_kept and dist.is_initialized() and self._group in dist.distributed_c10d._world.pg_map
        )

    def check(self, where: str, number: int | None = None) -> None:
        self._heartbeat.check(where, self._record, number)

    def hear(self, *, again: bool = True) -> None:
        self._heartbeat.hear(again=again)

    def leave(self, error: BaseException | None) -> None:
        self._heartbeat.leave(error)

    def unlike(self, rank: int, theirs: str, own: str) -> ShoalError:
        error = super().unlike(rank, theirs, own)
        if not theirs:
            return self._heartbeat.explain(error)
        self._record.told()
        self.journal.tag = NO_PURPOSE
        return error

    def diagnose(self, error: BaseException, where: str) -> BaseException:
        if isinstance(error, RanksDiffer) and error.rank is None:
            return self._heartbeat.explain(error)
        self._heartbeat.has_told()
        own = self._record.members[self.rank]  # number among all ranks
        return error.struck(f"rank {own} at {where}") if isinstance(error, WorldError) else error

    def free(self) -> None:
        """Make blocked calls on this channel fail, because there is a verdict, or this rank ends.

        Gloo has no abort, but a receive that times out closes all connections of its group. A
        receive from a rank that has left fails at once, and closes none.
        """
        # another thread may free it while this rank ends, and `end` removes the group
        group = getattr(self, "_group", None)
        if group is None:
            return
        nobody = torch.empty(1, device="cpu")
        for rank in self.others:
            try:
                waiting = group.recv([nobody], rank, _WAKE_TAG)
                waiting.wait(datetime.timedelta(milliseconds=1))
            except RuntimeError as error:
                if is_timeout(error):
                    break
        group.abort()  # also aborts the work of NCCL

    def end(self) -> None:
        """Free blocked threads, and join the threads that end when the group is no longer held."""
        if dist.is_initialized():
            # the program has destroyed all groups itself, and made others
            with suppress(ValueError):
                self.free()
                dist.destroy_process_group(self._group)
        del self._group


def has_joined() -> bool:
    """Return whether the program has set up a process group itself."""
    return dist.is_initialized()


def join(
    seat: Seat, timeout_s: float | None, start_timeout_s: float, lost_after_s: float | None = None
) -> ProcessGroupComm:
    """Join the ranks.

    A process group that the caller has already set up stays the caller's. Shoal makes its own
    groups next to it.

    Args:
        seat: this process's place, from the launcher; without a `meeting` if there is such a
            process group.
        timeout_s: seconds after which an exchange that does not end is an error. None: the limit
            depends on the reason (patience.py).
        start_timeout_s: seconds to wait for every rank.
        lost_after_s: seconds without any sign of life after which a rank is lost; by default 20.

    Raises:
        MissingRank: not every rank came within `start_timeout_s`. The error names the missing
            ranks.
        UsageError: a rank is there twice, or the servers and the tail leave too few workers.
    """
    raise_limit()
    if seat.meeting is not None:
        check_limit(seat.meeting.size, f"rank {seat.meeting.rank}, host {seat.host}")
    patience = Patience(timeout_s)
    roster = meet(seat, start_timeout_s)
    if roster.interface is not None:
        os.environ[INTERFACE] = roster.interface  # torch reads it for each group
    holder = StoreHolder(seat.holder, roster.beside_store if seat.restarts else ())
    topology = roster.topology
    heartbeat = Heartbeat(
        roster.values,
        roster.rank,
        topology,
        holder,
        _pulses(seat, roster),
        lost_after_s,
        patience,
    )

    def make() -> object:
        limit = _seconds(patience.longest_s)
        if seat.meeting is None:
            return dist.new_group(timeout=limit, backend=_backend(), group_desc="shoal")
        dist.init_process_group(
            _backend(),
            store=_store(roster.values, heartbeat, patience.connects_s),
            rank=roster.rank,
            world_size=roster.size,
            timeout=limit,
        )
        return dist.group.WORLD

    aside = Aside()
    heartbeat.reached("making the first connections")
    try:
        inside = Inside(heartbeat, start_timeout_s, aside, None)
        group = made(make, heartbeat, inside, range(roster.size), start_timeout_s)
    except BaseException as error:
        heartbeat.leave(error)  # told at once, whatever the program does next
        raise
    heartbeat.reached("start")
    membership = _Membership(heartbeat, aside, patience)
    return ProcessGroupComm(group, "world", topology, membership)


def _pulses(seat: Seat, roster: Roster) -> Pulses:
    """Start this rank's pulse, and tell the others where it is."""
    own = roster.everyone[roster.rank]
    addresses = [here.address for here in roster.everyone]
    # a rank that reaches the store by loopback may be reached at the store's address
    is_alone = is_loopback(own.address) and not all(map(is_loopback, filter(None, addresses)))
    listens = "0.0.0.0" if is_alone or not own.address else own.address
    pulse = Pulse(listens, seat.token)
    host = "" if is_alone else own.address or seat.host
    roster.values.write(f"pulse/{roster.rank}", PulseAddress(host, pulse.port))
    return Pulses(pulse, seat.meeting.address if seat.meeting else "", seat.token)


def _store(values: Values, heartbeat: Heartbeat, timeout_s: float) -> Store:
    """Return the store that the groups read: signed, unless NCCL's own threads read it, because
    these may not run Python.
    """
    if _has_nccl():
        return PrefixStore(values.scope, values.store)
    heartbeat.store = SignedStore(values, timeout_s, lambda: heartbeat.check(""))
    return heartbeat.store


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if _has_nccl() else "gloo"


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _as_nccl_knows(device: torch.device) -> str | None:
    """Return the name by which NCCL knows this rank's GPU, or None without NCCL: it refuses two
    ranks on one GPU.
    """
    if not _has_nccl():
        return None
    host = os.environ.get("NCCL_HOSTID", "")  # NCCL's name for the host, if it is set
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
