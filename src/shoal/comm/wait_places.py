"""Places of all ranks, and whether ranks wait for one another for ever.

All ranks do the same things together, in the same order on each channel. So each thing there has a
number, which is the same on every rank. Each rank keeps a journal: the last thing that it has
begun, and the thing that its main thread waits for. All journals together show which ranks wait in
vain:

    unlike   two ranks do different things under the same number of one channel
    a ring   each rank waits for something that another has not begun, and that one waits as well

Neither ends by waiting, however slow a link is. A rank that computes is in neither, because it may
begin the thing that the others wait for. The cost is a few attributes for each thing begun. Guarded
by tests/faults/test_different_places.py.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from shoal.contracts.attendance import MainWait
from shoal.contracts.comm import ChannelJournal, is_usual
from shoal.core.errors import RanksDiffer
from shoal.core.names import pins

NO_PURPOSE, _LABELS = 0, 1  # tags: of messages without a purpose, and of ones that say theirs
# limit of work that all ranks are in: at least so many seconds, and times the planned ones
_FLOOR_S, _TIMES = 60.0, 10.0
_ANY = 1 << 62  # greater than all numbers of channels
_MOST_RANKS = 4  # most ranks that a message names one by one


@dataclass(frozen=True)
class ChannelWait:
    """Wait of a rank's main thread, on one channel."""

    channel: str
    number: int  # number of the awaited thing on that channel; 0 if it has no number
    at: str  # its name, for people
    members: tuple[int, ...]  # the ranks that take part in it


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank, by its own report."""

    wait: ChannelWait | None
    begun: dict[str, int]  # last number that it has begun, by channel
    running: dict[str, tuple[int, str]]  # number and name of the thing that it does, by channel
    # the greatest number, by channel, at which it can still say that it has nothing to bring
    answers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SentSummons:
    """Summons from a rank to the others, to come to its place."""

    channel: str
    number: int  # number of the wait on that channel
    begun: dict[str, int]  # last number that the rank has begun, by channel


@final
@dataclass
class ChannelRecord:
    """Record of a rank's work on one channel."""

    name: str
    members: tuple[int, ...]
    numbered: bool = True  # whether all members begin the same things there
    begun: int = 0
    purpose: str = ""  # name of the last thing begun
    running: tuple[int, str] = (0, "")  # number and name of the thing that its lane does
    # tells the others that this rank brings nothing to the thing that they wait for
    answer: Callable[[], None] | None = None
    answers_to: int = 0  # the greatest number at which it may say so
    # takes part in place of this rank's main thread, on any thread
    attend: Callable[[int, MainWait], None] | None = None
    # seconds for a thing that all members have begun; None: the channel's own limit
    limit_s: float | None = None

    def told(self) -> None:
        """Forget the present thing: every rank knows that they differ here, and they may go on from
        it.
        """
        self.purpose, self.running = "", (0, "")

    @property
    def at(self) -> tuple[int, str]:
        """Number and name of the thing that this rank does there."""
        return self.running if self.running[0] else (self.begun, self.purpose)

    def begin(self, purpose: str, number: int | None = None) -> int:
        """Note that this rank begins a thing. Return its number."""
        if number is not None:
            self.begun = max(self.begun, number)
        elif self.numbered:
            self.begun += 1
        self.purpose = purpose
        return self.begun if number is None else number


@final
class Journal:
    """Journal of this rank's work, on all channels."""

    def __init__(self) -> None:
        self.wait: ChannelWait | None = None
        self.messages = 0  # messages that have landed: a sign that a wait gets something
        self.asked: set[str] = set()  # channels on which others wait for this rank's answer
        self._records: dict[str, ChannelRecord] = {}
        self._opened: Counter[str] = Counter()

    def note_opening(self, name: str, members: Iterable[int], numbered: bool) -> ChannelRecord:
        """Note a new channel. Every other rank has made as many of that name before it."""
        self._opened[name] += 1
        record = ChannelRecord(f"{name}#{self._opened[name]}", tuple(members), numbered)
        self._records[record.name] = record
        return record

    def closed(self, record: ChannelRecord) -> None:
        """Note that a channel is closed."""
        self._records.pop(record.name, None)

    def waits(self, record: ChannelRecord, number: int | None, at: str) -> None:
        """Note that the main thread waits for that number of a channel, or for the last it has
        begun.
        """
        awaited = record.begun if number is None else number
        self.wait = ChannelWait(record.name, awaited, at, record.members)

    def limit_s(self) -> float | None:
        """Return the limit for the thing that the main thread waits for, once all ranks have begun
        it.
        """
        record = None if self.wait is None else self._records.get(self.wait.channel)
        return None if record is None else record.limit_s

    def answer(self) -> None:
        """Tell waiting ranks that this one brings nothing. Only for the main thread."""
        for record in list(self._records.values()):
            if record.name in self.asked and record.answer is not None:
                record.answer()
        self.asked.clear()

    def summons(self) -> SentSummons | None:
        """Return the summons to where the main thread waits, if others may attend on any thread."""
        wait = self.wait
        if wait is None or wait.channel not in self.attended_channels():
            return None
        begun = {record.name: record.begun for record in list(self._records.values())}
        return SentSummons(wait.channel, wait.number, begun)

    def attended_channels(self) -> list[str]:
        """Return the channels on which this rank may take part on any thread."""
        return [record.name for record in list(self._records.values()) if record.attend]

    def heed(self, summons: SentSummons) -> None:
        """Let this rank take part where another one waits, if it has not begun that thing."""
        record = self._records.get(summons.channel)
        if record is None or record.attend is None or record.begun >= summons.number:
            return
        record.attend(summons.number, self._elsewhere(summons))

    def _elsewhere(self, summons: SentSummons) -> MainWait:
        """Return whether the main thread waits elsewhere, and whether it waits for the summoning
        rank.
        """
        wait = self.wait
        if wait is None or wait.channel == summons.channel:
            return MainWait.NONE
        begun = summons.begun.get(wait.channel)
        if begun is not None and begun < wait.number:
            return MainWait.FOR_READERS
        return MainWait.ELSEWHERE

    def place(self) -> RankPlace:
        """Return this rank's place."""
        records = list(self._records.values())
        used = [record for record in records if record.begun]
        return RankPlace(
            self.wait,
            {record.name: record.begun for record in used},
            {record.name: record.at for record in used},
            {
                record.name: _ANY if record.attend else record.answers_to
                for record in records
                if record.answer or record.attend
            },
        )


class ChannelNotes(ChannelJournal):
    """The notes of one channel, which go into its record.

    Args:
        record: the channel's.
        journal: this rank's, of all channels.
    """

    def __init__(self, record: ChannelRecord, journal: Journal) -> None:
        self.record, self._journal = record, journal

    def begins(self, purpose: str) -> None:
        self.record.begin(purpose)

    def queued(self, purpose: str, number: int | None = None) -> int:
        return self.record.begin(purpose, number)

    def runs(self, number: int, purpose: str) -> None:
        self.record.running = number, purpose

    def may_answer(self, answer: Callable[[], None] | None, up_to: int = 0) -> None:
        self.record.answer, self.record.answers_to = answer, up_to

    def may_attend(self, attend: Callable[[int, MainWait], None] | None) -> None:
        self.record.attend = attend

    def is_waiting(self) -> bool:
        return self._journal.wait is not None


@final
class TaggedNotes(ChannelNotes):
    """The notes of one channel, and the tag of its messages, which follows from their purpose.

    Messages of other purposes never meet: gloo ends the process where one is too long.

    Args:
        record: the channel's.
        journal: this rank's, of all channels.
        has_limits: whether work may take so many times as long as is planned.
        has_tags: whether messages have tags of their purposes.
    """

    def __init__(
        self, record: ChannelRecord, journal: Journal, *, has_tags: bool, has_limits: bool
    ) -> None:
        super().__init__(record, journal)
        self._has_limits, self._has_tags = has_limits, has_tags
        self.tag, self._says_purpose = NO_PURPOSE, False

    def tag_of(self, purpose: str) -> int:
        """Return the tag of messages for a purpose."""
        if not self._has_tags:
            return NO_PURPOSE
        return _LABELS if self._says_purpose else (zlib.crc32(purpose.encode()) >> 2) + 2

    @contextmanager
    def saying_purpose(self) -> Iterator[None]:
        """Within it messages say their purpose themselves, and have one tag."""
        self._says_purpose = True
        try:
            yield
        finally:
            self._says_purpose, self.tag = False, NO_PURPOSE

    def begins(self, purpose: str) -> None:
        self.tag = self.tag_of(purpose)
        super().begins(purpose)

    def runs(self, number: int, purpose: str) -> None:
        self.tag = self.tag_of(purpose)
        super().runs(number, purpose)

    def expects(self, seconds: float) -> None:
        if self._has_limits:
            self.record.limit_s = max(_FLOOR_S, _TIMES * seconds)


@dataclass(frozen=True)
class Apart:
    """Ranks that wait for one another for ever."""

    what: str
    rank: int  # a rank of the smallest group, which is likely at fault
    # waits of these ranks: a true finding shows the same ones at the next look
    waits: tuple[ChannelWait, ...] = ()

    def error(self, where: str) -> RanksDiffer:
        """Return the error that a rank at `where` raises."""
        layers = dict.fromkeys(re.findall(r"call of layer ([^,;\s]+)", self.what))
        do = f"{ALIKE}, or {pins(layers)}" if layers else ALIKE
        return RanksDiffer(self.what, where=where, do=do, rank=self.rank)


ALIKE = (
    "make the same calls in the same order on every rank: forward, backward and step; reads of "
    "gradients where layers are cut, owned or in a pipeline; parallelize. A rank may evaluate "
    "alone under torch.no_grad(), and read state_dict() alone behind optimizer.step(). Leave a "
    "backward out (a NaN loss) on all ranks, or on none, and have as many batches on all. Or let "
    'no layer be cut: strategies=["replicate", "sliced", "factor"]'
)


def apart(places: Mapping[int, RankPlace]) -> Apart | None:
    """Find the ranks that wait in vain, if there are any.

    It is certain if two looks in a row find the same, and if the second one sees a newer beat of
    each rank than the first.
    """
    waiting = {rank: place for rank, place in places.items() if place.wait is not None}
    return unlike(places) or _ring(waiting)


def unlike(places: Mapping[int, RankPlace]) -> Apart | None:
    """Find ranks that do different things under the same number of one channel."""
    at: dict[tuple[str, int], dict[int, str]] = {}
    for rank, place in places.items():
        for channel, (number, purpose) in place.running.items():
            if number and purpose:
                at.setdefault((channel, number), {})[rank] = purpose
    for purposes in at.values():
        if len(set(purposes.values())) > 1:
            said, rank, other = _describe(purposes)
            return Apart(f"rank {rank} does something else than rank {other}: {said}", rank)
    return None


def _ring(waiting: Mapping[int, RankPlace]) -> Apart | None:
    """Find ranks that each wait for something that another of them has not begun."""
    ring = dict(waiting)
    while ring:
        free = [rank for rank in ring if not _is_blocked(rank, ring)]
        if not free:
            waits = {rank: place.wait for rank, place in ring.items() if place.wait}
            said, rank, _ = _describe({rank: wait.at for rank, wait in waits.items()})
            what = f"ranks wait for one another at different places: {said}"
            return Apart(what, rank, tuple(waits.values()))
        for rank in free:
            del ring[rank]
    return None


def _is_blocked(rank: int, ring: Mapping[int, RankPlace]) -> bool:
    wait = ring[rank].wait
    assert wait is not None
    return any(
        other != rank
        and other in wait.members
        and wait.number > place.answers.get(wait.channel, 0)
        and place.begun.get(wait.channel, 0) < wait.number
        for other, place in ring.items()
    )


def missed(rank: int, places: Mapping[int, RankPlace]) -> set[str]:
    """Return the channels on which others wait for this rank, and it can answer that it will not
    come.
    """
    begun, answers = places[rank].begun, places[rank].answers
    waits = [place.wait for other, place in places.items() if other != rank and place.wait]
    return {
        wait.channel
        for wait in waits
        if rank in wait.members
        and begun.get(wait.channel, 0) < wait.number <= answers.get(wait.channel, 0)
    }


def _describe(purposes: Mapping[int, str]) -> tuple[str, int, int]:
    """Describe the places of ranks. Return also a rank of the smallest group, and another one.

    The smallest group comes first, because one rank that does something different is likely the
    cause.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank, purpose in sorted(purposes.items()):
        ranks_at.setdefault(purpose, []).append(rank)
    ordered = sorted(ranks_at.items(), key=lambda item: (len(item[1]), is_usual(item[0])))
    said = "; ".join(f"{named(ranks)}: {purpose}" for purpose, ranks in ordered)
    return said, ordered[0][1][0], ordered[-1][1][0]


def named(ranks: Iterable[int]) -> str:
    """Write ranks for a message."""
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    more = f" and {len(numbers) - _MOST_RANKS} more" if len(numbers) > _MOST_RANKS else ""
    return f"ranks {', '.join(map(str, numbers[:_MOST_RANKS]))}{more}"
