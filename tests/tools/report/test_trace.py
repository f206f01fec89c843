"""A trace of a step: what the engine noted and what the planner expected, as Chrome reads it."""

from __future__ import annotations

import copy
import json

import torch
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.trace import MAIN, TraceEvent
from shoal.front.session_start import using
from shoal.planner.timeline import Predictor
from shoal_tools.report.trace import chrome


def test_events_become_rows_of_a_trace() -> None:
    rows = json.loads(chrome({"rank 0": [TraceEvent("send", "lane 1", 0.5, 0.75)], "rank 1": []}))[
        "traceEvents"
    ]
    (send,) = [row for row in rows if row["ph"] == "X"]
    assert (send["name"], send["pid"], send["ts"], send["dur"]) == ("send", 0, 5e5, 2.5e5)
    assert [row["args"]["name"] for row in rows if row["ph"] == "M"] == [
        "rank 0",
        "lane 1",
        "rank 1",
    ]


def test_a_recorded_step_shows_what_the_plan_says() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), torch.randn(2, 3, 6)

    def work(comm: ThreadComm) -> tuple[list[TraceEvent], list[TraceEvent]]:
        mine = copy.deepcopy(model)
        with using(comm, Cluster(Topology(("host",) * comm.size), Link(1e-4, 1e8))) as session:
            optimizer = torch.optim.SGD(mine.parameters(), 0.1)
            pins = {"0": "sliced:direct", "1": "replicate:ring"}
            _, loss_fn, _ = shoal.parallelize(
                mine,
                lambda out, _: out.sum(),
                optimizer,
                sample=(x[comm.rank], torch.zeros(3)),
                pins=pins,
            )
            attached = session.attached[mine]
            with attached.engine.recording() as recorder:
                loss_fn(mine(x[comm.rank]), None).backward()
                optimizer.step()
                mine.state_dict()
            loss_fn(mine(x[comm.rank]), None).backward()  # not recorded
            plan = attached.plan
            predicted = Predictor(attached.profile, attached.cluster).predict(
                plan.choices, plan.bucket_bytes, plan.lanes
            )
            return recorder.events, predicted.events()

    for measured, predicted in run(2, work):
        assert all(event.begin_s <= event.end_s for event in (*measured, *predicted))
        assert [event.what for event in measured if event.thread == MAIN][:2] == [
            "backward",
            "wait for gradients",
        ]
        for events in (measured, predicted):
            lanes = sorted(event.what.split(" site")[0] for event in events if event.thread != MAIN)
            assert lanes == ["exchange", "exchange", "update and return"]


def test_a_recorded_step_shows_what_the_main_thread_waits_for_in_cut_layers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(2, 3, 6)

    def work(comm: ThreadComm) -> list[TraceEvent]:
        mine = copy.deepcopy(model)
        with using(comm, Cluster(Topology(("host",) * comm.size), Link(1e-4, 1e8))) as session:
            optimizer = torch.optim.SGD(mine.parameters(), 0.1)
            sample = x[comm.rank], torch.zeros(3)
            _, loss_fn, _ = shoal.parallelize(
                mine, lambda out, _: out.sum(), optimizer, sample=sample, pins={"2": "column"}
            )
            with session.attached[mine].engine.recording() as recorder:
                loss_fn(mine(x[comm.rank]), None).backward()
            loss_fn(mine(x[comm.rank]), None).backward()  # not recorded
            return recorder.events

    for events in run(2, work):
        moves = [event for event in events if event.what.startswith("messages from every rank")]
        # forward: counts, there, back; backward: there, back
        assert [event.thread for event in moves] == [MAIN] * 5
