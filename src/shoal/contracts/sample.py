"""One training step's forward on the user's sample, for all forms of a sample.

    loss_fn        the sample is (x, y), the loss `loss_fn(model(x), y)`
    compute_loss   the sample is a batch of any kind, the loss `compute_loss(model, batch)`
    neither        short for a compute_loss that calls the model and takes the loss that it returns:
                   a scalar, `.loss` or `["loss"]` of the output, or the one loss in a tuple, as in
                   `(logits, loss)`. The sample is (x, None), the batch x

`x` is a tensor, a tuple of positional or a mapping of keyword arguments of the model. A namedtuple,
as a PackedSequence, is one argument, unless forward takes its fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from shoal.contracts.batch import tensors_of
from shoal.contracts.batch_loss import BatchLoss, fewest_arguments, given_loss
from shoal.core.errors import SampleError, ShoalError, UsageError, WorldError
from shoal.core.no_operation import nothing

_NO_MEMORY = "can't allocate memory"  # torch raises it as a RuntimeError
LossFn = Callable[[Any, Any], Tensor]
ComputeLoss = Callable[..., Any]  # it takes the model, a batch, and arguments of trainers
_BY_METHODS = (
    "where methods other than forward make the loss, give compute_loss=f, a function of "
    "(model, batch), and None for loss_fn"
)


@dataclass(frozen=True)
class Objective:
    """Function that computes the loss of a sample. Without one, the model returns the loss."""

    loss_fn: LossFn | None = None
    compute_loss: ComputeLoss | None = None

    def loss(self, model: nn.Module, sample: Any) -> Any:
        """Return the loss, unchecked; None if a model returns none."""
        if self.compute_loss is not None:
            return computed_loss(self.compute_loss(model, sample))
        x, y = sample
        output = called(model, x)
        return own_loss(output) if self.loss_fn is None else self.loss_fn(output, y)

    def by(self, loss: Any) -> Objective:
        """Return the objective with the loss that `parallelize` returned."""
        return Objective(loss) if self.compute_loss is None else Objective(None, loss)


@dataclass(frozen=True)
class Sample:
    """Model, its loss and one batch, checked. `loss()` runs them.

    Without a `loss_fn` x is the whole batch, and y None.
    """

    model: nn.Module
    loss_fn: LossFn | None
    x: Any
    y: Any
    compute_loss: ComputeLoss | None = None
    # called before each run to restore x and y
    renew: Callable[[], None] = field(default=nothing, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: LossFn | None,
        sample: Any,
        compute_loss: ComputeLoss | None = None,
    ) -> Sample:
        """Check the sample's form without running it (SampleError with the problem)."""
        lazy = [
            name
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if is_lazy(tensor)
        ]
        if lazy:
            raise SampleError(
                "the model has parameters without a shape yet (lazy modules)",
                got=", ".join(lazy[:5]),
                do="run the model once on a batch first",
            )
        if compute_loss is not None:
            if sample is None:
                raise SampleError(
                    "there is no sample",
                    expected="sample=batch: what compute_loss(model, batch) is called with",
                    do="give one batch of the kind the training loop will see",
                )
            _check_rows(sample, "batch")
            return cls(model, None, sample, None, compute_loss)
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            own = loss_fn is None  # the model returns its loss
            raise SampleError(
                "there is no sample" if sample is None else "the sample is not a pair",
                got=describe(sample),
                expected="sample=(x, None): the model's input, and no target without a loss_fn"
                if own
                else "sample=(x, y): the model's input and the loss's target",
                do="write sample=(x, None), where x is one batch as the training loop will see it, "
                "or give a loss_fn or compute_loss="
                if own
                else "give one batch of the kind the training loop will see",
            )
        x, y = sample
        _check_rows(x, "x")
        if loss_fn is None and y is not None:
            raise SampleError(
                "the sample has a target, but there is no loss_fn to take it",
                got=f"y = {describe(y)}",
                do="give a loss_fn or compute_loss=; or, where the model returns its own loss, "
                "put the target into x and None for y",
            )
        return cls(model, loss_fn, x, y)

    def loss(self) -> Tensor:
        """Run the model and the loss.

        Raises:
            SampleError: either of them raised, or the loss cannot be trained on.
        """
        try:
            output = self.output()
        except ShoalError:
            raise
        except Exception as error:
            of_batch = self.compute_loss is not None
            problem = "compute_loss fails on" if of_batch else "the model does not take"
            raise self._refusal(f"{problem} the sample", error) from error
        if self.loss_fn is None:
            found = own_loss(output) if self.compute_loss is None else computed_loss(output)
            return self._check(found, output)
        try:
            loss = self.loss_fn(output, self.y)
        except ShoalError:
            raise
        except Exception as error:
            raise self._refusal(
                f"loss_fn does not take the model's output ({describe(output)})", error
            ) from error
        return self._check(loss, output)

    @property
    def function(self) -> LossFn | ComputeLoss | None:
        """The user's function that computes the loss; None if the model returns it."""
        return given_loss(self.compute_loss, self.loss_fn)

    def loss_of(self, batch: Any) -> Any:
        """Return the loss of another batch, or None. For samples without a loss_fn."""
        if self.compute_loss is not None:
            return computed_loss(self.compute_loss(self.model, batch))
        return own_loss(called(self.model, batch))

    def backward(self, loss: Tensor) -> None:
        """Run backward (SampleError if it raises)."""
        try:
            loss.backward()
        except ShoalError:
            raise
        except Exception as error:
            raise self._refusal("backward fails on the sample", error) from error

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over every tensor of the sample."""
        return tensors_in((self.x, self.y))

    def output(self) -> Any:
        """Run the model, or compute_loss, on the batch in its first state."""
        self.renew()
        if self.compute_loss is not None:
            return self.compute_loss(self.model, self.x)
        return called(self.model, self.x)

    def _given(self) -> str:
        if self.compute_loss is not None:
            return f"batch = {describe(self.x)}"
        return f"x = {describe(self.x)}, y = {describe(self.y)}"

    def _refusal(self, problem: str, error: Exception) -> ShoalError:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error):
            return WorldError(
                "memory ran out as the sample was run",
                got=f"{type(error).__name__}: {str(error)[:200]}; {self._given()}",
                do="give a smaller batch, here and in training; or end what else takes memory",
            )
        if self.compute_loss is not None:
            return SampleError(
                f"{problem}: {type(error).__name__}: {error}",
                got=self._given(),
                expected="a batch as compute_loss takes it",
                do="try compute_loss(model, batch).backward() on the same batch first",
            )
        return SampleError(
            f"{problem}: {type(error).__name__}: {error}",
            got=self._given(),
            expected="x is a tensor, a tuple of positional or a dict of keyword arguments of the "
            "model",
            do=_BY_METHODS
            if isinstance(error, NotImplementedError)  # a module without forward raises it
            else f"try loss_fn(model(x), y) on the same batch first; or, {_BY_METHODS}",
        )

    def _check(self, loss: Any, output: Any) -> Tensor:
        if self.compute_loss is not None:
            return check_computed(output)
        # compared with None, because a module may have no truth value
        by_function = self.loss_fn is not None
        source = "loss_fn" if by_function else "the model (there is no loss_fn)"
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        if not isinstance(loss, Tensor):
            problem = f"{source} returned no loss"
        elif loss.numel() != 1:
            problem = (
                f"{source} returned a loss of shape {tuple(loss.shape)}, which is not a scalar"
            )
        else:
            problem = f"{source} returned a loss that does not depend on any trainable parameter"
        raise SampleError(
            problem,
            got=f"{describe(loss if by_function else output)}, from {self._given()}",
            expected="a scalar tensor that requires grad"
            + (
                ""
                if by_function
                else ", or an output that has one as .loss or ['loss'], or as its one scalar"
            ),
            do="reduce it, for example with .mean()"
            + (
                ""
                if by_function
                else ", or give a loss_fn: where the model returns (logits, loss) also "
                "lambda out, y: out[1]"
            ),
        )


def computed_loss(computed: Any) -> Any:
    """Return the loss in the value of a compute_loss: alone, or with other values.

    With other values it is `["loss"]`, `.loss` or the first one of a tuple.
    """
    if isinstance(computed, tuple | list) and not hasattr(computed, "loss"):
        first = computed[0] if computed else None
        is_loss = isinstance(first, Tensor) and first.numel() == 1
        return first if is_loss else own_loss(computed)
    return own_loss(computed)


def check_computed(computed: Any) -> Tensor:
    """Return the loss in the value of a compute_loss (SampleError if there is none)."""
    loss = computed_loss(computed)
    if not isinstance(loss, Tensor):
        problem = "compute_loss returned no loss"
        do = "return the loss, a scalar tensor, or (loss, anything)"
    elif loss.numel() != 1:
        problem = f"compute_loss returned a loss of shape {tuple(loss.shape)}, which is no scalar"
        do = "reduce it, for example with .mean()"
    elif not loss.requires_grad:
        problem = "compute_loss returned a loss that does not depend on any trainable parameter"
        do = "compute it of what model(…) gives, without detach(), item() and torch.no_grad()"
    else:
        return loss
    raise SampleError(
        problem, got=describe(computed), expected="a scalar tensor that requires grad", do=do
    )


def check_compute_loss(compute_loss: Any, loss_fn: Any) -> None:
    """Refuse a value that cannot be called as compute_loss(model, batch) (UsageError)."""
    do = "give a function of (model, batch) that returns the loss"
    is_known = isinstance(compute_loss, BatchLoss)  # it is called with any batch
    given = given_loss(compute_loss)
    if not callable(given):
        raise UsageError("compute_loss is not callable", got=type(given).__name__, do=do)
    if isinstance(given, type):
        raise UsageError("compute_loss is a class", got=given.__name__, do=do)
    if loss_fn is not None:
        raise UsageError(
            "there are both a loss_fn and a compute_loss",
            do="give None for loss_fn, and let compute_loss(model, batch) call it",
        )
    if is_known and fewest_arguments(given):
        return
    try:
        inspect.signature(given).bind(None, None)
    except TypeError as error:
        raise UsageError(
            "compute_loss takes other arguments",
            got=str(error),
            do=f"{do}. If it takes more of them, leave out the sample, or give a tuple of all "
            "arguments behind the model: sample=(x, y) for compute_loss(model, x, y)",
        ) from error
    except ValueError:
        pass  # written in C: its signature cannot be seen


def _check_rows(batch: Any, name: str) -> None:
    sizes = [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]
    if sizes and not any(sizes):
        raise SampleError(
            "the sample has no rows", got=f"{name} = {describe(batch)}", do="give a batch with some"
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def describe(value: Any) -> str:
    """Describe a value for messages: a tensor's shape and type, a container's values, other
    types.
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        shown = ", ".join(describe(part) for part in value[:4]) + (", …" if len(value) > 4 else "")
        return f"({shown})" if isinstance(value, tuple) else f"[{shown}]"
    return (
        repr(value)
        if value is None or isinstance(value, int | float | bool)
        else type(value).__name__
    )


def called(model: nn.Module, x: Any) -> Any:
    """Return the output for a batch: a tensor, a tuple of positional or a mapping of keyword
    arguments.
    """
    args, kwargs = arguments(model, x)
    return model(*args, **kwargs)


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and keyword arguments for the call of a model with a batch."""
    if isinstance(x, tuple) and not _is_one_argument(model, x):
        return x, {}
    return ((), x) if isinstance(x, Mapping) else ((x,), {})


def _is_one_argument(model: nn.Module, x: tuple[Any, ...]) -> bool:
    """Return whether a tuple is one argument: a namedtuple, unless forward needs several."""
    if not hasattr(x, "_fields"):
        return False
    if isinstance(x, PackedSequence):
        return True
    try:
        inspect.signature(model.forward).bind(x)
    except TypeError:
        return False
    return True


def own_loss(output: Any) -> Any:
    """Find the loss in a model's output: the output itself, its "loss", or the scalar in a tuple.

    The result is None if there is none, or if a tuple has several scalars that require grad.
    Without gradients any scalar of a tuple counts.
    """
    graded = torch.is_grad_enabled()
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if (loss := getattr(output, "loss", None)) is not None or not isinstance(output, tuple | list):
        return loss
    scalars = [
        part
        for part in output
        if isinstance(part, Tensor) and part.dim() == 0 and (part.requires_grad or not graded)
    ]
    return scalars[0] if len(scalars) == 1 else None
