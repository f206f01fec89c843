"""Plain data in a checkpoint: state.json has it as JSON, and a file beside it has the tensors.

The form is that of contracts/plain.py. Here a tensor's name is the way to it, and values are saved
as well as may be: a named tuple as a tuple, any mapping as a dict. An unknown value is refused,
with the way to it. Guarded by tests/checkpoint/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.checkpoint.parts import Spread
from shoal.contracts.plain import MOST_KEYS, Decoder, Encoder, NotPlain, Path
from shoal.core.errors import UsageError

Take = Callable[[Path, Any], str]  # keeps a tensor that is at a place; its name
Give = Callable[[str], Tensor]  # the tensor of a name


def encoded(value: Any, take: Take, path: Path = ()) -> Any:
    """Return a value as JSON knows it.

    Args:
        value: plain data and tensors.
        take: keeps each tensor with its place, and returns its name.
        path: the keys that lead to the value.

    Raises:
        UsageError: something in it is not plain data.
    """
    try:
        return Encoder(take, (Tensor, Spread), exact=False).form(value, path)
    except NotPlain as error:
        raise unsaved_error(error.path, error.got, error.expected) from error


def unsaved_error(path: Path, got: str = "", expected: str = "") -> UsageError:
    """Return the error about a value that no checkpoint can have.

    Args:
        path: the keys that lead to it.
        got: the value in words; by default one that lies too deep.
        expected: the values that can be saved.
    """
    got = got or f"more than {MOST_KEYS} values within one another, or one within itself"
    return UsageError(
        f"{'.'.join(path)} cannot be saved",
        got=got,
        expected=expected,
        do="leave it out, or give what it is made of",
    )


def decoded(form: Any, give: Give) -> Any:
    """Return the value that was encoded.

    Args:
        form: the JSON form.
        give: returns the tensor of a name.

    Raises:
        ValueError: the form is none of a value.
    """
    try:
        return Decoder(give).value(form)
    except UsageError:  # `give` found a corrupted file
        raise
    except Exception as error:  # any error: the form may be anything
        raise ValueError(f"{type(error).__name__}: {error}"[:400]) from error
