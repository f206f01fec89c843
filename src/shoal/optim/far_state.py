"""FarState: the entry in `optimizer.state` of a parameter, if its state is not whole here.

Users may keep keys of their own in it. A look at any other key brings the states of the whole part
to every rank, in one-process form (a collective). Changes count, because the owners take the states
back before the next step or state_dict (`Part.absorb`). Guarded by
tests/equivalence/test_state_by_hand.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final


@final
class FarState(dict[str, Any]):
    """A parameter's entry. It is a dict, because other code looks for one.

    Args:
        own: the user's own keys.
        bring: brings the state to this rank. None: all of it is on this rank already.
    """

    def __init__(self, own: Any = (), bring: Callable[[], None] | None = None) -> None:
        dict.__init__(self, own)
        self.bring = bring

    def __getitem__(self, key: str) -> Any:
        self._look_for(key)
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._look_for(key)
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        self._look_for(key)
        dict.__delitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        self._look()
        return dict.__iter__(self)

    def __len__(self) -> int:
        self._look()
        return dict.__len__(self)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    def _look_for(self, key: str) -> None:
        if not dict.__contains__(self, key):
            self._look()

    def _look(self) -> None:
        if self.bring is not None:
            self.bring()


_MIXIN = ("get", "pop", "popitem", "setdefault", "update", "clear", "keys", "items", "values")

# a dict's own methods would treat the entry as complete
for _name in (*_MIXIN, "__contains__", "__eq__"):
    setattr(FarState, _name, getattr(MutableMapping, _name))


def here(entry: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an entry's keys and values on this rank now, without fetching any."""
    found: dict[str, Any] = {}
    if isinstance(entry, FarState):
        found.update(dict.items(entry))
    elif entry:
        found.update(entry)
    return found
