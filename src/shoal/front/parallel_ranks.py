"""`parallelize`, once ranks agree on the request (parallel.py): for one rank, and for several.

Steps 2 to 5 of parallel.py: measure, plan, rewrite, watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.agreement import from_first
from shoal.contracts.comm import Comm
from shoal.contracts.feature import Features, PlanFacts, planned
from shoal.contracts.sample import Sample
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.freed_memory import return_free_memory
from shoal.core.plan import Plan
from shoal.core.side_threads import side_threads
from shoal.core.terms import Terms
from shoal.engine.weights import inputs_alike
from shoal.features import Replan
from shoal.front.carriers import all_codecs, exchanges_of
from shoal.front.cluster import device_of, measured_cluster
from shoal.front.earlier_figures import KnownModel, key_of_model, known_plan, learn_plan
from shoal.front.fast import with_local_steps_if_sooner, with_local_steps_of
from shoal.front.no_effect import unused_micro_batches
from shoal.front.request import Request
from shoal.front.rounding import warn_of_rounding
from shoal.front.stages import Stages
from shoal.front.text import summary
from shoal.optim.extend import extend
from shoal.planner.dealt_plans import way_of_dealing
from shoal.planner.holders import check_cuts, holders_in
from shoal.planner.search import predict_again
from shoal.planner.search_options import Constraints
from shoal.planner.timeline import with_settings_of
from shoal.profiling.layers import ProfileOptions, profile_model
from shoal.profiling.trials import warn_of_unlike
from shoal.remote.holding_hosts import HoldingHosts
from shoal.rewrite.align import of_first
from shoal.rewrite.apply import check_served, cuts
from shoal.session.additions import add
from shoal.session.attach import attach
from shoal.session.compiled_models import all_uncompiled
from shoal.session.job import TrainingJob
from shoal.session.memory import keep_free_memory
from shoal.session.opening import Prepared
from shoal.session.replan_record import Again, keep
from shoal.session.session import Session, found
from shoal.session.watch import Watched
from shoal.strategies.row_parts import check_buffers, check_row_parts, is_pipelined


@dataclass(frozen=True)
class Found:
    """A plan, and the facts that it was made from."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster


def job_of(
    request: Request, loss_fn: Callable[..., Any] | None, optimizers: Sequence[Optimizer]
) -> TrainingJob:
    """Make the training job of a request."""
    options = request.options
    return TrainingJob(
        request.facts.model,
        loss_fn,
        optimizers,
        options.compute_loss,
        options.count,
        options.left_alone,
        options.memory,
        alike=options.weigh == "ranks",
        memory_limit=options.memory_limit,
    )


def alone(session: Session, job: TrainingJob, sample: Any) -> Any:
    """Check the sample, extend the optimizers as on several ranks, and return the loss."""
    if sample is not None:
        # raise the error already here, not only under torchrun
        Sample.of(job.model, job.loss_fn, sample, job.compute_loss)
    for optimizer in job.optimizers:
        extend(optimizer, job.left_alone)
        session.notice_training(optimizer, alone=True)
    add(job.model, None)
    return job.loss


def spread(
    session: Session,
    job: TrainingJob,
    request: Request,
    sample: Any,
    terms: Terms | None = None,
) -> Any:
    """Measure, plan, rewrite and watch, on every rank alike. Return the loss to train by.

    Args:
        session: the ranks.
        job: the model, its loss and its optimizers.
        request: the request.
        sample: one batch.
        terms: the rows of a call, if they are known.
    """
    with all_uncompiled:
        return _spread(session, job, request, sample, terms)


def _spread(
    session: Session, job: TrainingJob, request: Request, sample: Any, terms: Terms | None
) -> Any:
    comm, model, options = session.comm, job.model, request.options
    stages = Stages(speaks=comm.rank == 0)
    keep_free_memory()
    session.end_dropped_models()  # before this model is measured: they keep parts of models
    comm.reached("parallelize: measuring the model")
    how = profile_options(request)
    if comm.size == 1 and how.row_parts is None:  # nothing is given to other ranks
        how = replace(how, row_parts=1)
    profile = _profile_or_recall(job, sample, comm, request.features, how)
    if terms is not None:
        profile = replace(profile, terms=replace(terms, kept=profile.terms.kept))
    alike = job.loss_fn is not None and inputs_alike(comm, *sample)
    stages.done("measuring the model")
    comm.reached("parallelize: measuring the links")
    cluster = measured_cluster(
        session,
        exchanges_of(request.given_plan, options.pins),
        device_of(model),
        all_codecs(request.given_plan, options.pins, options.allowed_codecs),
    )
    return_free_memory()
    stages.done("measuring the links")
    comm.reached("parallelize: planning and rewriting")
    facts = replace(request.facts, profile=profile, cluster=cluster)
    plan, values = _make_plan(session, request, facts)
    stages.done("planning")
    if comm.rank == 0:
        warn_of_rounding(comm.topology, plan)
        if profile.terms.unlike is not None:
            warn_of_unlike(job.loss, profile.terms.unlike)
    again = Again(job.loss_fn, with_local_steps_of(plan, request).without_model(), alike)
    loss = follow(session, job, Found(plan, profile, cluster), again, values)
    if any(isinstance(feature, Replan) and feature.on for feature in request.features):
        keep(model, again)
    stages.say(summary(plan, profile.moving, profile.norms))
    stages.say(unused_micro_batches(options, plan))
    return loss


def follow(
    session: Session,
    job: TrainingJob,
    found: Found,
    again: Again[Request],
    values: Mapping[str, Tensor],
    before: Watched | None = None,
) -> Any:
    """Rewrite the model for a plan and watch it; return the loss to train by (a collective).

    Args:
        session: the ranks.
        job: the model, its loss and its optimizers.
        found: the plan, and the facts that it was made from.
        again: the request, and a fact that the sample showed.
        values: rank 0's values that differ between ranks.
        before: the hooks of the plan before, which has been released.
    """
    model, plan, profile = job.model, found.plan, found.profile
    prepared = Prepared(
        plan,
        profile,
        found.cluster,
        again.asked.features,
        again.alike,
        values,
        before,
    )
    loss, attached = attach(session, job, prepared)
    torch.clear_autocast_cache()  # within autocast the cache holds casts of the old weights
    if cuts(plan):
        return_free_memory()
    for optimizer in job.optimizers:
        session.notice_training(optimizer, alone=False)
    session.served.update(dict.fromkeys(filter(attrgetter("requires_grad"), model.parameters())))
    placed = with_settings_of(profile, plan)
    session.attached[model] = replace(attached, profile=placed, cluster=plan.on(found.cluster))
    return loss


def profile_options(request: Request) -> ProfileOptions:
    """Return the options for profiling the model of a request."""
    options, draft = request.options, request.draft
    row_parts: int | None = draft.micro_batches if is_pipelined(draft) else 1
    among = Constraints(pins=options.pins, strategies=request.usable, placement=options.placement)
    if request.given_plan is None and way_of_dealing(among) is not None:
        row_parts = options.micro_batches
    return ProfileOptions(
        row_parts=row_parts,
        buffers=options.buffers,
        compute_loss=options.compute_loss,
        counted=options.count is not None or options.weigh == "ranks",
    )


def _profile_or_recall(
    job: TrainingJob, sample: Any, comm: Comm, features: Features, how: ProfileOptions
) -> ModelProfile:
    """Profile a model, with the times of an earlier start if they are known."""
    parts = [how.row_parts, *(type(feature).__name__ for feature in features)]
    earlier = KnownModel(comm, key_of_model(job, sample, comm, parts))
    profile = profiled(job, sample, comm, features, replace(how, known=earlier.known))
    earlier.keep()
    return profile


def profiled(
    job: TrainingJob, sample: Any, comm: Comm, features: Features, how: ProfileOptions
) -> ModelProfile:
    """Profile a model, and let its features change the profile.

    Args:
        job: the model, its loss and its optimizers.
        sample: one batch.
        comm: the ranks, which measure together.
        features: features of training.
        how: options for `profile_model`.
    """
    with ExitStack() as stack:
        stack.enter_context(_others_frozen(job.model))
        changes = [stack.enter_context(feature.measuring(job.model)) for feature in features]
        profile = profile_model(job.model, job.loss_fn, job.optimizers, sample, comm, how)
        for change in changes:
            profile = change(profile)
    return profile


@contextmanager
def _others_frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the other parallelised models inside, because a loss may go through one of them.

    Otherwise they would send gradients, and their loaders would take a measured step for training.
    """
    session = found()
    own = {id(parameter) for parameter in model.parameters()}
    frozen = [
        parameter
        for other in (session.attached if session is not None else ())
        for parameter in other.parameters()
        if parameter.requires_grad and id(parameter) not in own
    ]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _make_plan(
    session: Session, request: Request, facts: PlanFacts
) -> tuple[Plan, Mapping[str, Tensor]]:
    """Return rank 0's plan and differing values. All ranks compare values while rank 0 searches."""
    comm = session.comm
    beside = comm.channel(f"model{session.models}-values")
    with closing(beside), side_threads(1, "values") as pool:
        comparing = pool.submit(of_first, facts.model, beside)
        plan = from_first(comm, Plan, lambda: chosen(request, facts))
        values = comparing.result()
    return plan, values


def chosen(request: Request, facts: PlanFacts, *, anew: bool = False) -> Plan:
    """Return the plan that is asked for, with its predicted step time.

    Args:
        request: the request.
        facts: facts with the profile and the cluster, as they were measured.
        anew: whether to make a plan even if the first one was given.
    """
    options, draft = request.options, request.draft
    profile, cluster = facts.profile, facts.cluster
    assert profile is not None and cluster is not None
    cluster = draft.on(cluster)
    if request.given_plan is not None and not anew:
        check_served(draft, profile, cluster)
        check_row_parts(draft, profile)
        if is_pipelined(draft):
            check_cuts(profile, holders_in(draft))
        plan = predict_again(draft, profile, cluster)
    else:
        among: dict[str, Any] = {
            "pins": options.pins,
            "strategies": request.usable,
            "placement": options.placement,
            "memory": options.memory,
            "memory_limit": options.memory_limit,
            "micro_batches": options.micro_batches,
            "options": options.search_options,
            "codecs": options.allowed_codecs,
        }
        session = found()
        hosts = session.other(HoldingHosts) if session is not None else None
        is_later = hosts is not None and hosts.calls > 1
        if (is_later or device_of(facts.model).type != "cpu") and not is_pipelined(draft):
            # such hosts hold layers of the first model alone, and on CPUs
            cluster = replace(cluster, tail=())
        plan = known_plan(profile, cluster, among)
        if session is not None and not (anew or session.others):
            plan = learn_plan(plan, profile, cluster, among, facts.model in session.usual_rows)
        check_row_parts(plan, profile)
    check_buffers(plan, profile)
    return with_local_steps_if_sooner(planned(plan, request.features, facts), request, facts)
