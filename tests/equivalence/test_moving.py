"""State that training changes on each rank otherwise: as DDP or one process has it, on all ranks
the same, for the bytes that are stated.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from moving import (
    READ,
    Centred,
    CentredLoss,
    Observed,
    Quantised,
    Queued,
    by_hand,
    normed,
    on_ranks,
)
from one_process import (
    DEVICE,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    plain,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import PlanError, SampleError, UsageError
from shoal.strategies.state_agreement import phase_of

BATCHES = features(6, 3, steps=6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_rank_0s_as_under_ddp(kind: type[nn.Module], ranks: int) -> None:
    model = built(kind)
    expected, _ = by_hand(model, F.cross_entropy, BATCHES, ranks)
    ended = on_ranks(model, F.cross_entropy, BATCHES, ranks)
    states = [own for own, *_ in ended]
    assert_same_bits(states)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert difference(weights, {name: states[0][name] for name in weights}) > 1e-3
    assert difference(expected, states[0]) <= 1e-10
    _, _, moving, _ = ended[0]
    assert moving and {moves.how for moves in moving} == {"first"}


@pytest.mark.parametrize(
    "way", ["sliced", "factor", "column", "sliced, low"], ids=lambda way: way.replace(", ", "_")
)
def test_it_agrees_under_every_way_to_serve_the_layers(way: str) -> None:
    model = built(Centred)
    expected, _ = by_hand(model, F.cross_entropy, BATCHES, 2)
    way, _, low = way.partition(", ")
    options: dict[str, Any] = {"pins": {"first": way, "last": way}}
    ended = on_ranks(model, F.cross_entropy, BATCHES, 2, memory="low" if low else "fast", **options)
    assert_same_bits([own for own, *_ in ended])
    assert difference(expected, ended[0][0]) <= 1e-10


def test_it_agrees_beside_servers_and_is_refused_where_workers_run_ahead() -> None:
    model, served = built(Centred), {"pins": {"*": "server"}, "servers": 1}
    expected, _ = by_hand(model, F.cross_entropy, BATCHES, 2)
    ended = on_ranks(model, F.cross_entropy, BATCHES, 2, **served)
    assert_same_bits([own for own, *_ in ended])
    assert difference(expected, ended[0][0]) <= 1e-10
    with pytest.raises(PlanError, match="workers that run ahead of one another cannot agree"):
        on_ranks(model, F.cross_entropy, BATCHES, 2, servers=1, staleness=1)
    on_ranks(model, F.cross_entropy, BATCHES, 2, servers=1, staleness=1, buffers="local")


def test_the_losss_own_state_agrees() -> None:
    model, loss = built(mlp), CentredLoss().to(DEVICE, torch.float64)
    batches = features(7, 3, steps=6)
    expected, loss_by_hand = by_hand(model, loss, batches, 2)
    ended = on_ranks(model, loss, batches, 2)
    assert difference(expected, ended[0][0]) <= 1e-10
    assert torch.equal(ended[0][1].center, ended[1][1].center)
    assert torch.allclose(ended[0][1].center, loss_by_hand.center, rtol=0, atol=1e-10)
    assert [moves.name for moves in ended[0][2]] == ["(loss).center"]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_running_means_are_one_processs(uneven: bool) -> None:
    """The mean of a whole batch is the mean of its parts, each weighed by its rows."""
    model = built(normed)
    alone = copy.deepcopy(model)
    plain(alone, F.cross_entropy, sgd(alone.parameters()), BATCHES)
    ended = on_ranks(model, F.cross_entropy, BATCHES, 2, uneven=uneven)
    assert_same_bits([own for own, *_ in ended])
    assert {moves.how for moves in ended[0][2]} == {"mean"}
    got, expected = ended[0][0]["0.running_mean"], alone.state_dict()["0.running_mean"]
    assert float((got - expected).abs().max()) <= 1e-12
    assert int(ended[0][0]["0.num_batches_tracked"]) == len(BATCHES)


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_a_norm_of_somebodys_own_is_averaged_too(dtype: torch.dtype, within: float) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen.mul_(0.5).add_(x.mean(0).to(self.seen.dtype), alpha=0.5)
                return self.last(x - x.mean(0))
            return self.last(x - self.seen)

    model = built(Own)
    model.seen = model.seen.to(dtype)  # type: ignore[operator]
    ended = on_ranks(model, F.cross_entropy, BATCHES, 2)
    assert_same_bits([own for own, *_ in ended])
    assert ended[0][0]["seen"].dtype is dtype
    assert [(moves.name, moves.how) for moves in ended[0][2]] == [("seen", "mean")]
    expected = torch.zeros(6, dtype=torch.float64, device=DEVICE)
    for x, _ in BATCHES:
        expected = expected * 0.5 + x.mean(0) * 0.5
    assert float((ended[0][0]["seen"].double() - expected).abs().max()) <= within


def test_statistics_that_nobody_changes_keep_their_bits() -> None:
    """As where a norm is put in eval after parallelize; sums of three round."""

    def loop(model: Any, loss: Any, optimizer: Any, batches: Any, comm: Any) -> None:
        plain(model, loss, optimizer, batches[:3])
        model[0].eval()
        kept.append(state(model[0]))
        plain(model, loss, optimizer, batches * 3)
        ended.append(state(model[0]))

    kept: list[Any] = []
    ended: list[Any] = []
    on_ranks(built(normed), F.cross_entropy, BATCHES, 3, loop=loop)
    names = ("running_mean", "running_var")
    for name in names:
        values = {tuple(own[name].tolist()) for own in (*kept, *ended)}
        assert len(values) == 1, name


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", [Centred, Quantised, Observed, normed])
def test_bytes_are_as_stated(kind: Any, ranks: int) -> None:
    """What a model with state sends more in a step than the same one whose state is local."""
    phase = None

    def sent(buffers: str) -> list[int]:
        counts: list[int] = [0] * ranks

        def loop(model: Any, loss: Any, optimizer: Any, batches: Any, comm: Any) -> None:
            plain(model, loss, optimizer, batches[:2])
            before = comm.counts.bytes_sent
            plain(model, loss, optimizer, batches[2:5])
            counts[comm.rank] = comm.counts.bytes_sent - before

        nonlocal phase
        ended = on_ranks(
            built(kind),
            F.cross_entropy,
            BATCHES,
            ranks,
            loop=loop,
            buffers=buffers,
            pins={"*": "replicate:direct"},
        )
        phase = phase or phase_of(ended[0][2], cluster_of(ranks))
        return counts

    more = sent("agree")
    local = sent("local")
    assert phase is not None
    stated = [3 * round(nbytes) for nbytes in phase.traffic.sent]
    assert [a - b for a, b in zip(more, local, strict=True)] == stated


def test_a_large_state_goes_on_from_every_rank() -> None:
    class Large(Centred):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("much", torch.zeros(50_000))

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if self.training:
                self.much.add_(x.mean())
            return output + self.much.mean()

    model = built(Large)
    expected, _ = by_hand(model, F.cross_entropy, BATCHES, 3)
    ended = on_ranks(model, F.cross_entropy, BATCHES, 3)
    assert_same_bits([own for own, *_ in ended])
    assert difference(expected, ended[0][0]) <= 1e-10
    phase = phase_of(ended[0][2], cluster_of(3))
    assert phase is not None and phase.traffic.worst < 2 * 50_005 * 8


def test_a_place_in_a_queue_agrees_where_rows_are_uneven() -> None:
    """The sample, of as many rows on every rank, does not show that it would differ."""

    def loop(model: Any, loss: Any, optimizer: Any, batches: Any, comm: Any) -> None:
        plain(
            model, loss, optimizer, [(x[: 2 + comm.rank], y[: 2 + comm.rank]) for x, y in batches]
        )

    ended = on_ranks(built(Queued), F.cross_entropy, BATCHES, 2, loop=loop)
    assert {moves.name for moves in ended[0][2]} == {"queue", "place"}
    assert_same_bits([own for own, *_ in ended])


def test_it_can_be_turned_off_and_said() -> None:
    model = built(Centred)
    local = on_ranks(model, F.cross_entropy, BATCHES, 2, buffers="local")
    assert not torch.equal(local[0][0]["center"], local[1][0]["center"])
    mean = on_ranks(model, F.cross_entropy, BATCHES, 2, buffers={"cent*": "mean"})
    assert [(moves.name, moves.how) for moves in mean[0][2]] == [("center", "mean")]
    assert_same_bits([own for own, *_ in mean])
    with pytest.raises(UsageError, match="neither the model nor the loss has"):
        on_ranks(model, F.cross_entropy, BATCHES, 2, buffers={"centre": "mean"})


def test_what_agrees_by_itself_stays() -> None:
    """A counter, and weights that follow the model's own."""

    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 3)
            self.teacher = nn.Linear(6, 3).requires_grad_(False)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            with torch.no_grad():
                self.teacher.weight.lerp_(self.last.weight, 0.1)
            return self.last(x) + self.teacher(x)

    ended = on_ranks(built(Follows), F.cross_entropy, BATCHES, 2)
    assert ended[0][2] == ()
    assert_same_bits([own for own, *_ in ended])


def test_one_rank_evaluates_and_saves_alone() -> None:
    def loop(model: Any, loss: Any, optimizer: Any, batches: Any, comm: Any) -> None:
        for x, y in batches:
            model.train()
            plain(model, loss, optimizer, [(x, y)])
            if comm.rank == 0:
                model.eval()
                with torch.no_grad():
                    model(x)
                torch.save(model.state_dict(), io.BytesIO())

    ended = on_ranks(built(normed), F.cross_entropy, BATCHES, 2, loop=loop)
    assert_same_bits([own for own, *_ in ended])


def test_two_calls_before_two_backwards() -> None:
    """As of a discriminator, of what is real and of what is not."""

    def loop(model: Any, loss: Any, optimizer: Any, batches: Any, comm: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            losses = loss(model(x), y), loss(model(x + 1), y)
            for each in losses:
                each.backward()
            optimizer.step()

    for kind in (Centred, normed):
        ended = on_ranks(built(kind), F.cross_entropy, BATCHES, 2, loop=loop)
        assert_same_bits([own for own, *_ in ended])


def test_weights_that_forward_changes_unlike_are_refused() -> None:
    def embeds() -> nn.Module:
        table = nn.Embedding(9, 6, max_norm=0.5)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(12, 3))

    batches = [
        (torch.arange(8, device=DEVICE).view(4, 2), torch.tensor([0, 1, 2, 0], device=DEVICE))
    ]
    with pytest.raises(SampleError, match=r"forward changes the trained weight 0\.weight"):
        on_ranks(built(embeds), F.cross_entropy, batches, 2)

    class Clipped(nn.Module):
        """All ranks do the same."""

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.last.weight.clamp_(-0.1, 0.1)
            return self.last(x)

    assert_same_bits([own for own, *_ in on_ranks(built(Clipped), F.cross_entropy, BATCHES, 2)])


def test_state_that_backward_changes_goes_last() -> None:
    """Under checkpointing forward runs again in backward, and changes it again."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = normed()

        def forward(self, x: Tensor) -> Tensor:
            run_again: Any = torch.utils.checkpoint.checkpoint
            output: Tensor = run_again(self.inner, x, use_reentrant=False)
            return output

    ended = on_ranks(built(Again), F.cross_entropy, BATCHES, 2)
    assert ended[0][2][0].in_backward
    assert_same_bits([own for own, *_ in ended])
