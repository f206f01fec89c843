"""What `Parts` takes and refuses, and what it makes of a batch. Nothing here needs Spark."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.core.errors import UsageError
from shoal_tools.spark import Parts
from shoal_tools.spark.batches import columns_of
from shoal_tools.spark.trained_model import TrainedModel

pytestmark = pytest.mark.quick
NET = nn.Linear(2, 3)


def make() -> nn.Module:
    return nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("given", "do"),
    [
        ({"model": NET}, "model=lambda: Linear(…)"),
        ({"model": nn.Linear}, "model=lambda: Linear(…)"),
        ({"model": "net"}, "model=lambda: …"),
        ({"loss": nn.CrossEntropyLoss()}, "loss=lambda: CrossEntropyLoss(…)"),
        ({"loss": functional.cross_entropy}, "loss=lambda: cross_entropy"),
        ({"loss": "mse"}, "loss=lambda: …"),
        ({"optimizer": torch.optim.SGD(NET.parameters(), lr=0.1)}, "lambda parameters: SGD(…)"),
        ({"optimizer": lambda: None}, "optimizer=lambda parameters: …"),
        ({"metric": 3}, "metric=lambda output, target: …"),
        ({"to_input": lambda: None}, "to_input=lambda features: …"),
        ({"compute_loss": lambda model: None}, "compute_loss=lambda model, batch: …"),
    ],
    ids=lambda each: each if isinstance(each, str) else "+".join(each),
)
def test_an_object_in_place_of_a_function_is_refused_with_the_function(
    given: dict[str, Any], do: str
) -> None:
    with pytest.raises(UsageError, match="is a function that executors call") as caught:
        Parts(**{"model": make, **given})
    assert do in caught.value.do


def test_functions_of_every_kind_are_taken() -> None:
    class Metric(nn.Module):
        def forward(self, output: Any, target: Any) -> tuple[int, int]:
            return 0, len(target)

    parts = Parts(
        functools.partial(nn.Linear, 2, 3),
        loss=lambda: functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        to_input=torch.stack,
        metric=Metric(),
    )
    assert isinstance(parts.model(), nn.Linear)
    with pytest.raises(UsageError, match=r"Parts\(options=…\) is a dict"):
        Parts(make, options=3)  # type: ignore[arg-type]


def batch(label: Any, features: Any = None, **more: Any) -> Any:
    x = torch.rand(3, 2) if features is None else features
    return Parts(make, **more).batch_of({"x": x, "y": label}, "x", "y")


@pytest.mark.parametrize(
    "kind", [torch.float64, torch.float32, torch.int32, torch.int16, torch.int8, torch.int64]
)
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss, lambda: functional.nll_loss], ids=["module", "function"]
)
def test_classes_are_served_from_any_column_of_whole_numbers(kind: torch.dtype, loss: Any) -> None:
    _, label = batch(torch.tensor([0, 2, 1]).to(kind), loss=loss)
    assert label.dtype == torch.int64 and label.tolist() == [0, 2, 1]


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf")])
def test_a_class_that_is_no_whole_number_is_told(value: float) -> None:
    with pytest.raises(UsageError, match="'y' has a value that is no class") as caught:
        batch(torch.tensor([0.0, value, 2.0]))
    assert caught.value.got == f"{value} at row 1 of a batch"


def test_probabilities_and_labels_of_unknown_losses_stay_as_they_are() -> None:
    shares = torch.rand(3, 3)
    assert batch(shares)[1] is shares
    own = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    assert batch(own, loss=lambda: lambda output, target: output.sum())[1] is own
    assert batch(own, compute_loss=lambda model, batch: model(batch[0]).sum())[1] is own


@pytest.mark.parametrize("kind", [torch.float64, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("of_model", [torch.float32, torch.float64])
def test_numbers_get_the_type_of_the_input_so_that_a_backward_can_be(
    kind: torch.dtype, of_model: torch.dtype
) -> None:
    label = torch.tensor([0, 1, 1]).to(kind)
    features = torch.rand(3, 2, dtype=torch.float64)
    x, y = batch(label, features, loss=nn.BCEWithLogitsLoss, to_input=lambda x: x.to(of_model))
    assert y.dtype == of_model
    output = nn.Linear(2, 1).to(of_model)(x)[:, 0]
    nn.BCEWithLogitsLoss()(output, y).backward()


@pytest.mark.parametrize(
    ("label", "got", "do"),
    [
        (["a", "b", "a"], "'a' at row 0", 'StringIndexer(inputCol="y"'),
        (["a", None, "a"], "'a' at row 0", "StringIndexer"),
        ([None, None, "a"], "null at row 0", "df.dropna(subset=['y'])"),
        ([b"1", b"2", b"3"], "b'1' at row 0", '.cast("double")'),
    ],
)
def test_labels_that_are_no_numbers_are_told(label: list[Any], got: str, do: str) -> None:
    with pytest.raises(UsageError, match="the label column 'y' has no numbers") as caught:
        batch(label)
    assert got in caught.value.got and do in caught.value.do


def test_a_loss_that_draws_numbers_changes_no_seed_and_is_made_once_on_each_executor() -> None:
    made = []

    def loss() -> nn.Module:
        made.append(torch.rand(1))
        return nn.CrossEntropyLoss(weight=torch.ones(3))

    parts = Parts(make, loss=loss)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for _ in range(3):
        parts.batch_of({"x": torch.rand(0, 2), "y": torch.tensor([1.0])}, "x", "y")
    assert torch.equal(before, torch.get_rng_state()) and len(made) == 1
    plain = Parts(make)
    plain.batch_of({"x": torch.rand(1, 2), "y": torch.tensor([1.0])}, "x", "y")
    assert pickle.loads(pickle.dumps(plain))._label_kind == "classes"


@pytest.mark.parametrize(
    ("column", "said", "do"),
    [
        ([1.0, None], "the column 'x' has a null", "df.dropna(subset=['x'])"),
        ([[1.0], None], "the column 'x' has a null", "df.dropna(subset=['x'])"),
        ([[1.0], [None]], "an array in the column 'x'", '~F.exists("x", F.isnull)'),
        (
            [[[1.0]], [[None]]],
            "an array in the column 'x'",
            'F.exists("x", lambda v1: F.exists(v1, F.isnull))',
        ),
    ],
)
def test_a_null_is_told_with_what_drops_it(column: list[Any], said: str, do: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        columns_of(pa.table({"x": column}))
    assert do in caught.value.do


def test_a_null_in_place_of_a_picture_is_told_in_fit_and_in_transform() -> None:
    pictures = columns_of(pa.table({"x": [b"one", None, b"three"], "y": [1, 2, 0]}))
    parts = Parts(make, to_input=lambda pictures: torch.rand(len(pictures), 2))
    with pytest.raises(UsageError, match="null in place of its features") as caught:
        parts.batch_of(pictures, "x", "y")
    assert caught.value.got == "null at row 1 of a batch" and "dropna" in caught.value.do
    model = make()
    trained = TrainedModel(parts, model.state_dict())
    with pytest.raises(UsageError, match="null in place of its features"):
        trained.computed(model, pictures["x"], [""], 8)
