"""One state of a run whose workers are ahead of one another: a consistent cut, for a checkpoint.

    1  finish    each worker has the servers' answers to its last step
    2  meet      so all gradients of all workers have been applied, and nobody makes a step
    3  refresh   each worker has the servers' parameters, as one that goes on from the checkpoint
    4  save      parameters and optimizer's state are of the same moment
    5  part      together

Costs the slowest worker's lag, and one gather of the parameters. Guarded by
tests/equivalence/test_ahead.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shoal.servers.ahead import RunningAhead
from shoal.session.session import Session


@contextmanager
def standing(session: Session | None) -> Iterator[None]:
    """Within it the session's workers stand still, where any run ahead (a collective)."""
    attached = [] if session is None else session.attached.values()
    running = [each.running for each in attached if each.plan.staleness != 0]
    if session is None or not running:
        yield
        return
    comm = session.comm
    with ExitStack() as stack:
        for each in running:
            if each.owners is not None and isinstance(each.owners.tell, RunningAhead):
                stack.enter_context(each.owners.tell.standing())
                each.owners.settle()  # 1
            if each.tables is not None:
                each.tables.reach()
        comm.gather_objects(None, "shoal.save: workers that run ahead stand still")  # 2
        for each in running:
            if each.owners is not None:
                each.owners.refresh()  # 3
            if each.tables is not None:
                each.tables.stands = True
                stack.callback(setattr, each.tables, "stands", False)
        yield  # 4
        comm.gather_objects(None, "shoal.save: workers that run ahead go on")  # 5
