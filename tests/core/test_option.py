"""An option: what a field of a record says of itself, and what it says by default."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from shoal.core.option import Flag, option, options_of

pytestmark = pytest.mark.quick
COUNTED = Flag("How many.", "--many", read=int)


@dataclass(frozen=True)
class Record:
    """A record with options, and with a field that is none."""

    second: int = option(2, keyword="twice", flag=COUNTED, compared=str, off=None)
    first: str = option("a")
    plain: int = field(default=3)
    by_name: dict[str, int] = option({}, compared=None)


def test_options_stand_in_the_order_of_fields() -> None:
    assert [found.name for found in options_of(Record)] == ["second", "first", "by_name"]


def test_an_option_says_what_was_declared() -> None:
    second, *_ = options_of(Record)
    assert (second.keyword, second.default, second.off) == ("twice", 2, None)
    assert second.flag is COUNTED
    assert second.compared is not None and second.compared(5) == "5"


def test_what_is_left_out_follows_from_name_and_default() -> None:
    _, first, by_name = options_of(Record)
    assert (first.keyword, first.default, first.off, first.flag) == ("first", "a", "a", None)
    assert first.compared is not None and first.compared("b") == "b"
    assert by_name.compared is None, "ranks may have others"


def test_a_record_says_the_same_as_its_class() -> None:
    def known(record: Record | type[Record]) -> list[tuple[object, ...]]:
        return [(o.name, o.keyword, o.default, o.off, o.flag) for o in options_of(record)]

    assert known(Record(second=7)) == known(Record), "a default is not the record's own value"


def test_each_record_has_a_mapping_of_its_own() -> None:
    one, other = Record(), Record()
    one.by_name["a"] = 1
    assert other.by_name == {}
    assert [o.default for o in options_of(Record)][-1] == {}
