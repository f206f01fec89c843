"""A profile says what the model is and in which order its gradients come, the same on every rank,
or why it cannot.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from profiled_models import Image, OwnLoss, Text, ids, pixels, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, SampleError
from shoal.core.facts import LayerProfile, ModelProfile
from shoal.profiling.layers import ProfileOptions, _by_the_fastest, profile_model
from shoal.profiling.products import ProductCost, ProductFacts
from shoal.strategies.embedding import IdFacts

pytestmark = pytest.mark.exact_times


def profile(model: nn.Module, loss_fn: Any, sample: Any, **options: Any) -> ModelProfile:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return profile_model(
        model, loss_fn, [optimizer], sample, ThreadComm(), ProfileOptions(**options)
    )


def shape(layer: LayerProfile) -> tuple[int, int, int]:
    return layer.rows, layer.inputs, layer.outputs


@pytest.fixture(scope="module")
def text() -> ModelProfile:
    return profile(Text(), token_loss, (ids(), ids()))


@pytest.fixture(scope="module")
def image() -> ModelProfile:
    return profile(Image(), F.cross_entropy, pixels())


def test_layers_come_in_the_order_of_backward(text: ModelProfile) -> None:
    """The reference order is taken from plain gradient hooks on a model of its own."""
    model, order = Text(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    token_loss(model(ids()), ids()).backward()
    owner = {p.name: layer.name for layer in text.layers for p in layer.parameters}
    last = {owner[name]: when for when, name in enumerate(order)}
    assert [layer.name for layer in text.layers] == [*sorted(last, key=last.__getitem__), "unused"]
    times = [layer.ready_s for layer in text.layers]
    assert times == sorted(times) and times[0] > 0 and times[-1] == text.backward_s


def test_a_reused_layer_is_ready_after_its_last_use() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.second(x)))

    got = profile(Reused(), F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))
    assert [layer.name for layer in got.layers] == ["first", "second"]
    assert (
        got.layer("second").calls == 2
        and got.layer("second").rows == 6
        and got.layer("first").rows == 3
    )


def test_sizes_of_linear_and_embedding_count_tokens(text: ModelProfile) -> None:
    assert shape(text.layer("head")) == (10, 8, 11)
    assert shape(text.layer("embed")) == (10, 11, 8)
    assert shape(text.layer("norm")) == (0, 0, 0)
    for name in ("head", "embed"):
        assert text.layer(name).measured(ProductFacts).seconds(10) > 0


def test_sizes_of_convolutions(image: ModelProfile) -> None:
    assert shape(image.layer("stem")) == (4 * 8 * 8, 9, 4)
    assert shape(image.layer("grouped")) == (4 * 3 * 3, 2 * 9, 6)
    assert image.layer("grouped").kind == "Conv2d"
    assert image.layer("grouped").measured(ProductFacts).seconds(10) == 0


def test_parameters_belong_to_the_module_that_holds_them(
    text: ModelProfile, image: ModelProfile
) -> None:
    assert [p.name for p in text.layer("(model)").parameters] == ["position"]
    assert {p.name for p in text.layer("attention").parameters} == {
        "attention.in_proj_weight",
        "attention.in_proj_bias",
    }
    weight = next(p for p in text.layer("head").parameters if p.name == "head.weight")
    assert (weight.shape, weight.numel, weight.itemsize) == ((11, 8), 88, 4)
    assert "frozen" not in {layer.name for layer in image.layers}
    assert image.nbytes == sum(p.nbytes for p in Image().parameters() if p.requires_grad)


def test_unused_parameters_are_flagged(text: ModelProfile) -> None:
    assert [p.used for p in text.layer("unused").parameters] == [False, False]
    assert text.layer("unused").calls == 0
    assert all(p.used for layer in text.layers if layer.name != "unused" for p in layer.parameters)


def test_times_of_the_parts_stay_within_the_whole(text: ModelProfile) -> None:
    assert 0 < sum(layer.forward_s for layer in text.layers) <= text.forward_s
    assert 0 < sum(layer.backward_s for layer in text.layers) <= text.backward_s
    assert text.optimizer_s > 0
    assert text.layer("head").forward_s > 0 and text.layer("head").backward_s > 0
    # its output is the head's: the inner layer is billed
    assert text.layer("(model)").backward_s == 0


def test_time_goes_to_the_layer_that_took_it() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            time.sleep(0.05)
            return dy

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(Slow.apply(self.b(self.a(x))))

    got = profile(Net(), F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))
    assert got.layer("c").backward_s > 0.05 > got.layer("b").backward_s
    assert got.layer("c").ready_s < 0.05 < got.layer("b").ready_s


def test_memory_for_a_gradient_takes_no_longer_than_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page faults while all ranks have them take any time; what x's gradient takes is none of
    it.
    """
    slow = ProductCost(fixed_s=1e-9, s_per_row=1e-9, anew_s=100.0)
    monkeypatch.setattr(
        "shoal.profiling.products.measure_products",
        lambda products, ranks: dict.fromkeys(products, slow),
    )
    model, sample = (
        nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 4)),
        (torch.rand(5, 9), torch.arange(5) % 4),
    )
    found = profile(model, F.cross_entropy, sample)
    first, second = found.layer("0"), found.layer("1")
    product = second.measured(ProductFacts)
    assert first.measured(ProductFacts).own_s == pytest.approx(first.backward_s)
    assert product.own_s == pytest.approx(second.backward_s - product.seconds(5))


def test_activation_checkpointing_counts_a_layer_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return checkpoint(self.b, h, use_reentrant=True) + checkpoint(
                self.b, h, use_reentrant=False
            )

    got = profile(Checkpointed(), F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))
    assert got.layer("b").calls == 2 and got.layer("b").rows == 6
    assert [layer.name for layer in got.layers] == ["b", "a"]


@pytest.mark.parametrize("form", ["scalar", "dict", "attribute"])
def test_keyword_arguments_and_a_model_with_its_own_loss(form: str) -> None:
    sample = {"features": torch.ones(6, 4), "labels": torch.zeros(6, dtype=torch.long)}
    got = profile(OwnLoss(form), None, (sample, None))
    assert shape(got.layer("fc")) == (6, 4, 3)


def test_positional_arguments() -> None:
    got = profile(
        nn.Bilinear(2, 3, 4), F.mse_loss, ((torch.ones(5, 2), torch.ones(5, 3)), torch.ones(5, 4))
    )
    assert [layer.name for layer in got.layers] == ["(model)"]


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def labels(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.long)


BAD_SAMPLES: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "none": (linear, F.cross_entropy, None, "there is no sample"),
    "not a pair": (linear, F.cross_entropy, torch.ones(6, 4), "not a pair"),
    "wrong width": (
        linear,
        F.cross_entropy,
        (torch.ones(6, 5), labels(6)),
        r"does not take the sample.*\(6, 5\)",
    ),
    "wrong names": (
        linear,
        F.cross_entropy,
        ({"inputs": torch.ones(6, 4)}, labels(6)),
        "inputs: float32",
    ),
    "wrong target": (
        linear,
        F.cross_entropy,
        (torch.ones(6, 4), labels(5)),
        r"loss_fn does not take.*int64 \(5,\)",
    ),
    "not a scalar": (linear, lambda out, y: out, (torch.ones(6, 4), labels(6)), r"shape \(6, 3\)"),
    "no gradient": (
        linear,
        lambda out, y: out.detach().sum(),
        (torch.ones(6, 4), labels(6)),
        "does not depend",
    ),
    "no loss": (
        linear,
        None,
        (torch.ones(6, 4), None),
        r"the model \(there is no loss_fn\) returned a loss of shape",
    ),
    "a target too many": (
        linear,
        None,
        (torch.ones(6, 4), labels(6)),
        "there is no loss_fn to take it",
    ),
    "lazy": (
        lambda: nn.LazyLinear(3),
        F.cross_entropy,
        (torch.ones(6, 4), labels(6)),
        "run the model once",
    ),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_bad_sample_is_refused_with_its_shapes(case: str) -> None:
    build, loss_fn, sample, message = BAD_SAMPLES[case]
    model = build()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(SampleError, match=f"(?s){message}"):
        profile_model(model, loss_fn, [optimizer], sample, ThreadComm())
    assert not model._forward_hooks or case == "lazy"


def text_on(comm: ThreadComm) -> ModelProfile:
    model = Text()
    return profile_model(
        model, token_loss, [torch.optim.AdamW(model.parameters())], (ids(), ids()), comm
    )


def test_every_rank_gets_the_same_profile(text: ModelProfile) -> None:
    profiles = run(3, text_on)
    assert profiles[0] == profiles[1] == profiles[2]
    assert [layer.name for layer in profiles[0].layers] == [layer.name for layer in text.layers]
    assert profiles[0].digest == text.digest


def test_uneven_rows_give_the_most_of_any_rank() -> None:
    def work(comm: ThreadComm) -> ModelProfile:
        x = torch.ones(2 + comm.rank, 4)
        return profile_model(nn.Linear(4, 3), F.mse_loss, [], (x, torch.ones(len(x), 3)), comm)

    first, second = run(2, work)
    assert first == second and first.layer("(model)").rows == 3


def test_a_bad_sample_on_one_rank_is_an_error_on_all() -> None:
    def work(comm: ThreadComm) -> str:
        x = torch.ones(2, 4 + comm.rank)
        with pytest.raises(SampleError) as caught:
            profile_model(nn.Linear(4, 3), F.mse_loss, [], (x, torch.ones(2, 3)), comm)
        return str(caught.value)

    first, second = run(2, work)
    assert first.startswith("rank 1 cannot go on") and "(2, 5)" in first
    assert second.startswith("the model does not take the sample")


def test_ranks_with_different_models_are_named() -> None:
    def work(comm: ThreadComm) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 + comm.rank // 2))
        with pytest.raises(RanksDiffer) as caught:
            profile_model(model, F.mse_loss, [], (torch.ones(2, 4), None), comm)
        return str(caught.value)

    for message in run(3, work):
        assert "rank 2, layer 1" in message and "(4, 4)" in message and "(3, 4)" in message


def test_a_slow_model_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.steps._BUDGET_S", 0.0)
    model = Image()
    calls = SimpleQueue[int]()  # a list would be as before
    model.register_forward_hook(lambda *_: calls.put(1))
    profile(model, F.cross_entropy, pixels())
    # to warm up, to measure, and to find what goes into the loss
    assert calls.qsize() == 3


def test_profiles_without_times_are_reproducible(image: ModelProfile) -> None:
    def untimed(got: ModelProfile) -> list[tuple[Any, ...]]:
        return [
            (
                layer.name,
                layer.kind,
                layer.rows,
                [replace(p, ready_s=0.0) for p in layer.parameters],
            )
            for layer in got.layers
        ]

    assert untimed(image) == untimed(profile(Image(), F.cross_entropy, pixels()))


class Sometimes(nn.Module):
    """Calls its second layer only for batches that ask for it; puts a parameter out as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4)
        self.query = Query()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h *= 2.0
        if x[0, 0] > 0:
            h = self.second(h)
        return h + self.table(torch.tensor([1, 2, 2])).sum(0) + self.query()


class Query(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return self.q


def test_a_layer_that_ranks_call_in_different_numbers_is_found() -> None:
    first = Sometimes()

    def work(comm: ThreadComm) -> ModelProfile:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sample = torch.full((3, 4), float(comm.rank)), torch.zeros(3, 4)
        return profile_model(model, F.mse_loss, [optimizer], sample, comm)

    vary = {layer.name: layer.calls_vary for layer in run(2, work)[0].layers}
    assert vary == {"first": False, "second": True, "table": False, "query": False}


def test_ids_are_counted_though_the_model_works_in_place() -> None:
    found = profile(Sometimes(), F.mse_loss, (torch.ones(3, 4), torch.zeros(3, 4)))
    assert found.layer("table").measured(IdFacts).distinct == 2


def test_no_hook_stays_on_a_parameter_that_is_an_output() -> None:
    model = Sometimes()
    profile(model, F.mse_loss, (torch.ones(3, 4), torch.zeros(3, 4)))
    assert not model.query.q._backward_hooks


def test_an_empty_tensor_among_others_is_no_empty_sample() -> None:
    class Boxes(nn.Linear):
        def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
            return super().forward(x) + boxes.sum()

    found = profile(
        Boxes(4, 2), F.mse_loss, ((torch.ones(3, 4), torch.zeros(0, 4)), torch.zeros(3, 2))
    )
    assert found.layers[0].rows == 3


def of_seconds(*layers: tuple[float, float]) -> ModelProfile:
    """A rank's profile of layers that take so long in forward and in backward."""
    made = [
        LayerProfile(name, "Linear", (), forward_s=forward_s, backward_s=backward_s)
        for name, (forward_s, backward_s) in zip("abc", layers, strict=True)
    ]
    forward_s, backward_s = (sum(seconds) for seconds in zip(*layers, strict=True))
    return ModelProfile(tuple(made), forward_s, backward_s, 0.0, digest="")


def test_layers_of_a_slow_host_have_the_proportions_of_the_fastest() -> None:
    """A quota makes a slow host sleep inside of one layer; its seconds together are right."""
    fast = of_seconds((1.0, 2.0), (2.0, 4.0), (1.0, 2.0))
    slow = of_seconds((3.0, 6.0), (4.0, 17.0), (5.0, 1.0))
    same, dealt = _by_the_fastest([fast, slow])
    assert same == fast
    seconds = [(layer.forward_s, layer.backward_s) for layer in dealt.layers]
    assert seconds == [(3.0, 6.0), (6.0, 12.0), (3.0, 6.0)]
    assert (dealt.forward_s, dealt.backward_s) == (12.0, 24.0)
    like = of_seconds((1.2, 2.2), (2.2, 4.2), (1.2, 2.2))
    assert _by_the_fastest([fast, like]) == [fast, like]
