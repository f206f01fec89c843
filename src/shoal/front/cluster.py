"""Measures the session's ranks and links, once: each exchange's pace, and the number of cores."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.codecs.coded_exchange import read_exchange
from shoal.codecs.paces import probe_codings
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.core.cores import bound_cores, container, given_cores, quota_cores
from shoal.core.facts import Cluster, Link
from shoal.core.registry import of
from shoal.exchange.direct import Direct
from shoal.front.earlier_figures import keep_cluster, key_of_links, known_cluster
from shoal.front.stages import Stages
from shoal.planner.search import LANES
from shoal.planner.search_options import DEFAULT
from shoal.profiling.links import is_as_before, probe_link, probe_now
from shoal.profiling.paces import CPU, probe_moves, probe_paces, probe_pack
from shoal.remote.tail_hosts import TailHosts
from shoal.servers.servers import Servers
from shoal.session.session import Session
from shoal.strategies.landing_pace import probe_landing

# seconds of a slow link for a bucket that shows how its directions slow each other
_BUCKET_S = 0.05
_TRIES = 3  # trials, if links seem to have changed


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter that is not at the host, or else the CPU."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), CPU)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the dtypes of the tensors, because the caller may be within `torch.autocast`.

    Lanes have threads of their own, for which torch keeps no such mode.
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@without_autocast()
def measured_cluster(
    session: Session,
    asked: Iterable[str] = (),
    device: torch.device = CPU,
    codecs: Iterable[str] = (),
) -> Cluster:
    """Return the session's ranks and links, measured at the first call (a collective).

    Later calls send a few messages, and measure again only if links have changed. They also measure
    `asked` exchanges and `codecs` that earlier calls have not measured. The measured buckets are on
    the `device`.
    """
    _forget_old_links(session)
    comm = session.comm
    is_kept = comm.size > 1 and not (session.other(Servers) or session.other(TailHosts))
    key = key_of_links(comm, device) if is_kept else ""
    if session.cluster is None and is_kept:
        session.cluster = known_cluster(comm, key)
        _forget_old_links(session)
    before = session.cluster
    cluster = _with_options(session, asked, device, codecs)
    if is_kept and cluster is not before and cluster.link.tried:  # it was measured, not given
        keep_cluster(comm, key, cluster)
    return cluster


def _with_options(
    session: Session, asked: Iterable[str], device: torch.device, codecs: Iterable[str]
) -> Cluster:
    """Return the cluster with the exchanges and codecs that are asked for."""
    cluster = _measure(session, device)
    if cluster.paces:
        session.cluster = cluster = with_codings(cluster, session.comm, codecs, device)
    more = {text: read_exchange(text) for text in asked if text not in cluster.paces}
    if more and cluster.paces:
        comm = session.comm
        sharing = comm.gather_objects(_machine(), "measuring the links: machines").count(_machine())
        lanes = [comm.channel(f"probe{i} of {', '.join(more)}") for i in range(LANES)]
        paces = probe_paces(comm, cluster.link, more, lanes=lanes, sharing=sharing, device=device)
        for lane in lanes:
            lane.close()
        session.cluster = replace(cluster, paces={**cluster.paces, **paces})
    return _measure(session, device)


@without_autocast()
def with_codings(
    cluster: Cluster, comm: Comm, codecs: Iterable[str], device: torch.device = CPU
) -> Cluster:
    """Return the cluster with the times of codecs, as plans write them. Known ones stay."""
    unknown = [codec for codec in codecs if codec not in cluster.codings]
    if not unknown:
        return cluster
    return replace(cluster, codings={**cluster.codings, **probe_codings(comm, unknown, device)})


def _forget_old_links(session: Session) -> None:
    """Forget links that carry far more or less than when they were measured.

    On one host there is no link, and the load of its processors decides the rate.
    """
    known = session.cluster
    if known is not None and len(known.topology.ranks_on) == 1:
        return
    # all ranks agree on this; links may never have been measured
    if known is None or not known.link.tried:
        return
    for _ in range(_TRIES):  # a busy moment of a processor looks like a slow link
        now = probe_now(session.comm, known.link)
        if is_as_before(known.link, now):
            return
    Stages(speaks=session.comm.rank == 0).say(
        f"links carry {now * 8e-6:,.0f} Mbit/s, and carried {known.link.tried * 8e-6:,.0f} when "
        "they were measured, so they are measured again"
    )
    session.cluster = None


def _measure(session: Session, device: torch.device) -> Cluster:
    if session.cluster is None:
        comm = session.comm
        cores, steady, sharing = _cores(comm)
        servers, tail = session.other(Servers), session.other(TailHosts)
        server_hosts = servers.hosts if servers else ()
        if comm.size == 1:
            link = Link(0.0, math.inf)
            session.cluster = Cluster(
                comm.topology, link, cores, servers=server_hosts, steady=steady
            )
        else:
            link = probe_link(comm, sharing=sharing)
            link = replace(link, tried=probe_now(comm, link))
            lanes = [comm.channel(f"probe{i}") for i in range(LANES)]
            usable = {
                name: exchange
                for name, exchange in ((name, kind()) for name, kind in of(Exchange).items())
                if exchange.exact
                and exchange.fits(comm.topology)
                and (exchange.at_host or (device != CPU and lanes[0].carries(device)))
            }
            where: dict[str, Any] = {"sharing": sharing, "device": device}
            paces = probe_paces(comm, link, usable, lanes=lanes, **where)
            moves = probe_moves(comm, link, Direct(), lane=lanes[0], **where)
            for lane in lanes:
                lane.close()
            bucket = min(DEFAULT.least_bytes, int(link.bytes_per_s * _BUCKET_S))
            duplex = servers.duplex(LANES, bucket) if servers else 1.0
            session.cluster = Cluster(
                comm.topology,
                link,
                cores,
                paces,
                pack_byte_s=probe_pack(comm, device),
                pack_each_s=probe_landing(comm, device),
                servers=server_hosts,
                tail=tail.hosts if tail else (),
                moves=moves,
                duplex=duplex,
                steady=steady,
            )
    return session.cluster


def _cores(comm: Comm) -> tuple[float, bool, int]:
    """Return the cores of a rank, whether they are its own quota, and the ranks on this machine."""
    given = agreed(comm, given_cores, "measuring the links: cores")
    seats = comm.gather_objects(
        (_machine(), (_machine(), container()), bound_cores(), quota_cores(), given),
        "measuring the links: machines",
    )
    machines = Counter(machine for machine, *_ in seats)
    boxes = Counter(box for _, box, *_ in seats)
    in_turns = own = math.inf
    for machine, box, bound, quota, given in seats:
        shared = quota / boxes[box] if boxes[box] > 1 else math.inf
        in_turns = min(in_turns, bound / machines[machine], shared)
        own = min(own, given, quota if boxes[box] == 1 else math.inf)
    return min(in_turns, own), own <= in_turns, machines[_machine()]


def _machine() -> str:
    """Return a name of the machine under its containers. Ranks with one name share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()
