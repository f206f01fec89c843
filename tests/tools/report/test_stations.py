"""The picture of a pipeline: a box for each station, as wide as it takes, in its rank's row."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from made_records import explanation

from shoal.core.explanation import StationExplanation
from shoal.core.record import Record
from shoal_tools.report.layers import draw_stations
from shoal_tools.report.page import page
from shoal_tools.report.run_file import from_json, to_json

SPACE = "{http://www.w3.org/2000/svg}"
STATIONS = (
    StationExplanation("rank 0 (h0)", ("<in>", "up"), 4e6, 0.1, 0.2, 1e6),
    StationExplanation("rank 1 (h1)", ("down",), 4e6, 0.2, 0.4, 2e6),
    StationExplanation("rank 0 (h0)", ("head",), 4e6, 0.05, 0.1, 1e6),
)


def test_boxes_are_as_wide_as_stations_take_and_in_the_rows_of_ranks() -> None:
    drawn = ElementTree.fromstring(draw_stations(STATIONS))
    boxes = list(drawn.iter(f"{SPACE}rect"))
    widths = [float(box.get("width", "")) for box in boxes]
    rows = [box.get("y") for box in boxes]
    assert widths == pytest.approx([2 * widths[2], 4 * widths[2], widths[2]], abs=0.1)
    assert rows[0] == rows[2] != rows[1]
    assert len(list(drawn.iter(f"{SPACE}polyline"))) == 2
    told = [box.findtext(f"{SPACE}title") for box in boxes]
    assert told[0] == "rank 0 (h0): <in> … up, 4 MB; forward 100 ms, backward 200 ms, sends 1 MB"
    assert draw_stations(()) == ""


def test_a_page_has_the_picture_and_a_file_the_stations() -> None:
    plan = explanation(8)
    piped = replace(plan, step=replace(plan.step, stations=STATIONS))
    label = "the stations of the pipeline"
    record = Record("piped", explanation=piped)
    assert from_json(to_json(record)) == record
    assert label in page(record)
    assert label not in page(Record("plain", explanation=plan))
