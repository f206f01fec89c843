"""Option: a field of a frozen record that says how people type it and how ranks compare it.

`parallelize` and the command line are built from such records: the core's choices
(front/options.py) and one for each feature (contracts/feature.py). A record checks itself when it
is constructed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.core.numbers import whole

_SLOT = "shoal"


@dataclass(frozen=True)
class Flag:
    """The command line's form of an option.

    Args:
        help: one or two sentences for `--help`.
        name: a name such as "--check-every"; by default made from the keyword, or in a `record`
            from the field's name.
        read: makes the value from the text, or raises ValueError with a hint. None: the flag takes
            no text, and stands for True.
        metavar: placeholder of the text in `--help`.
        choices: the possible texts, if there are few.
        many: whether the flag may be given several times. Then `read` takes a tuple of all texts.
        no: whether the flag has a `--no-…` form, and stands for True or False.
        record: type of the record that the field holds. Its own flags are offered in place of this
            one.
        make: makes that record from the given fields; by default its class.
        plans: whether each command that makes a plan offers the flag, not only `shoal train`.
    """

    help: str = ""
    name: str = ""
    read: Callable[[Any], Any] | None = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    many: bool = False
    no: bool = False
    record: type[Any] | None = None
    make: Callable[..., Any] | None = None
    plans: bool = False


@dataclass(frozen=True)
class Option:
    """A field, as `options_of` finds it.

    Args:
        name: the field's name.
        default: its value if nobody asks for another.
        keyword: its keyword of `parallelize`.
        flag: its flag on the command line, if it has one.
        compared: turns the value into plain data that ranks compare. None: each rank has its own.
        off: the value of the keyword that asks for nothing.
    """

    name: str
    default: Any
    keyword: str
    flag: Flag | None
    compared: Callable[[Any], Any] | None
    off: Any


def read_whole(noun: str, least: int = 0) -> Callable[[str], int]:
    """Make the `read` of a flag that takes a whole number.

    Args:
        noun: the things that it counts, such as "steps".
        least: the smallest number that is right.
    """

    def read(text: str) -> int:
        number = whole(text)
        if number is None or number < least:
            raise ValueError(f"{text!r} is not a number of {noun}, {least} or more")
        return number

    return read


def _itself(value: Any) -> Any:
    return value


def option(
    default: Any,
    *,
    keyword: str = "",
    flag: Flag | None = None,
    compared: Callable[[Any], Any] | None = _itself,
    off: Any = dataclasses.MISSING,
) -> Any:
    """Declare a field of a frozen dataclass as an option. `Option` explains the arguments."""
    about = {"keyword": keyword, "flag": flag, "compared": compared, "off": off}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={_SLOT: about})
    return dataclasses.field(default=default, metadata={_SLOT: about})


def options_of(record: Any) -> Iterator[Option]:
    """Yield the options of a record or of its class, in the order of its fields."""
    for field in dataclasses.fields(record):
        about = field.metadata.get(_SLOT)
        if about is None:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        yield Option(
            field.name,
            default,
            about["keyword"] or field.name,
            about["flag"],
            about["compared"],
            default if about["off"] is dataclasses.MISSING else about["off"],
        )
