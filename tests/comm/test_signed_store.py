"""PyTorch's groups over signed values: a stranger's addresses are as if they were not there."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from shoal.comm.signed_store import SignedStore
from shoal.contracts.store import open_store
from shoal.contracts.store_values import Values
from shoal.core.errors import PeerLost

TIME = datetime.timedelta(seconds=20)


@pytest.fixture
def store() -> TCPStore:
    return open_store("127.0.0.1")


def signed(store: TCPStore, token: str = "secret", **options: Callable[[], None]) -> SignedStore:
    values = Values(store.clone(), token)  # type: ignore[attr-defined]
    return SignedStore(values, timeout_s=20, **options)


def sums(stores: list[Store], among: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
    """What ranks over these stores get as their sum; `among` is done while they meet."""
    results: dict[int, torch.Tensor] = {}

    def rank(number: int) -> None:
        prefixed = PrefixStore("group/", PrefixStore("cpu/", stores[number]))
        group = dist.ProcessGroupGloo(prefixed, number, len(stores), timeout=TIME)
        tensor = torch.full((3,), float(number + 1))
        group.allreduce([tensor]).wait()
        results[number] = tensor

    threads = [Thread(target=rank, args=(number,)) for number in range(len(stores))]
    for thread in threads[:-1]:
        thread.start()
    among()
    threads[-1].start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(stores))]


def test_ranks_find_each_other(store: TCPStore) -> None:
    assert [t.tolist() for t in sums([signed(store) for _ in range(3)])] == [[6.0] * 3] * 3


def test_bad_values_in_the_place_of_addresses_are_put_right(store: TCPStore) -> None:
    def write_over() -> None:
        time.sleep(0.2)
        keys = [key for key in store.list_keys() if "cpu" in key]
        assert len(keys) >= 2  # of the two ranks that have come
        for number in range(1000):
            for key in keys:
                store.set(key, b"\xff" * (number % 200))

    done = threading.Event()

    def mend() -> None:  # as each rank's heartbeat does
        while not done.wait(0.05):
            for values in all_values:
                values.mend()

    all_values = [Values(store.clone(), "secret") for _ in range(3)]  # type: ignore[attr-defined]
    mender = Thread(target=mend)
    mender.start()
    try:
        results = sums([SignedStore(values, timeout_s=20) for values in all_values], write_over)
    finally:
        done.set()
        mender.join()
    assert [result.tolist() for result in results] == [[6.0] * 3] * 3


def test_what_another_token_signs_is_not_there(store: TCPStore) -> None:
    stranger, ours = signed(store, "another"), signed(store)
    stranger.set("key", b"address")
    assert stranger.get("key") == b"address"
    assert not ours.check(["key"])
    ours.set_timeout(datetime.timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="timed out: no rank wrote key"):
        ours.get("key")
    ours.set("key", b"ours")
    assert ours.multi_get(["key"]) == [b"ours"]
    assert [ours.add("count", 2), ours.add("count", -1)] == [2, 1]
    assert ours.delete_key("key") and not ours.check(["key"])


def test_whoever_waits_hears_that_a_rank_is_lost(store: TCPStore) -> None:
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise PeerLost("rank 1 is lost")

    errors: list[BaseException] = []

    def rank() -> None:
        try:
            dist.ProcessGroupGloo(signed(store, check=check), 0, 2, timeout=TIME)
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=rank)
    thread.start()
    time.sleep(0.2)
    lost.set()
    thread.join(timeout=5)
    assert [type(error) for error in errors] == [PeerLost]
