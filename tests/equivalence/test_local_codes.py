"""Rounds of local steps in few bytes: the algorithm of docs/guide/local-steps.md, in one process.

ranks     shoal: differences of weights as codes to owners, and changes as codes back
plain     one process with the weights of each rank, and what each rank and owner has not sent
"""

from __future__ import annotations

import pytest
import torch
from locally import ROUND, on_ranks, sgd
from one_process import assert_same_bits, built, difference, features, rows_of, state
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.codecs.coded_exchange import read_codec
from shoal.codecs.runs import Runs
from shoal.core.pieces import cut

STEPS = 4 * ROUND


def net() -> nn.Module:
    return built(lambda: nn.Linear(6, 40, bias=False))


class Codes:
    """What a code of some values stands for; what it loses goes with the next values."""

    def __init__(self, codec: str, numel: int) -> None:
        self.runs, self.lost = Runs(read_codec(codec)), torch.zeros(numel).double()

    def sent(self, values: Tensor) -> Tensor:
        values = values + self.lost
        code = torch.empty(self.runs.nbytes(len(values), 8), dtype=torch.uint8)
        self.runs.encode(values, code, None, {})
        sent = torch.empty_like(values)
        self.runs.decode(code, sent)
        self.lost = values - sent
        return sent


def ends_of_rounds(outer: shoal.Outer) -> list[int]:
    """The steps that end a round; in growing ones after 1, 2 and so on up to ROUND steps."""
    ends, length = [outer.warmup_steps], 1 if outer.grows else ROUND
    while ends[-1] + length <= STEPS:
        ends.append(ends[-1] + length)
        length = min(2 * length, ROUND)
    return ends[1:]


def plain(codec: str, outer: shoal.Outer, ranks: int) -> Tensor:
    """The weights that all have in common after STEPS steps."""
    models = [net() for _ in range(ranks)]
    optimizers = [sgd(model.parameters()) for model in models]
    old = next(models[0].parameters()).detach().flatten().clone()
    slices = [len(part) for part in cut(old, ranks)]
    there = [[Codes(codec, numel) for numel in slices] for _ in range(ranks)]
    back = [Codes(codec, numel) for numel in slices]
    momentum, ends = torch.zeros_like(old), ends_of_rounds(outer)
    for number, batch in enumerate(features(6, 40, steps=STEPS), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = batch if number <= outer.warmup_steps else rows_of(batch, rank, ranks)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if number == outer.warmup_steps:
            old = next(models[0].parameters()).detach().flatten().clone()
        if number not in ends:
            continue
        own = [next(m.parameters()).detach().flatten() for m in models]
        apart = [((old - weights) / ranks).split(slices) for weights in own]
        news = []
        for owner, (before, v) in enumerate(
            zip(old.split(slices), momentum.split(slices), strict=True)
        ):
            mean = apart[owner][owner].clone()  # its own part goes nowhere, so it is exact
            for rank in range(ranks):
                if rank != owner:
                    mean += there[rank][owner].sent(apart[rank][owner])
            new = outer.step(before, mean, v)
            news.append(before + back[owner].sent(new - before))
        old = torch.cat(news)
        for model in models:
            next(model.parameters()).data.copy_(old.view(40, 6))
    return old


@pytest.mark.parametrize(("first", "grows"), [(4, True), (4, False), (2, True), (0, True)])
def test_a_start_keeps_the_optimizer_and_what_codes_have_lost(first: int, grows: bool) -> None:
    """Exact steps, rounds of 1 and 2 steps, then whole rounds: momentum and errors go on."""
    outer = shoal.Outer(rule="nesterov", warmup_steps=first, grows=grows)
    assert ends_of_rounds(shoal.Outer(warmup_steps=2, grows=True)) == [3, 5, 8, 11]
    pins = {"*": "replicate:direct+int8(block=8)"}
    _, common = on_ranks(net, sgd, outer, 2, features(6, 40, steps=STEPS), pins=pins)
    weights = plain("int8(block=8)", outer, 2)
    got = next(iter(common[0].values())).flatten()
    assert difference({"w": weights}, {"w": got}) <= 1e-10


@pytest.mark.parametrize(
    ("codec", "rule", "ranks"),
    [
        ("sparse_bits", "nesterov", 2),
        pytest.param("sparse_bits(share=0.3, bits=4)", "average", 3, marks=pytest.mark.slow),
        pytest.param("int8(block=8)", "slowmo", 2, marks=pytest.mark.slow),
    ],
)
def test_rounds_in_codes_are_their_algorithm(codec: str, rule: str, ranks: int) -> None:
    outer = shoal.Outer(rule=rule, momentum=None if rule != "slowmo" else 0.0)
    batches, pins = features(6, 40, steps=STEPS), {"*": f"replicate:direct+{codec}"}
    own, common = on_ranks(net, sgd, outer, ranks, batches, pins=pins)
    assert_same_bits([*own, *common])
    got = next(iter(common[0].values())).flatten()
    assert difference({"w": plain(codec, outer, ranks)}, {"w": got}) <= 1e-10
    exact, _ = on_ranks(net, sgd, outer, ranks, batches)
    assert difference(own[0], exact[0]) > 1e-6, "nothing was lost"
    assert difference(own[0], state(net())) > 1e-3
