"""Membership: every order of events, without a network and without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from shoal_tools.elastic.members import FIRST_SETTLE_S, Members
from shoal_tools.elastic.messages import (
    Commit,
    Crew,
    CrewEnded,
    CrewTerms,
    FromPlace,
    Halt,
    Hello,
    JobOver,
    Leave,
    Outcome,
    Sign,
    Train,
    from_agent,
    from_place,
    write,
)

pytestmark = pytest.mark.quick
LOST_S = 20.0


@dataclass
class Hosts:
    """Agents that answer at once as agents do, and time that passes when a test says so."""

    least: int = 1
    most: int = 4
    now_s: float = 0.0
    crews: dict[str, Crew] = field(default_factory=dict)  # that each host runs
    told: list[tuple[str, FromPlace]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    commits: bool = True  # whether scripts have checkpoints

    def __post_init__(self) -> None:
        self.place = Members(LOST_S, self.lines.append)

    def hello(self, host: str, **more: object) -> None:
        terms = CrewTerms(self.least, self.most, wait_s=60, restarts=1)
        address, port = f"10.0.0.{host[1:]}", 1000 + int(host[1:])
        hello = Hello(host, host, 2, address, "10.0.0.9", port, terms, **more)  # type: ignore[arg-type]
        self.place.hear(host, hello, self.now_s)

    def end(self, host: str, outcome: Outcome, code: int = 0) -> None:
        crew = self.crews.pop(host)
        self.place.hear(host, CrewEnded(crew.number, outcome, 5, "fell", code), self.now_s)

    def lose(self, host: str) -> None:
        """Kill all of a host."""
        self.silent.add(host)
        self.crews.pop(host, None)
        self.place.broke(host, self.now_s)

    def leave(self, host: str) -> None:
        self.place.hear(host, Leave(), self.now_s)

    def wait(self, seconds: float) -> None:
        """Let time pass, with signs of life and answers."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.5
            for agent in self.place.agents:
                if agent not in self.silent:
                    self.place.hear(agent, Sign(), self.now_s)
            for agent, message in self.place.turn(self.now_s):
                self.told.append((agent, message))
                if agent not in self.silent:
                    self._obey(agent, message)

    def _obey(self, agent: str, message: FromPlace) -> None:
        if isinstance(message, Train):
            self.crews[agent] = message.crew
        elif isinstance(message, Halt) and agent in self.crews:
            self.end(agent, "halted")
        elif isinstance(message, Commit) and self.commits:
            self.end(agent, "committed")

    @property
    def crew(self) -> str:
        """The crew that all its members run."""
        number, names = {(crew.number, crew.names) for crew in self.crews.values()}.pop()
        assert ", ".join(sorted(self.crews)) == ", ".join(sorted(names.split(", ")))
        return f"{number}: {names}"

    def began(self, *names: str) -> Hosts:
        for name in names:
            self.hello(name)
        self.wait(FIRST_SETTLE_S + 1)
        return self


def test_the_first_crew_waits_for_hosts_that_come_one_after_the_other() -> None:
    hosts = Hosts()
    hosts.hello("h1")
    hosts.wait(2)
    hosts.hello("h2")
    hosts.wait(FIRST_SETTLE_S - 1)
    assert not hosts.crews
    hosts.wait(2)
    assert hosts.crew == "1: h1, h2"
    crew = hosts.crews["h2"]
    assert (crew.address, crew.port, crew.ranks) == ("10.0.0.1", 1001, 4)
    assert (crew.first_rank("h1"), crew.first_rank("h2")) == (0, 2)


def test_as_many_as_can_train_begin_at_once() -> None:
    hosts = Hosts(most=2)
    hosts.hello("h1"), hosts.hello("h2")
    hosts.wait(0.5)
    assert hosts.crew == "1: h1, h2"


def test_the_others_go_on_without_a_host_that_is_killed_and_hear_its_name() -> None:
    hosts = Hosts().began("h1", "h2", "h3")
    hosts.lose("h1")
    hosts.wait(2)
    assert hosts.crew == "2: h2, h3"
    assert hosts.crews["h2"].why == "host h1 is lost: its agent has ended"
    assert not [message for _, message in hosts.told if isinstance(message, Commit)]


def test_a_host_that_is_silent_is_lost_after_as_long_as_was_said() -> None:
    hosts = Hosts().began("h1", "h2")
    hosts.silent.add("h2")
    hosts.wait(LOST_S)
    assert hosts.crew == "1: h1, h2"
    del hosts.crews["h2"]
    hosts.wait(2)
    assert hosts.crew == "2: h1"
    assert "host h2 is lost: no sign of life for 20 s" in hosts.lines


def test_a_connection_that_is_made_again_is_no_loss() -> None:
    hosts = Hosts().began("h1", "h2")
    hosts.place.broke("h2", hosts.now_s)
    hosts.hello("h2", crew=hosts.crews["h2"])
    hosts.wait(5)
    assert hosts.crew == "1: h1, h2"


def test_hosts_that_come_are_taken_in_together_by_one_commit() -> None:
    hosts = Hosts().began("h1")
    hosts.hello("h2")
    hosts.wait(0.5)
    hosts.hello("h3")
    hosts.wait(3)
    assert hosts.crew == "2: h1, h2, h3"
    assert [m.why for _, m in hosts.told if isinstance(m, Commit)] == ["hosts h2, h3 came"]


def test_a_host_that_comes_waits_where_all_places_are_taken() -> None:
    hosts = Hosts(most=2).began("h1", "h2")
    hosts.hello("h3")
    hosts.wait(5)
    assert hosts.crew == "1: h1, h2"
    hosts.lose("h2")
    hosts.wait(2)
    assert hosts.crew == "2: h1, h3"


def test_a_script_without_checkpoints_goes_on_and_the_host_that_comes_waits() -> None:
    hosts = Hosts(commits=False).began("h1")
    hosts.hello("h2")
    hosts.wait(30)
    assert hosts.crew == "1: h1"


def test_a_host_that_is_told_to_leave_does_so_after_a_commit_of_all() -> None:
    hosts = Hosts().began("h1", "h2", "h3")
    hosts.leave("h2")
    hosts.wait(1)
    assert hosts.crew == "2: h1, h3"
    hosts.lose("h2")
    hosts.wait(1)
    assert hosts.crew == "2: h1, h3"
    assert "host h2 has left" in hosts.lines and not [x for x in hosts.lines if "lost" in x]


def test_a_host_that_does_not_commit_as_it_leaves_is_no_failure_of_the_job() -> None:
    hosts = Hosts(commits=False).began("h1", "h2")
    for host in ("h2", "h1"):
        hosts.leave(host)
        hosts.end(host, "failed", 1)
        hosts.wait(1)
        hosts.lose(host)
        hosts.wait(1)
    assert hosts.place.over is None


def test_ranks_that_fail_by_themselves_are_started_again_as_often_as_was_said() -> None:
    hosts = Hosts().began("h1", "h2")
    hosts.end("h2", "failed", 7)
    hosts.wait(1)
    assert hosts.crew == "2: h1, h2"
    hosts.end("h1", "failed", 7)
    hosts.wait(1)
    assert hosts.place.over is not None
    assert hosts.place.over.code == 7
    assert "a rank of host h1 fell, and has failed 2 times" in hosts.place.over.why


def test_ranks_that_fail_because_a_host_is_cut_off_are_no_failure_of_theirs() -> None:
    for _ in range(3):
        hosts = Hosts().began("h1", "h2")
        hosts.silent.add("h2")
        hosts.wait(10)
        hosts.end("h1", "failed", 1)
        hosts.crews.clear()
        hosts.wait(1)
        assert hosts.crew == "2: h1"
        assert hosts.crews["h1"].why == "host h2 is lost: no sign of life for 10 s"


def test_a_host_that_was_cut_off_halts_and_comes_again_as_a_new_one() -> None:
    hosts = Hosts().began("h1", "h2")
    old = hosts.crews["h2"]
    hosts.silent.add("h2")
    hosts.wait(LOST_S + 2)
    hosts.silent.clear()
    hosts.hello("h2", crew=old)
    hosts.crews["h2"] = old
    hosts.wait(3)
    assert ("h2", Halt(1, "the others go on without this host")) in hosts.told
    assert hosts.crew == "3: h1, h2"


def test_all_that_end_their_work_end_the_job() -> None:
    hosts = Hosts().began("h1", "h2")
    hosts.hello("h3")
    hosts.end("h1", "done")
    hosts.wait(0.5)
    hosts.end("h2", "done")
    hosts.wait(0.5)
    over = JobOver(0, "all ranks have ended their work")
    assert [each for each in hosts.told if each[1] == over] == [
        (h, over) for h in ("h1", "h2", "h3")
    ]
    hosts.hello("h4")
    assert ("h4", over) in hosts.place.turn(hosts.now_s)


def test_too_few_hosts_end_the_job_in_time_and_it_is_said_who_is_missing() -> None:
    hosts = Hosts(least=2).began("h1", "h2")
    hosts.lose("h2")
    hosts.wait(50)
    assert hosts.place.over is None and not hosts.crews
    hosts.wait(15)
    assert hosts.place.over is not None and hosts.place.over.code == 1
    assert "here: h1; host h2 is lost: its agent has ended" in hosts.place.over.why


def test_a_meeting_place_that_is_started_again_takes_up_the_crew_that_trains() -> None:
    hosts = Hosts().began("h1", "h2")
    hosts.lose("h2")
    hosts.wait(2)
    hosts.hello("h3")
    hosts.wait(3)
    assert hosts.crew == "3: h1, h3"
    again = Hosts(crews=dict(hosts.crews))
    again.hello("h1", crew=again.crews["h1"])
    again.wait(1)
    again.hello("h3", crew=again.crews["h3"])
    again.wait(LOST_S + 5)
    assert again.crew == "3: h1, h3"
    again.lose("h3")
    again.wait(2)
    assert again.crew == "4: h1"
    assert again.crews["h1"].job == hosts.crews["h1"].job


def test_a_host_that_was_lost_with_the_meeting_place_is_found_missing() -> None:
    hosts = Hosts().began("h1", "h2")
    again = Hosts(crews={"h1": hosts.crews["h1"]}, silent={"h2"})
    again.hello("h1", crew=hosts.crews["h1"])
    again.wait(LOST_S + 2)
    assert again.crew == "2: h1"


def test_ranks_that_ended_while_the_meeting_place_was_away_are_not_waited_for() -> None:
    hosts = Hosts().began("h1", "h2")
    crews = dict(hosts.crews)
    again = Hosts(crews={"h1": crews["h1"]})
    again.hello("h2", ended=1, outcome="failed")
    again.hello("h1", crew=crews["h1"])
    again.wait(FIRST_SETTLE_S + 2)
    assert again.crew == "2: h1, h2"


def test_an_agent_with_other_terms_is_refused() -> None:
    hosts = Hosts().began("h1")
    hosts.most = 3
    hosts.hello("h2")
    hosts.wait(0.5)
    (refused,) = [message for agent, message in hosts.told if agent == "h2"]
    assert isinstance(refused, JobOver) and refused.code == 2
    assert "--max 3" in refused.why and "--max 4" in refused.why


def test_messages_cross_as_they_are_and_others_are_refused() -> None:
    hosts = Hosts().began("h1")
    crew = hosts.crews["h1"]
    hello = Hello("a", "h1", 1, "", "", 1, CrewTerms(), crew, 3, "failed", True)
    for said in (hello, Sign(), CrewEnded(1, "done", 2), Leave()):
        assert from_agent(write(said)) == said
    for told in (Sign(), Train(crew), Halt(1, "x"), Commit(1, "x"), JobOver(1, "x")):
        assert from_place(write(told)) == told
    for text in (b"", b"[]", b'{"type":"Train"}', write(Halt(1, "x"))):
        with pytest.raises(ValueError):
            from_agent(text)
