"""Losses that scripts compute of a pipeline's output by torch functions, and readings of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computed_loops import clipped, plain
from odd_models import Keeping, KeepsTerm
from one_process import Batch, built
from piped import Script, assert_same
from pipeline_trials import (
    CLASSES,
    Blocks,
    assert_as_one_process,
    batch,
    batch_of_all,
    piped,
)
from small_models import Gpt, words
from torch import Tensor, nn
from torch.nn import functional as F

from shoal_tools.testing.byte_counts import TracedComm

slow = pytest.mark.slow


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    ids, targets = batch
    logits = model(ids)
    rows, length, classes = logits.shape
    return F.cross_entropy(logits.view(rows * length, classes), targets.view(rows * length))


def smoothed(model: Any, batch: Batch) -> Tensor:
    """Label smoothing by hand, and a penalty of the output."""
    logits = model(batch[0])
    logs = logits.log_softmax(-1)
    right = logs.gather(-1, batch[1][..., None]).squeeze(-1)
    return (-0.9 * right - 0.1 * logs.mean(-1)).mean() + 0.01 * logits.square().mean()


def of_next_words(model: Any, batch: Batch) -> Tensor:
    """The loss of a language model whose targets are its inputs, and of heads beside."""
    ids, targets = batch
    logits = model(ids)
    of_next = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    last = F.cross_entropy(logits[:, -1], targets[:, -1], reduction="none")
    return (of_next + 0.5 * last.mean()) / 2


def of_two_calls(model: Any, batch: Batch) -> Tensor:
    """Two calls, of which one loss takes both outputs."""
    ids, targets = batch
    first, second = model(ids), model(ids.flip(1))
    apart = F.mse_loss(first.softmax(-1), second.softmax(-1))
    both = torch.cat([first, second]).flatten(0, 1)
    return apart + F.cross_entropy(both, targets.repeat(2, 1).flatten())


def of_known_words(model: Any, batch: Batch) -> Tensor:
    """A mean over the words that a mask leaves."""
    known = batch[1] > 2
    return F.cross_entropy(model(batch[0])[known], batch[1][known])


@pytest.mark.parametrize(
    ("compute_loss", "loop", "ranks"),
    [
        (cross_entropy, clipped, 2),
        (smoothed, plain, 3),
        (of_two_calls, plain, 2),
        *(
            pytest.param(compute_loss, loop, ranks, marks=slow)
            for compute_loss in (cross_entropy, smoothed, of_next_words, of_two_calls)
            for loop in (plain, clipped)
            for ranks in (1, 3, 4)
        ),
    ],
)
def test_a_compute_loss_of_torch_functions(compute_loss: Any, loop: Any, ranks: int) -> None:
    assert_same(_computed(compute_loss, loop), ranks)


def test_a_compute_loss_that_counts_its_terms() -> None:
    options = {"count": lambda batch: (batch[1] > 2).sum()}
    assert_same(_computed(of_known_words, plain, **options), 3)


def _computed(compute_loss: Any, loop: Any, **options: Any) -> Script:
    def both(model: Any, returned: Any, optimizer: Any, batches: list[Batch]) -> Any:
        return loop(model, returned or compute_loss, optimizer, batches)

    options = {"compute_loss": compute_loss, **options}
    return Script(model=built(Gpt), batches=words(), loss_fn=None, loop=both, options=options)


def _direct(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y).backward()


def _of_a_part(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    output = model(x)
    (loss_fn(output[:, :2] * 2, y[:, :2]) + loss_fn(output.view(-1, 3), y)).backward()


def _looked_at(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    """Looks at the output and at the loss before backward, and scales the loss."""
    output = model(x)
    assert output.tolist() == (output.detach() + 0).tolist()
    loss = F.mse_loss(output, y)
    torch.testing.assert_close(loss.item(), loss_fn(output, y).item(), equal_nan=True)
    (loss * 3 + 2 * F.mse_loss(output, y * 2)).backward()


def _between(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    """Evaluates, drops a loss and drops an output between."""
    output = model(x)
    with torch.no_grad():
        F.mse_loss(model(x * 2), y)
    F.mse_loss(output, y * 3)
    F.mse_loss(output, y).backward()


def _over_the_mean(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    """Computes with a number of the output, and the output."""
    output = model(x)
    nothing = (output - output).mean()
    F.mse_loss(output + nothing, y).backward()


@pytest.mark.parametrize(
    "step",
    [
        _direct,
        _looked_at,
        *(pytest.param(each, marks=slow) for each in (_of_a_part, _between, _over_the_mean)),
    ],
)
def test_losses_without_a_loss_fn(step: Callable[..., None]) -> None:
    assert_as_one_process(Blocks(), step, ranks=3, rows=[(4, 4, 4), (1, 3, 2), (2, 0, 5)])


def test_a_step_leaves_nothing_for_the_collector() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[bool]:
        x, y = batch(rank)
        gone = []
        for compute in (loss_fn, F.mse_loss):
            output = model(x)
            forward = weakref.ref(output.forward), weakref.ref(output.forward.run)
            loss = compute(output, y) + model.term
            loss.backward()
            output[:, :2].tolist()
            del output, loss
            with torch.no_grad():
                model(x).argmax(-1)  # another call, because modules keep a number of the last
            gone += [each() is None for each in forward]
        return gone

    gc.disable()
    try:
        got = piped(KeepsTerm(), loop)
    finally:
        gc.enable()
    assert got == [[True] * 4] * 2


class KeepsTerms(Blocks):
    """Keeps a term of each block in a list, and one in each block, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__(Keeping)

    def body(self, x: Tensor) -> Tensor:
        self.terms = []
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            self.terms.append(x.pow(2).mean())
        return x


def _with_kept_terms(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    loss = loss_fn(model(x), y) + 0.1 * sum(model.terms)
    for block in model.blocks:
        loss = loss + 0.2 * block.term
    loss.backward()


def _with_kept_term(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        model(x)
        before = model.term.item()
    loss = loss_fn(model(x), y)
    assert model.term.item() == before
    (loss + 0.1 * model.term).backward()


@pytest.mark.parametrize(
    ("model", "step"),
    [(KeepsTerms, _with_kept_terms), pytest.param(KeepsTerm, _with_kept_term, marks=slow)],
)
def test_numbers_that_modules_keep_are_of_own_rows(
    model: Callable[[], nn.Module], step: Callable[..., None]
) -> None:
    assert_as_one_process(model(), step, ranks=3, rows=[(4, 4, 4), (1, 3, 2), (2, 2, 5)])


READS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    # a reading, and the most bytes that each other rank's rows cost
    "argmax": (lambda out, y: out.argmax(-1), 8),
    "best of softmax": (lambda out, y: torch.argmax(out.softmax(-1), dim=-1), 8),
    "best of last": (lambda out, y: out[:, -1:].argmax(1), 8),
    "topk": (lambda out, y: out.topk(1, -1).indices, 16),
    "max": (lambda out, y: torch.max(out, 1).values, 16),
    "accuracy": (lambda out, y: (out.argmax(-1) == y.argmax(-1)).float().mean(), 8),
    "binary": (lambda out, y: ((out.sigmoid() > 0.5) == (y > 0)).all(1).sum(), 8),
    "values": (lambda out, y: out * 2, 8 * CLASSES),
}
ROWS = 50


def test_readings_send_their_results_alone() -> None:
    comms: dict[int, TracedComm] = {}

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> dict[str, tuple[int, Any]]:
        x, y = batch(rank, rows=ROWS)
        found = {}
        for grad in (False, True):
            for name, (read, _) in READS.items():
                with torch.set_grad_enabled(grad):
                    output = model(x)
                    before = comms[rank].counts.bytes_sent
                    seen = read(output, y)
                    values = seen.tolist()
                found[f"{name} {grad}"] = comms[rank].counts.bytes_sent - before, values
        return found

    model = Blocks()
    got = piped(model, loop, wrapped=lambda comm: comms.setdefault(comm.rank, TracedComm(comm)))
    for name, (read, nbytes) in READS.items():
        batches = [batch(rank, rows=ROWS) for rank in (0, 1)]
        expected = [read(model(x), y).detach() for x, y in batches]
        for grad in (False, True):
            for rank in (0, 1):
                sent, values = got[rank][f"{name} {grad}"]
                torch.testing.assert_close(torch.tensor(values), expected[rank], check_dtype=False)
                targets = 8 * CLASSES * ROWS + 100 if name == "binary" else 8 * ROWS + 100
                assert sent <= (nbytes * ROWS + 200 if rank == 1 else targets), (name, sent)


def test_outputs_that_are_changed_in_place_without_gradients() -> None:
    """As sampling from a language model does it."""

    def sampled(logits: Tensor) -> list[Any]:
        last = logits[:, -2:]
        last[:, 0] = 5.0  # a view of the output
        scaled = logits[:, :2] / 0.5
        best, _ = torch.topk(scaled, 1)
        scaled[scaled < best] = -float("inf")
        return [F.softmax(scaled, dim=-1).tolist(), last.tolist(), logits.tolist()]

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Any]:
        with torch.no_grad():
            return sampled(model(batch(rank)[0]))

    model = Blocks()
    for rank, got in enumerate(piped(model, loop)):
        with torch.no_grad():
            expected = sampled(model(batch(rank)[0]))
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


class Tempered(nn.Module):
    """A model that has its loss, with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss = Blocks(), Temperature()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return output


class Temperature(nn.Module):
    """A loss with a trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return (output * self.scale - y).square().mean()


def test_a_loss_that_is_a_layer_of_the_model() -> None:
    model = Tempered().double()
    alone = copy.deepcopy(model)
    x, y = batch_of_all(2)
    alone.loss(alone(x), y).backward()

    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Tensor]:
        loss_fn(model(batch(rank)[0]), batch(rank)[1]).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for gradients in piped(model, loop, loss_fn=model.loss):
        for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert (gradient - parameter.grad).abs().max() <= 1e-10
