"""Shoal's objects in a form that `torch.distributed.checkpoint` takes.

Weights are tensors under their one-process names, so torch's own tools read them. Apart from
tensors, torch loads only values that exist already, but a new optimizer's state does not. So the
rest of each object is one piece of bytes. Guarded by tests/front/test_distributed_checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from shoal.checkpoint.tree import decoded, encoded
from shoal.comm.agreement import agreed
from shoal.core.errors import UsageError
from shoal.features import check_in_step
from shoal.front.save_and_load import saving
from shoal.front.state_checks import check_class, class_of, wrong_form
from shoal.front.stateful import (
    Loading,
    Modules,
    has_state,
    load_all,
    loadings,
    modules_of,
    state_of,
)
from shoal.session.session import ranks

_STATE, _CLASS = "json", "class"  # two texts among the tensors


@final
class Stateful:
    """Objects for `torch.distributed.checkpoint`, on any number of ranks and under any plan.

    Its `save` and `load` are collectives. Any number of ranks may load the checkpoint.

    Args:
        objects: objects under names of your own, as for `shoal.save`, each with a `state_dict`.
            Plain data cannot be loaded in place, so pass them to torch yourself.

    Raises:
        UsageError: one of them has no `state_dict`.

    Examples:
        >>> import shoal, tempfile, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> run = shoal.Stateful(model=model, optimizer=optimizer)
        >>> sorted(run.state_dict())
        ['model', 'optimizer']
    """

    def __init__(self, **objects: Any) -> None:
        for keyword, value in objects.items():
            if not has_state(value):
                raise UsageError(
                    f"{keyword} has no state_dict",
                    got=type(value).__name__,
                    do="give it to torch.distributed.checkpoint itself, beside this",
                )
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all objects, in one-process form (a collective).

        Raises:
            UsageError: ranks step by themselves.
        """
        modules = modules_of(self._objects)
        check_in_step([model for _, model in modules])
        with saving(self._objects):
            return {
                keyword: state_of(value, modules)
                if isinstance(value, nn.Module)
                else _pack(state_of(value, modules), class_of(value))
                for keyword, value in self._objects.items()
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the objects take such a state (a collective).

        Raises:
            UsageError: it is the state of other objects, or corrupted. No weights have changed.
        """
        modules = modules_of(self._objects)
        check_in_step([model for _, model in modules])

        def checked() -> list[Loading]:
            return [
                loading
                for keyword, value in self._objects.items()
                for loading in self._loadings(keyword, value, state, modules)
            ]

        wanted = agreed(ranks(), checked, "shoal.Stateful: checking what was saved")
        with torch.no_grad():
            load_all(ranks(), wanted)

    def _loadings(
        self, keyword: str, value: Any, state: Mapping[str, Any], modules: Modules
    ) -> Iterator[Loading]:
        if keyword not in state:
            raise wrong_form(keyword, "nothing", "what was saved under that name")
        saved = state[keyword]
        if not isinstance(value, nn.Module):
            saved, name = _unpack(saved, keyword)
            check_class(value, name, keyword)
        return loadings(value, saved, modules, keyword)


def _pack(state: Any, name: str) -> bytes:
    """Pack a state, and the name of its class, into bytes.

    They are safetensors. The state's JSON and the name are texts of bytes among them.
    """
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[str, ...], tensor: Tensor) -> str:
        number = str(len(tensors))
        tensors[number] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return number

    texts = {_STATE: json.dumps(encoded(state, take))}
    texts |= {_CLASS: name} if name else {}
    of_texts = {
        key: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for key, text in texts.items()
    }
    return save({**tensors, **of_texts})


def _unpack(content: Any, keyword: str) -> tuple[Any, str]:
    """Return the state that was packed, and the name of its class or ''."""
    try:
        tensors = load(content)
        texts = {
            key: tensors.pop(key).numpy().tobytes().decode()
            for key in (_STATE, _CLASS)
            if key in tensors
        }
        state = decoded(json.loads(texts[_STATE]), tensors.__getitem__)
    except Exception as error:  # any error: the bytes may be anything
        got = f"{type(error).__name__}: {error}"
        raise wrong_form(keyword, got, "the bytes that shoal.Stateful made") from error
    return state, texts.get(_CLASS, "")
