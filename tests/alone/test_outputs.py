"""A rank that reads an output alone, as `if rank == 0: print(out[0])` does: training goes on.

All ranks have computed the output. The reader sees the values of its own rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_alone import STEPS, batch, built, on_ranks, quickly_elsewhere
from torch import Tensor, nn
from torch.optim import Adam

from shoal.core.errors import RanksDiffer, UsageError
from shoal.engine import attendance

__all__ = ["quickly_elsewhere"]

pytestmark = pytest.mark.timeout(60)
Reader = Callable[[Any, Tensor, Any], Any]
APART = ["head", "pipeline"]  # ways in which an output is in parts
MORE = [*APART, "column", "pair"]


def numbers(value: Any) -> list[Tensor]:
    value = value.tolist() if isinstance(value, Tensor) else value
    return [torch.as_tensor(value, dtype=torch.float64)]


READERS: dict[str, Reader] = {
    "a row": lambda out, y, loss_fn: out[0].tolist(),
    "in words": lambda out, y, loss_fn: [len(f"{out[0]}".partition("grad")[0]) > 20],
    "accuracy": lambda out, y, loss_fn: (out.argmax(-1) == y).double().mean(),
    "softmax": lambda out, y, loss_fn: out.softmax(-1),
    "best probability": lambda out, y, loss_fn: out.softmax(-1).max(-1).values.mean(),
    "detached": lambda out, y, loss_fn: out.detach().cpu().numpy(),
    "data": lambda out, y, loss_fn: out.data[1:3].cpu(),
    "topk": lambda out, y, loss_fn: out.topk(2)[0],
    "classes of topk": lambda out, y, loss_fn: out.detach().topk(2)[1],
    "loss": lambda out, y, loss_fn: loss_fn(out, y).item(),
    "another loss": lambda out, y, loss_fn: nn.functional.cross_entropy(out * 2, y).item(),
    "sum": lambda out, y, loss_fn: out.sum().item(),
    "spread": lambda out, y, loss_fn: [out.mean().item(), out.std().item()],
    "a class": lambda out, y, loss_fn: out[:, 1],
    "some classes of a row": lambda out, y, loss_fn: out[0, :2],
    "transposed": lambda out, y, loss_fn: out.t(),
    "cast and scaled": lambda out, y, loss_fn: (out.float() / 2).sigmoid(),
    "logsumexp": lambda out, y, loss_fn: out.logsumexp(-1),
}
MOMENTS = ("behind forward", "behind backward", "behind the step")


def trained(
    model: Any, loss_fn: Any, optimizer: Any, batches: Any, reader: Reader | None, moments: Any
) -> list[Tensor]:
    """The ordinary loop, in which a reader looks at the output."""
    seen = []
    for x, y in batches:
        optimizer.zero_grad()
        output = model(x)
        for moment in MOMENTS:
            if reader is not None and moment in moments:
                seen += numbers(reader(output, y, loss_fn))
            if moment == MOMENTS[0]:
                loss = loss_fn(output, y)
                loss.backward()
            elif moment == MOMENTS[1]:
                optimizer.step()
        del output, loss
    return seen


def expected(
    way: str, reader: Reader, ranks: int, moments: Any, who: int = 0, **how: Any
) -> list[Tensor]:
    """The reader's values in one process, of the rows of one rank."""
    model = built(way)
    optimizer, loss_fn = Adam(model.parameters(), 0.01), nn.CrossEntropyLoss(**how)
    seen = []
    for step in range(STEPS):
        batches = [batch(way, rank, step) for rank in range(ranks)]
        (x, y), own = map(torch.cat, zip(*batches, strict=True)), batches[who]
        optimizer.zero_grad()
        output = model(x)
        rows = slice(4 * who, 4 * who + 4)
        for _moment in moments:
            seen += numbers(reader(output[rows].detach().requires_grad_(), own[1], loss_fn))
        loss_fn(output, y).backward()
        optimizer.step()
    return [*seen, *(value.double() for value in model.state_dict().values())]


def assert_close(seen: list[Tensor], wanted: list[Tensor], atol: float = 1e-10) -> None:
    assert len(seen) == len(wanted)
    for one, other in zip(seen, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", APART)
def test_a_rank_reads_an_output_alone(way: str, reader: str, moment: str, ranks: int) -> None:
    who = ranks - 1 if reader in ("softmax", "detached", "loss") else 0
    wanted = expected(way, READERS[reader], ranks, [moment], who)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Tensor]:
        batches = (batch(way, rank, step) for step in range(STEPS))
        own = READERS[reader] if rank == who else None
        seen = trained(model, loss_fn, optimizer, batches, own, [moment])
        return [*seen, *(value.double() for value in model.state_dict().values())]

    seen = on_ranks(way, work, ranks)[who]
    assert_close(seen, wanted, 1e-6 if reader == "cast and scaled" else 1e-10)


def on_all(out: Any, y: Tensor, loss_fn: Any, kind: str) -> Tensor:
    """A loss of all ranks: of the library, or one that takes the values of the output."""
    if kind == "own":
        return out.square().cumsum(1).mean()
    loss: Tensor = loss_fn(out, y)
    return loss


@pytest.mark.parametrize("kind", ["torch's", "own"])
@pytest.mark.parametrize("way", APART)
def test_a_log_of_the_same_comes_first(way: str, kind: str) -> None:
    """Rank 0 alone computes the loss, the sum and the accuracy, and then all train on."""

    def log(out: Any, y: Tensor, loss_fn: Any) -> list[Tensor]:
        values = [on_all(out, y, loss_fn, kind), out.sum(), (out.argmax(-1) == y).sum()]
        return [value for each in values for value in numbers(each.item())]

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Tensor]:
        seen = []
        for step in range(STEPS):
            x, y = batch(way, rank, step)
            optimizer.zero_grad()
            output = model(x)
            if rank == 0:
                seen += log(output, y, loss_fn)
            loss = on_all(output, y, loss_fn, kind)
            best = output.argmax(-1)
            loss.backward()
            optimizer.step()
            if rank == 0:
                seen += numbers(best)
        return [*seen, *(value.double() for value in model.state_dict().values())]

    model, loss_fn, wanted = built(way), nn.CrossEntropyLoss(), []
    optimizer = Adam(model.parameters(), 0.01)
    for step in range(STEPS):
        batches = [batch(way, rank, step) for rank in range(2)]
        x, y = map(torch.cat, zip(*batches, strict=True))
        optimizer.zero_grad()
        output = model(x)
        wanted += [*log(output[:4].detach(), y[:4], loss_fn), *numbers(output[:4].argmax(-1))]
        on_all(output, y, loss_fn, kind).backward()
        optimizer.step()
    assert_close(on_ranks(way, work)[0], [*wanted, *model.state_dict().values()])


@pytest.mark.parametrize("mode", ["no_grad", "evaluation", "inference"])
@pytest.mark.parametrize("way", MORE)
def test_outputs_of_a_forward_without_gradients(way: str, mode: str) -> None:
    """All ranks have made the forward. One looks, and another one after it."""
    x, y = batch(way, 7, 7)
    whole = built(way)(x)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Tensor]:
        model.train(mode == "no_grad")
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            output = model(x)
            seen = [numbers(r(output, y, loss_fn))[0] for r in READERS.values()] if rank else []
            together = output.softmax(-1)[1].tolist()
            if rank == 0:
                seen = [numbers(r(output, y, loss_fn))[0] for r in READERS.values()]
        return [*seen, torch.tensor(together, dtype=torch.float64)]

    wanted = [numbers(r(whole.detach(), y, nn.CrossEntropyLoss()))[0] for r in READERS.values()]
    for seen in on_ranks(way, work):
        assert_close(seen, [*wanted, whole.softmax(-1)[1].detach()], 1e-7)


@pytest.mark.parametrize("way", APART)
def test_a_backward_of_one_rank_alone_is_refused_at_once(way: str) -> None:
    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = batch(way, rank, 0)
        output = model(x)
        loss_fn(output, y).backward()
        optimizer.step()
        if rank == 0:
            with pytest.raises(RanksDiffer, match="rank 0 alone goes back through an output"):
                output.square().mean().backward()

    on_ranks(way, work)


@pytest.mark.parametrize("way", APART)
def test_ranks_with_losses_of_their_own_train_each_on_its_own(way: str) -> None:
    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[Tensor]:
        for step in range(STEPS):
            output = model(batch(way, rank, step)[0])
            optimizer.zero_grad()
            (output.sum() if rank else output.square().mean()).backward()
            optimizer.step()
        return list(model.state_dict().values())

    model = built(way)
    optimizer = Adam(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = [model(batch(way, rank, step)[0]) for rank in range(2)]
        ((outputs[1].sum() + outputs[0].square().mean()) / 2).backward()
        optimizer.step()
    for seen in on_ranks(way, work):
        assert_close(seen, list(model.state_dict().values()))


@pytest.mark.parametrize("way", APART)
def test_a_change_by_one_rank_alone_is_refused(way: str) -> None:
    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = batch(way, rank, 0)
        output = model(x)
        loss_fn(output, y).backward()
        optimizer.step()
        if rank == 0:
            with pytest.raises(UsageError, match="one rank alone"):
                output.mul_(2)

    on_ranks(way, work)


@pytest.mark.parametrize("way", APART)
def test_an_output_of_an_earlier_call_is_told_of(way: str) -> None:
    """Ranks have let go of it."""

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, _ = batch(way, rank, 0)
        with torch.no_grad():
            output = model(x) if rank == 0 else [model(x)].clear()
            model(x)
            if rank == 0:
                output[0].tolist()

    with pytest.raises(RanksDiffer, match="rank 0 alone reads an output that rank 1 has no more"):
        on_ranks(way, work)


def test_a_slow_rank_is_not_taken_to_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss comes a second late. The others wait, because a gradient comes back through it."""
    monkeypatch.setattr(attendance, "_PATIENCE_S", 0.1)

    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Tensor:
        x, y = batch("head", rank, 0)
        output = model(x)
        if rank:
            time.sleep(1.0)
        loss_fn(output, y).backward()
        optimizer.step()
        return dict(model.state_dict())["4.weight"]

    first, second = on_ranks("head", work)
    assert torch.equal(first, second)


def test_a_rank_holds_the_last_output_alone() -> None:
    def work(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> int:
        x, y = batch("head", rank, 0)
        for _ in range(3):
            loss_fn(model(x), y).backward()
            optimizer.step()
        outputs = model[4]._cut_layer._comm.attendance.outputs
        assert len(outputs._known) == 1
        return len(outputs._held)

    assert on_ranks("head", work) == [1, 1]
