"""A weight that is used otherwise than by calling its layer is found, and the reason names who uses
it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from profiled_models import Text, ids, token_loss
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from shoal.comm.threads import ThreadComm
from shoal.core.facts import Cluster, Link, Topology
from shoal.profiling.layers import profile_model
from shoal.strategies.sliced import Sliced


def reasons(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
) -> dict[str, str]:
    sample = (torch.ones(3, 4), torch.ones(3, 4))
    return {
        layer.name: layer.outside_use
        for layer in profile_model(model, loss_fn, [], sample, ThreadComm()).layers
    }


class Net(nn.Module):
    """Two layers; subclasses do something to the second one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_attention_reads_its_projection_without_calling_it() -> None:
    profile = profile_model(Text(), token_loss, [], (ids(), ids()), ThreadComm())
    found = {layer.name: layer.outside_use for layer in profile.layers if layer.outside_use}
    read = "its weight is read by attention (MultiheadAttention) without calling it"
    assert found == {"attention.out_proj": read}


def test_asking_for_shapes_and_types_is_no_use() -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert self.b.weight.shape[0] == self.b.weight.size(0) and self.b.weight.requires_grad
            return self.b(self.a(x.to(self.b.weight.dtype).to(self.b.weight.device)))

    assert reasons(Asks()) == {"a": "", "b": ""}


def test_a_borrowed_weight() -> None:
    class Borrows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + F.linear(x, self.b.weight)

    assert reasons(Borrows()) == {
        "a": "",
        "b": "its weight is read by (model) (Borrows) without calling it",
    }


def test_a_weight_in_a_list_and_one_in_the_loss() -> None:
    class Stacks(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * torch.stack([self.b.bias, self.b.bias]).sum()

    model = Stacks()
    found = reasons(model, lambda output, y: F.mse_loss(output, y) + model.a.weight.square().sum())
    assert found["a"] == "its weight is read by the loss"
    assert found["b"] == "its bias is read by (model) (Stacks) without calling it"


def test_a_custom_function_hides_nothing() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return dy @ w, dy.T @ x

    class Custom(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(Product.apply(self.a(x), self.b.weight))

    assert reasons(Custom()) == {
        "a": "",
        "b": "its weight is read by (model) (Custom) without calling it",
    }


@pytest.mark.parametrize("hidden", [True, False])
def test_what_is_read_unseen_by_torchs_functions_is_not_for_owners(hidden: bool) -> None:
    class Native(nn.Linear):
        """As a layer in C++ is: tensors are unpacked without a word."""

        def forward(self, input: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction() if hidden else nullcontext():
                return super().forward(input)

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b = Native(4, 4)

    profile = profile_model(
        Mixed(), F.mse_loss, [], (torch.ones(3, 4), torch.ones(3, 4)), ThreadComm()
    )
    cluster = Cluster(Topology(("h0", "h1")), Link(1e-4, 1e8), 1.0)
    told = {layer.name: Sliced().refuses(layer, cluster) for layer in profile.layers}
    assert told["a"] is None
    assert ("C++" in str(told["b"])) == hidden


def test_a_view_taken_before_forward_is_given_away_by_its_gradient() -> None:
    class Cached(Net):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = self.b.weight.t()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) @ self.transposed

    assert reasons(Cached()) == {"a": "", "b": "its gradient comes without a call of the layer"}


def test_tied_weights_name_each_other() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    profile = profile_model(Tied(), token_loss, [], (ids(), ids()), ThreadComm())
    assert {layer.name: layer.outside_use for layer in profile.layers} == {
        "embed": "its weight is tied to head",
        "head": "its weight is tied to embed",
    }
    assert [p.name for p in profile.layer("head").parameters] == ["head.bias"]
    assert [p.name for p in profile.layer("embed").parameters] == ["embed.weight"]


def test_one_module_under_two_names_is_not_tied() -> None:
    layer = nn.Linear(4, 4)
    assert reasons(nn.Sequential(layer, nn.ReLU(), layer)) == {"0": ""}


class Mixed(nn.Linear):
    """A Linear that is none: an output depends on the whole weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.softmax(0), self.bias)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda net: setattr(net, "b", Mixed(4, 4)), "and its weight is read by softmax"),
        (
            lambda net: setattr(net.b, "forward", lambda x: F.linear(x, net.b.weight)),
            "its forward has been replaced",
        ),
        (lambda net: net.b.weight.requires_grad_(False), "its weight is frozen"),
        (
            lambda net: net.b.register_forward_pre_hook(lambda m, x: (x[0] + m.weight,)),
            "its weight is read by add",
        ),
        (
            lambda net: net.b.weight.register_hook(lambda grad: grad.clamp(-1, 1)),
            "its weight has a gradient hook",
        ),
        (
            lambda net: net.b.bias.register_post_accumulate_grad_hook(lambda p: None),
            "its bias has a gradient hook",
        ),
    ],
    ids=["subclass", "forward", "frozen", "hook", "gradient hook", "accumulated gradient hook"],
)
def test_a_layer_that_is_not_torchs_own(change: Callable[[Net], object], reason: str) -> None:
    class Four(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:1].expand(4, 4))[:3]

    net = Four()
    change(net)
    found = reasons(net)
    assert reason in found["b"] and found["a"] == ""


def test_parametrized_weights_belong_to_their_parametrization() -> None:
    net = Net()
    parametrizations.weight_norm(net.b)
    assert parametrize.is_parametrized(net.b)
    found = reasons(net)
    assert found["a"] == "" and "ParametrizedLinear" in found["b"]
    assert found.keys() == {"a", "b", "b.parametrizations.weight"}


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_of_embeddings(option: dict[str, bool]) -> None:
    model = nn.Embedding(11, 11, **option)  # type: ignore[arg-type]
    layer = profile_model(model, token_loss, [], (ids(), ids()), ThreadComm()).layers[0]
    assert next(iter(option)) in layer.outside_use


def test_padding_of_an_embedding_is_fine() -> None:
    layer = profile_model(
        nn.Embedding(11, 11, padding_idx=0), token_loss, [], (ids(), ids()), ThreadComm()
    ).layers[0]
    assert layer.outside_use == ""


@pytest.mark.parametrize("look", [bool, float, Tensor.item, Tensor.tolist, torch.nonzero])
def test_layers_behind_a_look_at_values_may_be_called_unlike_often(
    look: Callable[[Tensor], object],
) -> None:
    class Gated(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            look(hidden.detach().sum())
            return self.b(hidden)

    sample = (torch.ones(3, 4), torch.ones(3, 4))
    layers = profile_model(Gated(), F.mse_loss, [], sample, ThreadComm()).layers
    told = {layer.name: layer.may_vary for layer in layers}
    assert told["a"] == "" and "looks at a tensor's values" in told["b"]
