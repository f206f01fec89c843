"""Puts a plan into a model and has an engine run it, once ranks have agreed on the plan.

1  open      features, servers, tables, a boundary for cut layers: channels, made in the same order
             on every rank
2  rewrite   rank 0's values come in, layers change in place, transfers come out (rewrite/)
3  start     an engine takes the transfers, features start
4  extend    optimizers learn the parts that ranks own
5  watch     hooks on the model (and the loss) weigh uneven rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from torch.optim import Optimizer

from shoal.contracts.cadence import Event
from shoal.contracts.comm import Comm
from shoal.contracts.feature import Attachment
from shoal.contracts.row_weights import Weighing
from shoal.contracts.state import OF_LOSS, states
from shoal.contracts.strategy import Place
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.buckets import Buckets
from shoal.core.eager_methods import keep_eager
from shoal.core.terms import INPUT, OF_ROWS, OUTPUT, Terms
from shoal.engine.attendance import LaneAttendance
from shoal.engine.border import Border
from shoal.engine.common_state import Common, NowAndThen
from shoal.engine.engine import Engine
from shoal.engine.lanes import streaming
from shoal.engine.weights import Weigher, Weight
from shoal.optim.closure_loss import LossOfRanks, steers_by_loss
from shoal.optim.cut import CutPart
from shoal.optim.extend import add_parts, scaler_of
from shoal.optim.owned_pieces import OwnedPart
from shoal.optim.owners import Owners
from shoal.optim.part import Part
from shoal.optim.table import TablePart
from shoal.optim.tail import TailPart
from shoal.remote.far_parameters import FarParameters
from shoal.remote.tail_hosts import TailHosts
from shoal.remote.verbs import Sum
from shoal.rewrite.align import of_first, take
from shoal.rewrite.apply import PlacedSite, Rewritten, apply, check, cuts, placed, splits
from shoal.servers.ahead_workers import RunningAhead
from shoal.servers.servers import Servers
from shoal.session.additions import add
from shoal.session.holding import HeldApart, holds_apart, open_holders
from shoal.session.job import TrainingJob
from shoal.session.opening import Opening, Prepared
from shoal.session.running import Running
from shoal.session.server_part import ServersPart, open_servers, open_tables
from shoal.session.session import Attached, Session, Threads
from shoal.session.watch import watch
from shoal.strategies.pipeline import (
    far_of,
    is_pipeline,
    loss_at_end,
    pipeline_of,
    take_state,
    with_counters,
)
from shoal.strategies.row_parts import row_parts_of
from shoal.strategies.stage import loss_at_tail
from shoal.strategies.state_agreement import OfState, transfers_of


def attach(
    session: Session, job: TrainingJob, prepared: Prepared
) -> tuple[Callable[..., Any] | None, Attached]:
    """Rewrite a model for a plan, on every rank of the session alike.

    Args:
        session: the ranks.
        job: the model, its loss and its optimizers.
        prepared: the plan to follow, and the facts that it was made from.

    Returns:
        The loss to use from now on (or the `compute_loss`, if there is one), and the attached
        model's record.
    """
    keep_eager()
    session.end_dropped_models()
    if prepared.plan.outer is not None:
        outer = prepared.plan.outer.on(session.comm.topology)
        prepared = replace(prepared, plan=replace(prepared.plan, outer=outer))
    servers, ends = session.other(Servers), session.other(TailHosts)
    num_servers = len(servers.hosts) if servers else 0
    num_ends = len(ends.hosts) if ends else 0
    check(prepared.plan, job.model, session.comm.size, num_servers, num_ends)
    opening = Opening(session, job, prepared, _state_among(session, job, prepared))
    try:
        running = _open(opening, num_servers)
    except Exception:
        opening.close()
        raise
    for attachment in running.attachments.values():
        attachment.start(running)
    if prepared.plan.in_step:
        _compare(session, job, running)
    far = [prepared.stage] if prepared.stage is not None else far_of(job.model)
    _listen(session, running, far, opening.opened_attendance)
    # 4
    parts = _extend_optimizers(opening, running)
    # 5
    if prepared.stage is not None:
        assert job.loss_fn is not None
        job = replace(job, loss_fn=loss_at_tail(job.loss_fn))
    if is_pipeline(job.model) and job.loss_fn is not None:
        job = replace(job, loss_fn=loss_at_end(job.loss_fn))
    loss, watched = watch(job, running, _terms(prepared), prepared.before)
    _join(opening.weighing, watched.border)
    add(job.model, running.engine)
    profile, cluster = prepared.profile, prepared.cluster
    return loss, Attached(
        running,
        prepared.plan,
        profile,  # type: ignore[arg-type]  # unknown if nothing was measured
        cluster,  # type: ignore[arg-type]
        prepared.features,
        parts,
        watched,
    )


def _open(opening: Opening, num_servers: int) -> Running:
    """Open the model's channels, rewrite its layers and start the engine."""
    # 1
    session, job, plan = opening.session, opening.job, opening.plan
    attachments = {  # first, because they may refuse
        feature.name: attachment
        for feature in opening.prepared.features
        if (attachment := feature.attach(opening)) is not None
    }
    if cuts(plan):
        opening.boundary()
    if holds_apart(plan):
        opening.apart = _opened_apart(opening)
    elif splits(plan) and not num_servers:
        opening.attendance()
    buckets = Buckets(job.memory)
    sites = placed(job.model, plan, session.comm.rank, num_servers, buckets)
    opening.tables = open_tables(session, sites, plan, job.optimizers)
    weigher = _weigher(opening)
    # 2
    rewritten = _rewritten(opening, sites)
    # 3
    return _running(opening, rewritten, buckets, weigher, attachments)


def _opened_apart(opening: Opening) -> HeldApart:
    """Tell hosts that bring no rows the layers that they hold."""
    plan, profile = opening.plan, opening.prepared.profile
    hosts = opening.session.other(TailHosts)
    assert hosts is not None
    parts, moving = row_parts_of(plan, profile), opening.prepared.moving
    apart = open_holders(hosts, opening.model, opening.job.loss_fn, plan, parts, moving)
    opening.main += [apart.comm]
    return apart


def _running(
    opening: Opening,
    rewritten: Rewritten,
    buckets: Buckets,
    weigher: Weigher,
    attachments: Mapping[str, Attachment[Any]],
) -> Running:
    """Start the engine, and return the running model. The session gets the threads to end them."""
    session, tables, stage = opening.session, opening.tables, opening.stage
    opening.main += [tables.comm] if tables else []
    opening.main += [stage.hosts.comm] if stage else []
    engine, at_servers = _start(opening, rewritten, buckets)
    owners = _owners(opening, engine, at_servers)
    running = Running(
        session.models,
        rewritten,
        engine,
        owners,
        weigher,
        tables,
        at_servers.number,
        attachments,
    )
    session.threads[running.number] = Threads(
        ref(opening.model),
        engine.routes.lanes,
        weigher,
        opening.opened_boundary,
        ref(engine),
        opening.opened_attendance,
        lasting=session.other(Servers) is not None,
    )
    session.models += 1
    return running


def _rewritten(opening: Opening, sites: Sequence[PlacedSite]) -> Rewritten:
    """Rewrite the model's layers by the plan, with rank 0's values."""
    stage, weighing = opening.stage, opening.weighing
    profile = opening.prepared.profile
    measured = {} if profile is None else {layer.name: layer for layer in profile.layers}

    def with_channels(place: Place) -> Place:
        boundary, tables = opening.opened_boundary, opening.tables
        model = opening.model if place.ways.holders else None
        ways = replace(place.ways, tables=tables, tail=stage, model=model, apart=opening.apart)
        profiles = {name: measured[name] for name in place.layers if name in measured}
        return replace(place, comm=boundary, weighs=weighing, ways=ways, profiles=profiles)

    sites = [replace(site, place=with_channels(site.place)) for site in sites]
    values = opening.prepared.values
    take(opening.model, of_first(opening.model, opening.comm) if values is None else values)
    if stage is not None:
        stage.weighs = weighing
    return apply(opening.model, sites, opening.serve)


def _weigher(opening: Opening) -> Weigher:
    """Make the weigher of each call's rows. It goes on from a checkpoint's, if there is one."""
    weighs = opening.job.weighs and opening.plan.in_step
    counts = opening.channel("counts") if weighs else None
    passes = opening.session.passes
    weigher = Weigher(counts, opening.prepared.inputs_alike, lambda: passes.may_repeat)
    known = opening.session.usual_rows.get(opening.model, {})
    if (usual := known.get(opening.comm.size)) is not None:
        weigher.go_on(usual)
    return weigher


def _start(opening: Opening, rewritten: Rewritten, buckets: Buckets) -> tuple[Engine, ServersPart]:
    """Make the engine and the servers' part. Every rank makes their channels in the same order."""
    if is_pipeline(opening.model):
        parts = row_parts_of(opening.plan, opening.prepared.profile)
        pipeline_of(opening.model).parts = parts
        known = states(opening.model, opening.job.loss)
        moving = with_counters(opening.model, opening.prepared.moving, known)
        opening.state_among = take_state(opening.model, moving, known, opening.apart)
    of_state = opening.state_among(opening.comm.size)
    transfers = [
        *(transfer for transfer in of_state if transfer.at_once),
        *rewritten.transfers,
        *(transfer for transfer in of_state if not transfer.at_once),
    ]
    if (profile := opening.prepared.profile) is not None:
        again = {p.name for layer in profile.layers for p in layer.parameters if p.again}
        for transfer in transfers if again else ():
            transfer.gather_parts(again)
    served = [transfer for transfer in transfers if transfer.served]
    num_lanes = min(opening.plan.lanes, len(transfers) - len(served))
    lanes = [opening.channel(f"lane{number}") for number in range(num_lanes)]
    at_servers = open_servers(opening, rewritten, served)
    device = streaming(parameter.device for parameter in opening.model.parameters())
    engine = Engine(
        transfers,
        lanes,
        at_servers.there,
        at_servers.back,
        buckets,
        device,
        opening.main,
        opening.inside,
    )
    return engine, at_servers


def _owners(opening: Opening, engine: Engine, at_servers: ServersPart) -> Owners | None:
    """Make the owners, which update parameters; None if no parameter has an owner."""
    tell = at_servers.tell(opening, engine)
    engine.listen(Event.ROUND_OPENED, partial(tell, Sum()))
    owned = [transfer for transfer in engine.transfers if isinstance(transfer, OwnedTransfer)]
    if not owned:
        return None
    beside = tell.beside if isinstance(tell, RunningAhead) else None
    return Owners(engine, owned, opening.comm.rank, tell, opening.plan.late, beside)


def _compare(session: Session, job: TrainingJob, running: Running) -> None:
    """Let ranks compare the values that they must have in common, as often as they can."""
    changes = running.owners.changes if running.owners else list
    common = Common(job.model, job.optimizers, session.passes, changes, scaler_of)
    engine, lane = running.engine, running.engine.routes.among_workers
    if engine.compare(common):
        return
    running.weigher.compare(common)
    if lane is not None:
        engine.listen(Event.BACKWARD_ENDED, NowAndThen(common, lane).on_backward_end)


def _listen(
    session: Session,
    running: Running,
    far: Sequence[FarParameters],
    attendance: LaneAttendance | None,
) -> None:
    """Connect the listeners to the engine's events."""
    passes, engine, tables = session.passes, running.engine, running.tables
    passes.waits.add(engine.routes)
    engine.listen(Event.ROUND_OPENED, running.weigher.note_opening)
    if attendance is not None:
        engine.listen(Event.FORWARD_ENTERED, attendance.parts.free)
    engine.listen(Event.FORWARD_ENTERED, passes.forward)
    entered = [passes.backward, *(table.begin for table in (tables.all if tables else ()))]
    for listener in [*entered, *(each.entered for each in far)]:
        engine.listen(Event.BACKWARD_ENTERED, listener)


def _terms(prepared: Prepared) -> Terms:
    """Return the terms of a loss without a count.

    If tail hosts have the output, use the input: a look at the output would bring it here.
    """
    terms = prepared.terms
    if prepared.stage is not None and terms.source == OUTPUT:
        return replace(terms, source=INPUT, path=(), dims=OF_ROWS.dims)
    return terms


def _extend_optimizers(opening: Opening, running: Running) -> tuple[Part, ...]:
    """Extend the optimizers by the parts that are not whole here, and return these parts."""
    boundary = opening.opened_boundary if cuts(opening.plan) else None
    attendance = opening.opened_attendance
    if attendance is not None:
        attendance.keep()
    all_parts: list[Part] = []
    for number, optimizer in enumerate(opening.optimizers):
        far = far_of(opening.model) if opening.stage is None else [opening.stage]
        parts = _parts(optimizer, number, running, boundary, far)
        if attendance is not None:
            _serve_states(attendance, parts)
        loss = None
        if steers_by_loss(optimizer):
            summed = opening.prepared.terms.summed
            loss = LossOfRanks(opening.session.comm, running.weigher.own, summed=summed)
        add_parts(optimizer, opening.model, running.engine, parts, opening.job.left_alone, loss)
        all_parts += parts
    return tuple(all_parts)


def _serve_states(attendance: LaneAttendance, parts: Sequence[Part]) -> None:
    """Let a rank that is alone read the state of an optimizer's parts."""
    for part in parts:
        if isinstance(part, CutPart):
            attendance.parts.states.append(part.states.parts)
        elif isinstance(part, OwnedPart):
            attendance.parts.owned.append(part.states)
            part.attendance = attendance


def _parts(
    optimizer: Optimizer,
    number: int,
    running: Running,
    boundary: Comm | None,
    far: Sequence[FarParameters],
) -> list[Part]:
    """List the parts of an optimizer that are not whole here, as a step opens them."""
    parts: list[Part] = []
    if running.owners is not None:
        parts.append(OwnedPart(optimizer, number, running.owners))
    if boundary is not None:
        parts.append(CutPart(optimizer, boundary))
    parts += [TailPart(optimizer, number, each) for each in far]
    if running.tables is not None:
        parts.append(TablePart(optimizer, number, running.tables))
    return parts


def _join(weighing: Weighing, border: ref[Border]) -> None:
    """Let a border weigh rows. Do not keep it alive, because parameters lead here."""

    def of_backward(call: Any) -> float | None:
        return None if (found := border()) is None else found.weighs(call)

    def call() -> Weight | None:
        return None if (found := border()) is None else found.engine.latest

    weighing.of_backward, weighing.call = of_backward, call


def _state_among(
    session: Session, job: TrainingJob, prepared: Prepared
) -> Callable[[int], Sequence[OfState]]:
    """Return a function that makes the transfers of state among so many ranks.

    First all ranks take rank 0's state of the loss, as they do with the model.
    """
    known = states(job.model, job.loss)
    for name in (state.name for state in prepared.moving if state.name.startswith(OF_LOSS)):
        tensor = known[name].tensor
        assert tensor is not None
        value = tensor.detach().contiguous()
        session.comm.broadcast(value, root=0)
        if session.comm.rank:
            tensor.data.copy_(value)
    return partial(transfers_of, prepared.moving, known)
