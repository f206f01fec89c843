"""Registry: classes of each contract by name, from Shoal, from other packages and from a script.

    1  Shoal's own       the classes in the contract's package: adding one is adding a file
    2  other packages'   entry points of the contract's group, looked up once
    3  a script's        `register`

Registered classes belong to the process, as classes do. Ranks that are threads share them.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from threading import RLock
from typing import Any, ClassVar, TypeVar

from shoal.core.errors import PlanError, UsageError


class Contract:
    """Base of contracts.

    Subclasses of a contract are found by `name`. Messages call it by its class name.
    """

    package: ClassVar[str]  # package that holds Shoal's own classes, one in each file
    group: ClassVar[str]  # group of entry points in which other packages offer theirs
    name: ClassVar[str]


T = TypeVar("T", bound=Contract)
C = TypeVar("C")

_lock = RLock()
_own: dict[type[Contract], dict[str, Any]] = {}  # steps 1 and 2, as far as they were looked up
_registered: dict[type[Contract], dict[str, Any]] = {}  # step 3


def of(contract: type[T]) -> dict[str, type[T]]:
    """Return every class of a contract by its name, in the order of the names."""
    with _lock:
        if contract not in _own:
            _own[contract] = _in_package(contract)  # 1
            for name, kind in _in_entry_points(contract, _own[contract]):  # 2
                _own[contract][name] = kind
        return dict(sorted({**_own[contract], **_registered.get(contract, {})}.items()))


def named(contract: type[T], name: str) -> T:
    """Make an instance of a class by its name, with default options.

    Raises:
        PlanError: there is no such class. The message lists all names and the nearest one.
    """
    return class_by_name(contract, name)()


def class_by_name(contract: type[T], name: str) -> type[T]:
    """Return the class of that name (PlanError as for `named`)."""
    classes = of(contract)
    if name not in classes:
        near = difflib.get_close_matches(name, classes, n=1)
        raise PlanError(
            f"there is no {_noun(contract)} called {name!r}",
            expected="one of " + ", ".join(classes) if classes else "none is registered",
            do=f"did you mean {near[0]!r}?"
            if near
            else ("use one of these names, or " if classes else "")
            + "shoal.register one of yours on every rank",
        )
    return classes[name]


def register(cls: type[C]) -> type[C]:
    """Make a strategy, an exchange, a codec or a launcher of your own known by its `name`.

    Call it on every rank, before `parallelize` (if there are servers or tail hosts, before `init`).
    The same class registered again, as in a notebook, replaces the former one.

    Args:
        cls: a concrete subclass of one of these contracts.

    Returns:
        The class itself, so that this works as a decorator.

    Raises:
        UsageError: it is abstract, of no or several contracts, without a name (or a strategy's
            role), or the name is another class's.

    Examples:
        >>> import shoal
        >>> from shoal.contracts.launcher import Launcher
        >>> @shoal.register
        ... class Nobody(Launcher):
        ...     name = "nobody"
        ...     def missing(self):
        ...         return "it starts nothing"
        ...     def launch(self, job):
        ...         raise NotImplementedError
        >>> shoal.unregister(Nobody)
    """
    contract = _contract_of(cls)
    with _lock:
        _check_free(cls, of(contract))
        _registered.setdefault(contract, {})[vars(cls)["name"]] = cls
    return cls


def unregister(cls: Any) -> None:
    """Forget a class that was registered (UsageError if it is not).

    Examples:
        >>> import shoal
        >>> from shoal.exchange.direct import Direct
        >>> class Mine(Direct):
        ...     name = "mine"
        >>> shoal.unregister(shoal.register(Mine))
    """
    with _lock:
        classes = _registered.get(_contract_of(cls), {})
        names = [name for name, kind in classes.items() if kind is cls]
        if not names:
            raise UsageError("the class is not registered", got=_place(cls), do="register it first")
        del classes[names[0]]


@contextmanager
def registered(*classes: Any) -> Iterator[None]:
    """Register classes inside a context, as a test does."""
    added: list[Any] = []
    try:
        for cls in classes:
            added.append(register(cls))
        yield
    finally:
        for cls in added:
            unregister(cls)


def from_outside(contract: type[Contract]) -> dict[str, str]:
    """Map each class of a contract that is not Shoal's own to its module and name."""
    return {
        name: _place(kind)
        for name, kind in of(contract).items()
        if not kind.__module__.startswith(f"{contract.package}.")
    }


def _in_package(contract: type[Contract]) -> dict[str, Any]:
    package = importlib.import_module(contract.package)
    classes: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            is_own = kind.__module__ == module.__name__ and not inspect.isabstract(kind)
            if is_own and issubclass(kind, contract):
                classes[kind.name] = kind
    return classes


def _in_entry_points(
    contract: type[Contract], own: dict[str, Any]
) -> Iterator[tuple[str, type[Any]]]:
    """Yield the classes of other packages.

    A broken one is left out, with a warning that names it.
    """
    for point in entry_points(group=contract.group):
        try:
            kind = point.load()
            if _contract_of(kind) is not contract:
                raise UsageError(f"it is no {_noun(contract)}", got=_place(kind))
            _check_free(kind, own)
        except Exception as error:  # another package may raise anything
            giver = point.dist.name if point.dist is not None else "an unknown package"
            warnings.warn(
                f"the entry point {point.name!r} of {giver} in {contract.group} is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            yield kind.name, kind


def _contract_of(cls: Any) -> type[Contract]:
    """Return the one contract of a class that can be registered (UsageError if it cannot)."""
    do = "derive it from Strategy, Exchange, SplitExchange, Codec or Launcher of shoal.contracts"
    if not isinstance(cls, type):
        raise UsageError("only a class can be registered", got=repr(cls), do=do)
    contracts = [base for base in cls.__mro__ if "group" in vars(base)]
    if len(contracts) != 1 or cls in contracts:
        got = ", ".join(contract.__name__ for contract in contracts) or "none"
        raise UsageError(f"{_place(cls)} is not of one contract", got=got, do=do)
    if inspect.isabstract(cls):
        lacks = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise UsageError(f"{_place(cls)} is abstract", got=f"it lacks {lacks}", do="write these")
    contract: type[Contract] = contracts[0]
    said = [name for name, kind in inspect.get_annotations(contract).items() if "ClassVar" in kind]
    unsaid = [name for name in said if not hasattr(cls, name)]
    if unsaid:
        raise UsageError(
            f"{_place(cls)} leaves open what every {_noun(contract)} says",
            got="it lacks " + ", ".join(unsaid),
            do=f"give it a value in the class, of the kind that {contract.__module__} names",
        )
    name = vars(cls).get("name")
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(
            f"{_place(cls)} has no name that a plan could say",
            got=repr(name),
            expected="a name of letters, digits and _",
            do='write  name: ClassVar[str] = "…"  in the class itself',
        )
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    missing = dataclasses.MISSING
    needed = [field.name for field in fields if field.default is field.default_factory is missing]
    if needed:
        got = ", ".join(needed) + " without one"
        raise UsageError(f"options of {_place(cls)} need defaults", got=got, do="give them one")
    return contract


def _check_free(cls: Any, classes: dict[str, Any]) -> None:
    """Refuse the name of another class."""
    other = classes.get(cls.name)
    if other is not None and _place(other) != _place(cls):
        raise UsageError(
            f"the name {cls.name!r} is taken",
            got=_place(cls),
            expected=f"a name other than that of {_place(other)}",
            do="give the class another name",
        )


def _place(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _noun(contract: type[Contract]) -> str:
    return contract.__name__.lower()
