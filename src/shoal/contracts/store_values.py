"""Values that ranks and launchers keep in their store: typed JSON, signed with the job's token.

Why here: a stranger on the network can write to the store's port. So ranks and launchers must agree
on how to tell their own values from a stranger's.

    scope/key  →  HMAC-SHA256(token; "shoal store", key and JSON), 16 bytes of it  +  JSON

The signature holds for one key only, so a value copied to another key counts as a stranger's, too.
msgspec reads JSON into the type that the reader names, and nothing in it is code. A value without a
valid signature or of another type counts as absent. So it does if there is no token to sign with.
If a process finds a stranger's value in place of its own, or nothing, it writes its own value again
for a while (`mend`). A read never blocks and costs one message: a compare-and-set that changes
nothing. Guarded by tests/contracts/test_store_values.py.
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
_NOTHING = "?"  # result of a compare-and-set with itself, for a key without a value
_MENDED_S = 20.0  # seconds for which a process looks after a value that it has written
_TRIES = 1000  # attempts at a key that a stranger keeps overwriting


_readers: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = Lock()


def _reader(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type, made under a lock: msgspec crashes if two threads make one at
    once.
    """
    with _making:
        if kind not in _readers:
            _readers[kind] = msgspec.json.Decoder(kind)
        return _readers[kind]


@dataclass(frozen=True)
class _Standing:
    """Value that this process has written."""

    values: Values
    key: str
    sealed: Any  # bytes, though the store's types ask for text
    until_s: float  # time until which the value is looked after


@dataclass
class _Own:
    """All values that this process has written to a store."""

    standing: dict[str, _Standing] = field(default_factory=dict)  # values by name
    mended_s: float = -math.inf  # time at which a value was last written again


@final
class Values:
    """The values of one scope of a store.

    Args:
        store: the store that holds them.
        token: the secret that signs them. Without one, a stranger's values of the right form pass.
        scope: the beginning of their keys.

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
        self._own = _Own()  # shared by all objects made from this one

    def within(self, scope: str, token: str | None = None) -> Values:
        """Return the values of another scope of the same store, perhaps signed with another
        token.
        """
        values = Values(self.store, self._token if token is None else token, scope)
        values._own = self._own
        return values

    def clone(self, timeout_s: float) -> Values:
        """Return the same values over a connection of their own."""
        own_connection: Store = self.store.clone()  # type: ignore[attr-defined]
        own_connection.set_timeout(datetime.timedelta(seconds=timeout_s))
        values = Values(own_connection, self._token, self.scope)
        values._own = self._own
        return values

    def write(self, key: str, value: Any, *, lasting: bool = False) -> None:
        """Write a value: a frozen dataclass, or other data that JSON has."""
        self.put(key, msgspec.json.encode(value), lasting=lasting)

    def put(self, key: str, text: bytes, *, lasting: bool = False) -> None:
        """Write bytes, signed. A `lasting` value is mended as long as this process lives."""
        sealed = self._seal(key, text)
        until = math.inf if lasting else time.monotonic() + _MENDED_S
        self._own.standing[self._key_name(key)] = _Standing(self, key, sealed, until)
        self.store.set(self._key_name(key), sealed)

    def remove(self, key: str) -> bool:
        """Remove a value. Return whether there was one."""
        self._own.standing.pop(self._key_name(key), None)
        return self.store.delete_key(self._key_name(key))

    def mend(self) -> None:
        """Write again the recent values of this process and its clones that were replaced or
        removed.
        """
        for name, standing in list(self._own.standing.items()):
            if standing.until_s < time.monotonic():
                self._own.standing.pop(name, None)
            elif standing.values._open(standing.key, self._seen(name)) is None:
                self._own.mended_s = time.monotonic()
                self.store.set(name, standing.sealed)

    @property
    def are_disturbed(self) -> bool:
        """Whether a stranger has overwritten one of these values recently."""
        return time.monotonic() - self._own.mended_s < _MENDED_S

    def read(self, key: str, kind: type[T]) -> T | None:
        """Return the value, or None if there is no signed value of this type."""
        return self.value_of(key, self.seen(key), kind)

    def take(self, key: str) -> bytes | None:
        """Return the bytes that `put` wrote, or None if there are no signed bytes."""
        return self._open(key, self.seen(key))

    def seen(self, key: str) -> bytes:
        """Return the raw bytes under a key, signed or not; empty if there are none."""
        return self._seen(self._key_name(key))

    def value_of(self, key: str, seen: bytes, kind: type[T]) -> T | None:
        """Return the value in bytes that `seen` returned, or None if it is not signed or of another
        type.
        """
        text = self._open(key, seen)
        if text is None:
            return None
        try:
            value: T = _reader(kind).decode(text)
            return value
        except Exception:  # any error: without a token the text may be anything
            return None

    def holds_other(self, key: str) -> bool:
        """Return whether the key has a value that is not signed with this token."""
        seen = self.seen(key)
        return bool(seen) and self._open(key, seen) is None

    def agree(self, key: str, value: T) -> T:
        """Write the value unless the key has a signed one already. Return the value that stands,
        which is then lasting.
        """
        own: Any = self._seal(key, msgspec.json.encode(value))
        standing: Any = b""
        for _ in range(_TRIES):
            found: bytes = self.store.compare_set(self._key_name(key), standing, own)
            first = self.value_of(key, found, type(value))
            if first is not None:
                self._own.standing[self._key_name(key)] = _Standing(self, key, found, math.inf)
                return first
            standing = found  # it is a stranger's: overwrite it
        return value

    def add(self, key: str, number: int) -> int:
        """Add to the whole number under a key, or to 0 if there is none. Return the sum."""
        total = number
        for _ in range(_TRIES):
            standing: Any = self.seen(key)
            before, _ = self.value_of(key, standing, tuple[int, str]) or (0, "")
            total = before + number
            # each text is unique, because a compare-and-set does not say which process wrote the
            # value
            own: Any = self._seal(key, msgspec.json.encode((total, uuid.uuid4().hex)))
            if self.store.compare_set(self._key_name(key), standing, own) == own:
                break
        return total

    def _seen(self, name: str) -> bytes:
        found: bytes = self.store.compare_set(name, _NOTHING, _NOTHING)
        return b"" if found == _NOTHING.encode() else found

    def _key_name(self, key: str) -> str:
        return f"{self.scope}/{key}"

    def _seal(self, key: str, text: bytes) -> Any:
        return self._signature(key, text) + text

    def _open(self, key: str, seen: bytes) -> bytes | None:
        signature, text = seen[:_SIGNATURE_BYTES], seen[_SIGNATURE_BYTES:]
        sound = hmac.compare_digest(signature, self._signature(key, text))
        return text if sound else None

    def _signature(self, key: str, text: bytes) -> bytes:
        named = DOMAIN + f"{self._key_name(key)}\0".encode() + text
        return hmac.digest(self._token.encode(), named, "sha256")[:_SIGNATURE_BYTES]
