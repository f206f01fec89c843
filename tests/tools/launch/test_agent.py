"""The words that start a host's agent."""

from __future__ import annotations

import pytest

from shoal.core.errors import UsageError
from shoal_tools.launch.agent import (
    HostCount,
    HostPlace,
    agent_command,
    elastic_agent_command,
    membership,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", (4, 4)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:8", (2, 8)), ("4:4", (4, 4))],
)
def test_numbers_of_hosts(text: str, expected: tuple[int, int]) -> None:
    found = membership(text, 4, 0)
    assert (found.least, found.most) == expected
    assert found.is_elastic == (expected[0] < expected[1])


@pytest.mark.parametrize("text", ["3", "5", "5:8", "0:4", "4:2", "x", "1:", ":4", "1:2:3", "-1"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--nnodes"):
        membership(text, 4, 0)


PLACE = HostPlace(1, 2, "10.0.0.2")


def words(members: HostCount) -> str:
    return " ".join(agent_command("py", members, ("a", 29500), PLACE, ("x", "${y}$z")))


def test_as_many_hosts_as_named_meet_without_pickles() -> None:
    said = words(HostCount(3, 3, 2))
    assert "--nnodes 3 --node-rank 1 --master-addr a --master-port 29500" in said
    assert "--nproc-per-node 2 --max-restarts 2" in said and "c10d" not in said
    assert said.endswith("x $${y}$$z")  # torchrun takes $$ for $


def test_hosts_may_leave_and_come() -> None:
    members = HostCount(1, 3, 2)
    said = " ".join(elastic_agent_command("py", members, PLACE, (60.0, 7.5), ("x", "$z")))
    assert "py -m shoal agent --rendezvous - --address 10.0.0.2 --grace 7.5" in said
    assert "--min 1 --max 3 --wait-for 60 --nproc-per-node 2 --max-restarts 2" in said
    assert said.endswith("-- x $z")


def test_one_host_listens_on_its_loopback() -> None:
    assert "torchrun_here --nproc-per-node 2" in words(HostCount(1, 1))
