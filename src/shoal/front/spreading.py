"""`parallelize`, once ranks agree on what was asked (parallel.py): what one rank does, and several.

Steps 2 to 5 of parallel.py: measure, plan, rewrite, watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.agreement import from_first
from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.sample import Sample
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, ModelProfile, Topology
from shoal.core.outer import Outer
from shoal.core.plan import Choice, Plan, rows_and_rest
from shoal.core.registry import named, of
from shoal.core.side_threads import side_threads
from shoal.engine.stragglers import Stragglers
from shoal.engine.weights import inputs_alike
from shoal.front.agreeing import check_moving, check_sync_norms
from shoal.front.carriers import all_codecs, bound_errors, codecs_of, exchanges_of
from shoal.front.cluster import device_of, measured_cluster
from shoal.front.locally import check_local_norms
from shoal.front.periods import begin_momentum, periods_of
from shoal.front.request import Request
from shoal.front.rounding import warn_of_rounding
from shoal.front.stages import Stages
from shoal.front.text import summary
from shoal.optim.extend import extend
from shoal.planner.local import with_local_steps
from shoal.planner.search import repredicted
from shoal.planner.sharing import plan_for, with_sharing
from shoal.planner.timeline import Predictor, as_planned
from shoal.profiling.layers import ProfileOptions, profile_model
from shoal.profiling.tails import tail_of
from shoal.remote.far_tail import FarTail
from shoal.remote.tail_hosts import TailHosts
from shoal.remote.tail_messages import Open
from shoal.rewrite.align import of_first
from shoal.rewrite.apply import check_served
from shoal.session.additions import add
from shoal.session.again import Again, keep
from shoal.session.attach import attach
from shoal.session.memory import give_back_freed, keep_freed
from shoal.session.running import Running
from shoal.session.session import Attached, Session
from shoal.session.watch import Watched
from shoal.strategies.carried import row_codec
from shoal.strategies.sync_batchnorm import SyncNorms
from shoal.strategies.sync_batchnorm import alone as sync_norms_alone
from shoal.tensors.crossing import Crossing


@dataclass(frozen=True)
class Job:
    """What `parallelize` was called with, checked, the same on every rank."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizers: Sequence[Optimizer]
    sample: Any
    asked: Request
    given_plan: Plan | None  # None: to be made


@dataclass(frozen=True)
class Found:
    """A plan, and the facts that it was made from."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster


def alone(session: Session, job: Job) -> Any:
    """Check the sample, and give the optimizers what they have on several ranks; the loss."""
    model, loss_fn, asked = job.model, job.loss_fn, job.asked
    if job.sample is not None:
        # said already here, not only under torchrun
        Sample.of(model, loss_fn, job.sample, asked.compute_loss)
    for optimizer in job.optimizers:
        extend(optimizer, asked.left_alone)
        session.notice_steps(optimizer)
    add(model, None)
    return asked.compute_loss or loss_fn


def spread(session: Session, job: Job) -> Any:
    """Measure, plan, rewrite and watch, on every rank alike; the loss to train by."""
    comm, model, asked = session.comm, job.model, job.asked
    stages = Stages(speaks=comm.rank == 0)
    keep_freed()
    comm.reached("parallelize: measuring the model")
    profile, norms = profiled(
        model,
        job.loss_fn,
        job.optimizers,
        job.sample,
        comm,
        _micro_batches(session, job),
        sync_batchnorm=asked.sync_batchnorm,
        buffers=asked.buffers,
        compute_loss=asked.compute_loss,
        counted=asked.count is not None,
    )
    names = [layer.name for layer in profile.layers]
    profile = profile.updated(periods_of(asked.update_every, names))
    alike = job.loss_fn is not None and inputs_alike(comm, *job.sample)
    stages.done("measuring the model")
    comm.reached("parallelize: measuring the links")
    cluster = measured_cluster(
        session,
        exchanges_of(job.given_plan, asked.pins),
        device_of(model),
        all_codecs(job.given_plan, asked.pins, codecs_of(asked.codecs)),
    )
    give_back_freed()
    stages.done("measuring the links")
    comm.reached("parallelize: planning and rewriting")
    plan, values = _planned(session, job, profile, cluster)
    stages.done("planning")
    check_plan(session, plan, profile)
    again = Again(job.loss_fn, asked, norms, alike)
    loss = follow(session, job, Found(plan, profile, cluster), again, values)
    if asked.replan:
        keep(model, again)
    stages.say(summary(plan, profile.moving, profile.norms))
    return loss


def follow(
    session: Session,
    job: Job,
    found: Found,
    again: Again[Request],
    values: Mapping[str, Tensor],
    before: Watched | None = None,
) -> Any:
    """Rewrite the model for a plan, and watch it; the loss to train by (a collective).

    Args:
        session: the ranks.
        job: the model, and what trains it.
        found: the plan, and the facts that it was made from.
        again: what was found beside the profile.
        values: rank 0's of what differs between ranks.
        before: what watched the model under the plan before, which has been released.
    """
    model, asked = job.model, again.asked
    plan, profile, cluster = found.plan, found.profile, found.cluster
    begin_momentum(plan.update_every, model, job.optimizers)
    loss, running = attach(
        session,
        model,
        job.loss_fn,
        job.optimizers,
        plan,
        count=asked.count,
        memory=asked.memory,
        stage=_open_tail(session, model, job.loss_fn, plan, profile),
        inputs_alike=again.alike,
        left_alone=asked.left_alone,
        moving=profile.moving,
        terms=profile.terms,
        norms=again.norms,
        compute_loss=asked.compute_loss,
        check_every=asked.check_every,
        values=values,
        before=before,
    )
    bound_errors(running.engine.transfers, asked.max_error, running.owners)
    placed = as_planned(profile, plan)
    _watch_stragglers(session, running, plan, placed, cluster)
    session.served.update(dict.fromkeys(filter(attrgetter("requires_grad"), model.parameters())))
    cluster = _as_trained(cluster, plan.staleness, plan.local_steps)
    session.attached[model] = Attached(running, plan, placed, cluster)
    return loss


def profiled(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizers: Sequence[Optimizer],
    sample: Any,
    comm: Comm,
    micro_batches: int | None,
    *,
    sync_batchnorm: bool,
    **how: Any,
) -> tuple[ModelProfile, SyncNorms]:
    """What `profile_model` finds, batch norms that go by the rows of all ranks among it."""
    with sync_norms_alone(model, sync_batchnorm) as norms:
        options = ProfileOptions(micro_batches, **how)
        profile = profile_model(model, loss_fn, optimizers, sample, comm, options)
    return replace(profile, norms=norms.described(profile)), norms


def _planned(
    session: Session, job: Job, profile: ModelProfile, cluster: Cluster
) -> tuple[Plan, Mapping[str, Tensor]]:
    """Rank 0's plan, and its values of what differs, which all ranks compare while it searches."""
    comm = session.comm
    beside = comm.channel(f"model{session.models}-values")
    with side_threads(1, "values") as pool:
        comparing = pool.submit(of_first, job.model, beside)
        plan = from_first(
            comm, Plan, lambda: chosen(job.given_plan, profile, cluster, job.asked, comm.topology)
        )
        values = comparing.result()
    beside.close()
    return plan, values


def _micro_batches(session: Session, job: Job) -> int | None:
    """That a batch is cut into; None where the end of this model is not elsewhere."""
    tail = session.other(TailHosts)
    if tail is None or tail.calls > 1:
        return None
    return (job.given_plan or job.asked).micro_batches


def check_plan(session: Session, plan: Plan, profile: ModelProfile) -> None:
    """Refuse a plan under which something would be wrong, and warn of what rounds."""
    if session.comm.rank == 0:
        warn_of_rounding(session.comm.topology, plan)
    check_moving(plan, profile.moving)
    has_tail = any(named(Strategy, choice.strategy).role.is_at_tail for choice in plan.choices)
    check_sync_norms(plan, profile.norms, has_tail=has_tail)
    check_local_norms(plan, profile.norms)


def _watch_stragglers(
    session: Session, running: Running, plan: Plan, profile: ModelProfile, cluster: Cluster
) -> None:
    """Have ranks name who keeps them waiting, where they keep step."""
    engine = running.engine
    lane = engine.routes.among_workers
    if plan.staleness != 0 or plan.local_steps or lane is None:
        return
    step = Predictor(profile, cluster).as_is(plan)
    for each in engine.routes.lanes:
        each.expects(step.step_s)
    expected_s = step.end_s - step.backward_s + step.waited_s
    rate = cluster.link.bytes_per_s
    Stragglers(engine, lane, session.comm.topology, expected_s, rate)


def _open_tail(
    session: Session,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    plan: Plan,
    profile: ModelProfile,
) -> FarTail | None:
    """The way to the end of the model, if the plan has it on tail hosts."""
    at_tail = {c.layer: c for c in plan.choices if named(Strategy, c.strategy).role.is_at_tail}
    hosts = session.other(TailHosts)
    if hosts is None or not at_tail:
        return None
    if hosts.calls > 1:
        raise PlanError(
            "tail hosts run the end of the model that is parallelised first",
            do='parallelise this one first, or leave "stage" out of its plan',
        )
    tail = tail_of(map(profile.layer, at_tail))
    assert tail is not None, "a layer is at the tail that is in no end of the model"
    if set(tail.layers) != set(at_tail):
        raise PlanError(
            "the layers that the plan gives to tail hosts are no end of the model",
            got=", ".join(at_tail),
            expected=", ".join(tail.layers),
            do="give all of these to them, or none",
        )
    modules = {name: model.get_submodule(name) for name in tail.modules}
    shared = {name: rows_and_rest(choice.exchange)[1] for name, choice in at_tail.items()}
    codec = _codec_of_tail(at_tail.values())
    written = "" if codec is None else str(codec)
    hosts.tell(Open(tail.modules, plan.micro_batches, plan.joined, shared, written))
    at_workers = [named(Strategy, c.strategy) for c in plan.choices if c.layer not in at_tail]
    alike = any(strategy.role.is_cut for strategy in at_workers)
    return FarTail(hosts, model, modules, loss_fn, plan.micro_batches, Crossing(codec), alike=alike)


def _codec_of_tail(at_tail: Iterable[Choice]) -> Codec | None:
    """As which activations cross: one for all layers of the tail."""
    rows = {choice.rows: choice.layer for choice in at_tail}
    if len(rows) > 1:
        ways = ", ".join(f"{layer} stage{codec}" for codec, layer in rows.items())
        raise PlanError(
            "layers on tail hosts have one codec for all",
            got=ways,
            do="give all of them the same, or none",
        )
    return row_codec(next(iter(rows)))


def chosen(
    given_plan: Plan | None,
    profile: ModelProfile,
    cluster: Cluster,
    asked: Request,
    topology: Topology | None = None,
) -> Plan:
    """The plan that is asked for, or that was given, with the step that it is predicted to take.

    The ranks are at a `topology`, by default that of the cluster.
    """
    topology = topology or cluster.topology
    if given_plan is None:
        stale, local = asked.staleness != 0, asked.local_steps
        cluster = _as_trained(cluster, asked.staleness, local)
        alone = "server" if cluster.apart else "replicate"
        strategies = asked.strategies if local is None else (alone,)
        kinds = of(Strategy)
        served = [name for name, kind in kinds.items() if kind.role.takes_servers]
        made = plan_for(
            profile,
            cluster,
            pins=asked.pins,
            strategies=served if stale and local is None else strategies,
            placement=asked.placement,
            staleness=None if cluster.apart else asked.staleness,
            memory=asked.memory,
            memory_limit=asked.memory_limit,
            micro_batches=asked.micro_batches,
            options=asked.search_options,
            codecs=codecs_of(asked.codecs),
        )
        if local is None:
            return made
        outer = asked.outer or (Outer(rule="average") if cluster.apart else Outer())
        made = replace(made, staleness=asked.staleness)
        return with_local_steps(made, profile, cluster, local, _placed(outer, cluster, topology))
    cluster = _as_trained(cluster, given_plan.staleness, given_plan.local_steps)
    check_served(given_plan, profile, cluster)
    plan = with_sharing(repredicted(given_plan, profile, cluster), profile, cluster)
    if plan.outer is None:
        return plan
    outer = _placed(plan.outer, cluster, topology)
    return with_local_steps(plan, profile, cluster, plan.local_steps, outer)


def _placed(outer: Outer, cluster: Cluster, topology: Topology) -> Outer:
    """The rule with what depends on where ranks are. To servers each worker pushes by itself."""
    return replace(outer, islands=False) if cluster.apart else outer.on(topology)


def _as_trained(cluster: Cluster, staleness: int | None, local_steps: int | str | None) -> Cluster:
    """The cluster, with whether workers run ahead of one another, or step by themselves."""
    apart = bool(local_steps and cluster.servers)
    return replace(cluster, ahead=apart or staleness != 0, apart=apart)
