"""Convert labels to the type that PyTorch's own losses take, whatever type their column has.

Spark's columns of labels are doubles mostly: StringIndexer and LIBSVM files give nothing else.
PyTorch takes classes in int64 only, and numbers in the type of the output.

    CrossEntropyLoss, NLLLoss, MultiMarginLoss    classes: int64, if each value is whole
    MSELoss, L1Loss, BCEWithLogitsLoss ...        numbers: the type of the model's input
    any other loss                                labels as they come
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.core.errors import UsageError

CLASSES, NUMBERS = "classes", "numbers"
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_OF_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
)
_FUNCTIONS = {
    CLASSES: (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss),
    NUMBERS: (
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.poisson_nll_loss,
        functional.kl_div,
    ),
}


def label_kind(make_loss: Callable[[], Any] | None) -> str:
    """Return CLASSES or NUMBERS, as the loss takes them, or "" if the loss is unknown."""
    if make_loss is None:
        return ""
    with torch.random.fork_rng(devices=[]):  # a loss with weights of its own draws them
        loss = make_loss()
    if isinstance(loss, _OF_CLASSES):
        return CLASSES
    if isinstance(loss, _OF_NUMBERS):
        return NUMBERS
    return next((kind for kind, functions in _FUNCTIONS.items() if loss in functions), "")


def converted(label: Any, kind: str, x: Any, column: str) -> Any:
    """Return labels in the type that the loss takes.

    Args:
        label: the labels of a batch, one for each row.
        kind: CLASSES, NUMBERS or "".
        x: the model's input; numbers take its type.
        column: the name of the labels' column.

    Raises:
        UsageError: a class is no whole number, or labels are no numbers.
    """
    if not kind:
        return label
    if not isinstance(label, Tensor):
        _check_numbers(label, column)
        return label
    if kind == CLASSES and not (label.is_floating_point() and label.dim() > 1):
        return _whole(label, column)
    if label.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return label
    is_double = isinstance(x, Tensor) and x.dtype == torch.float64
    return label.to(torch.float64 if is_double else torch.float32)


def _whole(label: Tensor, column: str) -> Tensor:
    if label.is_floating_point():
        wrong = (label != label.round()) | ~label.isfinite()
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            raise UsageError(
                f"the label column {column!r} has a value that is no class",
                got=f"{float(label[row])} at row {row} of a batch",
                expected="whole numbers from 0, as 2 or 2.0, for this loss",
                do="number the classes: StringIndexer(inputCol=…, outputCol=…); or take a loss for "
                "numbers: Parts(loss=nn.MSELoss)",
            )
    return label.long()


def _check_numbers(label: Any, column: str) -> None:
    """Raise UsageError where a column of labels has text, nulls, or something else."""
    row, wrong = next(
        ((row, each) for row, each in enumerate(label) if not isinstance(each, Tensor)), (0, None)
    )
    if not len(label) or isinstance(label[row], Tensor):
        return
    do = f'turn them into numbers: df.withColumn("{column}", df["{column}"].cast("double"))'
    if wrong is None:
        do = f"drop such rows: df.dropna(subset=[{column!r}])"
    elif isinstance(wrong, str):
        do = f'number the classes: StringIndexer(inputCol="{column}", outputCol="label"), and then '
        do += 'labelCol="label"'
    raise UsageError(
        f"the label column {column!r} has no numbers",
        got=f"{'null' if wrong is None else repr(wrong)[:80]} at row {row} of a batch",
        expected="numbers, for this loss",
        do=do,
    )
