"""Messages between an agent and the meeting place: JSON that is read into these types only.

    agent  ->  Hello · Sign · CrewEnded · Leave
    place  ->  Sign · Train · Halt · Commit · JobOver

A crew is the hosts that train together from one change to the next. Nothing here is code.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["done", "committed", "failed", "halted"]
MOST_BYTES = 1 << 20  # length of a message


class Member(msgspec.Struct, frozen=True):
    """A host of a crew: its agent's id, its name, and its number of ranks."""

    agent: str
    host: str
    slots: int


class Crew(msgspec.Struct, frozen=True):
    """Hosts that train together, and the place where their ranks meet.

    Args:
        number: counts the crews of a job from 1.
        job: id of the job.
        members: in the order of ranks.
        address: of the first member's host.
        port: a free one there.
        why: words about the change that made this crew.
    """

    number: int
    job: str
    members: tuple[Member, ...]
    address: str
    port: int
    why: str = ""

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(member.slots for member in self.members)

    @property
    def names(self) -> str:
        """Names of the hosts, for messages."""
        return ", ".join(member.host for member in self.members)

    def first_rank(self, agent: str) -> int:
        """Return the lowest rank of an agent's host."""
        place = [member.agent for member in self.members].index(agent)
        return sum(member.slots for member in self.members[:place])


class CrewTerms(msgspec.Struct, frozen=True):
    """CrewTerms of a job, which all agents must give alike.

    Args:
        least: fewest hosts that train.
        most: most hosts that train. Others wait for a place.
        wait_s: seconds to wait for hosts while there are fewer than `least`.
        restarts: number of failures of ranks after which the job ends.
    """

    least: int = 1
    most: int = 64
    wait_s: float = 600.0
    restarts: int = 3


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First words of an agent on each new connection.

    Args:
        agent: its id, which lasts as long as its process.
        host: name of the host.
        slots: number of ranks there.
        address: by which other hosts reach it; "" on the host of the meeting place.
        reached: address of the meeting place as this agent sees it.
        port: a free one, for ranks to meet.
        terms: of the job.
        crew: the one that runs there now.
        ended: number of the last crew that has ended there.
        outcome: how they ended.
        leaves: the host was told to leave.
    """

    agent: str
    host: str
    slots: int
    address: str
    reached: str
    port: int
    terms: CrewTerms
    crew: Crew | None = None
    ended: int = 0
    outcome: Outcome = "halted"
    leaves: bool = False


class Sign(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


class CrewEnded(msgspec.Struct, frozen=True, tag=True):
    """The ranks of an agent have all ended; `port` is a free one for the next crew."""

    number: int
    outcome: Outcome
    port: int
    said: str = ""
    code: int = 0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The agent's host was told to leave. Its ranks commit with all the others."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Start the ranks of this crew."""

    crew: Crew


class Halt(msgspec.Struct, frozen=True, tag=True):
    """End the ranks of the crew of that number at once."""

    number: int
    why: str


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks of that crew write a checkpoint, and end."""

    number: int
    why: str


class JobOver(msgspec.Struct, frozen=True, tag=True):
    """The job is over: exit code, and words about it."""

    code: int
    why: str


FromAgent = Hello | Sign | CrewEnded | Leave
FromPlace = Sign | Train | Halt | Commit | JobOver
Message = FromAgent | FromPlace
_READERS = {
    "agent": msgspec.json.Decoder(FromAgent),
    "place": msgspec.json.Decoder(FromPlace),
}


def write(message: Message) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message)


def from_agent(text: bytes) -> FromAgent:
    """Read a message of an agent (ValueError for anything else)."""
    said: FromAgent = _READERS["agent"].decode(text)
    return said


def from_place(text: bytes) -> FromPlace:
    """Read a message of the meeting place (ValueError for anything else)."""
    said: FromPlace = _READERS["place"].decode(text)
    return said
