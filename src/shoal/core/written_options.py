"""How plans and pins write an exchange or a codec: its name, and options that are not default.

    ring    ring(chunk_bytes=1048576)    direct+int8    ring(chunk_bytes=65536)+int8(block=256)

The form is Python's own, so Python's parser reads it. Options are the fields of the frozen
dataclass, by their names.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import threading
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from shoal.core.errors import PlanError
from shoal.core.registry import Contract, class_by_name

T = TypeVar("T", bound=Contract)

# Python 3.11 counts how deep the trees of all threads are together, and raises SystemError where
# one thread is interrupted by another (github.com/python/cpython/issues/106905)
_ONE_AT_A_TIME = threading.RLock()
_FORM = (
    'write a name, as "ring", or a name and options by their names, as "ring(chunk_bytes=1048576)"'
)


@dataclasses.dataclass(frozen=True)
class NameWithOptions:
    """A name and its options, as somebody wrote them."""

    name: str
    options: Mapping[str, Any]
    text: str  # all that was written, for messages


def written(thing: Contract) -> str:
    """A thing of a contract as plans write it: `read` gives an equal one."""
    fields: tuple[dataclasses.Field[Any], ...] = ()
    if dataclasses.is_dataclass(thing):
        fields = dataclasses.fields(thing)
    options = [
        f"{field.name}={value!r}"
        for field in fields
        if (value := getattr(thing, field.name)) != field.default
    ]
    return f"{thing.name}({', '.join(options)})" if options else thing.name


def parsed(text: str) -> list[NameWithOptions]:
    """The names that are written in a text, joined by `+`, each with its options.

    Raises:
        PlanError: it is written otherwise.
    """
    try:
        with _ONE_AT_A_TIME:
            tree = ast.parse(text.strip(), mode="eval").body
        nodes: list[ast.expr] = []
        while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
            nodes.insert(0, tree.right)
            tree = tree.left
        return [_read_name(node, text) for node in (tree, *nodes)]
    # also of a NUL, and of brackets that are too deep
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if not set("(+") & set(text):  # then it is meant as a name, whatever is in it
            return [NameWithOptions(text, {}, text)]
        raise PlanError(f"{text!r} is no name with options", do=_FORM) from error


def _read_name(node: ast.expr, text: str) -> NameWithOptions:
    call = node if isinstance(node, ast.Call) else None
    name = node if call is None else call.func
    if not isinstance(name, ast.Name) or (call is not None and call.args):
        raise ValueError(text)
    options: dict[str, Any] = {}
    for option in [] if call is None else call.keywords:
        if option.arg is None:
            raise ValueError(text)
        options[option.arg] = ast.literal_eval(option.value)
    return NameWithOptions(name.id, options, text)


def built(contract: type[T], named: NameWithOptions) -> T:
    """The thing of a contract that is meant.

    Raises:
        PlanError: there is none of that name, it has no such option, or it is of a wrong type.
    """
    kind: Any = class_by_name(contract, named.name)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    types = {field.name: get_type_hints(kind)[field.name] for field in fields if field.init}
    values = dict(named.options)
    for option, value in values.items():
        if option not in types:
            near = difflib.get_close_matches(option, types, n=1)
            do = f"did you mean {near[0]!r}?" if near else "leave it out"
            undecorated = "__dataclass_fields__" not in vars(kind)
            if undecorated and option in vars(kind).get("__annotations__", {}):
                do = f"write @dataclass(frozen=True) above {kind.__name__}: its fields are options"
            raise PlanError(
                f"{named.name} has no option {option!r}",
                where=named.text,
                expected="one of " + ", ".join(types) if types else "no options",
                do=do,
            )
        if not _fits(value, types[option]):
            raise PlanError(
                f"option {option} of {named.name} is of the wrong type",
                where=named.text,
                got=repr(value),
                expected=getattr(types[option], "__name__", str(types[option])),
                do="write a value of that type",
            )
        values[option] = float(value) if types[option] is float else value
    thing: T = kind(**values)
    return thing


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def read(contract: type[T], text: str) -> T:
    """The one thing of a contract that a text means (PlanError as for `parsed` and `built`)."""
    first, *more = parsed(text)
    if more:
        noun = contract.__name__.lower()
        raise PlanError(f"{text!r} is more than one {noun}", do=_FORM)
    return built(contract, first)
