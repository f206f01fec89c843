"""Streams that are different on each rank: each rank has a position and a state of its own.

The position is the number of batches taken from each part of this rank's stream. There is one part
for each worker. epoch_ends.py makes all ranks end the epoch together. This costs epoch_ends.py's
messages, and in a worker a copy of the dataset's state with each batch, if it has one.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, final

from shoal.core.errors import UsageError
from shoal.core.passes import Passes
from shoal.data.deal import Deal
from shoal.data.epoch_ends import OwnEnds
from shoal.data.own_stream import OwnStream, StreamPiece
from shoal.data.source import Fetch, LoaderStep, OwnPlace, Position, Source

T = TypeVar("T")
Place = tuple[int, bytes | None]  # digest of the last batch of a part, and the dataset's state


@final
class Streams(Source[T]):
    """Rows or batches of this rank's own stream."""

    kind = "a stream on each rank"

    def __init__(
        self,
        stream: OwnStream,
        num_workers: int,
        deal: Deal,
        seed: int,
        passes: Passes,
        ends: OwnEnds,
    ) -> None:
        super().__init__(deal, seed, passes, OwnPlace(ends.rank, ends.size))
        self._stream, self._num_parts, self._ends = stream, max(1, num_workers), ends
        self._loaded: list[Place] = []  # places of the parts, to go on from

    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """Begin a pass over the rest of the stream."""
        start = list(self.start)
        places: list[Place] = [(0, None)] * self._num_parts
        if start and self._loaded:
            places = list(self._loaded)
        self._stream.tell(self.seed, self.epoch, start)
        self._stream.states = [state and pickle.loads(state) for _, state in places]
        steps = self._given(fetch(), start or [0] * self._num_parts, places)
        return self._ends.together(steps, self.epoch, is_start=not start)

    def _given(
        self, pieces: Iterator[Any], taken: Position, places: list[Place]
    ) -> Iterator[LoaderStep[T]]:
        for piece in (StreamPiece(*each) for each in pieces):
            part, (known, _) = piece.part, places[piece.part]
            if piece.before and known and piece.before != known:
                self._warn(sum(taken))
            taken = [num + (number == part) for number, num in enumerate(taken)]
            places = [*places[:part], (piece.digest, piece.state), *places[part + 1 :]]
            yield LoaderStep(piece.batch, taken, places=places)

    def _warn(self, taken: int) -> None:
        warnings.warn(
            f"the stream of rank {self._ends.rank} is another one than when its position was saved:"
            f" it goes on behind {taken} batches of the new one. Give it rows in the same order in "
            "every run, or the dataset state_dict() and load_state_dict()",
            stacklevel=7,
        )

    def num_steps(self) -> int:
        """Raise TypeError, because the number is not known."""
        raise TypeError("the length of streams is not known: count steps as you go")

    def facts(self) -> str:
        """Return the kind in words: nothing else is known."""
        return "a stream on each rank"

    def state(self) -> dict[str, Any]:
        """Return the position of this rank's stream, with the dataset's own states."""
        state = super().state()
        if state["position"]:
            current = self._current()
            places = self._loaded if current is None else current.places
            state["digests"] = [digest for digest, _ in places]
            state["states"] = [own and pickle.loads(own) for _, own in places]
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a position of this rank, with the same number of ranks."""
        super().load(state)
        num = len(self.start)
        states = [state["own"]] if "own" in state else state.get("states", [None] * num)
        digests = state.get("digests", [0] * num)
        self._loaded = [
            (int(digest), None if own is None else pickle.dumps(own))
            for digest, own in zip(digests, states, strict=False)
        ]

    def check(self, order: int) -> None:
        """Check that there are as many workers as parts; other faults show in the pass itself."""
        if self.start and len(self.start) != self._num_parts:
            raise UsageError(
                "each worker had a part of the stream, and there are as many workers no more",
                got=f"num_workers={self._num_parts}",
                expected=f"num_workers={len(self.start)}",
                do="give the loader as many workers as it had, or begin an epoch: "
                "loader.set_epoch(epoch)",
            )
