"""`parallelize` and `plan`: from a model on one device to the same model on every rank.

    1  compare   every rank gave the same model, plan, pins and strategies, or all of them hear who did not
    2  measure   one sample through the model on all ranks at once; the links, once a session
    3  plan      rank 0 chooses, all take its plan
    4  rewrite   the model's layers change in place; transfers come out
    5  watch     an engine takes the transfers; hooks on the model (and the loss) weigh uneven rows

A lone process stops after checking what it was given.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal import exchange as exchanges
from shoal import strategies as all_strategies
from shoal.comm.agreement import agreed, from_first
from shoal.comm.tables import Tables
from shoal.core.buckets import Buckets
from shoal.core.contracts import Comm, Exchange, OwnedTransfer, Strategy, Transfer
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, Link, ModelProfile
from shoal.core.plan import Plan, Site
from shoal.core.registry import found, named
from shoal.planner.search import LANES, repredicted, search
from shoal.profiling.layers import profile_model
from shoal.profiling.links import probe_link
from shoal.profiling.paces import probe_paces, probe_pack
from shoal.rewrite.apply import apply, check_served, cuts, label, places
from shoal.runtime import feed
from shoal.runtime.engine import Engine
from shoal.runtime.memory import give_back_freed
from shoal.runtime.optimizer import extend
from shoal.runtime.orders import check_sendable
from shoal.runtime.owners import Owners, tell_nobody
from shoal.runtime.request import Request, checked, listed, require_same
from shoal.runtime.servers import ServedSite
from shoal.runtime.session import Attached, Session, current, ranks
from shoal.runtime.tables import TableForm
from shoal.runtime.watch import watch
from shoal.runtime.weights import Weigher

T = TypeVar("T")


def parallelize(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    *,
    sample: Any = None,
    plan: Plan | str | Path = "auto",
    pins: Mapping[str, str] | None = None,
    strategies: Iterable[str] | None = None,
    count: Callable[[Any, Any], float | Tensor] | None = None,
    staleness: int | None = 0,
    memory: str = "fast",
    placement: str | dict[str, int] = "balanced",
    memory_limit: float | None = None,
) -> tuple[Any, Any, Any]:
    """Change a model, its loss and its optimizer, in place, so that the ordinary loop trains on all ranks as one.

    After `loss.backward()` every `.grad` is the mean over the global batch, the same on every rank.

    Args:
        model: any module; names, state_dict keys and parameter objects stay as they are. Compile blocks afterwards.
        loss_fn: a module or function of (output, target) that gives a mean over local rows; None where the model
            returns its own loss.
        optimizer: one optimizer, or a list of them.
        sample: `(x, y)`, one batch such as training will see: x a tensor, a tuple of positional or a dict of keyword
            arguments of the model; y the target, None without a loss_fn.
        plan: "auto", a `Plan`, or the path of a saved one.
        pins: by dotted layer name or glob, a strategy ("factor") or a strategy and its exchange ("replicate:ring").
        strategies: names of the strategies that the planner may use; all by default.
        count: a function of (output, target) that gives how many terms the local mean is over, where that is not the
            number of rows (ignore_index, token losses). Without a loss_fn its target is what the model was called with.
        staleness: with servers only: by how many steps a worker may run ahead of the slowest, 0 for the synchronous
            step, None for any number. Otherwise all layers are served, every rank weighs the same however many rows it
            has, and there is no one gradient to read or to clip.
        memory: "fast", or "low": buckets of layers that have owners take memory only while they are on their way,
            backward waits where more than two a lane would, and a plan that is made here has small ones. One plan
            gives the same results either way, bit for bit.
        placement: who owns what in layers that have owners: "balanced" (equal shares of bytes, parameters are cut),
            "round-robin" or "hash" (whole parameters, to the servers where there are any), or a rank by dotted layer or
            parameter name or glob, as {"head.*": 0}; those layers are then given to owners, the rest is balanced.
        memory_limit: bytes that a rank may hold between steps for parameters, gradients, buckets and optimizer state;
            layers are given to owners, or cut over the ranks, until they are kept. `shoal.memory` tells what is held.

    Returns:
        `(model, loss_fn, optimizer)`: the same objects (a plain function as loss is wrapped).

    Raises:
        UsageError: what was given does not fit: sample, plan, pins, memory, placement, a compiled model, or ranks that
            differ.
        WorldError: a rank was lost while they prepared.
    """
    session = current()
    comm = session.comm
    asked = Request(plan, pins, strategies, count, staleness, memory, placement, memory_limit)
    comm.reached("parallelize: comparing what the ranks were given")
    given = agreed(comm, lambda: checked(asked, model, loss_fn, optimizer, session))
    optimizers = listed(optimizer)
    require_same(comm, asked, given, optimizers)
    session.optimizers[model] = tuple(optimizers)
    if comm.size == 1:
        for each in optimizers:
            extend(each)
        return model, loss_fn, optimizer
    comm.reached("parallelize: measuring the model")
    profile = profile_model(model, loss_fn, optimizers, sample, comm)
    comm.reached("parallelize: measuring the links")
    cluster = measured_cluster(session)
    give_back_freed()
    comm.reached("parallelize: planning and rewriting")
    chosen = from_first(comm, lambda: _chosen(given, profile, cluster, asked))
    buckets = Buckets(memory)
    boundary = comm.channel(f"model{len(session.attached)}-boundary") if cuts(chosen) else None
    tables = _open_tables(session, model, chosen, optimizers)
    transfers = apply(model, chosen, comm, len(cluster.servers), buckets, boundary, tables)
    engine, weigher, owners = _started(session, model, chosen, transfers, optimizers, buckets)
    engine.others = [comm for comm in (boundary, tables.comm if tables else None) if comm is not None]
    engine.entered = [table.begin for table in tables.all] if tables else []
    extended = [extend(each, engine, owners, number, tables) for number, each in enumerate(optimizers)]
    owned = tuple(each for each in extended if each is not None)
    placed = profile.placed(chosen.owners(profile.names))
    session.attached[model] = Attached(engine, weigher, chosen, placed, cluster, owned)
    return model, watch(model, loss_fn, count, engine, weigher, owners), optimizer


def _started(
    session: Session,
    model: nn.Module,
    plan: Plan,
    transfers: Sequence[Transfer],
    optimizers: Sequence[Optimizer],
    buckets: Buckets,
) -> tuple[Engine, Weigher, Owners | None]:
    """What runs the transfers, over channels made in the same order on every rank."""
    comm, prefix = session.comm, f"model{len(session.attached)}"
    owned = [transfer for transfer in transfers if isinstance(transfer, OwnedTransfer)]
    served = [transfer for transfer in owned if transfer.served]
    lanes = [comm.channel(f"{prefix}-lane{i}") for i in range(min(plan.lanes, len(transfers) - len(served)))]
    weigher = Weigher(comm.channel(f"{prefix}-counts") if plan.staleness == 0 else None)
    number, server_lanes = _open_servers(session, model, plan, served, optimizers)
    engine = Engine(transfers, lanes, server_lanes, buckets)
    session.lanes += engine.lanes
    tell = session.servers.tell(number, engine, plan.staleness) if session.servers and served else tell_nobody
    engine.began = partial(tell, "exchange")
    return engine, weigher, Owners(engine, owned, comm.rank, tell) if owned else None


def _open_servers(
    session: Session, model: nn.Module, plan: Plan, served: Sequence[OwnedTransfer], optimizers: Sequence[Optimizer]
) -> tuple[int, Sequence[Comm]]:
    """Let the servers, if the plan has any use for them, take their part."""
    if session.servers is None or not served:
        return 0, ()
    _check_for_servers(session, [p for transfer in served for p in transfer.parameters], optimizers)
    sites = [
        ServedSite(
            site.strategy,
            site.exchange,
            label(number, site),
            {name: (tuple(p.shape), p.stride(), p.dtype) for name, p in place.parameters.items()},
            {name: place.owners[name] for name in place.parameters if name in place.owners},
            place.spans,
        )
        for number, (site, place) in enumerate(places(model, plan, session.comm.rank))
        if _part_of_servers(site) == "owners"
    ]
    return session.servers.open(sites, served, optimizers, min(plan.lanes, len(served)), plan.staleness)


def _open_tables(session: Session, model: nn.Module, plan: Plan, optimizers: Sequence[Optimizer]) -> Tables | None:
    """The way to the tables that the plan leaves to servers, if to any."""
    tables = {
        name: parameter
        for site, place in places(model, plan, session.comm.rank)
        if _part_of_servers(site) == "tables"
        for name, parameter in place.parameters.items()
    }
    if session.servers is None or not tables:
        return None
    _check_for_servers(session, tables.values(), optimizers)
    forms = [TableForm(name, len(each), each.shape[1], each.dtype) for name, each in tables.items()]
    return session.servers.open_tables(forms, optimizers, plan.staleness)


def _part_of_servers(site: Site) -> str:
    """What servers are to a site: "owners" of its parameters among others, have its "tables", or ''."""
    strategy = named(all_strategies, Strategy, site.strategy)
    return ("owners" if strategy.owns else "tables") if strategy.served else ""


def _check_for_servers(session: Session, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Refuse what servers cannot own (a collective)."""
    if any(parameter.device.type != "cpu" for parameter in parameters):
        do = 'leave servers out, or "server" and "server_rows" out of strategies'
        raise PlanError("servers own parameters on CPUs only", do=do)
    agreed(session.comm, lambda: check_sendable(optimizers))


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
) -> Plan:
    """Plan without changing anything. With a `cluster` it needs no network; without, it measures the session's.

    Args:
        model, loss_fn, optimizer, sample, pins, strategies, placement, memory_limit: as for `parallelize`.
        cluster: the ranks and links to plan for.

    Raises:
        UsageError: as for `parallelize`; or no cluster and no session.
    """
    comm = ranks() if cluster else current().comm
    profile = profile_model(model, loss_fn, listed(optimizer), sample, comm)
    where = cluster or measured_cluster(current())
    return from_first(
        comm,
        lambda: search(
            profile, where, pins=pins, strategies=strategies, placement=placement, memory_limit=memory_limit
        ),
    )


def shard(loader: DataLoader[T]) -> DataLoader[T]:
    """A DataLoader that gives this rank its own rows: none twice, none lost, as many batches on every rank.

    Args:
        loader: the loader as one process would use it; `batch_size` is the number of rows on one rank. Its sampler and
            all its other options are kept; shuffling follows a seed that the ranks agree on and the epoch, which
            advances with every pass.

    Returns:
        A copy of it (alone, the loader itself).

    Raises:
        UsageError: not a DataLoader, one whose batches cannot be cut, or fewer rows than ranks.
    """
    comm = current().comm
    seed = comm.gather_objects(agreed(comm, lambda: feed.proposed_seed(loader)))[0]
    return agreed(comm, lambda: feed.shard(loader, comm.rank, comm.size, seed))


def measured_cluster(session: Session) -> Cluster:
    """The session's ranks and links, measured at the first call (a collective)."""
    if session.cluster is None:
        comm = session.comm
        seats = comm.gather_objects((_machine(), len(os.sched_getaffinity(0))))
        machines = Counter(machine for machine, _ in seats)
        cores = min(cores / machines[machine] for machine, cores in seats)
        if comm.size == 1:
            session.cluster = Cluster(comm.topology, Link(0.0, math.inf), cores)
        else:
            sharing = machines[_machine()]
            link = probe_link(comm, sharing=sharing)
            lanes = [comm.channel(f"probe{i}") for i in range(LANES)]
            every = {name: kind() for name, kind in found(exchanges, Exchange).items()}
            usable = {name: each for name, each in every.items() if each.exact and each.fits(comm.topology)}
            paces = probe_paces(comm, link, usable, lanes=lanes, sharing=sharing)
            for lane in lanes:
                lane.close()
            servers = session.servers.hosts if session.servers else ()
            session.cluster = Cluster(comm.topology, link, cores, paces, probe_pack(comm), servers)
    return session.cluster


def _machine() -> str:
    """A name for the machine under all its containers and network namespaces: ranks with one name share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _chosen(
    given: Plan | None,
    profile: ModelProfile,
    cluster: Cluster,
    asked: Request,
) -> Plan:
    if given is None:
        stale = asked.staleness != 0
        served = [name for name, kind in found(all_strategies, Strategy).items() if kind.served]
        made = search(
            profile,
            cluster,
            pins=asked.pins,
            strategies=served if stale else asked.strategies,
            placement=asked.placement,
            stale=stale,
            memory=asked.memory,
            memory_limit=asked.memory_limit,
        )
        return replace(made, staleness=asked.staleness)
    check_served(given, profile, cluster)
    return repredicted(given, profile, cluster)
