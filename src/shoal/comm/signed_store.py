"""Store of the ranks for PyTorch: gloo reads only signed values there, as if there were no others.

Gloo puts the address of each rank into the store and reads the other addresses. A stranger's
address would lead a rank's messages elsewhere, and a malformed one would end the rank. Waiting is a
loop that asks every few milliseconds, so that it can check whether the job still stands.

It is only for process groups of gloo. NCCL asks its store from threads of its own, even while
Python ends. Guarded by tests/comm/test_signed_store.py.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from typing import final

from torch.distributed import DistStoreError, Store

from shoal.comm.ports import close_ports
from shoal.contracts.store_values import Values

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


@final
class SignedStore(Store):
    """Signed values as a store for PyTorch.

    Args:
        values: the values.
        timeout_s: seconds to wait for a key, if the caller does not say.
        check: called during a wait; its error ends the wait.
    """

    def __init__(
        self, values: Values, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._values, self._check = values, check
        self._timeout = datetime.timedelta(seconds=timeout_s)
        # texts of this rank, among them its addresses for the group that is being made
        self._told: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Write bytes."""
        text = value.encode() if isinstance(value, str) else value
        self._told.append(text)
        self._values.put(key, text)

    def get(self, key: str) -> bytes:
        """Return the bytes of a key, once they are there."""
        return self._wait_for([key], self._timeout)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the bytes of several keys, once all are there."""
        return self._wait_for(keys, self._timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return all(self._values.take(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait_for(keys, timeout or self._timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        return self._values.add(key, amount)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time to wait from now on."""
        self._timeout = timeout

    def is_made(self) -> None:
        """Close the ports of a group, because all its ranks have connected."""
        told, self._told = self._told, []
        if not _connects_later():
            close_ports(told)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._values.remove(key)

    def has_extended_api(self) -> bool:
        """Return whether it can append: it has only the methods above."""
        return False

    def _wait_for(self, keys: Sequence[str], timeout: datetime.timedelta) -> list[bytes]:
        deadline, found = time.monotonic() + timeout.total_seconds(), []
        for key in keys:
            pause_s = _FIRST_PAUSE_S
            while (text := self._values.take(key)) is None:
                self._check()
                self._values.mend()
                if time.monotonic() > deadline:
                    raise DistStoreError(f"timed out: no rank wrote {key} to the store")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            found.append(text)
        return found


def _connects_later() -> bool:
    """Return whether gloo connects two ranks only when one sends to the other."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("0", "")
