"""Six public scripts with their authors' loaders: few lines changed, and as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_process import built, difference, on_threads, state
from public_scripts import SCRIPTS, changed_lines

from shoal.comm.threads import ThreadComm
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

SLOW = dict.fromkeys(("speech", "DCGAN", "nanoGPT"), pytest.mark.slow)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in SCRIPTS])
def test_a_public_script_trains_on_ranks_as_in_one_process(name: str, ranks: int) -> None:
    make, script, lines = SCRIPTS[name]
    if name == "ImageNet" and ranks == 3:
        pytest.skip("its batch of 8 is divided by the number of ranks")
    begin = built(make)
    alone, copies = copy.deepcopy(begin), [copy.deepcopy(begin) for _ in range(ranks)]
    cluster = Cluster(Topology(tuple(f"h{rank}" for rank in range(ranks))), Link(1e-5, 1e5), 1.0)

    def work(comm: ThreadComm) -> Any:
        with using(comm, cluster):
            return state(script(copies[comm.rank]))

    torch.manual_seed(5)
    with using(ThreadComm()):
        expected = state(script(alone))
    torch.manual_seed(5)
    states = on_threads(ranks, work)
    assert difference(state(begin), expected) > 1e-3, "training changed nothing"
    assert max(difference(expected, got) for got in states) <= 1e-10
    assert changed_lines(name) == lines
