"""Membership: which hosts are there, which of them train, and when that changes.

    a member is lost       the others halt at once, and go on with the hosts that are left
    its ranks fail         the same; so many failures end the job
    it is told to leave    all commit at the end of a step; the others go on
    a host comes           all commit at the end of a step, and go on with it

Nothing here talks to a network or looks at a clock: `hear` takes messages, `turn` the time, and
returns messages. So tests say every order of events.

Guarded by tests/tools/elastic/test_members.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from shoal.core.numbers import how_many
from shoal_tools.elastic.messages import (
    Commit,
    Crew,
    CrewEnded,
    CrewTerms,
    FromAgent,
    FromPlace,
    Halt,
    Hello,
    JobOver,
    Leave,
    Member,
    Train,
)

FIRST_SETTLE_S = 5.0  # without a new host, before the first crew starts with fewer than the most
SETTLE_S = 1.0  # without another new host, before a crew commits to take them in
RETURN_S = 1.0  # time for an agent to come again after its connection has broken
SLEPT_S = 3.0  # a turn that comes so late: this process was stopped
HALTING_S = 6.0  # without a sign of life, while a crew ends: lost


@dataclass
class AgentPlace:
    """One agent, as the meeting place knows it."""

    hello: Hello
    came_s: float
    heard_s: float
    port: int
    crew: int = 0  # number of the crew that runs there; 0 for none
    leaves: bool = False
    broke_s: float | None = None  # time at which its connection broke

    @property
    def member(self) -> Member:
        """The host as a member of a crew."""
        return Member(self.hello.agent, self.hello.host, self.hello.slots)


@dataclass
class CrewWatch:
    """The crew that trains now, and how its members have ended so far."""

    crew: Crew
    ends: dict[str, CrewEnded] = field(default_factory=dict)  # ends by agent
    lost: dict[str, str] = field(default_factory=dict)  # words, by agent
    halts: str = ""  # the reason for which all were told to halt
    commits: bool = False  # all were told to commit

    @property
    def running(self) -> list[Member]:
        """Members with ranks that may run still."""
        return [m for m in self.crew.members if m.agent not in {*self.ends, *self.lost}]


@final
class Members:
    """The members of one job.

    Args:
        lost_after_s: seconds without a sign of life after which a host is lost.
        say: prints a line.
    """

    def __init__(self, lost_after_s: float, say: Callable[[str], None] = lambda line: None) -> None:
        self.over: JobOver | None = None
        self._lost_after_s, self._say = lost_after_s, say
        self._places: dict[str, AgentPlace] = {}
        self._watch: CrewWatch | None = None
        self._terms: CrewTerms | None = None
        self._job, self._number, self._failures = uuid.uuid4().hex[:12], 0, 0
        self._turned_s = 0.0  # time of the last turn
        self._since_s = 0.0  # when hosts began to wait for a crew
        self._order: tuple[str, ...] = ()  # agents of the last crew
        self._news: list[str] = []  # words for the next crew
        self._out: list[tuple[str, FromPlace]] = []

    def hear(self, agent: str, message: FromAgent, now_s: float) -> None:
        """Take a message of an agent."""
        if self.over is not None:
            self._out.append((agent, self.over))
            return
        if isinstance(message, Hello):
            self._welcome(message, now_s)
        place = self._places.get(agent)
        if place is None:
            return
        place.heard_s, place.broke_s = now_s, None
        if isinstance(message, CrewEnded):
            place.port, place.crew = message.port, 0
            if self._watch is not None and self._watch.crew.number == message.number:
                self._watch.ends.setdefault(agent, message)
        elif isinstance(message, Leave) and not place.leaves:
            place.leaves = True
            self._say(f"host {place.hello.host} is told to leave")

    def broke(self, agent: str, now_s: float) -> None:
        """Note that the connection to an agent has ended."""
        if (place := self._places.get(agent)) is not None:
            place.broke_s = now_s

    def turn(self, now_s: float) -> list[tuple[str, FromPlace]]:
        """Act on the time, and on all that was heard; return messages by agent."""
        if now_s - self._turned_s > SLEPT_S:  # silence counts anew
            for place in self._places.values():
                place.heard_s = now_s
        self._turned_s = now_s
        if self.over is None:
            self._drop(now_s)
            if self._watch is not None:
                self._look(self._watch, now_s)
            if self._watch is None and self._terms is not None and self.over is None:
                self._form(self._terms, now_s)
        out, self._out = self._out, []
        return out

    @property
    def agents(self) -> list[str]:
        """All that are here."""
        return list(self._places)

    def _welcome(self, hello: Hello, now_s: float) -> None:
        if self._terms is None:
            self._terms, self._since_s = hello.terms, now_s
        if hello.terms != self._terms:
            got, expected = (words_of(each) for each in (hello.terms, self._terms))
            why = f"this agent has other terms than the first: {got}; there: {expected}"
            self._out.append((hello.agent, JobOver(2, why)))
            return
        known = self._places.get(hello.agent)
        came_s = known.came_s if known else now_s
        place = AgentPlace(hello, came_s, now_s, hello.port, leaves=hello.leaves)
        self._places[hello.agent] = place
        crew = hello.crew
        if crew is not None and self._watch is None and crew.number > self._number:
            self._adopt(crew, now_s)
        watch = self._watch
        here = watch is not None and hello.agent in {m.agent for m in watch.running}
        if crew is not None and watch is not None and here and crew.number == watch.crew.number:
            place.crew = crew.number
        elif crew is not None:
            place.crew = crew.number
            self._out.append((hello.agent, Halt(crew.number, "the others go on without this host")))
        elif watch is not None and here:
            watch.ends[hello.agent] = _end_of(watch.crew, hello)
        if known is None:
            self._say(f"host {hello.host} is here ({how_many(hello.slots, 'rank')})")

    def _adopt(self, crew: Crew, now_s: float) -> None:
        """Take up a crew that trains already: this meeting place was started again."""
        self._job, self._number = crew.job, crew.number
        self._order = tuple(member.agent for member in crew.members)
        self._watch = CrewWatch(crew)
        self._say(f"takes up crew {crew.number}, which trains: {crew.names}")
        for member in crew.members:
            place = self._places.get(member.agent)
            if place is not None and place.hello.crew is None:
                self._watch.ends[member.agent] = _end_of(crew, place.hello)
            if place is None:
                self._since_s = now_s
                terms = self._terms or CrewTerms()
                hello = Hello(member.agent, member.host, member.slots, "", "", 0, terms, crew)
                place = AgentPlace(hello, now_s, now_s, 0, crew=crew.number)
                self._places[member.agent] = place

    def _drop(self, now_s: float) -> None:
        """Drop the agents that are lost, and those that have left."""
        ends = self._watch is not None and bool(self._watch.halts or self._watch.ends)
        silent_s = min(HALTING_S, self._lost_after_s) if ends else self._lost_after_s
        for agent, place in list(self._places.items()):
            why = ""
            if place.broke_s is not None and now_s - place.broke_s > RETURN_S:
                why = "its agent has ended"
            elif now_s - place.heard_s > silent_s:
                why = f"no sign of life for {now_s - place.heard_s:.0f} s"
            elif place.broke_s is not None and place.leaves and not place.crew:
                why = "it has left"
            if not why:
                continue
            del self._places[agent]
            member = self._watch is not None and agent in {m.agent for m in self._watch.running}
            verb = "has left" if place.leaves and not member else "is lost"
            line = f"host {place.hello.host} {verb}" + (f": {why}" if verb == "is lost" else "")
            self._say(line)
            self._news.append(line)
            if member and self._watch is not None:
                self._watch.lost[agent] = line

    def _look(self, watch: CrewWatch, now_s: float) -> None:
        """Look at the crew that trains."""
        failed = [(a, end) for a, end in watch.ends.items() if end.outcome == "failed"]
        if (watch.lost or failed) and not watch.halts:
            watch.halts = next(iter(watch.lost.values()), "") or self._describe_end(
                watch, *failed[0]
            )
            self._tell_running(watch, Halt(watch.crew.number, watch.halts))
        trains = not (watch.halts or watch.commits or watch.ends)
        if trains and (why := self._change(watch, now_s)):
            watch.commits = True
            self._news.append(why)
            self._tell_running(watch, Commit(watch.crew.number, why))
        if not watch.running:
            self._conclude(watch, failed, now_s)

    def _describe_end(self, watch: CrewWatch, agent: str, end: CrewEnded) -> str:
        host = next(m.host for m in watch.crew.members if m.agent == agent)
        return f"a rank of host {host} {end.said or 'failed'}"

    def _change(self, watch: CrewWatch, now_s: float) -> str:
        """Return words about the change for which the crew is to commit, if there is one."""
        members = {member.agent for member in watch.crew.members}
        leaving = [p for a, p in self._places.items() if a in members and p.leaves]
        if leaving:
            return f"{_hosts(leaving)} left"
        terms = self._terms or CrewTerms()
        new = [p for a, p in self._places.items() if a not in members and not (p.leaves or p.crew)]
        new = new[: terms.most - len(members)]
        settled = all(now_s - place.came_s >= SETTLE_S for place in new)
        return f"{_hosts(new)} came" if new and settled else ""

    def _conclude(self, watch: CrewWatch, failed: Sequence[object], now_s: float) -> None:
        """The crew has ended everywhere: the job is over, or another crew follows."""
        self._watch, self._since_s = None, now_s
        terms, ends = self._terms or CrewTerms(), list(watch.ends.values())
        if not watch.lost and all(end.outcome == "done" for end in ends):
            self._end(JobOver(0, "all ranks have ended their work"))
            return
        members = [self._places.get(member.agent) for member in watch.crew.members]
        if failed and all(place is not None and not place.leaves for place in members):
            self._failures += 1
            self._news.append(f"{watch.halts} (failure {self._failures} of {terms.restarts + 1})")
        if self._failures > terms.restarts:
            code = next(end.code for end in ends if end.outcome == "failed")
            why = f"{watch.halts}, and has failed {how_many(self._failures, 'time')}"
            self._end(JobOver(code or 1, why))

    def _form(self, terms: CrewTerms, now_s: float) -> None:
        """Start a crew of the hosts that wait, if they are enough."""
        waiting = {a: p for a, p in self._places.items() if not (p.leaves or p.crew)}
        known = [a for a in self._order if a in waiting]
        agents = [*known, *(a for a in waiting if a not in known)][: terms.most]
        if len(agents) < terms.least:
            if now_s - self._since_s > terms.wait_s:
                self._end(JobOver(1, self._too_few(terms, agents)))
            return
        newest_s = max(waiting[agent].came_s for agent in agents)
        if not self._number and len(agents) < terms.most and now_s - newest_s < FIRST_SETTLE_S:
            return
        self._number += 1
        first = waiting[agents[0]]
        crew = Crew(
            self._number,
            self._job,
            tuple(waiting[agent].member for agent in agents),
            _address(first, [waiting[agent] for agent in agents]),
            first.port,
            "; ".join(dict.fromkeys(self._news)),
        )
        self._news, self._order, self._watch = [], tuple(agents), CrewWatch(crew)
        for agent in agents:
            waiting[agent].crew = crew.number
            self._out.append((agent, Train(crew)))
        hosts, ranks = how_many(len(agents), "host"), how_many(crew.ranks, "rank")
        because = f" ({crew.why})" if crew.why else ""
        self._say(f"crew {crew.number}: {hosts}, {ranks}: {crew.names}{because}")

    def _too_few(self, terms: CrewTerms, agents: Sequence[str]) -> str:
        here = ", ".join(self._places[agent].hello.host for agent in agents) or "none"
        lost = "; ".join(dict.fromkeys(self._news))
        return (
            f"{how_many(terms.least, 'host')} are needed, and in {terms.wait_s:g} s there were "
            f"fewer; here: {here}" + (f"; {lost}" if lost else "")
        )

    def _end(self, over: JobOver) -> None:
        self.over = over
        self._say(f"the job is over: {over.why}")
        self._out += [(agent, over) for agent in self._places]

    def _tell_running(self, watch: CrewWatch, message: FromPlace) -> None:
        self._out += [(member.agent, message) for member in watch.running]


def _end_of(crew: Crew, hello: Hello) -> CrewEnded:
    """Return how the ranks of a crew have ended on a host, as its agent says later."""
    outcome = hello.outcome if hello.ended == crew.number else "failed"
    return CrewEnded(crew.number, outcome, hello.port)


def words_of(terms: CrewTerms) -> str:
    """Return terms as the options that give them."""
    return (
        f"--min {terms.least} --max {terms.most} --wait-for {terms.wait_s:g} "
        f"--max-restarts {terms.restarts}"
    )


def _hosts(places: Sequence[AgentPlace]) -> str:
    names = ", ".join(place.hello.host for place in places)
    return f"{'host' if len(places) == 1 else 'hosts'} {names}"


def _address(first: AgentPlace, places: Sequence[AgentPlace]) -> str:
    """Return the address at which the ranks of a crew meet: that of its first host.

    An agent on the host of the meeting place may not know by which address others reach it. They
    reach the meeting place there.
    """
    return next(_addresses(first, places), "127.0.0.1")


def _addresses(first: AgentPlace, places: Sequence[AgentPlace]) -> Iterator[str]:
    if first.hello.address:
        yield first.hello.address
    yield from (place.hello.reached for place in places if place.hello.address)
