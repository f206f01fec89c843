"""Objects of Shoal's as `torch.distributed.checkpoint` takes them.

Weights are tensors under their one-process names, so its own tools read them. Of all else it loads
only what is there already, which a new optimizer's state is not. So that is one piece of bytes for
each object. Guarded by tests/front/test_distributed_checkpoint.py.
"""

from __future__ import annotations

import json
from typing import Any, final

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from shoal.checkpoint.tree import decoded, encoded
from shoal.core.errors import UsageError
from shoal.features import check_in_step
from shoal.front.saving import saving
from shoal.front.stateful import has_state, modules_of, put_back, state_of


@final
class Stateful:
    """Objects for `torch.distributed.checkpoint`, of any number of ranks and any plan.

    Its `save` and `load` are collectives. Any number of ranks may load what others saved.

    Args:
        objects: under names of your own, as for `shoal.save`: all with a `state_dict`. Plain data
            are not loaded in place, so give them to it yourself.

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
        """The state of all objects, in one-process form (a collective).

        Raises:
            UsageError: ranks step by themselves.
        """
        modules = modules_of(self._objects)
        check_in_step([model for _, model in modules])
        with saving(self._objects):
            return {
                keyword: state_of(value, modules)
                if isinstance(value, nn.Module)
                else _packed(state_of(value, modules))
                for keyword, value in self._objects.items()
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the objects take such a state (a collective)."""
        modules = modules_of(self._objects)
        check_in_step([model for _, model in modules])
        for keyword, value in self._objects.items():
            own = state[keyword]
            saved = own if isinstance(value, nn.Module) else _unpacked(own)
            with torch.no_grad():
                put_back(value, saved, modules, keyword)


def _packed(state: Any) -> bytes:
    """A state as bytes: safetensors, with its JSON as text of bytes among them."""
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[str, ...], tensor: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    text = json.dumps(encoded(state, take)).encode()
    return save({**tensors, "json": torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def _unpacked(content: bytes) -> Any:
    tensors = load(content)
    form = json.loads(tensors.pop("json").numpy().tobytes())
    return decoded(form, tensors.__getitem__)
