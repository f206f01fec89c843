"""Pages in a real browser: nothing wrong, nothing fetched, small, quick; the timeline moves.

Chromium is taken from PATH (on Debian: apt-get install chromium).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_records import everything, timed, trained

from shoal_tools.report.page import page

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright here: make test-browser installs it"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MOST_BYTES, MOST_S = 3_000_000, 2.0
WIDE, NARROW = (1280, 900), (390, 800)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
RECORDS = {
    "5 layers": everything(5),
    "500 layers": everything(500, exchanges=160),
    "5 layers trained": trained(5),
    "500 layers timed": timed(500),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    with playwright.sync_playwright() as plays:
        started = plays.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page that is open, and what was wrong with it."""

    def __init__(self, browser: Any, file: Path, **how: Any) -> None:
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_context(**how).new_page()
        self.page.on("console", lambda said: self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri(), wait_until="load")

    def processor_s(self) -> float:
        """What it has taken so far, which does not grow while others have the machine."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable")
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "ProcessTime")

    def window(self) -> list[int]:
        """What of the timeline is seen, in microseconds."""
        self.page.wait_for_timeout(50)
        return [int(us) for us in self.page.get_attribute("#timeline", "data-window").split()]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens the page of a record by name."""
    pages: list[Opened] = []

    def open_(name: str, **how: Any) -> Opened:
        file = tmp_path / "report.html"
        file.write_text(page(RECORDS[name]))
        pages.append(Opened(browser, file, **how))
        return pages[-1]

    yield open_
    for each in pages:
        assert each.wrong == []
        each.page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", RECORDS)
def test_a_page_is_right_small_and_quick(
    opened: Any, tmp_path: Path, name: str, size: tuple[int, int], theme: str
) -> None:
    width, height = size
    shown = opened(name, viewport={"width": width, "height": height}, color_scheme=theme)
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    assert [url for url in shown.asked if not url.startswith(("file:", "data:"))] == []
    assert shown.processor_s() < MOST_S
    assert int(shown.page.get_attribute("#timeline", "data-drawn")) > 10
    across = shown.page.evaluate("document.documentElement.scrollWidth")
    assert across <= width, "nothing is wider than the window"
    paper = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(",")))
    assert (brightness > 3 * 128) == (theme == "light")


def test_the_timeline_zooms_moves_and_tells(opened: Any) -> None:
    shown = opened("5 layers")
    first = shown.window()
    canvas = shown.page.locator("#timeline")
    shown.page.click("[data-zoom=in]")
    closer = shown.window()
    assert closer[1] - closer[0] == pytest.approx((first[1] - first[0]) / 2, rel=1e-3)
    canvas.focus()
    shown.page.keyboard.press("ArrowRight")
    assert shown.window()[0] > closer[0]
    shown.page.keyboard.press("0")
    whole = shown.window()
    assert whole[0] == 0 and whole[1] > first[1]
    shown.page.keyboard.press("1")
    assert shown.window() == first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + 45
    shown.page.mouse.dblclick(*middle)
    before = shown.window()
    shown.page.mouse.move(*middle)
    shown.page.mouse.down()
    shown.page.mouse.move(middle[0] - 200, middle[1], steps=4)
    shown.page.mouse.up()
    after = shown.window()
    assert after[0] > before[0] and after[1] - after[0] == before[1] - before[0]
    shown.page.mouse.move(*middle)
    tip = shown.page.locator("#tip")
    assert tip.is_visible()
    assert "ms" in tip.inner_text()


def test_another_rank_is_chosen(opened: Any) -> None:
    shown = opened("5 layers")
    assert shown.page.locator("#rank option").all_inner_texts() == ["rank 0 (h0)", "rank 3 (h3)"]
    before = shown.page.locator("#timeline").screenshot()
    shown.page.select_option("#rank", "1")
    shown.window()
    assert shown.page.locator("#timeline").screenshot() != before


def test_interfaces_of_others_are_shown_when_asked_for(opened: Any) -> None:
    shown = opened("5 layers")
    height = "document.getElementById('timeline').clientHeight"
    before = shown.page.evaluate(height)
    shown.page.check("#foreign")
    shown.window()
    assert shown.page.evaluate(height) > before


def test_of_many_layers_some_are_shown_and_any_is_found(opened: Any) -> None:
    shown = opened("500 layers")
    rows = shown.page.locator(".layer:visible")
    assert rows.count() == 16
    shown.page.fill("#find", "blocks.7.")
    assert rows.count() == 4
    shown.page.fill("#find", "factor")
    assert rows.count() == 83
    shown.page.fill("#find", "")
    shown.page.check("#all")
    assert rows.count() == 500
    shown.page.uncheck("#all")
    shown.page.evaluate("location.hash = '#layer-3'")
    shown.page.wait_for_timeout(50)
    assert rows.count() == 17
    assert shown.page.locator("#layer-3 .why").is_visible()


def test_a_layer_says_why(opened: Any) -> None:
    shown = opened("5 layers")
    shown.page.click("#layer-2 summary")
    why = shown.page.locator("#layer-2 .why")
    assert why.is_visible()
    assert "add 50.0 ms a step" in why.inner_text()
    assert "It flips: factor sends less while K < 512." in why.inner_text()


def test_without_its_script_only_the_timeline_is_missing(opened: Any) -> None:
    shown = opened("500 layers", java_script_enabled=False)
    assert shown.page.locator("#layers").is_visible()
    assert "The timeline needs JavaScript" in shown.page.locator("noscript").inner_text()
