"""Rows that come to cut layers in chunks: the same training, and each product under the next
transfer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from one_process import DEVICE, Training, adamw, assert_same, built, cluster_of, features, numbers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal.planner.search_options import SearchOptions
from shoal.tensors import boundary
from shoal.tensors.boundary import CallRows, Move

ENTERED = ("column", "row", "column_pair", "head")  # what rows are brought to


@pytest.fixture(params=[2, 3, 8], ids="chunks{}".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many, whatever is predicted; and where there are ranks, rows do come so."""
    asked, chunked = set(), CallRows.chunks
    monkeypatch.setattr(
        CallRows, "chunks", lambda rows, number: asked.add(number) or chunked(rows, number)
    )
    yield request.param
    assert asked <= {request.param} and (asked or request.node.callspec.params.get("ranks") == 1)


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4))


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ENTERED)
def test_the_same_as_one_process(way: str, ranks: int, uneven: bool, chunks: int) -> None:
    assert_same(
        Training(
            model=built(pair),
            batches=features(7, 4),
            optimizer=adamw,
            search_options=SearchOptions(chunks=(chunks,)),
        ),
        ranks,
        way,
        uneven=uneven,
    )


@pytest.mark.parametrize("way", ["column", "row", "column_pair"])
def test_more_leading_dimensions(way: str, chunks: int) -> None:
    batches = [(numbers(12, 2, 3, 7, seed=s), numbers(12, 2, 3, 4, seed=s + 9)) for s in range(5)]
    assert_same(
        Training(
            model=built(pair),
            batches=batches,
            loss_fn=F.mse_loss,
            search_options=SearchOptions(chunks=(chunks,)),
        ),
        3,
        way,
        uneven=True,
    )


def with_bfloat16(model, loss_fn, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("way", ENTERED)
def test_under_autocast(way: str, chunks: int) -> None:
    batches = [(x.float(), y) for x, y in features(7, 4)]
    assert_same(
        Training(
            model=built(pair, torch.float32),
            batches=batches,
            loop=with_bfloat16,
            search_options=SearchOptions(chunks=(chunks,)),
        ),
        3,
        way,
        within=2e-2,
    )


class Checkpointed(nn.Module):
    """A pair, and a layer behind it which backward reaches first: it runs the pair again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = pair()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Pinned(Training):
    def pins_of(self, way: str, ranks: int) -> dict[str, str]:
        return {"body.0": "column_pair", "body.4": way}


@pytest.mark.parametrize("way", ["column", "row", "head"])
def test_checkpointed_behind_a_pair(way: str) -> None:
    assert_same(Pinned(model=built(Checkpointed), batches=features(7, 4)), 3, way)


def test_another_bias_is_used() -> None:
    model, (x, y) = built(pair), features(7, 4)[0]
    with torch.no_grad():
        expected = functional_call(
            model, {"0.bias": torch.ones(9, dtype=x.dtype, device=DEVICE)}, x
        )
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(comm: ThreadComm) -> None:
        model = copies[comm.rank]
        with using(comm, cluster_of(2)):
            optimizer = adamw(model.parameters())
            shoal.parallelize(
                model, F.cross_entropy, optimizer, sample=(x, y), pins={"*": "column"}
            )
            with torch.no_grad():
                got = functional_call(
                    model, {"0.bias": torch.ones(9, dtype=x.dtype, device=DEVICE)}, x
                )
        torch.testing.assert_close(got, expected)

    run(2, work, timeout_s=10)


@pytest.mark.parametrize("imaginary", [0.0, 1.0], ids=["real", "complex"])
@pytest.mark.parametrize(
    ("weight", "bias", "inside"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_what_takes_no_gradient_gets_none(
    weight: bool, bias: bool, inside: bool, imaginary: float, chunks: int
) -> None:
    def work(comm: ThreadComm) -> None:
        dtype = torch.complex128 if imaginary else torch.float64
        turn = (
            torch.polar(torch.ones(1), torch.tensor([imaginary])).to(DEVICE, torch.complex128)
            if imaginary
            else 1.0
        )
        x, w, b = (numbers(*shape, seed=1, dtype=dtype) * turn for shape in ((8, 7), (3, 7), (3,)))
        mine, rows = x[4 * comm.rank : 4 * comm.rank + 4].clone(), CallRows(comm, (4, 4))
        for leaf, needed in ((mine, inside), (w, weight), (b, bias)):
            leaf.requires_grad_(needed)
        got = boundary.linear(
            mine, w, b, rows.chunks(chunks), lambda each: each.gathered(scale=1.0)
        )
        torch.testing.assert_close(got, F.linear(x, w, b))
        slope = numbers(8, 3, seed=2, dtype=dtype)
        got.backward(slope)
        back = 2 * (slope @ w.conj())[4 * comm.rank : 4 * comm.rank + 4]
        expected = {w: slope.t() @ x.conj(), b: slope.sum(0), mine: back}
        for leaf, needed in ((mine, inside), (w, weight), (b, bias)):
            if needed:
                torch.testing.assert_close(leaf.grad, expected[leaf].detach())
            else:
                assert leaf.grad is None

    run(2, work, timeout_s=10)


def test_each_product_is_made_while_others_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def moving(way: str, number: int):
        def move(x: Tensor):
            events.append(f"{way} {number} starts")
            return lambda: events.append(f"{way} {number} is there") or x

        return move

    def enter(rows: CallRows) -> Move:
        number = chunks.index(rows)
        return Move(moving("row", number), moving("gradient", number), 1.0, ThreadComm(), "a")

    linear = F.linear
    monkeypatch.setattr(
        boundary.F, "linear", lambda *args: events.append("product") or linear(*args)
    )
    chunks = [CallRows(ThreadComm(), (2,)), CallRows(ThreadComm(), (3,))]
    x, weight = numbers(5, 7, seed=1).requires_grad_(), numbers(4, 7, seed=2).requires_grad_()
    out = boundary.linear(x, weight, None, chunks, enter)
    order = [
        "row 0 starts",
        "row 1 starts",
        "row 0 is there",
        "product",
        "row 1 is there",
        "product",
    ]
    assert events == order
    events.clear()
    weighed = boundary._weight_gradient
    monkeypatch.setattr(
        boundary, "_weight_gradient", lambda *args: events.append("weight") or weighed(*args)
    )
    out.sum().backward()
    order = [
        "gradient 0 starts",
        "gradient 1 starts",
        "weight",
        "gradient 0 is there",
        "gradient 1 is there",
    ]
    assert events == order
    torch.testing.assert_close(
        weight.grad, torch.ones(4, 5, dtype=x.dtype, device=DEVICE) @ x.detach()
    )


def test_no_more_chunks_than_the_fewest_rows() -> None:
    rows = CallRows(ThreadComm(), (5, 3, 2))
    assert [chunk.counts for chunk in rows.chunks(4)] == [(3, 2, 1), (2, 1, 1)]
    assert [chunk.counts for chunk in CallRows(ThreadComm(), (5, 0)).chunks(4)] == [(5, 0)]
