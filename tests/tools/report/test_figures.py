"""Figures of one name are the same in a report's sentences, cards, tables, bars and files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from made_records import everything, outcome, simulation, timed, trained

from shoal.core.outcome import Outcome, Term
from shoal.core.record import Record
from shoal.front.text import plain
from shoal_tools.report.drawing import duration, percent
from shoal_tools.report.figures import measured_step, predicted_step_s
from shoal_tools.report.foresight import foresight
from shoal_tools.report.page import page
from shoal_tools.report.run_file import from_json, to_json
from shoal_tools.report.step_table import step_table


def drawn_outcome(draw: random.Random) -> Outcome:
    """An account of steps that may be anything, whose parts add up to them."""
    names = ("compute", "exchanges", "optimizer")
    terms = [Term(name, draw.expovariate(5), draw.expovariate(5)) for name in names]
    return Outcome(
        sum(term.predicted_s for term in terms),
        sum(term.measured_s for term in terms),
        draw.randrange(2, 200),
        (*terms, Term("between steps", 0.0, draw.expovariate(9))),
    )


def drawn_records() -> Iterator[tuple[str, Record]]:
    draw = random.Random(7)
    for number in range(12):
        account = drawn_outcome(draw)
        record = replace((trained, timed)[number % 2](5), outcome=account)
        assert record.explanation is not None
        compute, exchanges, optimizer = (term.predicted_s for term in account.terms[:3])
        step = replace(
            record.explanation.step,
            forward_s=compute / 3,
            backward_s=compute * 2 / 3,
            exposed_s=exchanges,
            optimizer_s=optimizer,
        )
        step_s = draw.expovariate(3)  # the median, which no account has
        contenders = [replace(c, median_s=c.median_s * step_s) for c in record.contenders]
        yield (
            f"{('trained', 'timed')[number % 2]} {number}",
            replace(
                record,
                explanation=replace(record.explanation, step=step),
                step_s=contenders[0].median_s if contenders else step_s,
                contenders=tuple(contenders),
            ),
        )


RECORDS = dict(drawn_records())


def cards(text: str) -> dict[str, tuple[str, str]]:
    found = re.findall(
        r'<li><span class="name">(.*?)</span><strong>(.*?)</strong><span class="more">(.*?)</span>',
        text,
    )
    return {name: (figure, more) for name, figure, more in found}


def row(text: str, name: str) -> list[str]:
    section = text[text.index('<section id="step">') :]
    found = re.search(rf"<td class=\"words\">(?:<span[^>]*></span>)?{name}</td>(.*?)</tr>", section)
    assert found is not None
    return re.findall(r"<td>(.*?)</td>", found[1])


def bars(text: str) -> dict[str, str]:
    section = text[text.index('<div class="stacks">') :]
    found = re.findall(
        r'<span class="name">(\w+)</span>\n.*?\n<span class="figure">(.*?)</span>', section
    )
    return dict(found[:2])


@pytest.mark.quick
@pytest.mark.parametrize("name", RECORDS)
def test_the_step_is_one_figure_on_the_page(name: str) -> None:
    record = RECORDS[name]
    text, headline = page(record), measured_step(record)
    assert headline is not None
    shown, counts = cards(text)["a step"]
    assert shown == duration(headline.seconds)
    assert counts == headline.counts
    assert f"A step takes {shown}." in text
    predicted_s = predicted_step_s(record)
    assert predicted_s is not None
    predicted = cards(text)["a step, predicted"][0]
    off = abs(predicted_s - headline.seconds) / headline.seconds
    assert f"The prediction is {percent(off)} " in text
    assert row(text, "the step")[0] == bars(text)["predicted"] == predicted == duration(predicted_s)
    assert row(text, "the step")[1] == bars(text)["measured"]
    if record.contenders:  # its ratios are of other steps, which is said
        assert f"The {counts}, is {shown}." in text
        assert duration(record.contenders[0].median_s) == shown
    else:
        assert row(text, "the step")[1] == shown


@pytest.mark.parametrize("name", RECORDS)
def test_the_terminal_the_page_and_the_file_have_the_same_account(name: str) -> None:
    record = RECORDS[name]
    account = record.outcome
    assert account is not None
    text, said = page(record), str(account)
    told = json.loads(to_json(record))["run"]["outcome"]
    assert told["measured_s"] == account.measured_s
    for term, saved in zip(account.terms[:3], told["terms"], strict=False):
        figures = row(text, term.name)[:2]
        assert figures == [duration(term.predicted_s), duration(term.measured_s)]
        assert saved["measured_s"] == term.measured_s
        assert f"{term.measured_s * 1e3:.1f} ms" in said
    assert f"{account.measured_s * 1e3:.1f} ms" in said
    assert page(from_json(to_json(record))) == text


@pytest.mark.parametrize("name", RECORDS)
def test_parts_add_up_to_the_step(name: str) -> None:
    record = RECORDS[name]
    table = step_table(record)
    assert table is not None and record.outcome is not None
    assert table.whole.measured_s == pytest.approx(record.outcome.measured_s, rel=1e-12)
    assert table.whole.predicted_s == pytest.approx(record.outcome.predicted_s, rel=1e-12)
    assert table.between is not None and table.between not in table.parts


def test_without_an_account_the_recorded_steps_say_so() -> None:
    text = page(trained(5))
    assert "A step takes 720 ms." in text
    assert cards(text)["a step"] == ("720 ms", "median step of rank 0")
    assert "over the steps that were recorded; a whole one took 745 ms" in text
    assert "Recorded: 3 steps, of 710 ms on rank 0 (h0)." in text


def test_one_step_alone_is_no_account() -> None:
    record = replace(trained(5), outcome=replace(outcome(), steps=1))
    headline = measured_step(record)
    assert headline is not None and headline.seconds == record.step_s


def test_a_simulation_has_the_same_figures_in_terminal_page_and_file() -> None:
    answer = simulation()
    text, shown = page(everything(5)), plain(foresight(answer))
    saved = answer.to_json()["hosts"]
    for scale, told in zip(answer.scales, saved, strict=True):
        line = re.search(rf"^ *{scale.hosts:,} .*$", shown, re.M)
        assert line is not None
        words = line[0].split()
        cells = duration(scale.step_s).split() + duration(scale.p95_s).split()
        assert words[1 : 1 + len(cells)] == cells
        assert f"{scale.times:.2f}" in words
        name = f"<td>{scale.hosts:,}</td><td>{duration(scale.step_s)}</td>"
        assert name in text
        limit = told["limit"]
        at = text.index(name)
        assert f'<td class="words">{limit}' in text[at : text.index("</tr>", at)]
        assert limit in words
