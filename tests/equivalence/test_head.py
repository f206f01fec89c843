"""Heads whose logits stay cut: every use of them that needs no gathering, and every other one, as
in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    DEVICE,
    UNEVEN,
    Training,
    adamw,
    assert_same,
    built,
    call,
    cluster_of,
    features,
    integers,
    numbers,
    on_threads,
    rows_of,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, UsageError
from shoal.front.session_start import using
from shoal.tensors.boundary import CallRows
from shoal.tensors.cut_output import CutOutput

CLASSES = 11


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class Speaking(nn.Module):
    """A language model's head: (rows, tokens, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def spoken() -> list[tuple[Tensor, Tensor]]:
    batches = []
    for step in range(5):
        ids = integers(CLASSES, 12, 5, seed=step)
        batches.append((ids, ids.masked_fill(integers(3, 12, 5, seed=step + 20) == 0, -100)))
    return batches


def with_margin(out: Tensor, y: Tensor) -> Tensor:
    """Large-margin cosine loss (Wang et al., "CosFace", 2018, equation 4), of logits instead of
    cosines.
    """
    target, log_sum = out.gather(1, y.unsqueeze(1)).squeeze(1), torch.logsumexp(out, 1)
    others = log_sum + torch.log1p(-torch.exp(target - log_sum))
    return (torch.logaddexp(others, target - 0.35) - (target - 0.35)).mean()


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64, device=DEVICE)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
    "none": lambda out, y: F.cross_entropy(out, y, reduction="none").square().mean(),
    "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.2),
    "weighted": lambda out, y: F.cross_entropy(out, y, WEIGHTS, reduction="none").mean(),
    "weighted and smoothed": lambda out, y: F.cross_entropy(
        out, y, WEIGHTS, reduction="none", label_smoothing=0.2
    ).mean(),
    "scaled and shifted": lambda out, y: F.cross_entropy((out - 1.5) / 0.7 * 1.1, y),
    "capped": lambda out, y: F.cross_entropy(torch.tanh(out / 3) * 3, y),
    "cast": lambda out, y: F.cross_entropy(out.float().to(torch.float64), y),
    "log_softmax": lambda out, y: F.nll_loss(F.log_softmax(out, -1), y),
    "modules of log_softmax": lambda out, y: nn.NLLLoss(WEIGHTS, reduction="none")(
        nn.LogSoftmax(1)(out), y
    ).mean(),
    "a penalty beside": lambda out, y: (
        F.cross_entropy(out, y) + 1e-2 * torch.logsumexp(out, -1).square().mean()
    ),
    "a margin": lambda out, y: with_margin(out, y),
    "twice": lambda out, y: (
        F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out * 2, (y + 1) % CLASSES)
    ),
}
GATHERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": lambda out, y: (F.softmax(out, -1) * F.log_softmax(out, -1)).sum(-1).mean(),
    "probabilities of all": lambda out, y: torch.softmax(out * 2, dim=1).square().sum() / len(y),
    "squares": lambda out, y: out.square().mean(),
    "probabilities": lambda out, y: F.cross_entropy(out, F.one_hot(y, CLASSES).to(out.dtype)),
    "a penalty beside": lambda out, y: F.cross_entropy(out, y) + 1e-2 * out.var(-1).mean(),
    "other classes": lambda out, y: F.cross_entropy(out[:, 1:], y.clamp(max=CLASSES - 2)),
}


@UNEVEN
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss, uneven):
    training = Training(model=built(mlp), batches=features(7, CLASSES), loss_fn=LOSSES[loss])
    assert_same(training, 3, "head", uneven=uneven, within=1e-6 if loss == "cast" else 1e-10)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks(ranks, optimizer):
    assert_same(
        Training(model=built(mlp), batches=features(7, CLASSES), optimizer=optimizer), ranks, "head"
    )


@pytest.mark.parametrize("loss", GATHERED)
def test_what_the_sample_does_not_show_is_gathered(loss):
    """The planner saw a plain cross entropy; what comes later is right all the same."""

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            GATHERED[loss](model(x), y).backward()
            optimizer.step()

    assert_same(
        Training(model=built(mlp), batches=features(7, CLASSES), loop=loop), 3, "head", uneven=True
    )


class Tempered(nn.Module):
    """A head whose logits a learned number scales, once it is on."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.body, self.head, self.on = nn.Linear(7, 5), nn.Linear(5, CLASSES), on
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(x)))
        return logits * self.temperature.exp() if self.on else logits


def test_a_learned_temperature_gets_the_gradient_of_every_class():
    def loop(model, loss_fn, optimizer, batches):
        model.on = True
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    training = Training(
        model=built(lambda: Tempered(on=False)), batches=features(7, CLASSES), loop=loop
    )
    assert_same(training, 3, "head")
    with pytest.raises(AssertionError, match="serves no layer"):
        Training(model=built(lambda: Tempered(on=True)), batches=features(7, CLASSES)).pins_of(
            "head", 3
        )


@pytest.mark.parametrize("loss", [*GATHERED, "mse"])
def test_a_sample_that_needs_the_logits_is_refused(loss):
    losses = {**GATHERED, "mse": lambda out, y: F.mse_loss(out, torch.zeros_like(out))}

    def work(comm: ThreadComm) -> None:
        model = mlp().to(DEVICE, torch.float64)
        sample = rows_of(features(7, CLASSES)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                model, losses[loss], sgd(model.parameters()), sample=sample, pins={"2": "head"}
            )

    with pytest.raises(
        PlanError, match="head cannot serve layer 2: its output does not go into a cross entropy"
    ):
        on_threads(2, work)


SHIFTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flatten": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    "shifted": lambda out, y: F.cross_entropy(
        out[:, :-1, :].contiguous().view(-1, CLASSES), y[:, 1:].contiguous().view(-1)
    ),
    "reshaped": lambda out, y: F.cross_entropy(
        out[..., :-1, :].reshape(-1, out.size(-1)), y[..., 1:].reshape(-1)
    ),
    "masked": lambda out, y: F.cross_entropy(out[y >= 0], y[y >= 0]),
    "last token": lambda out, y: F.cross_entropy(out[:, -1], y[:, -1].clamp(min=0)),
    "transposed": lambda out, y: F.cross_entropy(
        out.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)
    ),
}


@UNEVEN
@pytest.mark.parametrize("loss", SHIFTS)
def test_tokens(loss, uneven):
    def count(output: Any, target: Tensor) -> Tensor:
        kept = {
            "shifted": target[:, 1:],
            "reshaped": target[:, 1:],
            "last token": target[:, -1].clamp(min=0),
        }
        return (kept.get(loss, target) != -100).sum()

    training = Training(model=built(Speaking), batches=spoken(), loss_fn=SHIFTS[loss], count=count)
    assert_same(training, 3, "head", uneven=uneven)


class Own(nn.Module):
    """Computes its loss itself, as language models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Speaking()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(ids).float()
        loss = F.cross_entropy(
            logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].reshape(-1)
        )
        return {"loss": loss, "logits": logits}


@UNEVEN
def test_a_loss_inside_the_model(uneven):
    def loop(model, loss_fn, optimizer, batches):
        for x, _ in batches:
            optimizer.zero_grad()
            call(model, x)["loss"].backward()
            optimizer.step()

    batches = [({"ids": x, "labels": y}, None) for x, y in spoken()]
    training = Training(
        model=built(Own),
        batches=batches,
        loss_fn=None,
        loop=loop,
        count=lambda output, called_with: (called_with["labels"][..., 1:] != -100).sum(),
    )
    assert_same(training, 3, "head", uneven=uneven, within=1e-6)


def logits_on(ranks: int, work: Callable[[CutOutput, Tensor], Any]) -> list[Any]:
    """What `work` returns on each rank, of cut logits and the same logits whole."""
    whole = numbers(2 * ranks, 3, CLASSES)

    def on_rank(comm: ThreadComm) -> Any:
        parts = whole.tensor_split(ranks, -1)
        mine = whole[2 * comm.rank : 2 * comm.rank + 2]
        rows = CallRows(comm, (6,) * ranks)
        widths = [part.shape[-1] for part in parts]
        cut = CutOutput.of(
            parts[comm.rank].reshape(-1, widths[comm.rank]),
            rows,
            widths,
            torch.arange(6, device=DEVICE).view(2, 3),
        )
        return work(cut, mine)

    return run(ranks, on_rank, timeout_s=10)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda out: F.cross_entropy(out.flatten(0, 1), torch.arange(6, device=DEVICE)),
    "some": lambda out: F.cross_entropy(out[:, 1], torch.arange(2, device=DEVICE)),
    "out of order": lambda out: F.cross_entropy(
        out.permute(1, 0, 2).reshape(6, -1), torch.arange(6, device=DEVICE)
    ),
    "twice": lambda out: F.cross_entropy(out[0][ids(0, 2, 2)], ids(1, 2, 3)),
    "ignored": lambda out: F.cross_entropy(out[1], ids(1, -7, 3), WEIGHTS, ignore_index=-7),
    "one": lambda out: F.cross_entropy(out[1, 2], ids(4)[0]),
    "smoothed": lambda out: F.cross_entropy(out[1], ids(1, -100, 3), WEIGHTS, label_smoothing=0.3),
}


@pytest.mark.parametrize("loss", PICKS)
def test_gradients_of_picked_rows(loss):
    def work(cut: CutOutput, whole: Tensor) -> None:
        part, rows = cut._part.requires_grad_(), cut._rows
        whole.requires_grad_()
        expected, got = PICKS[loss](whole), PICKS[loss](cut)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        (expected * (rows.comm.rank + 1)).backward()
        (got * (rows.comm.rank + 1)).backward()
        mean = rows.to_rows(part.grad, cut._widths, 1.0) * rows.comm.size
        torch.testing.assert_close(mean, whole.grad.flatten(0, 1), rtol=1e-12, atol=1e-12)

    logits_on(3, work)


def test_the_best_classes_are_found_without_gathering():
    def work(cut: CutOutput, whole: Tensor) -> None:
        cut._tell = lambda rows: pytest.fail("gathered")
        assert torch.equal(cut.argmax(-1), whole.argmax(-1))
        assert torch.equal(
            cut[:, 1:].argmax(dim=-1, keepdim=True), whole[:, 1:].argmax(dim=-1, keepdim=True)
        )
        values, classes = cut.topk(5)
        assert torch.equal(values, whole.topk(5).values)
        assert torch.equal(classes, whole.topk(5).indices)
        assert torch.equal(torch.topk(cut, 2, dim=-1)[1], whole.topk(2).indices)
        assert torch.equal(
            torch.argmax(input=torch.mul(input=cut, other=-1), dim=2), whole.argmin(-1)
        )

    logits_on(3, work)


def test_softmax_and_sums_of_exponentials_stay_cut():
    def work(cut: CutOutput, whole: Tensor) -> None:
        for made in (
            lambda x: x.softmax(-1),
            lambda x: F.log_softmax(x, 2),
            lambda x: torch.softmax(x, dim=2),
        ):
            assert isinstance(made(cut), CutOutput)
            assert torch.allclose(made(cut) + 0 * whole, made(whole), rtol=1e-12)
        assert F.softmax(cut, -1, dtype=torch.float32).dtype == torch.float32
        for keepdim in (False, True):
            assert torch.allclose(
                torch.logsumexp(cut, -1, keepdim), torch.logsumexp(whole, -1, keepdim), rtol=1e-12
            )
        index = torch.full((*whole.shape[:-1], 1), 3, device=DEVICE)
        assert torch.equal(torch.gather(cut, 2, index), torch.gather(whole, 2, index))
        assert torch.equal(
            cut.gather(2, index.expand(whole.shape)), whole.gather(2, index.expand(whole.shape))
        )

    logits_on(3, work)


def test_everything_else_gathers():
    def work(cut: CutOutput, whole: Tensor) -> None:
        assert (cut.shape, cut.dtype, cut.device, len(cut)) == (
            whole.shape,
            whole.dtype,
            whole.device,
            2,
        )
        assert torch.equal(cut.sum(-1), whole.sum(-1))
        assert torch.equal(torch.softmax(cut, 0), whole.softmax(0))
        assert torch.equal(cut[..., 2], whole[..., 2])
        assert torch.equal(cut.transpose(1, 2), whole.transpose(1, 2))
        assert torch.equal(cut + whole, whole + whole)
        assert torch.equal(whole @ cut.mT, whole @ whole.mT)
        assert torch.equal(cut.argmax(0), whole.argmax(0))
        assert torch.equal(cut.topk(2, 1).values, whole.topk(2, 1).values)
        assert str(cut) == str(whole)

    logits_on(3, work)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda out: out.mul_(2),
    "/=": lambda out: out.__itruediv__(2),
    "an item": lambda out: out.__setitem__((slice(None), 0, 1), 1.0),
    "a view": lambda out: out.view(-1, CLASSES)[:, 2].zero_(),
    "what is turned": lambda out: out.mT[:, 0].zero_(),
    "a class of a view": lambda out: out.flatten(0, 1)[:, 3].zero_(),
    "a view of a view": lambda out: out.flatten(0, 1)[1:].unsqueeze(0).mul_(3),
    "one of two": lambda out: out.chunk(2)[0].sub_(1),
    "what it is detached from": lambda out: out.detach().mul_(0.5),
    "its data": lambda out: out.data.mul_(0.5),
    "what a cast leaves as it is": lambda out: out.double().mul_(2),
    "a function's argument": lambda out: F.rrelu(out, 0.5, 0.5, True, True),
    "out=": lambda out: torch.add(torch.ones_like(out), 1, out=out),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_of_the_object_its_views_and_its_base(change):
    def work(cut: CutOutput, whole: Tensor) -> None:
        whole = whole.clone()
        views = [(each[0], each.detach().flatten(0, 1)) for each in (cut, whole)]
        for each in (cut, whole):
            CHANGES[change](each)
        assert torch.equal(cut + 0, whole)
        for got, expected in zip(*views, strict=True):
            assert torch.equal(got + 0, expected)

    logits_on(2, work)


def test_what_is_changed_in_place_stays_the_same_object():
    def work(cut: CutOutput, whole: Tensor) -> None:
        before = cut
        cut /= 2
        assert cut is before
        assert cut.relu_() is before
        assert F.relu(cut, inplace=True) is before
        assert cut.shape == whole.shape

    logits_on(2, work)


def test_an_index_that_copies_changes_no_base():
    def work(cut: CutOutput, whole: Tensor) -> None:
        copy = cut[[0, 1]]
        copy *= 2
        assert torch.equal(copy + 0, whole[[0, 1]] * 2)
        assert torch.equal(cut + 0, whole)

    logits_on(2, work)


def test_a_hook_behind_the_use_of_an_output_is_refused():
    def work(cut: CutOutput, whole: Tensor) -> None:
        cut.logsumexp(-1)
        for hang in (lambda: cut.register_hook(lambda g: g * 2), cut.retain_grad):
            with pytest.raises(UsageError, match="comes behind its use"):
                hang()

    logits_on(2, work)


def test_a_target_out_of_range_is_refused():
    def work(cut: CutOutput, whole: Tensor) -> None:
        with pytest.raises(IndexError, match=f"not one of {CLASSES} classes"):
            F.cross_entropy(cut.flatten(0, 1), torch.full((6,), CLASSES))

    logits_on(2, work)


def test_gradients_of_parameters_with_a_history_are_refused():
    """Also where the head is all there is, so that nothing goes back beyond it."""

    def loop(model, loss_fn, optimizer, batches):
        loss_fn(model(batches[0][0]), batches[0][1]).backward(create_graph=True)

    training = Training(
        model=built(lambda: nn.Sequential(nn.Linear(7, CLASSES))),
        batches=features(7, CLASSES),
        loop=loop,
    )
    with pytest.raises(UsageError, match="create_graph=True"):
        training.on_ranks(2, "head")


def test_bfloat16():
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model(x), y)
            assert loss.dtype == torch.float32
            loss.backward()
            optimizer.step()

    batches = [(x.float(), y) for x, y in features(7, CLASSES)]
    assert_same(
        Training(model=built(mlp, torch.float32), batches=batches, loop=loop),
        3,
        "head",
        within=2e-2,
    )
