"""Hosts that hold stages and bring no rows: ranks that train get what one process gets."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import Apart, assert_same
from one_process import Batch, adamw, built, difference, integers, sgd
from piped import LOOPS, Script, plain, script
from small_models import WORDS, Gpt, of_words
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.session.holding import _check_devices
from shoal.session.session import current
from shoal_tools.testing.planned_faults import FaultyComm, Kill, Killed

END = {"blocks.2.*": "pipeline:2", "norm": "pipeline:2", "head": "pipeline:2"}
ROW = {"blocks.1.*": "pipeline:3", "blocks.2.*": "pipeline:4", "norm": "pipeline:5"}
PINS = {
    "mlp": {"2": "pipeline:2"},
    "vit": {"blocks.[12].*": "pipeline:2", "norm": "pipeline:2", "head": "pipeline:2"},
    "unet": {"up1": "pipeline:2", "conv1.*": "pipeline:2", "out": "pipeline:2"},
    "lstm": {"second": "pipeline:2", "head": "pipeline:2"},
    "adapted": {"blocks.[12].*": "pipeline:2"},
}


def pins_of(kind: str) -> dict[str, str]:
    return {"*": "replicate"} | PINS.get(kind, END)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    [
        "mlp",
        "own loss",
        *(
            pytest.param(kind, marks=SLOW)
            for kind in ("vit", "unet", "lstm", "adapted", "frozen first")
        ),
    ],
)
def test_one_host_holds_the_end(kind: str) -> None:
    assert_same(Apart(script(kind), 2, 1), pins_of(kind))


@pytest.mark.parametrize("optimizer", [adamw, pytest.param(sgd, marks=SLOW)])
@pytest.mark.parametrize(
    "loop", ["clipped", *(pytest.param(loop, marks=SLOW) for loop in LOOPS if loop != "clipped")]
)
def test_three_hosts_in_a_row(loop: str, optimizer: Any) -> None:
    tried = script("gpt", loop=LOOPS[loop], optimizer=optimizer)
    assert_same(Apart(tried, 3, 3), {"*": "replicate", "head": "pipeline:5"} | ROW)


@pytest.mark.parametrize(
    ("hosts", "pins"),
    [
        (2, {"*": "pipeline:0", "blocks.0.*": "pipeline:1", **END, "head": "pipeline:3"}),
        (1, {"*": "pipeline:0", "blocks.[12].*": "pipeline:2", "head": "pipeline:1"}),
    ],
    ids=["the end", "the middle"],
)
def test_hosts_beside_ranks_that_hold_stages_too(hosts: int, pins: dict[str, str]) -> None:
    assert_same(Apart(script("gpt"), 2, hosts), pins)


def test_a_gradient_penalty_of_uneven_rows() -> None:
    """The call of the penalty is computed with whole weights, and weighed by its rows."""

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
        for x, y in batches:
            inputs = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            loss = loss_fn(model(x), y) + 0.2 * (slope.norm(2, dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert_same(Apart(script("mlp", loop=loop), 2, 1), pins_of("mlp"))


@pytest.mark.parametrize("front", ["sliced", pytest.param("factor", marks=SLOW)])
def test_layers_before_may_have_owners_or_factors(front: str) -> None:
    pins = {"*": "replicate", "blocks.[01].mlp.*": front} | END
    assert_same(Apart(script("gpt"), 2, 1), pins)


def test_layers_without_ranks_are_dealt_to_the_hosts() -> None:
    end = {"blocks.[12].*": "pipeline", "norm": "pipeline", "head": "pipeline"}

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> str:
        plain(model, loss_fn, optimizer, batches)
        return shoal.explain(model) if hasattr(optimizer, "accumulate") else ""

    texts = assert_same(Apart(script("gpt", loop=loop), 2, 2), {"*": "replicate"} | end)
    assert "pipeline:2" in str(texts[0]) and "pipeline:3" in str(texts[0])
    assert "rank 3 (apart1)" in str(texts[0])


@pytest.mark.parametrize("count", [2, 3])
def test_rows_go_in_parts(count: int) -> None:
    tried = script("gpt", options={"micro_batches": count})
    assert_same(Apart(tried, 2, 1), pins_of("gpt"))


class Encoder(nn.Module):
    """Has all that transformers of Hugging Face have: masks, buffers, hooks, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, 8), nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, WORDS)
        self.register_buffer("places", torch.arange(16).expand(1, -1), persistent=False)
        self.calls = 0
        self.blocks[2].register_forward_hook(lambda module, args, output: output * 1.5)
        self.head.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.words(ids) + torch.sin(self.places[:, : ids.shape[1]].double()).unsqueeze(-1)
        bias = None
        if mask is not None and not bool(mask.all()):
            bias = (1.0 - mask[:, None, :].double()) * -1e9
        for block in self.blocks:
            x = block(x, bias)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Layer(nn.Module):
    """Attends under a mask, and follows the mean of its values in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.norm = nn.Dropout(0.0), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 8**0.5
        attended = (scores if bias is None else scores + bias).softmax(-1) @ v
        x = x + self.drop(self.out(attended))
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def masked() -> list[Batch]:
    """Batches with a mask and labels, or without a mask."""
    found: list[Batch] = []
    for step in range(4):
        ids = integers(WORDS, 12, 5, seed=step)
        mask = (torch.arange(5) < 3 + ids[:, :1] % 3).long()
        found.append(({"ids": ids, "mask": mask, "labels": ids.roll(1, 1)}, None))
    return found


def in_whole(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> Any:
    """Trains without batch norm by other rows; reads logits and buffers, and evaluates."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    losses = []
    for x, _ in batches:
        optimizer.zero_grad()
        output = model(**x)
        output["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            found = model(x["ids"], x["mask"])["logits"]
            losses.append((found.argmax(-1) == x["labels"]).double().mean())
    return losses


def test_a_model_with_masks_buffers_hooks_and_a_loss_of_its_own() -> None:
    model = built(Encoder)
    tried = Script(model=model, batches=masked(), loss_fn=None, loop=in_whole, uneven=False)
    pins = {"*": "replicate", "blocks.[12].*": "pipeline:2", "head": "pipeline:3"}
    found = assert_same(Apart(tried, 2, 2), pins)
    (expected, _) = tried.alone()
    means = torch.stack([sum(each) / 2 for each in zip(*found, strict=True)])
    assert difference({"": torch.stack(expected)}, {"": means}) <= 1e-10


def test_buffers_that_training_changes_come_back_from_hosts() -> None:
    """Batch norm sees one rank's rows, and all ranks have the mean of statistics."""

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> Any:
        plain(model, loss_fn, optimizer, batches)
        return {name: b.clone() for name, b in model.named_buffers() if "norm" in name}

    batches = [({**x, "mask": torch.ones_like(x["mask"])}, None) for x, _ in masked()]
    tried = Script(model=built(Encoder), batches=batches, loss_fn=own_loss, loop=loop, uneven=False)
    pins = {"*": "replicate", "blocks.[12].*": "pipeline:2", "head": "pipeline:3"}
    apart = Apart(tried, 2, 2).trained(pins)
    together = tried.on_ranks(2, {"*": "replicate"})
    for (_, got), (_, expected) in zip(apart, together, strict=True):
        assert difference(got, expected) <= 1e-10
    assert all(int(b) == 4 for name, b in apart[0][0].items() if "num_batches" in name)


def own_loss(output: Any, target: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def by_functions(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> Any:
    """Losses of the loop's own functions of torch, sliced, scaled and read."""
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        logits = model(x)
        smooth = -logits.log_softmax(-1).mean()
        loss = 0.9 * F.cross_entropy(logits.view(-1, WORDS), y.flatten()) + 0.1 * smooth
        loss = loss + 0.01 * logits[:, 1:].square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found.append((model(x).argmax(-1) == y).double().mean())
    return found


def by_values(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    """The output is changed in place, and has a hook: each rank brings its own values."""
    for x, y in batches:
        optimizer.zero_grad()
        logits = model(x)
        logits *= 0.5
        logits.register_hook(lambda grad: grad * 2)
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [by_functions, by_values])
def test_losses_of_the_loop(loop: Any) -> None:
    assert_same(Apart(script("gpt", loop=loop), 2, 1), pins_of("gpt"))


def test_a_compute_loss() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return of_words(model(x), y) + 0.1 * model(x.flip(1)).square().mean()

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            (loss_fn or compute)(model, batch).backward()
            optimizer.step()

    tried = script("gpt", loop=loop, options={"compute_loss": compute})
    assert_same(Apart(replace(tried, loss_fn=None), 2, 1), pins_of("gpt"))


def test_a_checkpoint_goes_on_on_other_ranks(tmp_path: Path) -> None:
    def of_part(begin: int, end: int, before: Path | None, after: Path | None) -> Script:
        def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
            if before:
                shoal.load(before, model=model, optimizer=optimizer)
            plain(model, loss_fn, optimizer, batches)
            if after:
                shoal.save(after, model=model, optimizer=optimizer)

        return replace(tried, batches=tried.batches[begin:end], loop=loop)

    tried = script("gpt", optimizer=adamw)
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    _, expected = tried.alone()
    Apart(of_part(0, 2, None, first), 2, 2).trained(pins_of("gpt") | {"head": "pipeline:3"})
    of_part(2, 3, first, second).on_ranks(2)
    Apart(of_part(3, 4, second, third), 3, 1).trained({"*": "replicate", "head": "pipeline:3"})
    _, got = of_part(4, 5, third, None).alone()
    assert difference(expected, got) <= 1e-10


def test_an_ordinary_model_comes_back() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        plain(model, loss_fn, optimizer, batches[:3])
        if hasattr(optimizer, "accumulate"):
            shoal.unparallelize(model)
            assert type(model) is Gpt and all(type(p) is nn.Parameter for p in model.parameters())
            kept = copy.deepcopy(optimizer.state_dict()["state"])
            assert len(kept) == len(list(model.parameters()))

    assert_same(Apart(script("gpt", loop=loop, optimizer=adamw), 2, 1), pins_of("gpt"))


def test_values_cross_as_codes() -> None:
    tried = script("gpt")
    _, expected = tried.alone()
    pins = {layer: pin.replace("pipeline", "pipeline+bfloat16") for layer, pin in END.items()}
    (_, got), *_ = Apart(tried, 2, 1).trained({"*": "replicate"} | pins)
    assert 1e-6 < difference(expected, got) < 0.1


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no such rank": ({"*": "replicate", "head": "pipeline:3"}, "a rank that there is not"),
    "a layer that is cut": (
        {"*": "replicate", "blocks.0.mlp.*": "column", "head": "pipeline:2"},
        "column does not serve layers beside those on hosts",
    ),
    "some ranks that train": (
        {"*": "replicate", "blocks.*": "pipeline:1", "head": "pipeline:2"},
        "all layers of a model, or none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_are_refused(name: str) -> None:
    pins, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        Apart(script("gpt"), 2, 1).trained(pins)


def test_a_second_backward_is_refused() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        x, y = batches[0]
        loss = loss_fn(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(UsageError, match="a second backward"):
        Apart(script("gpt", loop=loop), 2, 1).trained(pins_of("gpt"))


@pytest.mark.parametrize("lost", [pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), 2, 3])
def test_a_lost_rank_is_named_by_all(lost: int) -> None:
    """Also a host without rows; no rank waits for a time-out."""
    comms: dict[int, FaultyComm] = {}
    errors: dict[int, BaseException] = {}

    def wrapped(comm: Any) -> Any:
        comms[comm.rank] = FaultyComm(comm, [])
        return comms[comm.rank]

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        plain(model, loss_fn, optimizer, batches[:1])
        if shoal.world().rank == 0:
            comms[lost].suffer(Kill(lost, comms[lost].operations + 3))
        try:
            plain(model, loss_fn, optimizer, batches[1:])
        except BaseException as error:
            errors[shoal.world().rank] = error
            raise

    begin = time.monotonic()
    with pytest.raises(Killed):
        tried = Apart(script("gpt", loop=loop), 2, 2, 60.0, wrapped)
        tried.trained(pins_of("gpt") | {"head": "pipeline:3"})
    assert time.monotonic() - begin < 40
    assert set(errors) == {0, 1}
    for rank, error in errors.items():
        assert rank == lost or f"rank {lost}" in str(error)


def test_ranks_that_do_other_things_are_told() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        x, y = batches[0]
        loss_fn(model(x), y).backward()
        if shoal.world().rank:
            optimizer.step()
        model.head.weight.sum().item()

    with pytest.raises(RanksDiffer, match="Step of optimizer 0"):
        Apart(script("gpt", loop=loop), 2, 1, 60.0).trained(pins_of("gpt"))


def test_a_saved_plan_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"

    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        if hasattr(optimizer, "accumulate") and not shoal.world().rank:
            current().attached[model].plan.save(file)
        plain(model, loss_fn, optimizer, batches)

    _, expected = script("gpt").alone()
    Apart(script("gpt", loop=loop), 2, 1).trained(pins_of("gpt"))
    read = script("gpt", options={"plan": file})
    (_, got), *_ = Apart(read, 2, 1).trained({})
    assert difference(expected, got) <= 1e-10


def test_layers_on_a_gpu_are_refused() -> None:
    """The device "meta" stands for a GPU."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    _check_devices(model, {"0": 2, "1": 1}, 2)
    with pytest.raises(PlanError, match="on CPUs only"):
        _check_devices(model, {"0": 0, "1": 2}, 2)
