"""`parallelize` and `plan`: from a model on one device to the same model on every rank.

    1  compare   every rank gave the same model, plan, pins and features, or all of them hear which
                 rank did not
    2  measure   one sample through the model on all ranks at once; the links, once a session
    3  plan      rank 0 chooses, all take its plan
    4  rewrite   the model's layers change in place; transfers come out
    5  watch     an engine takes the transfers; hooks on the model (and the loss) weigh uneven rows

A lone process stops after checking its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.agreement import agreed, from_first
from shoal.contracts.batch_loss import given_loss
from shoal.contracts.feature import Feature
from shoal.core.buckets import MEMORY
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster
from shoal.core.numbers import shown
from shoal.core.placement import BALANCED
from shoal.core.plan import Plan
from shoal.core.terms import WEIGH
from shoal.features import Lossy, Older
from shoal.front.carriers import all_codecs, exchanges_of
from shoal.front.cluster import device_of, measured_cluster, with_codings
from shoal.front.first_batch import by_first_batch, for_sample
from shoal.front.forward_only import for_use, mean_of_output, thaw_all
from shoal.front.learning_loss import learning_loss, spread_loss
from shoal.front.no_effect import effective, find_untrained
from shoal.front.options import AUTO, Options
from shoal.front.parallel_ranks import alone, chosen, job_of, profile_options, profiled, spread
from shoal.front.replan import at_epoch_ends
from shoal.front.request import (
    Request,
    check_functions,
    checked,
    facts_for,
    listed,
    request_of,
    require_same,
)
from shoal.front.session_start import is_tail_host, serve_and_end
from shoal.front.stages import Stages
from shoal.optim.closure_loss import check_updated_everywhere
from shoal.profiling.moving_state import check_ways
from shoal.remote.holding_hosts import HoldingHosts
from shoal.session.compiled_models import all_uncompiled, without_compilation
from shoal.session.job import TrainingJob
from shoal.session.pending_model import pending_of
from shoal.session.replan_record import kept
from shoal.session.session import Session, current, ranks

_CHECKING = "parallelize: checking what was given"


def parallelize(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    *,
    sample: Any = None,
    compute_loss: Callable[[nn.Module, Any], Any] | None = None,
    count: Callable[..., float | Tensor] | None = None,
    weigh: str = WEIGH[0],
    left_alone: Iterable[nn.Parameter] = (),
    plan: Plan | str | Path = AUTO,
    pins: Mapping[str, str] | None = None,
    strategies: Iterable[str] | None = None,
    placement: str | dict[str, int] = BALANCED,
    memory: str = MEMORY[0],
    memory_limit: float | None = None,
    lossy: Lossy | None = None,
    features: Iterable[Feature[Any]] = (),
    **older: Unpack[Older],
) -> tuple[Any, Any, Any]:
    """Change a model, its loss and optimizer in place: the usual loop then trains on all ranks.

    After `loss.backward()` every `.grad` is the mean over the global batch, the same on every rank.

    Args:
        model: any module. Names, state_dict keys and parameter objects stay as they are. If it, or
            a module of it, is compiled already, that is compiled anew.
        loss_fn: a module or function of (output, target) that gives a mean over local rows, or a
            sum, as the sample shows. None if you give a `compute_loss`, or if the model returns its
            own loss: a scalar, `.loss`, `["loss"]` or the one scalar of a tuple, as in (logits,
            loss).
        optimizer: one optimizer, or a list of them. None for a model that is only used: it is
            evaluated, or gives features, and its parameters may be frozen.
        sample: `(x, y)`, one batch such as training will see. x is a tensor, a tuple of positional
            or a dict of keyword arguments of the model. A namedtuple is one argument. y is the
            target, or None without a loss_fn. With a `compute_loss` the sample is any batch that
            this function takes. If you leave it out there, the first batch is the sample.
        compute_loss: in place of a loss_fn, a function of (model, batch) that computes the loss, as
            trainers have it. It may call the model, or parts of it, as it likes, take further
            arguments, and return more: (loss, anything), or a dict or an object with a "loss".
            Train by the function that is returned.
        count: a function of (output, target) that gives the number of terms of the local mean, if
            that is not the number of rows (ignore_index, token losses). Without a loss_fn its
            target is the input that the model was called with. With a `compute_loss` it takes
            (batch). Each step waits for the number, so on a GPU the host should know it already.
            Losses of torch with class weights or ignored targets count themselves.
        weigh: "rows", or "ranks" if the loss of every rank counts alike, however many rows it has:
            it is divided by the terms of all ranks already, or compares rows of all ranks
            (`shoal.gather`). It is a word for a count that is always 1.
        left_alone: parameters in the optimizer that are not the model's, and that your program
            itself keeps equal among ranks, such as a head cut by hand. Their gradients are not
            exchanged, weighed or clipped.
        plan: "auto", a `Plan`, or the path of a saved plan.
        pins: a strategy ("factor"), or a strategy and its exchange ("replicate:ring"), by dotted
            layer name or glob. A codec in a pin ("sliced:direct+int8") needs no `lossy`. Pins win
            over a given plan.
        strategies: names of the strategies that the planner may use. By default all. A layer that
            none of them fits is replicated.
        placement: the owners in layers that have owners: "balanced" (equal shares of bytes,
            parameters are cut), "round-robin" or "hash" (whole parameters, to the servers if there
            are any), or a rank by dotted layer or parameter name or glob, as {"head.*": 0}. Layers
            that you name are then given to owners, and the rest is balanced.
        memory: "fast" or "low". With "low", buckets of layers that have owners take memory only
            while they are on their way. Backward waits if more than two per lane would be on their
            way, and a plan that is made here has small buckets. One plan gives the same results
            either way, bit for bit.
        memory_limit: bytes that a rank may hold between steps for parameters, gradients, buckets
            and optimizer state. Layers are given to owners, or cut over the ranks, until the limit
            is kept. `shoal.memory` tells how much is held.
        lossy: options that may change the mathematics: codecs, local steps, layers that are updated
            less often. `shoal.Lossy` lists them. None by default.
        features: features of training, such as `shoal.SyncBatchNorm()`, or one of your own.
        older: the features' options by their keywords, and some options of the core:

            * `accuracy`: "exact", as one process; "near", which allows codecs that lost nothing
              measurable (16 bits, int8, int4, each with error feedback); or "fast", which allows
              every codec and local steps. They are taken if a loss is then reached sooner by the
              clock.
            * `total_steps`: number of steps of the whole run, from which "fast" chooses how long
              rounds of local steps are and how they begin. 448 by default.
            * `codecs`, `max_error`, `local_steps`, `outer`, `first`, `update_every`: as in
              `shoal.Lossy`.
            * `sync_batchnorm`: if True, BatchNorm layers normalise by the rows of all ranks, as one
              process does. Their statistics cross the network in forward and backward, and main
              threads wait for them. nn.SyncBatchNorm layers always do so.
            * `buffers`: how buffers that drift apart between ranks are reconciled. "agree": after
              each backward all ranks have the same buffers. The value is rank 0's if training reads
              the buffer, and the mean if training only writes it, as the sample shows. "local":
              each rank keeps its own. Or give "first", "mean" or "local" by dotted name or glob:
              {"*.center": "first"}. The other buffers agree then.
            * `check_every`: number of backwards from one comparison of replicas to the next. Ranks
              compare the bits of weights and optimizer state that each rank updates itself. A rank
              that differs is named and, if there is a majority, given its bits. 100 by default; 0:
              never.
            * `replan`: if True, the plan is made anew as an epoch of a sharded loader ends, from
              the measured times of steps and the speed of links. Another plan must be predicted to
              take a tenth less time. To ask for it yourself, call `shoal.replan`. A given plan is
              the first one.
            * `staleness`: number of steps that a worker may run ahead of the slowest, with servers
              only. 0 is the synchronous step, None is any number. If it is not 0, all layers are
              served, every rank weighs the same however many rows it has, and there is no one
              gradient to read or to clip. With local steps it counts rounds of them.
            * `micro_batches`: number of parts that each rank's batch is cut into, in a pipeline.
              If you pin the pipeline, it is 1 by default. Otherwise the planner finds it. Other
              plans have no parts.
            * `schedule`: with "1f1b" micro-batches of a pipeline go back as soon as they can, and a
              rank keeps few activations. It needs a compute_loss. "all_forward" by default.
            * `search_options`: sizes of buckets and the like that the planner may try.

    Rank 0 logs how long each stage took, and the plan in one line, at level INFO of the logger
    "shoal". The log goes to stderr if your program has set up no logging.

    Returns:
        `(model, loss_fn, optimizer)`: the same objects, except that a loss that is a plain function
        may be wrapped. With a compute_loss, `(model, compute_loss, optimizer)`.

    Raises:
        UsageError: an argument does not fit: sample, plan, pins, memory, placement, a feature, or
            ranks that differ.
        WorldError: a rank was lost during the preparation.
        Served: on a tail host, after its work. If you do not catch it, it ends the script with exit
            code 0.

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
    asked = dict(
        compute_loss=compute_loss,
        count=count,
        weigh=weigh,
        left_alone=left_alone,
        plan=plan,
        pins=pins,
        strategies=strategies,
        placement=placement,
        memory=memory,
        memory_limit=memory_limit,
        **older,
    )
    before = current().models
    trained = by_options(
        lambda: Options.of(asked, lossy, features), model, loss_fn, optimizer, sample
    )
    if pending_of(without_compilation(model)) is None and before == 0:
        _say_own(current())
    return trained


def _say_own(session: Session) -> None:
    """Log once, after the first model, a fact that surprises many."""
    if session.models and session.comm.size > 1:
        Stages(speaks=session.comm.rank == 0).say(_OWN)


_OWN = (  # a fact that surprises many
    "each rank's loss is of its own rows, and shoal.mean(loss, weight=rows) is that of all; every "
    "rank runs the whole script, so write files under shoal.world().is_main"
)


@torch.inference_mode(False)  # inference mode would give no gradients to measure, and no parameters
def by_options(
    options: Callable[[], Options],
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    sample: Any,
) -> tuple[Any, Any, Any]:
    """Parallelise by a record of options, which is made at the time when ranks compare it."""
    if optimizer is None and isinstance(model, nn.Module):
        loss = mean_of_output if loss_fn is None else loss_fn
        with thaw_all(model) as unused:
            by_options(lambda: for_use(options()), model, loss, unused, sample)
        return model, loss_fn, None
    session, given = current(), model
    if isinstance(given, nn.Module):
        model = without_compilation(given)
    comm = session.comm
    if is_tail_host(session):
        serve_and_end(session, model, loss_fn, listed(optimizer))
    if (hosts := session.other(HoldingHosts)) is not None:
        hosts.calls += 1
    comm.reached("parallelize: comparing what the ranks were given")
    request = agreed(
        comm,
        lambda: effective(
            checked(for_sample(options(), sample), model, loss_fn, optimizer, session)
        ),
        _CHECKING,
    )
    optimizers = listed(optimizer)
    require_same(comm, request, model, optimizers)
    session.optimizers[model] = tuple(optimizers)
    session.released.discard(model)
    job = job_of(request, loss_fn, optimizers)
    stages = Stages(speaks=comm.rank == 0 and comm.size > 1)
    stages.say(request.note)
    stages.say(find_untrained(session, job))
    if comm.size == 1 and request.is_nothing_for_one():
        return given, alone(session, job, sample), optimizer
    if sample is None and job.compute_loss is not None:
        loss = by_first_batch(session, job, request, partial(_begun, session, model))
        return given, loss, optimizer
    return given, _spread_all(session, job, request, sample), optimizer


def _spread_all(session: Session, job: TrainingJob, request: Request, sample: Any) -> Any:
    """Parallelise a model, after a loss that learns. Return the loss to train by."""
    if (learning := learning_loss(job, session)) is not None:
        job, request = spread_loss(session, job, request, sample, learning)
    loss = spread(session, job, request, sample)
    if kept(job.model) is not None:
        at_epoch_ends(session, job.model)
    return loss


def _begun(session: Session, model: nn.Module) -> None:
    """End the work of `parallelize` for a model that its first batch has parallelised."""
    if kept(model) is not None:
        at_epoch_ends(session, model)
    if session.models == 1:
        _say_own(session)


def plan(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    *,
    sample: Any,
    cluster: Cluster | None = None,
    **asked: Any,
) -> Plan:
    """Plan without changing anything.

    Args:
        model: as for `parallelize`. So are loss_fn, optimizer and sample.
        cluster: the ranks and links to plan for. If you give it, no network is needed. Otherwise
            the session's links are measured.
        asked: keywords of `parallelize`, also `lossy` and `features`, but no `plan`.

    Raises:
        UsageError: as for `parallelize`; or there is no cluster and no session.

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
    if "plan" in asked:
        raise UsageError("shoal.plan makes a plan, and takes none", do="leave out plan=")
    lossy, features = asked.pop("lossy", None), asked.pop("features", ())
    options = Options.of(asked, lossy, features)
    return plan_by_options(options, model, loss_fn, listed(optimizer), sample, cluster)


@torch.inference_mode(False)
def plan_by_options(
    options: Options,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizers: Sequence[Optimizer],
    sample: Any,
    cluster: Cluster | None,
) -> Plan:
    """Plan by a record of options, as `plan` does."""
    if cluster is not None and not isinstance(cluster, Cluster):
        raise UsageError(
            "cluster is no shoal.Cluster",
            got=shown(cluster),
            do="give for instance shoal.Cluster(shoal.Topology(hosts), shoal.Link(1e-4, 125e6))",
        )
    comm, model = ranks() if cluster else current().comm, without_compilation(model)
    options = for_sample(options, sample)
    check_functions(options, loss_fn)
    check_ways(options.buffers, model, given_loss(options.compute_loss, loss_fn))
    request = effective(request_of(options, model, facts_for(options, model, cluster)))
    check_updated_everywhere(optimizers, model, request.draft)
    job = job_of(request, loss_fn, optimizers)
    Stages(speaks=comm.rank == 0).say(request.note)
    how = profile_options(request)
    with all_uncompiled:
        profile = profiled(job, sample, comm, request.features, replace(how, counted=True))
    wanted = all_codecs(None, request.options.pins, options.allowed_codecs)
    device = device_of(model)
    measured = (
        with_codings(cluster, comm, wanted, device)
        if cluster
        else measured_cluster(current(), exchanges_of(None, request.options.pins), device, wanted)
    )
    facts = replace(request.facts, profile=profile, cluster=measured)
    return from_first(comm, Plan, lambda: chosen(request, facts))
