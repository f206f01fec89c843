"""Trains a model of which hosts without rows hold layers, and the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from one_process import State, assert_same_bits, cluster_of, difference, rows_of, state
from piped import Script

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using


@dataclass(frozen=True)
class Apart:
    """A script, with ranks that train and hosts that hold layers.

    Args:
        script: the script.
        ranks: number of ranks that train.
        hosts: number of hosts that bring no rows.
        timeout_s: seconds of a receive.
        wrapped: returns the ranks' messages with faults.
    """

    script: Script
    ranks: int
    hosts: int
    timeout_s: float = 20.0
    wrapped: Callable[[Any], Any] = lambda comm: comm

    def trained(self, pins: Mapping[str, str]) -> list[tuple[Any, State]]:
        """What the loop returns on each rank that trains, and the state behind it."""
        tried, ranks = self.script, self.ranks
        copies = [copy.deepcopy(tried.model) for _ in range(ranks + self.hosts)]
        hosts = tuple(f"apart{number}" for number in range(self.hosts))
        cluster = replace(cluster_of(ranks), tail=hosts)

        def work(comm: ThreadComm) -> Any:
            place = min(comm.rank, ranks - 1)
            own = [rows_of(b, place, ranks, tried.uneven) for b in tried.batches]
            model = copies[comm.rank]
            with using(self.wrapped(comm), cluster), suppress(SystemExit):
                model, loss_fn, optimizer = shoal.parallelize(
                    model,
                    copy.deepcopy(tried.loss_fn),
                    tried.optimizer(p for p in model.parameters() if p.requires_grad),
                    sample=own[0],
                    pins=pins,
                    **tried.options,
                )
                return tried.loop(model, loss_fn, optimizer, own), state(model)
            assert comm.rank >= ranks
            return None

        names = cluster.topology.hosts + hosts
        return run(
            ranks + self.hosts, work, timeout_s=self.timeout_s, hosts=names, tail=self.hosts
        )[:ranks]


def assert_same(tried: Apart, pins: Mapping[str, str], within: float = 1e-10) -> list[Any]:
    """Ranks get what one process gets, and every rank the same bits; returns its results."""
    _, expected = tried.script.alone()
    got = tried.trained(pins)
    assert_same_bits([each for _, each in got])
    assert difference(state(tried.script.model), expected) > 1e-3, "training changed nothing"
    assert difference(expected, got[0][1]) <= within
    return [each for each, _ in got]
