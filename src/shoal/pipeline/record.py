"""A record of a model's forward: the values, and the events that make and use them.

It knows the values that cross a cut, a place before a call of a module: they were made before it
and are used after it. Values that every rank computes for itself from the inputs are left out
(positions, masks).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.errors import UsageError
from shoal.core.random_state import undrawn
from shoal.pipeline.absent_tensors import LOOKS, Forms, Undecided, is_empty
from shoal.pipeline.memory import is_item, memory_of, storage_of, written_by
from shoal.pipeline.moving_buffers import CountingBuffer
from shoal.pipeline.trees import copied, look_into_dataclasses, tensors_in
from shoal.pipeline.unhooked_modules import without_backward_hooks, without_hooks
from shoal.pipeline.walk import END, Name, Position, Walk, walking

INPUT: Position = (-1.0,)  # the origin of the forward's inputs


@dataclass(frozen=True)
class Value:
    """A tensor of the forward.

    Args:
        made: the position behind which it is there.
        is_given: whether it follows from inputs and constants alone.
        nbytes: its bytes.
        takes_grad: whether it takes a gradient.
        inputs: numbers of the inputs that it follows from.
    """

    made: Position
    is_given: bool
    nbytes: int
    takes_grad: bool
    inputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Returned:
    """Results of a module's call: a tree, with a form or an alias for each tensor.

    Args:
        form: the tree.
        leaves: of each leaf, a tensor on no device ("meta"), the number of the tensor among the
            arguments that it is, or any other object.
        devices: of each leaf that is a tensor.
        takes_grad: whether each leaf takes a gradient.
    """

    form: Any
    leaves: tuple[Any, ...]
    devices: tuple[torch.device | None, ...]
    takes_grad: tuple[bool, ...]


@dataclass(frozen=True)
class Alias:
    """The number of a tensor among a call's arguments."""

    number: int


Life = tuple[Position, Position, int]  # behind which a value is there, its last use, its bytes


@final
class LiveBytes:
    """Bytes of values that were made before a place and are used behind it.

    Args:
        lives: the life of each value.
    """

    def __init__(self, lives: Iterable[Life]) -> None:
        known = list(lives)
        self._made, self._begun = _sums((made, nbytes) for made, _, nbytes in known)
        self._last, self._ended = _sums((max(made, last), nbytes) for made, last, nbytes in known)

    def at(self, cut: Position) -> int:
        """Return the bytes that cross a cut."""
        return self._begun[bisect_left(self._made, cut)] - self._ended[bisect_left(self._last, cut)]


def _sums(sizes: Iterable[tuple[Position, int]]) -> tuple[list[Position], list[int]]:
    """Return places in order, and the bytes at places before each."""
    ordered = sorted(sizes)
    return [place for place, _ in ordered], [0, *accumulate(nbytes for _, nbytes in ordered)]


@dataclass
class ForwardRecord:
    """Events and values of one forward."""

    values: dict[Name, Value] = field(default_factory=dict)
    uses: dict[Name, list[Position]] = field(default_factory=dict)
    calls: dict[Position, str] = field(default_factory=dict)  # names of called modules
    functions: dict[Position, str] = field(default_factory=dict)
    given: set[Position] = field(default_factory=set)  # events with given results
    returned: dict[tuple[Position, Any], Returned] = field(default_factory=dict)
    # parameters and buffers that functions use, and inputs that events need
    parameters: dict[Position, set[str]] = field(default_factory=dict)
    buffers: dict[Position, set[str]] = field(default_factory=dict)
    inputs: dict[Position, frozenset[int]] = field(default_factory=dict)
    looked_at: set[int] = field(default_factory=set)  # inputs with values that decide the way
    looking: set[Position] = field(default_factory=set)  # calls of modules that look at these
    # checkpoints of torch by their first event: the end of each
    checkpoints: dict[Position, tuple[Position, Position]] = field(default_factory=dict)
    memory: dict[Name, int] = field(default_factory=dict)  # equal for views of one another
    # writes in place, into this memory
    writes: list[tuple[Position, int]] = field(default_factory=list)
    countings: list[CountingBuffer] = field(default_factory=list)  # changes of buffers by constants

    def live(self, cut: Position) -> list[Name]:
        """Return the names of the values that cross a cut, in order."""
        return sorted(
            name
            for name, value in self.values.items()
            if not value.is_given
            and value.made < cut
            and any(use >= cut for use in self.uses.get(name, ()))
        )

    @cached_property
    def live_bytes(self) -> LiveBytes:
        """The bytes that cross each cut, once the forward has ended."""
        return LiveBytes(
            (value.made, max(self.uses[name]), value.nbytes)
            for name, value in self.values.items()
            if not value.is_given and self.uses.get(name)
        )

    def parts_views(self, cut: Position) -> list[Name]:
        """Return two views of one memory that cross a cut, behind which one of them changes."""
        later = {key for position, key in self.writes if position >= cut}
        crossing: dict[int, Name] = {}
        for name in self.live(cut) if later else ():
            first = crossing.setdefault(self.memory[name], name)
            if first != name and self.memory[name] in later:
                return [first, name]
        return []

    def state_uses(self) -> dict[Position, set[str]]:
        """Return the names of parameters and buffers that functions use, by position."""
        return {
            position: self.parameters.get(position, set()) | self.buffers.get(position, set())
            for position in sorted({*self.parameters, *self.buffers})
        }

    @property
    def changes_inputs(self) -> bool:
        """Whether forward changes its inputs in place."""
        inputs = {key for name, key in self.memory.items() if name[0] == INPUT}
        return any(key in inputs for _, key in self.writes)

    def inputs_between(self, begin: Position, end: Position) -> set[int]:
        """Return the numbers of the inputs that events from `begin` to before `end` need."""
        found = set(self.looked_at)
        for position, numbers in self.inputs.items():
            if begin <= position < end:
                found |= numbers
        return found


def signature(args: Any, kwargs: Any, module: nn.Module) -> Any:
    """Return a key for the forms of a call's results: the forms of its arguments, and its mode."""
    leaves, form = pytree.tree_flatten((args, kwargs))

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if isinstance(leaf, int | float | str | bool | type(None)) else type(leaf)

    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return str(form), tuple(map(of, leaves)), module.training, torch.is_grad_enabled(), autocast


def returned(args: Any, kwargs: Any, output: Any) -> Returned:
    """Return the forms of a call's results."""
    given = tensors_in((args, kwargs))
    leaves, form = pytree.tree_flatten(output)

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for number, tensor in enumerate(given):
            if tensor is leaf:
                return Alias(number)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    return Returned(
        form,
        tuple(map(of, leaves)),
        tuple(None if tensor is None else tensor.device for tensor in tensors),
        tuple(tensor is not None and tensor.requires_grad for tensor in tensors),
    )


@final
class Recording(Walk):
    """Walks into every call of a module, and notes each event.

    Only values that follow from the inputs alone are computed: of all else only the forms are
    known. So parameters may be elsewhere, and buffers stay as they are.

    Args:
        model: the module.
        forms: computes forms.
        inputs: the tensors of the call, in order.
        filled: positions of tensors into which forward writes values that follow from parameters.
        moving: names of buffers that training changes: only one rank has their present values.
    """

    def __init__(
        self,
        model: nn.Module,
        forms: Forms,
        inputs: Sequence[Tensor],
        filled: Set[Position] = frozenset(),
        moving: Set[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.record = ForwardRecord()
        self._forms, self._filled, self._moving = forms, filled, moving
        self._memory: dict[
            int, tuple[Any, Position]
        ] = {}  # the event that made a memory, by that memory
        self._names: Any = WeakIdKeyDictionary()
        self._modules = {module: name for name, module in model.named_modules()}
        self._parameters: Any = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters():
            self._parameters[parameter] = name
        self._buffers: Any = WeakIdKeyDictionary()
        for name, buffer in model.named_buffers():
            self._buffers[buffer] = name
        self._kept: Any = WeakIdKeyDictionary()  # buffers that forward changes
        self._moved = set[int]()  # identities of tensors that it changes not by constants alone
        for number, tensor in enumerate(inputs):
            self._made(tensor, (INPUT, number), INPUT, given=True, inputs=frozenset({number}))

    def function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        used = tensors_in((args, kwargs))
        if function in LOOKS:
            return self._looked_at(function, used, args, kwargs)
        parameters = {self._parameters[t] for t in used if t in self._parameters}
        if buffers := {self._buffers[t] for t in used if t in self._buffers}:
            self.record.buffers.setdefault(self.here, set()).update(buffers)
        state = parameters or not buffers.isdisjoint(self._moving)
        given = not state and not any(map(is_empty, used))
        written = written_by(function, args, kwargs)
        self._writes(written, given=given)
        given = given and self.here not in self._filled
        output, given = self._run(function, args, kwargs, written, given=given)
        made = tensors_in(output)
        if not made:
            for tensor in used:
                self._note_use(tensor, self.here)
            if given and self._forms.needs_values(function, args, kwargs):
                self._look(used)
            return output
        position = self.here
        self.passed()
        self.record.functions[position] = getattr(function, "__name__", "")
        if parameters:
            self.record.parameters[position] = parameters
        self._note(position, position, used, made, given=given)
        return output

    def _writes(self, written: Sequence[Tensor], *, given: bool) -> None:
        """Note that a function changes tensors in place."""
        for tensor in written:
            if tensor not in self._names:
                continue  # a buffer
            key = memory_of(tensor)
            self.record.writes.append((self.here, key))
            value = self.record.values[self._names[tensor]]
            if value.is_given and not given:
                raise _Filled(self._memory[key][1])

    def _run(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        written: Sequence[Tensor],
        *,
        given: bool,
    ) -> tuple[Any, bool]:
        """Return a function's results, and whether these follow from the inputs alone."""
        written = [t for t in written if t not in self._names]
        if written and (not given or tensors_in((args[1:], kwargs))):
            self._moved.update(map(id, written))
        if not given:
            return self._form(function, args, kwargs), False
        if written:  # a buffer, which a record leaves as it is
            self._kept.update(dict.fromkeys(written))
            self.record.countings.append(CountingBuffer(args[0], function, args[1:], kwargs))
            return (None if is_item(function) else args[0]), True
        with undrawn() as has_drawn:
            output = function(*args, **kwargs)
            if not has_drawn():
                return output, True
        return self._forms.likes(output), False

    def _form(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return self._forms.called(function, args, kwargs)
        except Undecided as error:
            raise undecided(str(error), self._frame_name) from None

    @property
    def _frame_name(self) -> str:
        return self.record.calls.get(self._frames[-1][0], "")

    def _looked_at(
        self, function: Callable[..., Any], used: Sequence[Tensor], args: Any, kwargs: Any
    ) -> Any:
        if any(map(is_empty, used)) or any(t in self._parameters for t in used):
            raise undecided(getattr(function, "__name__", ""), self._frame_name)
        self._look(used)
        return function(*args, **kwargs)

    def _look(self, used: Sequence[Tensor]) -> None:
        """Note that forward looks at the values of these, which follow from inputs."""
        for tensor in used:
            if tensor in self._names:
                self.record.looked_at |= self.record.values[self._names[tensor]].inputs
        frame = self._frames[-1][0]
        self.record.looking.update(frame[:length] for length in range(1, len(frame) + 1))

    def module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        position = self.called()
        self.record.calls[position] = self._modules.get(module, "")
        with self.aside():
            used = tensors_in((args, kwargs))
            known = signature(args, kwargs, module)
            for tensor in used:
                self._note_use(tensor, position)
        with without_hooks(module), without_backward_hooks(module):
            output = self.walk_into(position, module, args, kwargs)
        look_into_dataclasses(output)
        with self.aside():
            made = tensors_in(output)
            for tensor in made:
                self._note_use(tensor, (*position, END))
            given = not any(True for _ in module.parameters()) and not any(
                map(is_empty, [*used, *made])
            )
            self.record.returned[position, known] = returned(args, kwargs, output)
            self._note(position, (*position, END), used, made, given=given)
        return output

    def on_checkpoint_end(self, begin: Position) -> None:
        events = [*self.record.calls, *self.record.functions]
        first = min((event for event in events if event >= begin), default=begin)
        self.record.checkpoints[begin] = first, self.here

    def finish(self, output: Any) -> None:
        """Note the output of the forward."""
        look_into_dataclasses(output)
        for tensor in tensors_in(output):
            self._note_use(tensor, (END,))
        self.record.countings = [
            each for each in self.record.countings if id(each.buffer) not in self._moved
        ]

    def _note(
        self,
        position: Position,
        made_at: Position,
        used: Sequence[Tensor],
        made: Sequence[Tensor],
        *,
        given: bool,
    ) -> None:
        if given:
            self.record.given.add(position)
        inputs: frozenset[int] = frozenset().union(
            *(self.record.values[self._names[t]].inputs for t in used if t in self._names)
        )
        from_given = frozenset().union(
            *(
                self.record.values[self._names[t]].inputs
                for t in used
                if t in self._names and self.record.values[self._names[t]].is_given
            )
        )
        self.record.inputs[position] = from_given
        for tensor in used:
            self._note_use(tensor, position)
        for number, tensor in enumerate(made):
            self._made(tensor, (position, number), made_at, given=given, inputs=inputs)

    def _made(
        self, tensor: Tensor, name: Name, made: Position, *, given: bool, inputs: frozenset[int]
    ) -> None:
        if tensor in self._parameters or tensor in self._buffers or tensor in self._kept:
            return
        key = memory_of(tensor)
        self._memory.setdefault(key, (storage_of(tensor), name[0]))
        self.record.memory[name] = key
        nbytes = tensor.numel() * tensor.element_size()
        self.record.values[name] = Value(made, given, nbytes, tensor.requires_grad, inputs)
        self._names[tensor] = name

    def _note_use(self, tensor: Tensor, position: Position) -> None:
        if (name := self._names.get(tensor)) is not None:
            self.record.uses.setdefault(name, []).append(position)


def undecided(function: str, module: str) -> UsageError:
    """Return the error of a forward that looks at values elsewhere."""
    return UsageError(
        f"forward looks at values that another rank has: {function}",
        where=f"the forward of {module or 'the model itself'}",
        do="leave out the pipeline, or compute without looking (torch.where in place of if)",
    )


def recorded(
    model: nn.Module,
    forms: Forms,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    moving: Set[str] = frozenset(),
) -> tuple[ForwardRecord, Any]:
    """Walk through a forward, and return its record and the form of its output.

    Raises:
        UsageError: forward looks at values that follow from parameters.
    """
    filled = set[Position]()
    while True:
        # an object for each place, because another batch may have another tensor in each
        its_args, its_kwargs = copied((args, dict(kwargs)))
        recording = Recording(model, forms, tensors_in((its_args, its_kwargs)), filled, moving)
        try:
            with walking():
                output = recording.run(forward, its_args, its_kwargs)
        except _Filled as found:
            if found.position in filled or found.position == INPUT:
                raise UsageError(
                    "forward writes what follows from parameters into an input, or into what "
                    "several ranks make",
                    do="write into a copy: x = x.clone()",
                ) from None
            filled.add(found.position)
            continue
        recording.finish(output)
        return recording.record, output


class _Filled(BaseException):
    """Values that follow from parameters are written into a tensor that was made without them."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
