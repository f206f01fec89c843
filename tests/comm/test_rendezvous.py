"""What a rank reads in the environment that its launcher has set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.comm.rendezvous import host_name, is_alone, seat, token, token_of, variables
from shoal.contracts.launcher import MARK, Job, Meeting, Seat
from shoal.core.errors import UsageError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a rank 1 of 3, as Shoal's launchers set them."""
    for name, value in variables("10.0.0.1", 29500, 1, 3, 0, 1).items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RUN_ID", MARK, "GLOO_SOCKET_IFNAME", "SHOAL_SERVERS", "SHOAL_TAIL"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_seat_is_what_the_launcher_has_said(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SHOAL_HOST", "h7")
    environment.setenv("SHOAL_SERVERS", "2")
    environment.setenv("GLOO_SOCKET_IFNAME", "eth7")
    environment.setenv(MARK, "12")
    meeting = Meeting(1, 3, "10.0.0.1", 29500)
    own = Seat("h7", servers=2, holder=None, job="12", interface="eth7")
    assert seat() == replace(own, meeting=meeting)
    assert seat(has_joined=True) == own


@pytest.mark.parametrize(
    ("run_id", "job", "restarts"),
    [("", "", False), ("none", "", True), ("none-1", "none-1", True)],
    ids=["Shoal's launchers", "torchrun", "torchrun with --rdzv-id"],
)
def test_a_job_is_what_torchrun_calls_it_and_may_be_started_again(
    environment: pytest.MonkeyPatch, run_id: str, job: str, restarts: bool
) -> None:
    environment.setenv("TORCHELASTIC_RUN_ID", run_id)
    assert (seat().job, seat().restarts) == (job, restarts)


@pytest.mark.parametrize("written", ["fd00::1", "[fd00::1]"])
def test_an_address_may_stand_in_brackets(environment: pytest.MonkeyPatch, written: str) -> None:
    environment.setenv("MASTER_ADDR", written)
    assert seat().meeting == Meeting(1, 3, "fd00::1", 29500)


def test_without_a_launcher_that_holds_the_store_rank_0_does(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert seat().holder == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": "here"}, "'here'"),
        ({"RANK": "3"}, "RANK=3, WORLD_SIZE=3"),
        ({"RANK": "-1"}, "'-1'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is too large(.|\n)*'70000'(.|\n)*at most 65535"),
        ({"MASTER_PORT": "\u0662\u0669\u0665\u0660\u0660"}, "MASTER_PORT is not set to a number"),
        ({"WORLD_SIZE": "\u00b2"}, "WORLD_SIZE is not set to a number(.|\n)*'\u00b2'"),
        ({"WORLD_SIZE": "10000000"}, "WORLD_SIZE is too large"),
        ({"RANK": "9" * 5000}, "RANK is not set to a number"),
        ({"RANK": " 1"}, "RANK is not set to a number"),
        ({"SHOAL_TAIL": "\u00b2"}, "SHOAL_TAIL is not set to a number"),
        ({"SHOAL_SERVERS": "two"}, "SHOAL_SERVERS is not set to a number"),
    ],
    ids=str,
)
def test_variables_that_do_not_fit_are_named(
    environment: pytest.MonkeyPatch, changed: dict[str, str | None], said: str
) -> None:
    for name, value in changed.items():
        environment.setenv(name, value) if value is not None else environment.delenv(name)
    assert not is_alone()
    with pytest.raises(UsageError, match=said):
        seat()


@pytest.mark.parametrize(
    "there", [{}, {"WORLD_SIZE": "1", "RANK": "0"}], ids=["no launcher", "one rank"]
)
def test_a_process_without_others_is_alone(
    environment: pytest.MonkeyPatch, there: dict[str, str]
) -> None:
    assert not is_alone()
    for name in ("RANK", "WORLD_SIZE"):
        environment.delenv(name)
    for name, value in there.items():
        environment.setenv(name, value)
    assert is_alone()


def test_a_host_has_a_name_where_nobody_has_given_it_one(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("SHOAL_HOST", raising=False)
    assert host_name()


@pytest.mark.parametrize("written", ["", "  ", "\udcff"], ids=["empty", "spaces", "no UTF-8"])
def test_a_token_that_is_no_secret_is_told_at_once(
    environment: pytest.MonkeyPatch, written: str
) -> None:
    environment.setenv("SHOAL_TOKEN", written)
    for ask in (seat, token, lambda: token_of(Job((), 1, {"SHOAL_TOKEN": written}))):
        with pytest.raises(UsageError, match="SHOAL_TOKEN is set, and is no secret") as caught:
            ask()
        assert "unset SHOAL_TOKEN" in caught.value.do
    environment.setenv("SHOAL_TOKEN", "a secret")
    assert seat().token == token() == "a secret"
    environment.delenv("SHOAL_TOKEN")
    assert token() == "" and token_of(Job((), 1))
