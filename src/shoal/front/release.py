"""`unparallelize`: from a model on every rank back to an ordinary model in each process.

    1  compare   every rank releases the same model, and it can be released
    2  extend    optimizers have their own methods again, and all of their state
    3  owners    parameters have their values, gradients and classes again
    4  watch     hooks come off the model and the loss
    5  rewrite   layers are as they were before, with whole tensors     (rewrite/apply.py)
    6  open      threads end, channels are given back, servers forget the model

This undoes session/attach.py. Its steps have the same names.
"""

from __future__ import annotations

from torch import nn

from shoal.comm.agreement import agreed
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.learning_loss import taken_loss
from shoal.optim.extend import release as release_optimizer
from shoal.rewrite.apply import release as release_layers
from shoal.servers.servers import Servers
from shoal.session.additions import remove
from shoal.session.compiled_models import all_uncompiled, without_compilation
from shoal.session.pending_model import end_waiting
from shoal.session.replan_record import forget
from shoal.session.running import Running
from shoal.session.session import Session, current


def unparallelize(model: nn.Module) -> None:
    """Undo `parallelize`, in place: an ordinary model and its optimizers on every rank.

    A collective: every rank calls it, between a step and the next forward. Modules, parameters and
    optimizers are the same objects as before, whole, with no trace of Shoal. Each rank has all
    values, all of the optimizer's state, and gradients if there are any. A loss that `parallelize`
    wrapped stays usable and weighs nothing. Then each process trains by itself, or you call
    `parallelize` again, also for another plan. Losses of codecs, which would have been sent later,
    are dropped with a warning on rank 0. If you `shoal.save` before, the checkpoint has them.

    Args:
        model: a model that `parallelize` was given.

    Raises:
        UsageError: the model is not parallelised, gradients were accumulated and not sent, its end
            is on tail hosts, or workers run ahead of one another.
        RanksDiffer: another rank releases another model.
        WorldError: a rank was lost; then start again from a checkpoint.

    Examples:
        >>> import torch, shoal
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> _ = shoal.parallelize(model, None, optimizer)
        >>> shoal.unparallelize(model)
        >>> hasattr(optimizer, "accumulate")
        False
    """
    session, model = current(), without_compilation(model)
    session.comm.reached("unparallelize: comparing what the ranks were given")
    running = agreed(
        session.comm, lambda: _running_model(session, model), "unparallelize: checking the model"
    )
    require_same_model(session, running, "unparallelize", "release")
    if running is not None:
        running.engine.settle()
    end_waiting(model)
    optimizers = session.optimizers.pop(model)
    still_used = {id(held) for of_other in session.optimizers.values() for held in of_other}
    for optimizer in optimizers:
        is_used = id(optimizer) in still_used
        if running is not None:
            release_optimizer(optimizer, running.engine)
        elif not is_used:
            release_optimizer(optimizer)
        if not is_used:
            session.ignore_training(optimizer)
    if running is not None:
        with all_uncompiled:
            give_back(session, model, running)
    remove(model)
    forget(model)
    session.released.add(model)
    if (loss := taken_loss(model)) is not None:
        unparallelize(loss)


def _running_model(session: Session, model: nn.Module) -> Running | None:
    """Return the running model; None if this process is alone."""
    if model not in session.optimizers:
        raise UsageError(
            "the model is not parallelised",
            got=type(model).__name__,
            do="call shoal.parallelize first",
        )
    attached = session.attached.get(model)
    if attached is None:
        return None
    if not attached.plan.in_step and not attached.plan.is_local:
        raise UsageError(
            "workers run ahead of one another, so there is no one state to give back",
            do="save a checkpoint, and start again from it",
        )
    attached.running.check_release(model)
    return attached.running


def require_same_model(session: Session, running: Running | None, call: str, doing: str) -> None:
    """Raise RanksDiffer if ranks name different models in a call, which is for `doing` that."""
    numbers = session.comm.gather_objects(
        None if running is None else running.number, f"{call}: which model"
    )
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise RanksDiffer(
                f"rank {rank} and rank 0 {doing} different models",
                got=f"rank {rank}: the model that was parallelised as number {number}",
                expected=f"as on rank 0: number {numbers[0]}",
                do=f"call {call} for the same models in the same order on every rank",
                rank=rank,
            )


def give_back(
    session: Session, model: nn.Module, running: Running, *, goes_on: bool = False
) -> None:
    """Make the model ordinary. Its optimizers are ordinary already (2).

    Args:
        session: the ranks.
        model: the module.
        running: the parts that run it.
        goes_on: whether it follows another plan next.
    """
    threads, watched = session.threads.pop(running.number), session.attached[model].watched
    if running.owners is not None:
        running.owners.release()  # 3
    threads.drain()
    threads.counts.drain()
    for attachment in reversed(list(running.attachments.values())):
        attachment.release(goes_on=goes_on)
    if watched is not None:
        watched.release()  # 4
    release_layers(model, running.rewritten)  # 5
    servers = session.other(Servers)
    if servers is not None and running.at_servers is not None:
        servers.leave(running.at_servers)
    session.comm.gather_objects(
        "released", "unparallelize: all have released"
    )  # no rank needs a channel of the model any more
    threads.close()  # 6
    threads.close_boundary()
    if servers is not None and running.tables is not None:
        servers.close_tables(running.tables)
    if servers is not None and running.at_servers is not None:
        servers.close_model(running.at_servers)
    del session.attached[model]
    session.passes.waits.discard(running.engine.routes)
    for parameter in model.parameters():
        session.served.pop(parameter, None)
