"""`explain`: the reasons of a model's own plan, on any rank, without asking the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using


def linear() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)


def test_each_layer_is_shown_with_its_choice_and_what_else_could_serve_it() -> None:
    def work(comm: ThreadComm) -> str:
        with using(comm, Cluster(Topology(("host",) * 2), Link(1e-4, 1e8))):
            model, loss_fn, optimizer = linear()
            sample = torch.randn(4, 8) + comm.rank, torch.randint(4, (4,))
            pins = {"0": "replicate:ring", "2": "factor"}
            shoal.parallelize(model, loss_fn, optimizer, sample=sample, pins=pins)
            text = shoal.explain(model) if comm.rank == 1 else ""
            comm.numbers([0, 0], "the end")  # rank 1 has asked alone
            return text

    _, text = run(2, work)
    assert "* replicate:ring" in text and "* factor" in text
    assert "sliced:direct" in text  # what else
    assert "cannot: " in text and "predicted step" in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100


def test_alone_there_is_nothing_to_explain_and_before_parallelize_it_is_refused() -> None:
    with using(ThreadComm()):
        model, loss_fn, optimizer = linear()
        with pytest.raises(shoal.UsageError, match="not parallelised"):
            shoal.explain(model)
        shoal.parallelize(model, loss_fn, optimizer)
        assert shoal.explain(model) == ""
