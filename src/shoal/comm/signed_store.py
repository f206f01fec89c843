"""The ranks' store as PyTorch sees it: what gloo reads there is signed, or as if it were not there.

Gloo puts the address of each rank into the store and reads the others'. A stranger's would send a
rank's messages elsewhere, and one that is malformed would end it. Waiting is a loop that asks every
few milliseconds, so that it can look whether the job still stands.

Only for process groups of gloo: NCCL asks its store from threads of its own, also while Python
ends. Guarded by tests/comm/test_signed_store.py.
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
    """Signed values as a store of PyTorch's.

    Args:
        values: where they are.
        timeout_s: how long to wait for a key, where the one who waits does not say.
        check: looks whether to go on waiting; what it raises ends the wait.
    """

    def __init__(
        self, values: Values, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._values, self._check = values, check
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._told: list[bytes] = []  # among it the addresses of the group that is being made

    def set(self, key: str, value: str | bytes) -> None:
        """Put bytes there."""
        text = value.encode() if isinstance(value, str) else value
        self._told.append(text)
        self._values.put(key, text)

    def get(self, key: str) -> bytes:
        """The bytes, once they are there."""
        return self._awaited([key], self._timeout)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The bytes of several keys, once all are there."""
        return self._awaited(keys, self._timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(self._values.take(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all are there."""
        self._awaited(keys, timeout or self._timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        return self._values.add(key, amount)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long to wait from now on."""
        self._timeout = timeout

    def is_made(self) -> None:
        """All ranks of a group have connected, so that its ports close."""
        told, self._told = self._told, []
        if not _connects_later():
            close_ports(told)

    def delete_key(self, key: str) -> bool:
        """Take a key away."""
        return self._values.remove(key)

    def has_extended_api(self) -> bool:
        """Whether it can append; it has what is above only."""
        return False

    def _awaited(self, keys: Sequence[str], timeout: datetime.timedelta) -> list[bytes]:
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
    """Whether gloo connects two ranks only when one sends to the other."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("0", "")
