"""A list of strategies: these where they fit, and replicas elsewhere."""

from __future__ import annotations

import pytest
from one_process import (
    State,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    on_threads,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.front.joining import using

BATCHES = features(7, 3)


def network() -> nn.Module:
    """Linear layers with a norm between them, which few strategies serve."""
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("listed", "served"),
    [
        (["factor"], ["factor", "replicate", "factor"]),
        (["column"], ["column", "replicate", "column"]),
        (["row", "head"], ["row", "replicate", "row"]),
        (["sliced"], ["sliced"] * 3),
    ],
)
def test_what_they_do_not_fit_is_replicated(listed: list[str], served: list[str]) -> None:
    alone = built(network)
    plain(alone, F.cross_entropy, sgd(alone.parameters()), BATCHES)

    def work(comm: ThreadComm) -> tuple[list[str], State]:
        model, mine = built(network), [rows_of(b, comm.rank, 2, True) for b in BATCHES]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                nn.CrossEntropyLoss(),
                sgd(model.parameters()),
                sample=mine[0],
                strategies=listed,
            )
            plain(model, loss_fn, optimizer, mine)
            plan = shoal.plan_of(model)
            assert plan is not None
            by_name = {choice.layer: choice.strategy for choice in plan.choices}
            return [by_name[name] for name in ("0", "2", "3")], state(model)

    ranks = on_threads(2, work)
    assert [ways for ways, _ in ranks] == [served] * 2
    assert_same_bits([of_rank for _, of_rank in ranks])
    assert difference(state(alone), ranks[0][1]) <= 1e-10
