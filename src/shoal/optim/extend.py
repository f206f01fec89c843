"""Extends an optimizer by parts: its methods are replaced once, and loop over them.

    optimizer.step()            1  closure, if any
                                2  checks
                                3  the engines hear of it, and every part opens: after the hooks
                                   that users have put before
                                8  the optimizer's own code, on the parameters that the parts leave
                                9  every part closes, and the engines hear of it: before the hooks
                                   that users have put after
    optimizer.accumulate()      a context: backwards inside send nothing, the next one sends all
    optimizer.clip_grad_norm_   the norm from every part's norms, then every part is scaled
    optimizer.state_dict()      in one-process form: every part's whole state (a collective)
    optimizer.load_state_dict() takes that form, and every part takes its own state

The numbers are from docs/ideas/walk-optimizer-step.md; the parts have the others. Guarded by
tests/equivalence/test_owners.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.contracts.cadence import Event
from shoal.engine.engine import Engine
from shoal.optim.checks import Arguments, SeenScaler, check_parameters, checked_step
from shoal.optim.closure_loss import LossOfRanks
from shoal.optim.methods import Methods
from shoal.optim.part import Keeping, Part, put, shown
from shoal.optim.whole_parameters import WholePart

_EXTENSION = "_shoal_extension"


def extend(optimizer: Optimizer, left_alone: Sequence[nn.Parameter] = ()) -> None:
    """Give an optimizer `accumulate` and `clip_grad_norm_`, as one process has them.

    `clip_grad_norm_` leaves these parameters alone.
    """
    _extension(optimizer).leave_alone(left_alone)


def add_parts(
    optimizer: Optimizer,
    model: nn.Module,
    engine: Engine,
    parts: Sequence[Part],
    left_alone: Sequence[nn.Parameter] = (),
    loss: LossOfRanks | None = None,
) -> None:
    """Let parts take over their parameters of a model, and the state of these in the optimizer.

    Args:
        optimizer: the user's optimizer. It may get parts of several models.
        model: the model, which has been parallelised.
        engine: the engine that runs the model's exchange.
        parts: the parts in the order in which a step opens them, the same on every rank.
        left_alone: parameters of the optimizer that no part has.
        loss: the loss of closures, for an optimizer that steers by it.
    """
    _extension(optimizer).leave_alone(left_alone)
    _extension(optimizer).add(_ParallelModel(engine, set(model.parameters()), tuple(parts), loss))


def release(optimizer: Optimizer, engine: Engine | None = None) -> None:
    """Remove the parts of an engine's model. Their state goes back into `optimizer.state`.

    A collective: call it while parameters are still owned and cut. When no model is left, the
    optimizer has its own methods again. Without an engine, the optimizer has no parts.
    """
    extension = _extension(optimizer)
    extension.remove(engine)
    if not extension.trained:
        del optimizer.__dict__[_EXTENSION]


def kept_state_dict(optimizer: Optimizer, keeping: Keeping) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with this rank's parts in the forms of `keeping`.

    Args:
        optimizer: the optimizer, with or without parts.
        keeping: the forms of parts.
    """
    extension: _Extension | None = optimizer.__dict__.get(_EXTENSION)
    return optimizer.state_dict() if extension is None else extension.kept(keeping)


def scaler_of(optimizer: Optimizer) -> Mapping[str, float]:
    """Return the state of the GradScaler that steps an optimizer; empty if none has so far."""
    extension: _Extension | None = optimizer.__dict__.get(_EXTENSION)
    return {} if extension is None else extension.scaler.state


def _extension(optimizer: Optimizer) -> _Extension:
    if _EXTENSION not in optimizer.__dict__:
        optimizer.__dict__[_EXTENSION] = _Extension(optimizer)
    extension: _Extension = optimizer.__dict__[_EXTENSION]
    return extension


@dataclass(frozen=True)
class _ParallelModel:
    """One parallelised model with parameters in an optimizer."""

    engine: Engine
    parameters: set[Tensor]
    parts: tuple[Part, ...]
    loss: LossOfRanks | None  # over the rows that this model counts


@final
class _Extension:
    """Everything that an optimizer has been extended by."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.trained: list[_ParallelModel] = []
        self._parts: list[Part] = []  # parts of all models
        self._left_alone: set[Tensor] = set()
        self._whole = WholePart(optimizer, self._parts, self._left_alone)
        self._accumulating: list[ExitStack] = []  # open contexts
        self._open = 0  # depth of steps: a step that calls its base class's runs the hooks of both
        self._hooks: list[RemovableHandle] = []
        self._keeping: Keeping | None = None  # set while a state is taken
        self.scaler = SeenScaler()
        self._declared = signature(type(optimizer).step)
        self._added, self._replaced = Methods(optimizer), Methods(optimizer)
        self._stepping = Methods(optimizer)
        self._added.put("accumulate", MethodType(self._accumulate, optimizer))
        self._added.put("clip_grad_norm_", MethodType(self._clip_grad_norm, optimizer))

    def leave_alone(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allow steps of these parameters from now on, whatever their gradients are."""
        self._left_alone.update(parameters)

    def add(self, trained: _ParallelModel) -> None:
        """Let a model's parts take over their parameters."""
        if not self._hooks:
            self._hooks += [
                self._optimizer.register_step_pre_hook(self._check_step),
                self._optimizer.register_step_post_hook(self._note_step),
            ]
        if (trained.parts or trained.engine.follows_steps) and not self._follows_steps:
            self._stepping.replace("step", self._step)
        if trained.parts and not self._parts:
            self._replaced.replace("state_dict", self._state_dict)
            self._replaced.replace("load_state_dict", self._load_state_dict)
            self._replaced.refuse_copies()
        self.trained.append(trained)
        for stack in self._accumulating:  # the first batch may come inside an open context
            stack.enter_context(trained.engine.accumulating())
        self._parts += trained.parts
        for part in trained.parts:
            if any(self._optimizer.state.get(parameter) for parameter in part.parameters()):
                part.take_state()

    def remove(self, engine: Engine | None) -> None:
        """Give the optimizer back the state of a model's parts, and with the last its methods."""
        for removed in [trained for trained in self.trained if trained.engine is engine]:
            for part in removed.parts:
                part.absorb(part.parameters())
            states = [part.whole_state() for part in removed.parts]
            self.trained.remove(removed)
            for part, state in zip(removed.parts, states, strict=True):
                self._parts.remove(part)
                part.release()
                put(self._optimizer, state)
        if not self._parts:
            self._replaced.restore()
        if not self._follows_steps:
            self._stepping.restore()
        if not self.trained:
            self._added.restore()
            for hook in self._hooks:
                hook.remove()

    @property
    def _follows_steps(self) -> bool:
        """Return whether the step has been replaced, because a part or an engine works in it."""
        return any(trained.parts or trained.engine.follows_steps for trained in self.trained)

    def _check_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Check before a step that all its gradients have been exchanged."""
        self.scaler.look(optimizer)
        # step 2
        loss = self.trained[-1].loss
        changed = checked_step(self._declared, args, kwargs, self._check_sent, loss)
        known = [self._left_alone, *(trained.parameters for trained in self.trained)]
        check_parameters(optimizer, known)
        return changed

    def _note_step(self, *_: object) -> None:
        for trained in self.trained:
            trained.engine.spent.on_step_end()

    def _check_sent(self) -> None:
        for trained in self.trained:
            trained.engine.begin_step()

    def _step(self, original: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():  # step 1
                loss = closure()
        hooks = self._optimizer._optimizer_step_post_hooks
        # users' hooks may clip gradients, or edit groups
        before = self._optimizer.register_step_pre_hook(self._enter)
        behind = self._optimizer.register_step_post_hook(self._leave)
        # move the others after `behind`, which was the last, in their order
        hooks.update({key: hooks.pop(key) for key in list(hooks) if key != behind.id})
        try:
            result = original()  # step 8
        finally:
            self._open = 0
            self._close()
            behind.remove()
            before.remove()
        return result if closure is None else loss

    def _enter(self, *_: object) -> None:
        self._open += 1
        if self._open == 1:  # step 3
            self._tell(Event.STEP_BEGUN)
            for part in self._parts:
                part.open()

    def _leave(self, *_: object) -> None:
        self._open -= 1
        if self._open == 0:
            self._close()
            self._tell(Event.STEP_ENDED)

    def _tell(self, event: Event) -> None:
        for trained in self.trained:
            trained.engine.on_event(event)

    def _close(self) -> None:
        # step 9: the first part sees the groups in their first state
        for part in reversed(self._parts):
            part.close()

    @contextmanager
    def _accumulate(self, optimizer: Optimizer) -> Iterator[None]:
        """Send nothing in the backwards inside. The next one outside sends the sum of all.

        Until then `.grad` is this rank's own, or an error if ranks own it.
        """
        with ExitStack() as stack:
            for trained in self.trained:
                stack.enter_context(trained.engine.accumulating())
            self._accumulating.append(stack)
            try:
                yield
            finally:
                self._accumulating.remove(stack)

    def _clip_grad_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the norm of all gradients of this optimizer, as one vector (a collective).

        It works as torch.nn.utils.clip_grad_norm_. Gradients at their owners stay there, although
        torch's function would bring them to every rank.

        Args:
            max_norm: the largest norm that stays unchanged.
            norm_type: the p of the norm; may be infinite.
            error_if_nonfinite: whether to raise an error if the norm is not finite.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` was given.
        """
        self._check_sent()
        parts = [self._whole, *self._parts]
        norms = [norm for part in parts for norm in part.norms(norm_type)]
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        if norms:
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the gradients' norm of order {norm_type} is not finite: {float(total)}"
            )
        # a norm without a limit leaves gradients alone, even infinite ones
        if max_norm != math.inf:
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
            for part in parts:
                part.scale(factor)
        first = next(p for group in self._optimizer.param_groups for p in group["params"])
        return total.to(first.device, first.dtype)

    def _state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        keeping = self._keeping
        for part in self._parts:
            part.absorb(part.parameters())
        of_parts = [  # save 5
            part.whole_state() if keeping is None else part.kept_state(keeping)
            for part in self._parts
        ]
        states = {p: state for of_part in of_parts for p, state in of_part.items()}
        with shown(self._optimizer, states):
            return original()

    def kept(self, keeping: Keeping) -> dict[str, Any]:
        """Return the optimizer's state with this rank's parts in the forms of `keeping`."""
        self._keeping = keeping
        try:
            return self._optimizer.state_dict()
        finally:
            self._keeping = None

    def _load_state_dict(self, original: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        original(state_dict)
        for part in self._parts:
            part.load()
