"""`parallelize` and `plan`: from a model on one device to the same model on every rank.

    1  compare   every rank gave the same model, plan, pins and strategies, or all of them hear who
                 did not
    2  measure   one sample through the model on all ranks at once; the links, once a session
    3  plan      rank 0 chooses, all take its plan
    4  rewrite   the model's layers change in place; transfers come out
    5  watch     an engine takes the transfers; hooks on the model (and the loss) weigh uneven rows

A lone process stops after checking what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.comm.agreement import agreed, from_first
from shoal.contracts.sample import check_compute_loss
from shoal.core.facts import Cluster
from shoal.core.outer import Outer
from shoal.core.plan import MICRO_BATCHES, Plan
from shoal.engine.replicas import EVERY
from shoal.front.carriers import all_codecs, codecs_of, exchanges_of
from shoal.front.cluster import device_of, measured_cluster, with_codings
from shoal.front.joining import is_tail_host, serve_and_end
from shoal.front.replanning import at_epoch_ends
from shoal.front.request import Request, checked, in_a_tuple, listed, require_same
from shoal.front.spreading import Job, alone, profiled, spread
from shoal.planner.search_options import DEFAULT, SearchOptions
from shoal.planner.sharing import plan_for
from shoal.profiling.moving import check_ways
from shoal.remote.tail_hosts import TailHosts
from shoal.session.session import current, ranks

_CHECKING = "parallelize: checking what was given"


def parallelize(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    *,
    sample: Any = None,
    plan: Plan | str | Path = "auto",
    pins: Mapping[str, str] | None = None,
    strategies: Iterable[str] | None = None,
    count: Callable[..., float | Tensor] | None = None,
    staleness: int | None = 0,
    memory: str = "fast",
    placement: str | dict[str, int] = "balanced",
    memory_limit: float | None = None,
    micro_batches: int = MICRO_BATCHES,
    search_options: SearchOptions = DEFAULT,
    left_alone: Iterable[nn.Parameter] = (),
    buffers: str | Mapping[str, str] = "agree",
    sync_batchnorm: bool = False,
    codecs: str | Iterable[str] = (),
    compute_loss: Callable[[nn.Module, Any], Any] | None = None,
    check_every: int = EVERY,
    max_error: float | None = None,
    local_steps: int | str | None = None,
    outer: Outer | None = None,
    update_every: Mapping[str, int] | None = None,
    replan: bool = False,
) -> tuple[Any, Any, Any]:
    """Change a model, its loss and optimizer in place: the usual loop then trains on all ranks.

    After `loss.backward()` every `.grad` is the mean over the global batch, the same on every rank.

    Args:
        model: any module. Names, state_dict keys and parameter objects stay as they are. Compile
            blocks afterwards.
        loss_fn: a module or function of (output, target) that gives a mean over local rows, or a
            sum, as the sample shows. None where there is a `compute_loss`, or the model returns its
            own loss: a scalar, `.loss`, `["loss"]` or the one scalar of a tuple, as in (logits,
            loss).
        optimizer: one optimizer, or a list of them.
        sample: `(x, y)`, one batch such as training will see: x a tensor, a tuple of positional or
            a dict of keyword arguments of the model. A namedtuple is one argument. y is the target,
            None without a loss_fn. With a `compute_loss` it is any batch that this takes.
        plan: "auto", a `Plan`, or the path of a saved one.
        pins: by dotted layer name or glob, a strategy ("factor") or a strategy and its exchange
            ("replicate:ring").
        strategies: names of the strategies that the planner may use. By default all.
        count: a function of (output, target) that gives how many terms the local mean is over,
            where that is not the number of rows (ignore_index, token losses). Without a loss_fn its
            target is what the model was called with. With a `compute_loss` it takes (batch). Each
            step waits for the number, so on a GPU it is better one that the host knows already.
        staleness: with servers only: by how many steps a worker may run ahead of the slowest, 0 for
            the synchronous step, None for any number. Otherwise all layers are served, every rank
            weighs the same however many rows it has, and there is no one gradient to read or to
            clip. With `local_steps` it counts rounds of these.
        memory: "fast", or "low": buckets of layers that have owners take memory only while they are
            on their way, backward waits where more than two a lane would, and a plan that is made
            here has small ones. One plan gives the same results either way, bit for bit.
        placement: who owns what in layers that have owners: "balanced" (equal shares of bytes,
            parameters are cut), "round-robin" or "hash" (whole parameters, to the servers where
            there are any), or a rank by dotted layer or parameter name or glob, as {"head.*": 0};
            those layers are then given to owners, the rest is balanced.
        memory_limit: bytes that a rank may hold between steps for parameters, gradients, buckets
            and optimizer state. Layers are given to owners, or cut over the ranks, until they are
            kept. `shoal.memory` tells what is held.
        micro_batches: that a batch is cut into where the end of the model runs on hosts of its own
            ("stage").
        search_options: sizes of buckets and the like that the planner may try.
        left_alone: parameters in the optimizer that are not the model's, and that your program
            itself keeps right among ranks, such as a head cut by hand. Their gradients are not
            exchanged, weighed or clipped.
        buffers: of buffers that training changes on each rank otherwise. "agree": after each
            backward all ranks have the same, rank 0's of what training reads, the mean of what it
            only writes, as the sample shows. "local": each rank keeps its own. Or by dotted name or
            glob "first", "mean" or "local": {"*.center": "first"}; the others agree.
        sync_batchnorm: whether BatchNorm layers normalise by the rows of all ranks, as one process
            does on the global batch. Their statistics cross the network in forward and backward,
            and main threads wait for them. nn.SyncBatchNorm layers always do.
        codecs: names of those that the planner may use, as ["bfloat16", "int8(block=128)"], or
            "all". Where the predicted step gets a tenth shorter, values then go in fewer bytes and
            not exactly. By default none. A codec in a plan or pin ("sliced:direct+int8") needs no
            leave.
        compute_loss: in place of a loss_fn, a function of (model, batch) that computes the loss, as
            trainers have it. It may call the model, or parts of it, as it likes. Train by the one
            that is returned.
        check_every: backwards from one comparison of replicas to the next: whether ranks have the
            same bits of weights and optimizer state that each updates itself. Who differs is named
            and, where a majority is, given its bits. 0: never.
        max_error: with codecs, a bound of the relative error of a parameter's mean over 100 steps.
            Where it is off by more, its bucket goes exactly from then on, with a warning. By
            default each codec has its own bound.
        local_steps: each rank makes so many steps by itself, then all come together by an `outer`
            rule; or "auto", the fewest that hide the exchange. With servers each pushes what it has
            learned to these. This changes the mathematics. None: gradients are exchanged in every
            step.
        outer: that rule, `shoal.Outer()` by default. It also says whether the ranks of one host
            step together, and how many exact steps come first. With servers it is `rule="average"`.
        update_every: by dotted layer name or glob, every how many steps a layer is updated, as
            {"classifier.*": 4}. Until then each rank adds up its gradients, and `.grad` is None.
            Then it is their mean over all rows. This changes the mathematics, and saves the bytes
            of the steps between.
        replan: whether the plan is made anew as an epoch of a sharded loader ends, from what steps
            took and links carry. Another one must be predicted to take a tenth less time. To ask
            for it yourself, call `shoal.replan`. A given plan is the first one. Not with servers,
            tail hosts, a staleness, local_steps or update_every.

    Rank 0 logs how long each stage took, and in one line the plan, at level INFO of the logger
    "shoal": to stderr where the program has set up no logging.

    Returns:
        `(model, loss_fn, optimizer)`: the same objects, but for a loss that is a plain function,
        which may be wrapped. With a compute_loss, `(model, compute_loss, optimizer)`.

    Raises:
        UsageError: what was given does not fit: sample, plan, pins, memory, placement, a compiled
            model, or ranks that differ.
        WorldError: a rank was lost while they prepared.
        Served: on a tail host, behind its work. Not caught, it ends the script, with exit code 0.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> model, loss_fn, optimizer = shoal.parallelize(model, loss_fn, optimizer, sample=(x, y))
        >>> loss_fn(model(x), y).backward()
        >>> optimizer.step()

        With a function that computes the loss of a batch:

        >>> model, batch = torch.nn.Linear(4, 2), {"x": x, "y": y}
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def compute_loss(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> model, compute_loss, optimizer = shoal.parallelize(
        ...     model, None, optimizer, sample=batch, compute_loss=compute_loss
        ... )
        >>> compute_loss(model, batch).backward()
    """
    session = current()
    comm = session.comm
    if is_tail_host(session):
        serve_and_end(session, model, loss_fn, listed(optimizer))
    if (tail := session.other(TailHosts)) is not None:
        tail.calls += 1
    asked = Request(
        plan=plan,
        pins=pins,
        strategies=in_a_tuple(strategies),
        count=count,
        staleness=staleness,
        memory=memory,
        placement=placement,
        memory_limit=memory_limit,
        micro_batches=micro_batches,
        search_options=search_options,
        left_alone=tuple(left_alone),
        buffers=buffers,
        sync_batchnorm=sync_batchnorm,
        codecs=in_a_tuple(codecs),
        compute_loss=compute_loss,
        check_every=check_every,
        max_error=max_error,
        local_steps=local_steps,
        outer=outer,
        update_every=update_every,
        replan=replan,
    )
    comm.reached("parallelize: comparing what the ranks were given")
    given_plan = agreed(comm, lambda: checked(asked, model, loss_fn, optimizer, session), _CHECKING)
    optimizers = listed(optimizer)
    require_same(comm, asked, given_plan, model, optimizers)
    session.optimizers[model] = tuple(optimizers)
    session.released.discard(model)
    # what one rank would not do by itself
    other = local_steps is not None or bool(update_every)
    if given_plan is not None:
        other = given_plan.local_steps > 0 or bool(given_plan.update_every)
    loss = (alone if comm.size == 1 and not other else spread)(
        session, Job(model, loss_fn, optimizers, sample, asked, given_plan)
    )
    if replan and model in session.attached:
        at_epoch_ends(session, model)
    return model, loss, optimizer


def plan(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    *,
    sample: Any,
    cluster: Cluster | None = None,
    pins: Mapping[str, str] | None = None,
    strategies: Iterable[str] | None = None,
    placement: str | dict[str, int] = "balanced",
    memory_limit: float | None = None,
    micro_batches: int = MICRO_BATCHES,
    search_options: SearchOptions = DEFAULT,
    buffers: str | Mapping[str, str] = "agree",
    sync_batchnorm: bool = False,
    codecs: str | Iterable[str] = (),
    compute_loss: Callable[[nn.Module, Any], Any] | None = None,
) -> Plan:
    """Plan without changing anything.

    What is not named below is as for `parallelize`.

    Args:
        cluster: the ranks and links to plan for. With one no network is needed. Without one the
            session's links are measured.

    Raises:
        UsageError: as for `parallelize`; or no cluster and no session.

    Examples:
        >>> import shoal, torch
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sample = torch.ones(8, 4), torch.zeros(8, 2)
        >>> hosts = shoal.Topology(("one", "other"))
        >>> link = shoal.Link(latency_s=1e-4, bytes_per_s=125e6)
        >>> cluster = shoal.Cluster(hosts, link)
        >>> plan = shoal.plan(model, loss_fn, optimizer, sample=sample, cluster=cluster)
        >>> plan.ranks, len(plan.choices)
        (2, 1)
    """
    comm = ranks() if cluster else current().comm
    tail = cluster.tail if cluster else current().other(TailHosts)
    if compute_loss is not None:
        check_compute_loss(compute_loss, loss_fn)
    check_ways(buffers, model, compute_loss or loss_fn)
    allowed = codecs_of(codecs)
    profile, _ = profiled(
        model,
        loss_fn,
        listed(optimizer),
        sample,
        comm,
        micro_batches if tail else None,
        sync_batchnorm=sync_batchnorm,
        buffers=buffers,
        compute_loss=compute_loss,
        counted=True,
    )
    wanted, device = all_codecs(None, pins, allowed), device_of(model)
    where = (
        with_codings(cluster, comm, wanted, device)
        if cluster
        else measured_cluster(current(), exchanges_of(None, pins), device, wanted)
    )
    return from_first(
        comm,
        Plan,
        lambda: plan_for(
            profile,
            where,
            pins=pins,
            strategies=strategies,
            placement=placement,
            memory_limit=memory_limit,
            micro_batches=micro_batches,
            options=search_options,
            codecs=allowed,
        ),
    )
