"""What a page's timeline is drawn of: rows, times, and the step by its parts."""

from __future__ import annotations

from typing import Any

import pytest
from made_records import predicted, track

from shoal.core.record import PREDICTED, Track
from shoal.core.trace import MAIN, STEPS, LinkRate, TraceEvent
from shoal_tools.report.tracks import drawn, most_off, step_parts


def lane(track: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [lane for lane in track["lanes"] if lane["name"] == name]
    return dict(found)


def test_the_main_thread_comes_first_and_steps_have_no_row() -> None:
    data = drawn((predicted(6), track("rank 0", 6, 2)))
    for shown in data["tracks"]:
        assert [row["name"] for row in shown["lanes"]] == [MAIN, "lane 0", "lane 1", "lane 2"]
    assert data["tracks"][1]["steps"] == [0, 720_000]
    assert data["tracks"][0]["steps"] == []


def test_where_backward_begins_is_told_of_each_track() -> None:
    data = drawn((predicted(6), track("rank 0", 6, 2), track("rank 1", 6, 2, slower=1.5)))
    assert [shown["backward"] for shown in data["tracks"]] == [0, 200_000, 300_000]
    assert data["end"] == 2_145_000
    assert data["window"] == [0, 870_000], "one measured step, and all of the predicted one"


def test_all_of_the_predicted_step_can_be_seen() -> None:
    short = TraceEvent("backward", MAIN, 0.3, 0.4), TraceEvent("step", STEPS, 0.2, 0.5)
    data = drawn((predicted(6), Track("rank 0", short)))
    assert data["end"] == 970_000
    assert data["window"] == [0, 970_000]


def test_without_measured_steps_the_prediction_begins_at_0() -> None:
    data = drawn((predicted(3),))
    assert lane(data["tracks"][0], MAIN)["events"][0][1] == 0
    assert data["window"] == [0, data["end"]] == [0, 670_000]


def test_events_within_others_are_deeper() -> None:
    events = [("a", 0, 9), ("b", 1, 3), ("c", 2, 3), ("d", 2, 3), ("e", 4, 5), ("f", 9, 10)]
    made = tuple(TraceEvent(what, MAIN, begin, end) for what, begin, end in events)
    (shown,) = drawn((Track("rank 0", made),))["tracks"]
    row = lane(shown, MAIN)
    assert [depth for _, _, _, depth in row["events"]] == [0, 1, 2, 2, 1, 0]
    assert row["depth"] == 3


def test_links_that_carry_next_to_nothing_have_no_row() -> None:
    rates = (
        LinkRate("eth0, sent", 0.0, 800.0),
        LinkRate("lo, sent", 0.0, 0.1),
        LinkRate("eth0, sent", 1.0, 0.0),
    )
    (shown,) = drawn((Track("rank 0", (TraceEvent("forward", MAIN, 0.0, 1.0),), rates),))["tracks"]
    told = [[0, 800.0], [1_000_000, 0.0]]
    assert shown["links"] == [{"name": "eth0, sent", "own": True, "most": 800.0, "rates": told}]


def test_interfaces_that_are_not_the_jobs_are_marked() -> None:
    names = "eth0, sent", "eth0, received", "docker0, sent"
    rates = tuple(LinkRate(name, 0.0, 90.0) for name in names)
    known = Track("rank 0", (), rates, interfaces=("eth0",))
    for made, expected in ((known, [False, True, True]), (Track("rank 0", (), rates), [True] * 3)):
        (shown,) = drawn((made,))["tracks"]
        assert [link["own"] for link in shown["links"]] == expected


def test_colours_go_by_what_events_are() -> None:
    names = "forward, waits included", "backward", "wait for exchange b", "exchange b", "lunch"
    made = tuple(TraceEvent(what, MAIN, number, number + 1) for number, what in enumerate(names))
    labels = drawn((Track("rank 0", made),))["labels"]
    assert labels == [[name, colour] for name, colour in zip(names, (0, 1, 2, 4, 6), strict=True)]


def test_parts_are_medians_of_the_slowest_rank() -> None:
    parts = step_parts((predicted(3), track("rank 0", 3, 3), track("rank 1", 3, 3, slower=1.5)))
    seconds = [(part.predicted_s, part.measured_s) for part in parts]
    expected = [(0.2, 0.3), (0.38, 0.6), (0.05, 0.09), (0.04, 0.06)]
    assert [pytest.approx(pair) for pair in expected] == seconds
    worst = most_off(parts)
    assert worst is not None and worst.name == "backward"
    assert worst.off_s == pytest.approx(0.22)


@pytest.mark.parametrize("tracks", [(), (predicted(2),), (track("rank 0", 2, 1),)])
def test_what_is_not_known_is_off_by_nothing(tracks: tuple[Track, ...]) -> None:
    parts = step_parts(tracks)
    assert bool(parts) == bool(tracks)
    assert most_off(parts) is None
    for part in parts:
        assert (part.predicted_s is None) != (part.measured_s is None)


def test_a_step_that_was_recorded_without_events_is_empty() -> None:
    data = drawn((Track(PREDICTED, ()), Track("rank 0", (TraceEvent("step", STEPS, 0.0, 1.0),))))
    assert [shown["lanes"] for shown in data["tracks"]] == [[], []]
    assert data["end"] == 1_000_000
