"""Numbers that modules keep in forward, for the script to read: the loss of a mixture of experts.

    self.aux_loss = …        on the rank that holds the layer, and once for each rank's rows
    loss + model.aux_loss    every rank adds that of its own rows

So such a number is an output as any other: it goes to the end, which tells each rank its own. They
cost a message each. Larger tensors stay where they are: a read of these is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.batch import tensors_of
from shoal.contracts.loss_attributes import keep, kept_values_of
from shoal.core.errors import UsageError
from shoal.pipeline.absent_tensors import Absent
from shoal.pipeline.record import Recording
from shoal.pipeline.trees import leaves_in, look_into_dataclasses
from shoal.pipeline.walk import running_walk

Place = tuple[str, str]  # the name of a module, and of its attribute


class WithKept(NamedTuple):
    """An output, with the values of attributes that have numbers."""

    output: Any
    kept: dict[Place, Any]


@final
class KeptNumbers:
    """Attributes into which a model's forward writes.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._written: dict[Place, Any] = {}  # their values in a record, which stand for all others

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward, which returns these numbers beside its output."""

        def called(*args: Any, **kwargs: Any) -> WithKept:
            output = forward(*args, **kwargs)
            if isinstance(running_walk(), Recording):
                check_objects((args, kwargs))  # it may have filled a cache
                found = self._find_absent()
                self._written |= found
                return WithKept(output, {p: v for p, v in found.items() if _are_numbers(v)})
            places = [place for place, value in self._written.items() if _are_numbers(value)]
            return WithKept(output, {place: self._value(place) for place in places})

        return called

    def begin(self) -> None:
        """Forget the values of the call before."""
        for place, value in self._written.items():
            self._put(place, value)

    def ended(self, kept: Mapping[Place, Any]) -> None:
        """Put the numbers of this rank's rows into the attributes. Larger tensors are elsewhere."""
        for place, value in self._written.items():
            self._put(place, kept.get(place, value))

    def _find_absent(self) -> dict[Place, Any]:
        """Return the attributes that hold values of this walk, all of which are absent."""
        return {
            (name, attribute): _copy_values(value)
            for name, module in self._modules.items()
            for attribute, value in kept_values_of(module).items()
            if any(isinstance(leaf, Absent) for leaf in leaves_in(value))
        }

    def _value(self, place: Place) -> Any:
        value = vars(self._modules[place[0]]).get(place[1])
        like, form = (pytree.tree_structure(each) for each in (self._written[place], value))
        if like != form:
            raise UsageError(
                "forward keeps more or fewer values than it kept for the sample",
                where=".".join(filter(None, place)),
                got=str(form),
                expected=str(like),
                do="let forward begin with an empty list (self.terms = []), or return these values",
            )
        return _copy_values(value)

    def _put(self, place: Place, value: Any) -> None:
        module, attribute = self._modules[place[0]], place[1]
        if attribute in vars(module):
            keep(module, attribute, _copy_values(value))


def _are_numbers(value: Any) -> bool:
    """Return whether all tensors among some values are numbers."""
    return all(
        not isinstance(leaf, Tensor) or (not leaf.dim() and leaf.is_floating_point())
        for leaf in leaves_in(value)
    )


def _copy_values(value: Any) -> Any:
    """Return a list or dict of its own with the same values."""
    return pytree.tree_map(lambda leaf: leaf, value)


def check_objects(arguments: Any) -> None:
    """Raise UsageError if tensors are in an object, which other ranks would not get."""
    look_into_dataclasses(arguments)
    for leaf in leaves_in(arguments):
        if not isinstance(leaf, _PLAIN) and tensors_of(leaf):
            raise UsageError(
                "an argument of the model is an object with tensors, which a pipeline does not "
                "take to other ranks",
                got=type(leaf).__name__,
                do="give tensors in tuples, lists, dicts or dataclasses (generate() of "
                "transformers: use_cache=False)",
            )


_PLAIN = (Tensor, int, float, str, bool, type(None))  # leaves that hold no other tensors
