"""Names with options are read as they are written, and what does not fit is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Exchange
from shoal.core import registry
from shoal.core.cost import Traffic
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.core.written_options import parsed, read, written
from shoal.exchange.direct import Direct
from shoal.exchange.ring import Ring


@dataclass(frozen=True)
class Optional(Exchange):
    """Has an option of every type."""

    name: ClassVar[str] = "optional"
    exact: ClassVar[bool] = False
    ratio: float = 0.5
    label: str = ""
    quick: bool = False
    most: int | None = None

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        raise NotImplementedError

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        raise NotImplementedError

    def gather(self, flat: Tensor, comm: Comm) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        (Direct(), "direct"),
        (Ring(), "ring"),
        (Ring(chunk_bytes=1 << 20), "ring(chunk_bytes=1048576)"),
        (Optional(), "optional"),
        (
            Optional(-1e-9, 'a "+b(" c', True, 3),
            "optional(ratio=-1e-09, label='a \"+b(\" c', quick=True, most=3)",
        ),
    ],
)
def test_what_is_written_is_read_back(exchange: Exchange, text: str) -> None:
    with registry.registered(Optional):
        assert written(exchange) == str(exchange) == text
        assert read(Exchange, text) == exchange


@pytest.mark.parametrize(
    ("text", "exchange"),
    [
        (" ring ", Ring()),
        ("ring()", Ring()),
        ("ring( chunk_bytes = 4194304 )", Ring()),
        ("optional(ratio=1)", Optional(1.0)),
        ("optional(most=None)", Optional()),
    ],
)
def test_other_ways_to_write_it_mean_the_same(text: str, exchange: Exchange) -> None:
    with registry.registered(Optional):
        assert read(Exchange, text) == exchange
        assert type(read(Exchange, "optional(ratio=1)").ratio) is float  # type: ignore[attr-defined]


def test_names_may_be_joined() -> None:
    names = parsed("ring(chunk_bytes=3) + int8(block=256)+other")
    assert [(each.name, each.options) for each in names] == [
        ("ring", {"chunk_bytes": 3}),
        ("int8", {"block": 256}),
        ("other", {}),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ring(chunk_byts=3)", "no option 'chunk_byts'(.|\n)*did you mean 'chunk_bytes'"),
        ("direct(chunk_bytes=3)", "no option 'chunk_bytes'(.|\n)*expected: no options"),
        ("ring(chunk_bytes='3')", "wrong type(.|\n)*got: '3'\n  expected: int(.|\n)*of that type"),
        ("ring(chunk_bytes=3.0)", "wrong type"),
        ("ring(chunk_bytes=True)", "wrong type"),
        ("ring(chunk_bytes=[1])", "wrong type"),
        ("optional(quick=1)", "wrong type"),
        ("optional(ratio='much')", "wrong type"),
        ("optional(most='3')", "wrong type"),
        ("ring(3)", "no name with options(.|\n)*options by their names"),
        ("ring(**{})", "no name with options"),
        ("ring(chunk_bytes=size)", "no name with options"),
        ("ring(chunk_bytes=3", "no name with options"),
        ("ring.new()", "no name with options"),
        ("ring+", "no name with options"),
        ("ring-direct", "no exchange called 'ring-direct'"),
        ("", "no exchange called ''"),
        ("rings", "did you mean 'ring'"),
        ("ring+direct", "more than one exchange"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, said: str) -> None:
    with registry.registered(Optional), pytest.raises(PlanError, match=said):
        read(Exchange, text)


def test_what_the_class_itself_refuses_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        read(Exchange, "ring(chunk_bytes=0)")


def test_options_without_a_default_cannot_be_registered() -> None:
    @dataclass(frozen=True)
    class Needy(Optional):
        name: ClassVar[str] = "needy"
        most: Any = None

    @dataclass(frozen=True)
    class Needier:
        size: int

    registry.register(Needy)
    registry.unregister(Needy)

    @dataclass(frozen=True)
    class Neediest(Optional, Needier):
        name: ClassVar[str] = "neediest"

    with pytest.raises(UsageError, match=r"need defaults(.|\n)*size"):
        registry.register(Neediest)


def test_a_field_of_a_class_that_is_no_dataclass_is_no_option() -> None:
    class Undecorated(Direct):
        name = "undecorated"
        most: int = 3

    with registry.registered(Undecorated), pytest.raises(PlanError, match=r"@dataclass\(frozen"):
        read(Exchange, "undecorated(most=4)")
