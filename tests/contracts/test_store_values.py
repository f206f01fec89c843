"""Values in the store: ours come back, a stranger's are as nothing, and no read blocks."""

from __future__ import annotations

import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Thread

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from shoal.contracts.store_values import Values


@dataclass(frozen=True)
class Note:
    """A value."""

    what: str
    rank: int | None = None


NOTE = Note("rank 2 (host h²) failed", 2)


def tcp() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


STORES = {"memory": HashStore, "tcp": tcp, "prefix": lambda: PrefixStore("a", tcp())}


class Evil:
    """Runs code where a pickle of it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("a stranger's pickle was read",)


def signed(text: bytes, token: str = "secret", key: str = "note") -> bytes:
    values = Values(HashStore(), token)
    values.put(key, text)
    return values.seen(key)


BAD = {
    "nothing": b"",
    "a word": b"x",
    "what a read compares with": b"?",
    "zeros": bytes(100),
    "unsigned": json.dumps({"what": "rank 0 failed", "rank": 0}).encode(),
    "another token": signed(b'{"what": "x"}', "another"),
    "another key": signed(b'{"what": "x"}', key="other"),
    "a pickle": pickle.dumps(Evil()),
    "a signed pickle": signed(pickle.dumps(Evil())),
    "a signed number": signed(b"7"),
    "signed, another type": signed(b'{"what": 7}'),
    "signed, too large": signed(b'{"what": "x", "rank": ' + b"9" * 10_000 + b"}"),
    "signed, deep": signed(b"[" * 100_000),
    "signed, deep where it is skipped": signed(b'{"what": "x", "more": ' + b"[" * 100_000),
    "signed, no UTF-8": signed(b'{"what": "\xff"}'),
    "long": b"\xff" * (1 << 20),
}


@pytest.fixture(params=STORES)
def values(request: pytest.FixtureRequest) -> Values:
    return Values(STORES[request.param](), "secret", "shoal")


def test_a_value_comes_back_under_its_token_scope_and_key_only(values: Values) -> None:
    assert values.read("note", Note) is None
    values.write("note", NOTE)
    assert values.read("note", Note) == NOTE
    assert not values.holds_other("note")
    assert values.within("shoal", "another").read("note", Note) is None
    assert values.within("shoal", "another").holds_other("note")
    assert values.within("shoal/1", "secret").read("note", Note) is None
    assert values.read("notes", Note) is None
    raw = values.store.get("shoal/note")
    values.store.set("shoal/other", raw)
    values.store.set("shoal/1/note", raw)
    assert values.read("other", Note) is None
    assert values.within("shoal/1", "secret").read("note", Note) is None


def test_reads_do_not_write(values: Values) -> None:
    values.read("note", Note)
    values.holds_other("note")
    assert not values.store.check(["shoal/note"])


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("token", ["secret", ""])
def test_a_bad_value_is_as_none_and_is_written_over(bad: bytes, token: str) -> None:
    values = Values(tcp(), token)
    values.store.set("shoal/note", bad)
    assert values.read("note", Note) is None
    assert values.agree("note", NOTE) == NOTE
    assert values.read("note", Note) == NOTE
    values.store.set("shoal/note", bad)
    values.write("note", NOTE)
    assert values.read("note", Note) == NOTE


def test_the_first_of_ours_stands(values: Values) -> None:
    assert values.agree("note", NOTE) == NOTE
    assert values.agree("note", Note("another")) == NOTE
    assert values.read("note", Note) == NOTE


def test_numbers_add_up_over_what_a_stranger_writes(values: Values) -> None:
    assert values.add("count", 2) == 2
    with ThreadPoolExecutor(4) as threads:
        sums = list(threads.map(lambda _: values.add("count", 1), range(40)))
    assert sorted(sums) == list(range(3, 43))
    values.store.set("shoal/count", "x")
    assert values.add("count", 1) == 1


def test_agreeing_ends_where_a_stranger_goes_on_writing() -> None:
    values, stop = Values(tcp(), "secret"), Event()
    stranger = values.store.clone()  # type: ignore[attr-defined]

    def write() -> None:
        while not stop.is_set():
            stranger.set("shoal/note", str(time.monotonic()))

    thread = Thread(target=write)
    thread.start()
    began = time.monotonic()
    try:
        assert values.agree("note", NOTE) == NOTE
    finally:
        stop.set()
        thread.join()
    assert time.monotonic() - began < 5


def test_what_was_put_of_late_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    values = Values(tcp(), "secret")
    inner, clone = values.within("shoal/1", "another"), values.clone(5)
    values.write("note", NOTE)
    inner.write("note", NOTE)
    inner.write("go", 1, lasting=True)
    values.store.set("shoal/note", "x")
    values.store.delete_key("shoal/1/note")
    clone.mend()
    assert values.read("note", Note) == inner.read("note", Note) == NOTE
    values.within("shoal").write("note", Note("newer"))
    clone.mend()
    assert values.read("note", Note) == Note("newer")
    assert values.remove("note")
    clone.mend()
    assert not values.store.check(["shoal/note"])
    later = time.monotonic() + 1000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    values.store.set("shoal/1/note", "x")
    values.store.set("shoal/1/go", "x")
    clone.mend()
    assert inner.read("note", Note) is None
    assert inner.read("go", int) == 1
