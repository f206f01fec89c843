"""What a sample shows: what rows are, where they are counted, and whether a loss is a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shoal.contracts.sample import LossFn, Sample
from shoal.core.errors import SampleError, UsageError
from shoal.core.terms import INPUT, OF_ROWS, OUTPUT, TARGET, Terms
from shoal.profiling import terms
from shoal.profiling.terms import Outputs, SampleTerms, agreed_terms, count_of, seen


class Model(nn.Module):
    """Any function of its input; with a parameter, as a model has one."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        output: Tensor = self.function(*args) * self.scale
        return output


def shown(function: Any, loss_fn: LossFn | None, *ranks: tuple[Any, Any]) -> Terms:
    """What the samples of all ranks show."""
    return agreed_terms([seen(Sample.of(Model(function), loss_fn, each)) for each in ranks])


def classes(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % 2


def flat_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def pooled(nodes: Tensor, owner: Tensor) -> Tensor:
    return torch.zeros(2, 3).index_add(0, owner, nodes)


def bags(ids: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(ids, torch.ones(9, 2), offsets)


def of_pictures(pictures: Sequence[Tensor]) -> Tensor:
    return torch.stack([picture.mean((1, 2)) for picture in pictures])


def of_packed(packed: PackedSequence) -> Tensor:
    return packed.data.mean() * torch.ones(int(packed.batch_sizes[0]), 3)


def test_rows_are_the_first_dimension() -> None:
    samples = [(torch.rand(n, 3), classes(n)) for n in (5, 4)]
    assert shown(lambda x: x, F.cross_entropy, *samples) == OF_ROWS


@pytest.mark.parametrize("features", [3, 6, 12])
def test_features_as_many_as_the_target_has_numbers_are_no_rows(features: int) -> None:
    net = nn.Linear(features, 3)
    terms = shown(net, F.mse_loss, (torch.randn(2, features), torch.randn(2, 3)))
    counts = [count_of(terms, torch.randn(rows, features)) for rows in (1, 4)]
    assert counts[1] == 4 * counts[0]


def test_graphs_are_counted_at_the_output() -> None:
    samples = [((torch.rand(n, 3), classes(n)), classes(2)) for n in (9, 3)]
    terms = shown(pooled, F.cross_entropy, *samples)
    assert terms.source == OUTPUT and count_of(terms, torch.rand(7, 3)) == 7


def test_bags_are_counted_by_their_output_or_offsets() -> None:
    samples = [((torch.arange(n) % 9, torch.tensor([0, 1, 2, 2])), classes(4)) for n in (8, 5)]
    assert shown(bags, F.cross_entropy, *samples).source == OUTPUT


def test_lists_have_as_many_rows_as_they_are_long() -> None:
    samples = [([torch.rand(3, 4, 4 + i) for i in range(n)], classes(n)) for n in (3, 1)]
    terms = shown(of_pictures, F.cross_entropy, *samples)
    assert terms == OF_ROWS
    assert count_of(terms, (([torch.rand(3, 2, 2)] * 5,), {})) == 5


def test_packed_sequences_are_counted_by_sequence() -> None:
    packed = [pack_sequence([torch.rand(4, 3), torch.rand(2, 3)][:n]) for n in (2, 1)]
    samples = [(p, classes(n)) for p, n in zip(packed, (2, 1), strict=True)]
    terms = shown(of_packed, F.cross_entropy, *samples)
    assert terms.source == OUTPUT and count_of(terms, torch.rand(2, 3)) == 2


def test_tokens_of_a_text_are_terms_where_the_loss_is_a_mean_over_them() -> None:
    samples = [(torch.rand(2, t, 3), classes(2, t)) for t in (7, 5)]
    terms = shown(lambda x: x, flat_entropy, *samples)
    assert count_of(terms, ((torch.rand(2, 6, 3),), {})) == 12


def test_the_columns_of_a_table_of_one_row() -> None:
    samples = [(torch.rand(1, t, 3), classes(1, t)) for t in (9, 3)]
    terms = shown(lambda x: x, flat_entropy, *samples)
    assert count_of(terms, ((torch.rand(1, 6, 3),), {})) == 6


def test_a_sum_along_time_and_a_mean_over_rows_counts_rows() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        return each.view(target.shape).sum(1).mean()

    samples = [(torch.rand(2, t, 3), classes(2, t)) for t in (7, 5)]
    terms = shown(lambda x: x, loss_fn, *samples)
    assert count_of(terms, ((torch.rand(2, 6, 3),), {})) == 2


def test_time_first_is_not_taken_for_rows() -> None:
    """Also where there are as many steps as rows, on every rank."""
    for steps in ((5, 5), (8, 8)):
        samples = [(torch.rand(t, 8, 3), classes(8)) for t in steps]
        terms = shown(lambda x: x.mean(0), F.cross_entropy, *samples)
        inputs, output = ((torch.rand(6, 4, 3),), {}), torch.rand(4, 3)
        assert count_of(terms, inputs if terms.source == INPUT else output) == 4


def test_what_neither_input_nor_output_tells_is_counted_at_the_target() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum() * target).mean()

    samples = [(torch.rand(3, 5), torch.rand(n)) for n in (4, 7)]
    assert shown(lambda x: x.mean(0)[:2], loss_fn, *samples).source == TARGET


@pytest.mark.parametrize(
    ("loss_fn", "summed"),
    [
        (nn.CrossEntropyLoss(), False),
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (lambda out, y: F.cross_entropy(out, y, reduction="sum") / 32, True),
        (lambda out, y: F.mse_loss(out[:, 0], y.float(), reduction="sum"), True),
        (lambda out, y: F.cross_entropy(out, y) + 2.0, False),
        (lambda out, y: out.logsumexp(0).sum(), False),  # over rows: neither
    ],
)
def test_sums(loss_fn: LossFn, summed: bool) -> None:
    samples = [(torch.rand(n, 3), classes(n)) for n in (5, 4)]
    assert shown(lambda x: x, loss_fn, *samples).summed is summed


def test_a_sum_and_something_else_is_refused() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") + 5.0

    with pytest.raises(SampleError, match="does not grow with rows"):
        shown(lambda x: x, loss_fn, (torch.rand(5, 3), classes(5)))


@pytest.mark.parametrize(("reduction", "summed"), [("sum", True), ("mean", False)])
def test_a_model_with_a_loss_of_its_own(reduction: str, summed: bool) -> None:
    """Its dropout and its statistics are out of the way when it is tried."""

    class Own(Model):
        def forward(self, *args: Any) -> Tensor:
            x, y = args
            dropped = F.dropout(x * self.scale, 0.5, self.training)
            return F.cross_entropy(dropped, y, reduction=reduction)

    sample = (torch.rand(5, 3), classes(5)), None
    found = agreed_terms([seen(Sample.of(Own(None), None, sample))])
    assert found.summed is summed


def test_an_input_of_another_form_than_the_samples_is_refused() -> None:
    terms = Terms(INPUT, (0, 1), (0,))
    assert count_of(terms, ((torch.rand(3), torch.rand(4)), {})) == 4
    with pytest.raises(UsageError, match="count=lambda output, y"):
        count_of(terms, ((torch.rand(3),), {}))


def test_ranks_that_show_other_places_take_one_that_all_have() -> None:
    by_first, by_output = Terms(), Terms(OUTPUT)
    ranks = [SampleTerms("mean", (by_first, by_output)), SampleTerms("mean", (by_output,))]
    assert agreed_terms(ranks) == by_output


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def mean_of(*path: Any) -> Any:
    """A loss that is a mean over the rows at the end of a path."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        for step in path:
            batch = batch[step]
        return model(batch).square().mean()

    return compute_loss


def alike(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is no mean over rows: of views against one another."""
    first, second = batch
    return (model(first) @ model(second).T).logsumexp((0, 1))


def of_rows(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([model(row["x"]).square().mean() for row in batch]).mean()


def of_words(model: nn.Module, batch: Any) -> Tensor:
    return model(torch.tensor([[len(word), 1.0, 2.0] for word in batch])).square().mean()


def of_listed_pictures(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([model(picture).square().mean() for picture in batch]).mean()


def of_bags(model: nn.Module, batch: Any) -> Tensor:
    nodes, labels = batch
    return model(nodes).mean() - labels.mean()


def of_two_loaders(model: nn.Module, batch: Any) -> Tensor:
    """A loss of a batch of each loader, which is [x, y, number]."""
    return sum(F.mse_loss(model(part[0])[:, 0], part[1]) for part in (batch["a"], batch["b"]))  # type: ignore[return-value]


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
WHOLE: dict[str, tuple[Any, Any, float]] = {
    "a tensor": (X, mean_of(), 5),
    "a tuple": ((X, X[:, 0]), mean_of(0), 5),
    "a list": ([X, X[:, 0]], mean_of(0), 5),
    "a dict": ({"scale": torch.ones(1), "x": X}, mean_of("x"), 5),
    "a dict of lists": ({"x": X, "names": [["a"]] * 5}, mean_of("x"), 5),
    "a list for each loader": (
        {name: [X, X[:, 0], torch.arange(5)] for name in "ab"},
        of_two_loaders,
        5,
    ),
    "two rows in a list": ([X[:2], X[:2, 0]], mean_of(0), 2),
    "views of which none is a mean": ((X, X + 1), alike, 5),
    "a list of such views": ([X, X + 1], alike, 5),
    "rows in a list": ([{"x": row} for row in X], of_rows, 5),
    "words": (["a", "bc", "def", "g"], of_words, 4),
    "pictures in a list": ([X[:2], X[2:4], X[1:3], X[3:]], of_listed_pictures, 4),
    "a target of its own rows": ((X, torch.ones(2)), of_bags, 2),
    "a batch of one text": ({"x": X[None]}, mean_of("x"), 1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_rows_of_a_whole_batch(name: str) -> None:
    batch, compute_loss, rows = WHOLE[name]
    found = agreed_terms([seen(Sample.of(Rows(), None, batch, compute_loss))], of_batch=True)
    assert (count_of(found, batch), found.summed) == (rows, False)


def of_boxes(model: nn.Module, batch: Any) -> Tensor:
    pictures, targets = batch
    each = [
        model(picture).mean() - target["boxes"].square().mean()
        for picture, target in zip(pictures, targets, strict=True)
    ]
    return torch.stack(each).mean()


BOXES = {"boxes": torch.ones(2, 4)}


@pytest.mark.parametrize(
    "batch",
    [
        ((X, X[:4], X), (BOXES, BOXES, BOXES)),  # pictures and targets, as detection has them
        [["a", "b"], ["c", "d"]],
    ],
)
def test_a_batch_whose_rows_nobody_sees_is_refused(batch: Any) -> None:
    with pytest.raises(SampleError, match="nobody can tell how many rows"):
        seen(Sample.of(Rows(), None, batch, of_boxes))


def test_a_sum_over_the_rows_of_a_whole_batch() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().sum()

    found = agreed_terms([seen(Sample.of(Rows(), None, {"x": X}, compute_loss))], of_batch=True)
    assert found.summed


def test_a_sample_of_one_row_on_one_rank_alone() -> None:
    def terms(rows: int) -> Any:
        return seen(Sample.of(Rows(), None, {"x": X[:rows]}, mean_of("x")))

    assert count_of(agreed_terms([terms(1), terms(4)], of_batch=True), {"x": X}) == 5


@pytest.mark.parametrize("most_bytes", [1 << 20, 8])
def test_a_kept_output_spares_a_forward_unless_it_is_large(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(terms, "_SMALL_BYTES", most_bytes)
    calls: list[int] = []

    def twice(x: Tensor) -> Tensor:
        calls.append(1)
        return 2 * x

    sample = Sample.of(Model(twice), F.mse_loss, (torch.ones(4, 3), torch.zeros(4, 3)))
    expected, outputs = seen(sample), Outputs()
    outputs.kept_of(sample).loss()
    assert seen(sample, outputs=outputs) == expected
    assert len(calls) == 2 + (most_bytes == 8)


def test_a_kept_output_is_as_it_was_before_the_loss_and_has_no_history() -> None:
    outputs = Outputs()
    sample = Sample.of(
        Model(lambda x: 2 * x),
        lambda output, y: (output.mul_(3) - y).mean(),
        (torch.ones(4, 3), torch.zeros(4, 3)),
    )
    outputs.kept_of(sample).loss().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(outputs.copy, torch.full((4, 3), 2.0)) and outputs.copy.grad_fn is None
