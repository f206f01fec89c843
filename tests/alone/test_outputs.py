"""A rank that reads an output alone, as `if rank == 0: print(out[0])` does: training goes on.

All ranks have computed the output. The reader sees the values of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_alone import STEPS, batch, built, on_ranks, quickly_elsewhere
from torch import Tensor, nn
from torch.optim import Adam

__all__ = ["quickly_elsewhere"]

pytestmark = pytest.mark.timeout(60)
Reader = Callable[[Any, Tensor, Any], Any]
APART = ["head", "pipeline"]  # ways in which an output is in parts
MORE = [*APART, "column", "pair"]
TOP = {"values": 0, "indices": 1}


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
