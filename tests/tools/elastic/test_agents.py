"""Agents and their meeting place: real processes and sockets, on this machine."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from agents import HERE, lives, up

from shoal.core.errors import UsageError
from shoal_tools.elastic.messages import CrewTerms
from shoal_tools.elastic.place import MeetingPlace

pytestmark = [pytest.mark.quick, pytest.mark.processes, pytest.mark.timeout(120)]


def test_ranks_have_torchruns_variables_and_all_end_with_their_work(tmp_path: Path) -> None:
    with up(tmp_path, "a", "b") as hosts:
        told = [hosts.told(host, 1) for host in ("a", "b")]
        assert sorted(each[0] for each in told) == ["0", "1"]
        ((address, port),) = {(each[2], each[3]) for each in told}
        assert {each[1] for each in told} == {"2"} and address == HERE
        with socket.create_server((HERE, int(port))):  # rank 0 can listen there
            pass
        hosts.end()
        assert [hosts.code(who) for who in ("a", "b", "place")] == [0, 0, 0]


def test_a_killed_agent_takes_its_rank_along_and_the_others_go_on(tmp_path: Path) -> None:
    with up(tmp_path, "a", "b") as hosts:
        pid = hosts.told("a", 1)[5]
        left = hosts.told("b", 1)[5]
        hosts.signal("a", signal.SIGKILL)
        assert hosts.told("b", 2)[:2] == ["0", "1"]
        assert not lives(pid) and not lives(left)
        assert "halts: host a is lost: its agent has ended" in hosts.printed("b")
        hosts.start("a")  # and it comes again
        assert [hosts.told(host, 3)[0] for host in ("b", "a")] == ["0", "1"]
        assert "commits: host a came" in hosts.printed("b")
        hosts.end()
        assert [hosts.code(who) for who in ("b", "place")] == [0, 0]


def test_a_host_that_is_told_to_leave_commits_with_the_others_and_ends_with_0(
    tmp_path: Path,
) -> None:
    with up(tmp_path, "a", "b") as hosts:
        for host in ("a", "b"):
            hosts.told(host, 1)
        hosts.signal("a", signal.SIGTERM)
        assert hosts.code("a") == 0
        assert hosts.told("b", 2)[:2] == ["0", "1"]
        assert "host a has left" in hosts.printed("place") or "host a left" in hosts.printed("b")
        assert "lost" not in hosts.printed("place")


def test_ranks_go_on_without_the_meeting_place_which_takes_them_up_again(tmp_path: Path) -> None:
    with up(tmp_path, "a", "b") as hosts:
        pids = [hosts.told(host, 1)[5] for host in ("a", "b")]
        hosts.signal("place", signal.SIGKILL)
        hosts.code("place")
        hosts.until(lambda: all("ranks go on" in hosts.printed(host) for host in ("a", "b")))
        hosts.start_place()
        hosts.until(lambda: all("is back" in hosts.printed(host) for host in ("a", "b")))
        hosts.until(lambda: "takes up crew 1" in hosts.printed("place"))
        assert all(map(lives, pids))
        hosts.signal("b", signal.SIGKILL)
        assert hosts.told("a", 2)[:2] == ["0", "1"]


def test_a_rank_that_fails_by_itself_is_said_and_ends_the_job_with_its_code(tmp_path: Path) -> None:
    with up(tmp_path, "a", terms=CrewTerms(most=2, restarts=1)) as hosts:
        hosts.start("b", command=(str(Path(__file__).with_name("failing.py")), str(tmp_path)))
        assert [hosts.code(who) for who in ("a", "b", "place")] == [7, 7, 7]
        assert "a rank of host b ended with exit code 7, and has failed 2 times" in hosts.printed(
            "place"
        )


def test_an_agent_with_another_token_is_told_so(tmp_path: Path) -> None:
    with up(tmp_path) as hosts:
        hosts.start("a", token="another")
        assert hosts.code("a") == 1
        assert "the meeting place has another SHOAL_TOKEN" in hosts.printed("a")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_changes_leave_agents_and_the_meeting_place_as_the_first_did(tmp_path: Path) -> None:
    with up(tmp_path, "a", "b", terms=CrewTerms(most=2, restarts=99)) as hosts:

        def held() -> dict[str, int]:
            pids = {who: str(hosts.pids[who]) for who in ("a", "place")}
            (pids["nursery"],) = (
                Path(f"/proc/{pids['a']}/task/{pids['a']}/children").read_text().split()
            )
            files = {
                f"files of {who}": len(os.listdir(f"/proc/{pid}/fd")) for who, pid in pids.items()
            }
            memory = {
                f"MB of {who}": int(Path(f"/proc/{pid}/statm").read_text().split()[1]) // 256
                for who, pid in pids.items()
            }
            threads = {
                f"threads of {who}": len(os.listdir(f"/proc/{pid}/task"))
                for who, pid in pids.items()
            }
            return {**files, **memory, **threads}

        found = []
        for crew in range(1, 52):
            for host in ("a", "b"):
                rank = hosts.told(host, crew)[5]
            if crew in (2, 51):
                found.append(held())
            os.kill(int(rank), signal.SIGKILL)
        first, last = found
        assert {
            what: last[what] - number for what, number in first.items() if last[what] > number + 2
        } == {}


def test_strangers_are_not_heard(tmp_path: Path) -> None:
    with up(tmp_path, "a", "b") as hosts:
        strangers = [socket.create_connection((HERE, hosts.port)) for _ in range(20)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(os.urandom(100 * number) or b"\0\0\0\4")
        for host in ("a", "b"):
            hosts.told(host, 1)
        for stranger in strangers:
            stranger.close()


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server((HERE, 0)) as taken, pytest.raises(UsageError, match="--port"):
        MeetingPlace(HERE, taken.getsockname()[1], "", 20.0, print)
