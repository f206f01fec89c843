"""`Parts`: the functions that a stage of a pipeline calls, and the batch made with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.sample import Objective, called, own_loss
from shoal.core.errors import UsageError
from shoal.front.options import keywords
from shoal_tools.spark.factories import check_function
from shoal_tools.spark.labels import converted, label_kind

# options of `parallelize` that `Parts` has fields of its own for
_OWN = ("model", "loss_fn", "optimizer", "sample", "compute_loss")


@dataclass(frozen=True)
class Parts:
    """Functions of a user that make model, loss and optimizer. Executors are sent no objects.

    A batch is (input, label), or the input alone where `labelCol` is "" or the model returns its
    own loss.

    Args:
        model: makes the module.
        loss: makes the loss, a function of (output, target). None: the model returns its own loss,
            as for `parallelize`. If it is one of PyTorch's own, labels get the type that it takes:
            classes int64, numbers the type of the input.
        optimizer: takes the parameters, and makes the optimizer or a list of them.
        to_input: takes the features of a batch, and makes the model's input. Features are a tensor
            or, if they are text or bytes, a list. By default they are the input, with numbers as
            float32.
        to_batch: takes all columns, as {"x": tensor}, and makes the whole batch. It replaces
            `to_input`, except in `transform`.
        compute_loss: takes (model, batch) and returns the loss. It replaces `loss`.
        metric: takes (output, target), and returns how many are right, of how many. If the model
            returns its own loss, it takes (output, input). With a `compute_loss`, (model, batch).
        options: options of `shoal.parallelize`, as {"strategies": ["factor"]}, or a function that
            takes the model and makes them.

    Raises:
        UsageError: you gave an object in place of a function that makes it, both a loss and a
            `compute_loss`, or an option that `parallelize` does not take.

    Examples:
        >>> from torch import nn
        >>> from shoal_tools.spark import Parts
        >>> parts = Parts(lambda: nn.Linear(64, 10), options={"pins": {"": "replicate"}})
        >>> parts.model()
        Linear(in_features=64, out_features=10, bias=True)
    """

    model: Callable[[], nn.Module]
    loss: Callable[[], Any] | None = nn.CrossEntropyLoss
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = torch.optim.AdamW
    to_input: Callable[[Any], Any] | None = None
    to_batch: Callable[[dict[str, Any]], Any] | None = None
    compute_loss: Callable[[nn.Module, Any], Any] | None = None
    metric: Callable[[Any, Any], tuple[float, float]] | None = None
    options: Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for name in ("model", "optimizer"):
            check_function(name, getattr(self, name))
        for name in ("loss", "to_input", "to_batch", "compute_loss", "metric"):
            if getattr(self, name) is not None:
                check_function(name, getattr(self, name))
        if self.compute_loss is not None and self.loss not in (None, nn.CrossEntropyLoss):
            raise UsageError(
                "a compute_loss computes the whole loss, so there is no other",
                got=f"loss={self.loss!r} beside a compute_loss",
                do="leave one of them out",
            )
        if not callable(self.options):
            check_options(self.options)

    @property
    def returns_loss(self) -> bool:
        """Whether the model itself returns the loss."""
        return self.loss is None and self.compute_loss is None

    def options_for(self, model: nn.Module) -> dict[str, Any]:
        """Return the further options for `parallelize`, and check their names."""
        options = self.options(model) if callable(self.options) else self.options
        check_options(options)
        return dict(options)

    def objective(self) -> Objective:
        """Return the loss function or `compute_loss`; neither if the model returns its loss."""
        if self.compute_loss is not None or self.loss is None:
            return Objective(None, self.compute_loss)
        return Objective(self.loss())

    def columns(self, features: str, label: str, more: Iterable[str]) -> list[str]:
        """List the columns to send: features, `more`, and the label if a loss or batch needs it."""
        if not label and self.loss is not None and not (self.compute_loss or self.to_batch):
            raise UsageError("a loss needs a target", got='labelCol=""', do="name the label column")
        is_alone = self.returns_loss and self.to_batch is None
        return list(dict.fromkeys([features, *([label] if label and not is_alone else []), *more]))

    @cached_property
    def _label_kind(self) -> str:
        return "" if self.compute_loss is not None else label_kind(self.loss)

    def input_of(self, features: Any) -> Any:
        """Make the input that the model is called with.

        Raises:
            UsageError: a row has a null.
        """
        if isinstance(features, list):
            check_nulls(features)
        if self.to_input is not None:
            return self.to_input(features)
        return features.float() if isinstance(features, Tensor) else features

    def batch_of(self, columns: dict[str, Any], features: str, label: str) -> Any:
        """Make the batch that the loss is computed from."""
        if self.to_batch is not None:
            return self.to_batch(columns)
        x = self.input_of(columns[features])
        if self.returns_loss or not label:
            return x
        return x, converted(columns[label], self._label_kind, x, label)

    def sample_of(self, batch: Any) -> Any:
        """Return a batch as a sample for `parallelize`."""
        return (batch, None) if self.returns_loss else batch

    def found(self, objective: Objective, model: nn.Module, batch: Any) -> BatchResult:
        """Compute the loss of a batch; return it with the arguments for metric and count."""
        if objective.compute_loss is not None:
            return BatchResult(objective.compute_loss(model, batch), (model, batch), (batch,))
        x, target = self.sample_of(batch)
        output = called(model, x)
        if objective.loss_fn is not None:
            loss = objective.loss_fn(output, target)
            return BatchResult(loss, (output, target), (output, target))
        if (loss := own_loss(output)) is None:
            raise UsageError(
                "the model returned no loss",
                got=type(output).__name__,
                expected="a scalar, .loss, ['loss'], or the one scalar of a tuple",
                do="give Parts a loss or a compute_loss",
            )
        return BatchResult(loss, (output, x), (output, x))


@dataclass(frozen=True)
class BatchResult:
    """Loss and outputs of one batch."""

    loss: Tensor
    judged: tuple[Any, Any]  # arguments of the metric
    counted: tuple[Any, ...]  # arguments of the count


@dataclass(frozen=True)
class Sums:
    """Sums of losses, right answers and rows. Sums of several processes can be added."""

    losses: float = 0.0
    weight: float = 0.0  # sum of the losses' weights: their rows, or the result of `count`
    right: float = 0.0
    of_all: float = 0.0
    rows: int = 0

    def __add__(self, other: Sums) -> Sums:
        """Add two sums, field by field."""
        return Sums(
            self.losses + other.losses,
            self.weight + other.weight,
            self.right + other.right,
            self.of_all + other.of_all,
            self.rows + other.rows,
        )


def summed(
    parts: Parts,
    objective: Objective,
    model: nn.Module,
    batches: Iterable[tuple[int, Any]],
    count: Callable[..., Any] | None,
) -> Sums:
    """Sum over batches, given as (number of rows, batch). No gradient is computed."""
    sums = Sums()
    with torch.no_grad():
        for rows, batch in batches:
            found = parts.found(objective, model, batch)
            weight = rows if count is None else float(count(*found.counted))
            right, of_all = parts.metric(*found.judged) if parts.metric else (0.0, 0.0)
            sums += Sums(float(found.loss) * weight, weight, float(right), float(of_all), rows)
    return sums


def check_nulls(features: list[Any]) -> None:
    """Check that all rows have features: a picture, a text.

    Raises:
        UsageError: a row has a null.
    """
    row = next((row for row, each in enumerate(features) if each is None), None)
    if row is not None:
        raise UsageError(
            "a row has a null in place of its features",
            got=f"null at row {row} of a batch",
            do="drop such rows: df.dropna(subset=[featuresCol])",
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Check that `parallelize` takes these options.

    Raises:
        UsageError: it does not take one, or `Parts` has a field of its own for it.
    """
    if not isinstance(options, Mapping):
        raise UsageError(
            "Parts(options=…) is a dict, or a function of the model that makes one",
            got=repr(options)[:80],
            expected='as {"strategies": ["factor"]}',
        )
    known = {*keywords(), "lossy", "features"} - set(_OWN)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(
            "options has what shoal.parallelize does not take from there",
            got=", ".join(map(repr, unknown)),
            expected="of " + ", ".join(sorted(known)),
            do="correct the name; Parts itself takes the model, loss, optimizer and compute_loss",
        )
