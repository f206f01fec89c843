"""What a script registers takes part like Shoal's own; what cannot be registered is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, final

import pytest
from torch import Tensor

import shoal
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Exchange
from shoal.contracts.launcher import Job, Launcher, Result
from shoal.contracts.strategy import Strategy
from shoal.core import registry
from shoal.core.cost import Traffic
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Topology
from shoal.exchange.ring import Ring


@dataclass(frozen=True)
class Lonely(Exchange):
    """Leaves everything as it is."""

    name: ClassVar[str] = "lonely"
    exact: ClassVar[bool] = False

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        return Traffic((0.0,) * topology.size, (0.0,) * topology.size, rounds=0)

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        return

    def gather(self, flat: Tensor, comm: Comm) -> None:
        return


@dataclass(frozen=True)
class Rival(Lonely):
    """Another of that name."""

    name: ClassVar[str] = "lonely"


@dataclass(frozen=True)
class Nameless(Lonely):
    """Has its name from elsewhere."""


@dataclass(frozen=True)
class Unspeakable(Lonely):
    """Its name would not be read as one."""

    name: ClassVar[str] = "lonely+ring"


@dataclass(frozen=True)
class TakesRings(Lonely):
    """Has a name of Shoal's own."""

    name: ClassVar[str] = "ring"


class Both(Lonely, Launcher):
    """Is of two contracts."""

    name = "both"

    def missing(self) -> str | None:
        return None

    def launch(self, job: Job) -> Result:
        return Result((0,), None)


@final
class Idle(Launcher):
    """Starts nothing."""

    name = "idle"

    def missing(self) -> str | None:
        return "it starts nothing"

    def launch(self, job: Job) -> Result:
        raise NotImplementedError


def test_shoals_own_are_found_by_name() -> None:
    assert {"allreduce", "direct", "ring", "tree"} <= set(registry.of(Exchange))
    assert {"replicate", "sliced", "factor"} <= set(registry.of(Strategy))
    assert {"lab", "local", "torchrun"} <= set(registry.of(Launcher))
    assert registry.named(Exchange, "ring") == Ring()


def test_what_is_registered_is_found_until_it_is_not() -> None:
    with registry.registered(Lonely, Idle):
        assert registry.of(Exchange)["lonely"] is Lonely
        assert registry.named(Launcher, "idle").missing() == "it starts nothing"
        assert "lonely" not in registry.of(Launcher)
        assert registry.from_outside(Exchange) == {"lonely": f"{__name__}.Lonely"}
    assert "lonely" not in registry.of(Exchange)
    assert registry.from_outside(Exchange) == {}


def test_it_is_a_decorator() -> None:
    @shoal.register
    @dataclass(frozen=True)
    class Mine(Lonely):
        name: ClassVar[str] = "mine"

    assert registry.of(Exchange)["mine"] is Mine
    shoal.unregister(Mine)


def test_the_same_class_again_takes_the_formers_place() -> None:
    """As when a notebook's cell runs twice."""

    def again() -> type[Exchange]:
        @dataclass(frozen=True)
        class Cell(Lonely):
            name: ClassVar[str] = "cell"

        return Cell

    first, second = again(), again()
    shoal.register(first)
    with registry.registered(second):
        assert registry.of(Exchange)["cell"] is second
    with pytest.raises(UsageError, match="not registered"):
        shoal.unregister(first)


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (object, "not of one contract"),
        (Exchange, "not of one contract"),
        (Both, "not of one contract"),
        ("ring", "only a class"),
        (Lonely(), "only a class"),
        (Nameless, "no name"),
        (Unspeakable, "no name"),
        (TakesRings, "taken"),
    ],
)
def test_what_cannot_be_registered_is_refused(cls: Any, said: str) -> None:
    before = registry.of(Exchange)
    with pytest.raises(UsageError, match=said):
        shoal.register(cls)
    assert registry.of(Exchange) == before


def test_an_abstract_class_is_refused_with_what_it_lacks() -> None:
    class Half(Launcher):
        name = "half"

        def missing(self) -> str | None:
            return None

    with pytest.raises(UsageError, match="lacks launch"):
        shoal.register(Half)


def test_a_strategy_without_a_role_is_refused() -> None:
    class Roleless(Strategy):
        name = "roleless"

        refuses = estimate = apply = lambda *_: None

    with pytest.raises(UsageError, match="lacks role"):
        shoal.register(Roleless)


def test_a_name_that_another_class_has_is_refused() -> None:
    with registry.registered(Lonely), pytest.raises(UsageError, match=r"taken(.|\n)*Lonely"):
        shoal.register(Rival)


def test_a_name_that_there_is_not_comes_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'ring'"):
        registry.named(Exchange, "rings")
    with pytest.raises(PlanError, match=r"shoal\.register"):
        registry.named(Exchange, "zzz")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points that seem to be installed."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [p for p in points if p.group == group]
    )
    monkeypatch.setattr(registry, "_own", {})
    yield points


def test_another_packages_entry_points_are_found(given: list[EntryPoint]) -> None:
    given.append(EntryPoint("lonely", f"{__name__}:Lonely", "shoal.exchanges"))
    assert registry.of(Exchange)["lonely"] is Lonely
    assert "lonely" not in registry.of(Strategy)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:Thing", "ModuleNotFoundError"),
        (f"{__name__}:Idle", "no exchange"),
        (f"{__name__}:TakesRings", "taken"),
        (f"{__name__}:Nameless", "no name"),
    ],
)
def test_a_broken_entry_point_is_left_out_with_a_warning(
    given: list[EntryPoint], value: str, said: str
) -> None:
    given.append(EntryPoint("broken", value, "shoal.exchanges"))
    given.append(EntryPoint("lonely", f"{__name__}:Lonely", "shoal.exchanges"))
    with pytest.warns(UserWarning, match=rf"'broken'.*left out: (.|\n)*{said}"):
        assert registry.of(Exchange)["lonely"] is Lonely
    assert registry.of(Exchange)["ring"] is Ring
