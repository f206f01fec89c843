"""`shoal.plan` for a cluster that is only described."""

from __future__ import annotations

import torch
from torch import nn

import shoal


def test_a_described_cluster_is_planned_for_without_a_session() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    sample = torch.randn(2, 512), torch.randint(4, (2,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    where = shoal.Cluster(
        shoal.Topology(("a", "b", "c")), shoal.Link(latency_s=1e-4, bytes_per_s=1e6)
    )
    made = shoal.plan(model, nn.CrossEntropyLoss(), optimizer, sample=sample, cluster=where)
    assert made.ranks == 3 and made.choice("0").strategy in (
        "column",
        "column_pair",
        "factor",
        "row",
    )
    assert type(model[0]) is nn.Linear
