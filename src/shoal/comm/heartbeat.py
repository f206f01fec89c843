"""Who lives, and how far they are: every rank writes a beat to the launcher's store and reads the others' in doubt.

A broken connection tells that something died, not what: the survivors' own ends break connections too. So each rank
beats twice a second on a connection of its own; after a failure a rank watches for beats that stopped, and the first to
find one writes the verdict, which all the others then repeat. Costs one small store write a rank every half second.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from typing import final

import torch.distributed as dist
from torch.distributed import PrefixStore

from shoal.core.errors import PeerLost

_BEAT_S = 0.5
_DEAD_S = 3.0  # no beat for as long as this, while others are seen beating: lost
_SILENT_S = 20.0  # the same when nothing has failed yet: a host that went away without closing its connections
_CONNECT_S = 10.0


@final
class Heartbeat:
    """This rank's beat and the reading of the others'."""

    def __init__(self, store: PrefixStore, rank: int, size: int, host: str) -> None:
        self._rank, self._size, self._host = rank, size, host
        # Connections of their own: one that waits blocks whoever shares it.
        self._beats: PrefixStore = store.clone()  # type: ignore[attr-defined]
        self._reader: PrefixStore = store.clone()  # type: ignore[attr-defined]
        self._beats.set_timeout(datetime.timedelta(seconds=_CONNECT_S))
        self._reader.set_timeout(datetime.timedelta(seconds=_CONNECT_S))
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last count, and when it was first seen here
        self._looked = time.monotonic()
        self.at = "start"
        self._stop = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name="shoal-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop beating: this rank is done."""
        self._stop.set()

    def check(self, where: str) -> None:
        """Raise PeerLost if a rank was found dead, or is silent for long. Reads the store every two seconds."""
        self.at = where
        if time.monotonic() - self._looked < 2.0:
            return
        self._looked = time.monotonic()
        found = self._published(where) or self._silent(where, _SILENT_S)
        if found is not None:
            raise found

    def verdict(self, where: str) -> PeerLost | None:
        """After a failure: the lost rank's name, agreed among the survivors; None if every rank goes on beating."""
        deadline = time.monotonic() + _DEAD_S + 2 * _BEAT_S
        while time.monotonic() < deadline:
            found = self._published(where) or self._silent(where, _DEAD_S)
            if found is not None:
                return found
            time.sleep(_BEAT_S / 2)
        return None

    def behind(self) -> dict[int, str]:
        """Ranks that are somewhere else than this one by their own last word, and where."""
        words = {r: self._read(r).get("at", "?") for r in range(self._size) if r != self._rank}
        return {r: f"last at: {at}" for r, at in words.items() if at != self.at}

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(_BEAT_S):
            count += 1
            try:
                self._write(count)
            except (RuntimeError, dist.DistError):
                return  # the store is gone: the launcher has ended

    def _write(self, count: int) -> None:
        self._beats.set(f"beat/{self._rank}", json.dumps({"count": count, "at": self.at, "host": self._host}))

    def _read(self, rank: int) -> dict[str, str]:
        try:
            with self._lock:
                if not self._reader.check([f"beat/{rank}"]):
                    return {}
                words: dict[str, str] = json.loads(self._reader.get(f"beat/{rank}"))
                return words
        except (RuntimeError, dist.DistError):
            return {}

    def _silent(self, where: str, limit_s: float) -> PeerLost | None:
        now = time.monotonic()
        for rank in range(self._size):
            if rank == self._rank:
                continue
            words = self._read(rank)
            count = int(words.get("count", -1))
            if self._seen.get(rank, (None, 0.0))[0] != count:
                self._seen[rank] = (count, now)
            elif now - self._seen[rank][1] > limit_s:
                host = words.get("host", "?")
                self._publish(f"rank {rank} (host {host}) is gone, last seen at: {words.get('at', '?')}", rank)
                return self._published(where)
        return None

    def _publish(self, text: str, rank: int) -> None:
        try:
            with self._lock:
                self._reader.compare_set("verdict", "", json.dumps({"text": text, "rank": rank}))
        except (RuntimeError, dist.DistError):
            return

    def _published(self, where: str) -> PeerLost | None:
        try:
            with self._lock:
                if not self._reader.check(["verdict"]):
                    return None
                words = json.loads(self._reader.get("verdict"))
        except (RuntimeError, dist.DistError):
            return PeerLost("the launcher's store is gone", where=where, do="see what the launcher printed")
        return PeerLost(
            f"a peer was lost: {words['text']}",
            where=f"rank {self._rank} at {where}",
            do="see what that rank printed last; start the job again",
            rank=words["rank"],
        )
