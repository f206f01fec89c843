"""Values that ranks and launchers keep in their store: typed JSON, signed with the job's token.

Why here: whoever reaches the store's port can write there, and ranks and launchers must agree on
how a value of theirs is told from a stranger's.

    scope/key  →  HMAC-SHA256(token; "shoal store", key and JSON), 16 bytes of it  +  JSON

The signature holds for one key only, so a value that is copied to another key is a stranger's too.
msgspec reads JSON into the type that the reader names, and nothing in it is code. A value that is
no such thing is as if nothing were there, also where there is no token to sign with. What a process
has put there it puts back for a while when it finds a stranger's value, or nothing, in its place
(`mend`). A read never blocks and costs one message: a compare-and-set that changes nothing.
Guarded by tests/contracts/test_store_values.py.
"""

from __future__ import annotations

import datetime
import hmac
import math
import time
import uuid
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar, final

import msgspec
from torch.distributed import Store

T = TypeVar("T")

DOMAIN = b"shoal store\0"  # the first word under a signature, which no other protocol has
_SIGNATURE_BYTES = 16
_NOTHING = "?"  # what a compare-and-set with itself gives for a key that nobody has written
_MENDED_S = 20.0  # how long what is put there is looked after
_TRIES = 1000  # at a key that a stranger goes on writing


_readers: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = Lock()


def _reader(kind: Any) -> msgspec.json.Decoder[Any]:
    """What reads values of a type, made once: two threads that make one crash msgspec."""
    with _making:
        if kind not in _readers:
            _readers[kind] = msgspec.json.Decoder(kind)
        return _readers[kind]


@dataclass(frozen=True)
class _Standing:
    """What this process has put there."""

    values: Values
    key: str
    sealed: Any  # bytes, where the store's types ask for text
    until_s: float  # it is looked after


@dataclass
class _Own:
    """All that this process has put into a store."""

    standing: dict[str, _Standing] = field(default_factory=dict)  # by name
    mended_s: float = -math.inf  # when something was put back


@final
class Values:
    """The values of one scope of a store.

    Args:
        store: where they are.
        token: the secret that signs them; without one a stranger's values pass if their form does.
        scope: what their keys begin with.

    Examples:
        >>> from torch.distributed import HashStore
        >>> values = Values(HashStore(), token="secret", scope="shoal")
        >>> values.write("steps", 3)
        >>> values.read("steps", int)
        3
        >>> values.within("shoal", token="another").read("steps", int)
    """

    def __init__(self, store: Store, token: str = "", scope: str = "shoal") -> None:
        self.store, self.scope = store, scope
        self._token = token
        self._own = _Own()  # shared by all that are made of these

    def within(self, scope: str, token: str | None = None) -> Values:
        """Values of another scope of the same store, perhaps signed with another token."""
        values = Values(self.store, self._token if token is None else token, scope)
        values._own = self._own
        return values

    def clone(self, timeout_s: float) -> Values:
        """The same on a connection of its own."""
        own_connection: Store = self.store.clone()  # type: ignore[attr-defined]
        own_connection.set_timeout(datetime.timedelta(seconds=timeout_s))
        values = Values(own_connection, self._token, self.scope)
        values._own = self._own
        return values

    def write(self, key: str, value: Any, *, lasting: bool = False) -> None:
        """Put a value there: a frozen dataclass, or other data that JSON has."""
        self.put(key, msgspec.json.encode(value), lasting=lasting)

    def put(self, key: str, text: bytes, *, lasting: bool = False) -> None:
        """Put bytes there, signed; what is `lasting` is mended as long as this process lives."""
        sealed = self._sealed(key, text)
        until = math.inf if lasting else time.monotonic() + _MENDED_S
        self._own.standing[self._named(key)] = _Standing(self, key, sealed, until)
        self.store.set(self._named(key), sealed)

    def remove(self, key: str) -> bool:
        """Take away what is there; whether something was."""
        self._own.standing.pop(self._named(key), None)
        return self.store.delete_key(self._named(key))

    def mend(self) -> None:
        """Put back what was put here or by a clone of late, where no signed value stands now."""
        for name, standing in list(self._own.standing.items()):
            if standing.until_s < time.monotonic():
                self._own.standing.pop(name, None)
            elif standing.values._opened(standing.key, self._seen(name)) is None:
                self._own.mended_s = time.monotonic()
                self.store.set(name, standing.sealed)

    @property
    def are_disturbed(self) -> bool:
        """Whether a stranger has written over them of late."""
        return time.monotonic() - self._own.mended_s < _MENDED_S

    def read(self, key: str, kind: type[T]) -> T | None:
        """The value, or None where there is none that is signed and of this type."""
        return self.value_of(key, self.seen(key), kind)

    def take(self, key: str) -> bytes | None:
        """The bytes that were `put` there, or None where there are none that are signed."""
        return self._opened(key, self.seen(key))

    def seen(self, key: str) -> bytes:
        """What is there, whoever wrote it; empty where nothing is."""
        return self._seen(self._named(key))

    def value_of(self, key: str, seen: bytes, kind: type[T]) -> T | None:
        """The value that was `seen` there, or None where it is not signed or not of this type."""
        text = self._opened(key, seen)
        if text is None:
            return None
        try:
            value: T = _reader(kind).decode(text)
            return value
        except Exception:  # of whatever kind: the text may be anything where there is no token
            return None

    def holds_other(self, key: str) -> bool:
        """Whether something stands there that is not signed with this token."""
        seen = self.seen(key)
        return bool(seen) and self._opened(key, seen) is None

    def agree(self, key: str, value: T) -> T:
        """Put the value there if it is the first of ours; the one that stands, and is lasting."""
        own: Any = self._sealed(key, msgspec.json.encode(value))
        standing: Any = b""
        for _ in range(_TRIES):
            found: bytes = self.store.compare_set(self._named(key), standing, own)
            first = self.value_of(key, found, type(value))
            if first is not None:
                self._own.standing[self._named(key)] = _Standing(self, key, found, math.inf)
                return first
            standing = found  # a stranger's: step over it
        return value

    def add(self, key: str, number: int) -> int:
        """Add to a whole number that stands there, or to 0; the sum."""
        total = number
        for _ in range(_TRIES):
            standing: Any = self.seen(key)
            before, _ = self.value_of(key, standing, tuple[int, str]) or (0, "")
            total = before + number
            # no two are alike, as a compare-and-set does not say whose value stands
            own: Any = self._sealed(key, msgspec.json.encode((total, uuid.uuid4().hex)))
            if self.store.compare_set(self._named(key), standing, own) == own:
                break
        return total

    def _seen(self, name: str) -> bytes:
        found: bytes = self.store.compare_set(name, _NOTHING, _NOTHING)
        return b"" if found == _NOTHING.encode() else found

    def _named(self, key: str) -> str:
        return f"{self.scope}/{key}"

    def _sealed(self, key: str, text: bytes) -> Any:
        return self._signature(key, text) + text

    def _opened(self, key: str, seen: bytes) -> bytes | None:
        signature, text = seen[:_SIGNATURE_BYTES], seen[_SIGNATURE_BYTES:]
        sound = hmac.compare_digest(signature, self._signature(key, text))
        return text if sound else None

    def _signature(self, key: str, text: bytes) -> bytes:
        named = DOMAIN + f"{self._named(key)}\0".encode() + text
        return hmac.digest(self._token.encode(), named, "sha256")[:_SIGNATURE_BYTES]
