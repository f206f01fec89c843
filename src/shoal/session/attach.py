"""Puts a plan into a model and has an engine run it: what ranks do once they have agreed on a plan.

1  open      servers, tables, a boundary for cut layers: channels, made in the same order on every
             rank
2  rewrite   rank 0's values come in, layers change in place, transfers come out (rewrite/)
3  watch     an engine takes the transfers; hooks on the model (and the loss) weigh uneven rows
4  extend    optimizers learn what ranks own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.agreement import agreed
from shoal.contracts.cadence import Event
from shoal.contracts.comm import Comm
from shoal.contracts.sample import ComputeLoss
from shoal.contracts.state import OF_LOSS, states
from shoal.contracts.strategy import Place
from shoal.contracts.transfer import OwnedTransfer, Transfer
from shoal.contracts.weighing import Weighing
from shoal.core.buckets import MEMORY, Buckets
from shoal.core.eager import keep_eager
from shoal.core.errors import PlanError
from shoal.core.facts import MovingState
from shoal.core.plan import Plan
from shoal.core.role import Role
from shoal.core.terms import INPUT, OF_ROWS, OUTPUT, Terms
from shoal.engine.border import Border
from shoal.engine.common import Common
from shoal.engine.engine import Engine
from shoal.engine.lanes import streaming
from shoal.engine.replicas import EVERY, Replicas
from shoal.engine.weights import Weigher, Weight
from shoal.optim.cut import CutPart
from shoal.optim.extend import add_parts
from shoal.optim.owned import OwnedPart
from shoal.optim.owners import Owners, tell_nobody
from shoal.optim.part import Part
from shoal.optim.table import TablePart
from shoal.optim.tail import TailPart
from shoal.remote.far_tail import FarTail
from shoal.remote.orders import ParameterForm, ServedSite, SumGradients, TableForm, Tell
from shoal.remote.tables import Tables
from shoal.rewrite.align import of_first, take
from shoal.rewrite.apply import PlacedSite, Rewritten, apply, check, cuts, placed
from shoal.servers.ahead import RunningAhead
from shoal.servers.servers import Servers, check_sendable
from shoal.session.additions import add
from shoal.session.rounds import Company, Exchanged, Rounds, island_of, set_off
from shoal.session.running import Running
from shoal.session.session import Session, Threads
from shoal.session.watch import Watched, watch
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.moving import OfState, transfers_of
from shoal.strategies.stage import loss_at_tail
from shoal.strategies.sync_batchnorm import SyncNorms


def attach(
    session: Session,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    *,
    count: Callable[..., float | Tensor] | None = None,
    memory: str = MEMORY[0],
    stage: FarTail | None = None,
    weighs: bool = True,
    inputs_alike: bool = False,
    left_alone: Sequence[nn.Parameter] = (),
    moving: Sequence[MovingState] = (),
    terms: Terms = OF_ROWS,
    norms: SyncNorms | None = None,
    compute_loss: ComputeLoss | None = None,
    check_every: int = EVERY,
    values: Mapping[str, Tensor] | None = None,
    before: Watched | None = None,
) -> tuple[Callable[..., Any] | None, Running]:
    """Rewrite a model for a plan, on every rank of the session alike; the loss to use from now on.

    `weighs` says whether uneven rows are weighed, `inputs_alike` whether ranks are given the same
    inputs on purpose, `moving` what state agrees after each backward. Parameters of optimizers that
    are `left_alone` are nobody's here. `terms` say what a loss without a `count` is a mean over,
    `norms` which batch norms go by the rows of all ranks. Where there is a `compute_loss`, that to
    use from now on is returned. Replicas are compared every `check_every` backwards; 0: never.

    `values` are rank 0's of what differs between ranks; None: they are compared here. `before` was
    watched under another plan, and has been released: the loss goes on.
    """
    keep_eager()
    session.end_gone()
    comm, buckets = session.comm, Buckets(memory)
    if plan.outer is not None:
        plan = replace(plan, outer=plan.outer.on(comm.topology))
    servers = session.other(Servers)
    num_servers = len(servers.hosts) if servers else 0
    check(plan, model, comm.size, num_servers)
    norms, is_cut = norms if norms is not None and norms.names else None, cuts(plan)
    boundary = comm.channel(f"model{session.models}-boundary") if is_cut or norms else None
    sites = placed(model, plan, comm.rank, num_servers, buckets)
    tables, weighing = _open_tables(session, sites, plan, optimizers), Weighing()

    def met(place: Place) -> Place:
        return replace(place, comm=boundary, tables=tables, tail=stage, weighs=weighing)

    sites = [replace(site, place=met(site.place)) for site in sites]
    take(model, of_first(model, comm) if values is None else values)
    rewritten = apply(model, sites, comm, plan.outer)
    if norms is not None:
        assert boundary is not None
        norms.join(boundary, weighing)
    in_step = plan.staleness == 0 and not plan.local_steps
    weigher = _weigher(session, model, inputs_alike, weighs=weighs and in_step)
    waited_for = (boundary, tables.comm if tables else None, stage.hosts.comm if stage else None)
    main = [comm for comm in waited_for if comm is not None]
    state_of = _of_state(session, model, compute_loss or loss_fn, moving)
    of_state, island = state_of(comm.size), island_of(comm, plan, f"model{session.models}")
    if plan.local_steps:
        set_off([*rewritten.transfers, *of_state], optimizers, plan.local_steps, 0)
    engine, owners, at_servers = _started(
        session, model, plan, rewritten, of_state, optimizers, buckets, main, island
    )
    rounds = None
    if plan.local_steps:
        exchanged = Exchanged([site for site, _ in rewritten.sites], state_of)
        rounds = _rounds(session, model, plan, optimizers, engine, weigher, exchanged, island)
    if in_step:
        _compare(session, model, optimizers, engine, owners, weigher)
        if check_every:
            _compare_replicas(rewritten, engine, optimizers, check_every)
    model_number = session.models
    session.threads[model_number] = Threads(
        ref(model),
        engine.routes.lanes,
        weigher,
        boundary,
        ref(engine),
        lasting=servers is not None,
    )
    session.models += 1
    _listen(engine, session, weigher, tables, stage)
    if stage is not None:
        stage.weighs = weighing
        assert loss_fn is not None
        loss_fn = loss_at_tail(loss_fn)
        if terms.source == OUTPUT:  # to look at the output would bring it
            terms = replace(terms, source=INPUT, path=(), dims=OF_ROWS.dims)
    all_parts: list[Part] = []
    for number, optimizer in enumerate(optimizers):
        parts = _parts(optimizer, number, owners, boundary if is_cut else None, stage, tables)
        add_parts(optimizer, model, engine, parts, left_alone)
        all_parts += parts
    loss, watched = watch(
        model, loss_fn, count, engine, weigher, owners, terms, compute_loss, before
    )
    _join(weighing, watched.border)
    add(model, engine)
    return loss, Running(
        model_number,
        rewritten,
        engine,
        owners,
        tuple(all_parts),
        watched,
        weigher,
        tables,
        at_servers,
        norms,
        rounds,
    )


def _weigher(session: Session, model: nn.Module, inputs_alike: bool, *, weighs: bool) -> Weigher:
    """What knows of every call how the rows are shared out; as a checkpoint had it, if one had."""
    comm = session.comm
    counts = comm.channel(f"model{session.models}-counts") if weighs else None
    weigher = Weigher(counts, inputs_alike)
    if (usual := session.usual_rows.get(model, {}).get(comm.size)) is not None:
        weigher.go_on(usual)
    return weigher


def _rounds(
    session: Session,
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[Optimizer],
    engine: Engine,
    weigher: Weigher,
    exchanged: Exchanged,
    island: Company | None,
) -> Rounds:
    """When ranks that step by themselves come together. The first round begins, or the warm-up."""
    comm, passes, known, counts = session.comm, session.passes, ref(model), None
    if plan.outer is not None and plan.outer.warmup_steps:
        counts = comm.channel(f"model{session.models}-counts")

    def in_common() -> Common:
        model = known()
        assert model is not None
        return Common(model, optimizers, passes)

    all_ranks = Company(comm.size, counts)
    rounds = Rounds(engine, weigher, plan, optimizers, exchanged, all_ranks, island, in_common)
    rounds.begin({})
    return rounds


def _compare(
    session: Session,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    engine: Engine,
    owners: Owners | None,
    weigher: Weigher,
) -> None:
    """Have ranks compare in every backward what they must have in common."""
    common = Common(model, optimizers, session.passes, owners.changes if owners else list)
    if not engine.compare(common):
        weigher.compare(common)


def _listen(
    engine: Engine,
    session: Session,
    weigher: Weigher,
    tables: Tables | None,
    stage: FarTail | None,
) -> None:
    """Tell of the engine's events who goes by them."""
    passes = session.passes
    passes.waits.add(engine.routes)
    engine.listen(Event.ROUND_OPENED, weigher.opened)
    engine.listen(Event.FORWARD_ENTERED, passes.forward)
    entered = [passes.backward, *(table.begin for table in (tables.all if tables else ()))]
    for listener in entered if stage is None else [*entered, stage.entered]:
        engine.listen(Event.BACKWARD_ENTERED, listener)


def _join(weighing: Weighing, border: ref[Border]) -> None:
    """Have a border say what rows weigh. It is not kept alive: parameters lead here."""

    def of_backward(call: Any) -> float | None:
        return None if (found := border()) is None else found.weighs(call)

    def call() -> Weight | None:
        return None if (found := border()) is None else found.engine.latest

    weighing.of_backward, weighing.call = of_backward, call


def _compare_replicas(
    rewritten: Rewritten, engine: Engine, optimizers: Sequence[Optimizer], every: int
) -> None:
    """Have ranks look now and then whether they have the same bits of what each updates itself."""
    weights = {
        name: parameter
        for site, _ in rewritten.sites
        # of tables whose rows go, a pass over all rows would take longer than the steps
        if site.strategy.role in (Role.BUCKET, Role.LAYER)
        for name, parameter in site.place.parameters.items()
    }
    owned = [
        t for t in rewritten.transfers if isinstance(t, OwnedTransfer) and not t.served and t.pieces
    ]
    if weights or owned:
        replicas = Replicas(weights, owned, optimizers, engine.routes.lanes[0], every)
        engine.listen(Event.BACKWARD_ENDED, replicas.backward_ended)


def _parts(
    optimizer: Optimizer,
    number: int,
    owners: Owners | None,
    boundary: Comm | None,
    stage: FarTail | None,
    tables: Tables | None,
) -> list[Part]:
    """What others have of an optimizer's parameters, in the order in which a step opens it."""
    parts: list[Part] = []
    if owners is not None:
        parts.append(OwnedPart(optimizer, number, owners))
    if boundary is not None:
        parts.append(CutPart(optimizer, boundary))
    if stage is not None:
        parts.append(TailPart(optimizer, number, stage))
    if tables is not None:
        parts.append(TablePart(optimizer, number, tables))
    return parts


def _started(
    session: Session,
    model: nn.Module,
    plan: Plan,
    rewritten: Rewritten,
    of_state: Sequence[Transfer],
    optimizers: Sequence[Optimizer],
    buckets: Buckets,
    main: Sequence[Comm],
    island: Company | None = None,
) -> tuple[Engine, Owners | None, int | None]:
    """What runs the transfers, over channels made in the same order on every rank."""
    comm, prefix = session.comm, f"model{session.models}"
    first = [transfer for transfer in of_state if transfer.at_once]
    last = [transfer for transfer in of_state if not transfer.at_once]
    transfers = [*first, *rewritten.transfers, *last]
    owned = [transfer for transfer in transfers if isinstance(transfer, OwnedTransfer)]
    served = [transfer for transfer in transfers if transfer.served]
    lanes = [
        comm.channel(f"{prefix}-lane{i}")
        for i in range(min(plan.lanes, len(transfers) - len(served)))
    ]
    number, there, back = _open_servers(session, rewritten, plan, served, optimizers)
    device = streaming(parameter.device for parameter in model.parameters())
    inside = () if island is None else island.lanes
    engine = Engine(transfers, lanes, there, back, buckets, device, main, inside)
    tell: Tell = tell_nobody
    servers = session.other(Servers)
    if servers is not None and number is not None:
        if plan.local_steps:
            geo = [transfer for transfer in served if isinstance(transfer, GeoTransfer)]
            servers.step_alone(number, engine, geo, len(there))
        else:
            tell = servers.tell(number, engine, plan.staleness)
    engine.listen(Event.ROUND_OPENED, partial(tell, SumGradients()))
    beside = tell.beside if isinstance(tell, RunningAhead) else None
    owners = Owners(engine, owned, comm.rank, tell, plan.late, beside) if owned else None
    return engine, owners, number


def _of_state(
    session: Session,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    moving: Sequence[MovingState],
) -> Callable[[int], Sequence[OfState]]:
    """What brings state to agree among so many ranks.

    Here all ranks take rank 0's of the loss, as of the model.
    """
    known = states(model, loss_fn)
    for name in (state.name for state in moving if state.name.startswith(OF_LOSS)):
        tensor = known[name].tensor
        assert tensor is not None
        value = tensor.detach().contiguous()
        session.comm.broadcast(value, root=0)
        if session.comm.rank:
            tensor.data.copy_(value)
    return partial(transfers_of, moving, known)


def _open_servers(
    session: Session,
    rewritten: Rewritten,
    plan: Plan,
    served: Sequence[Transfer],
    optimizers: Sequence[Optimizer],
) -> tuple[int | None, Sequence[Comm], Sequence[Comm]]:
    """Let the servers take their part, if the plan uses them: the channels there and back."""
    servers, lanes = session.other(Servers), min(plan.lanes, len(served))
    if servers is None or not served:
        return None, (), ()
    geo = [transfer for transfer in served if isinstance(transfer, GeoTransfer)]
    if geo:
        return *servers.open_weights(geo, lanes, plan.staleness), ()
    owned = [transfer for transfer in served if isinstance(transfer, OwnedTransfer)]
    _check_for_servers(session, optimizers)
    sites = [
        _served_site(site) for site, _ in rewritten.sites if site.strategy.role.owns_at_servers
    ]
    return servers.open(sites, owned, optimizers, lanes, plan.staleness)


def _served_site(placed_site: PlacedSite) -> ServedSite:
    """What servers are told of a site of which they own a part."""
    site, place = placed_site.site, placed_site.place
    return ServedSite(
        site.strategy,
        site.exchange,
        placed_site.label,
        {
            name: ParameterForm(tuple(p.shape), p.stride(), p.dtype)
            for name, p in place.parameters.items()
        },
        {name: place.owners[name] for name in place.parameters if name in place.owners},
        dict(place.spans),
    )


def _open_tables(
    session: Session,
    sites: Sequence[PlacedSite],
    plan: Plan,
    optimizers: Sequence[Optimizer],
) -> Tables | None:
    """The way to the tables that the plan leaves to servers, if to any."""
    tables = {
        name: parameter
        for site in sites
        if site.strategy.role.has_tables
        for name, parameter in site.place.parameters.items()
    }
    servers = session.other(Servers)
    if servers is None or not tables:
        return None
    if any(table.device.type != "cpu" for table in tables.values()):
        do = 'leave "server_rows" out of strategies, or servers out'
        raise PlanError("servers have tables of models on CPUs only", do=do)
    _check_for_servers(session, optimizers)
    forms = [
        TableForm(name, len(table), table.shape[1], table.dtype) for name, table in tables.items()
    ]
    return servers.open_tables(forms, optimizers, plan.staleness)


def _check_for_servers(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what servers cannot own (a collective)."""
    agreed(
        session.comm,
        lambda: check_sendable(optimizers),
        "parallelize: checking what servers are given",
    )
