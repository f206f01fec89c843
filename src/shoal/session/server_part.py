"""The servers' part of a model: parameters that they own, weights, tables of rows.

All workers tell servers of it, in the same order. Guarded by tests/equivalence/
test_servers.py, test_geo.py and test_tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Transfer
from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.engine.engine import Engine
from shoal.optim.owners import tell_nobody
from shoal.remote.orders import ParameterForm, ServedSite, TableForm, Tell
from shoal.remote.tables import Tables
from shoal.rewrite.apply import PlacedSite, Rewritten
from shoal.servers.servers import Servers, check_sendable
from shoal.session.opening import Opening
from shoal.session.session import Session
from shoal.strategies.geo import GeoTransfer


@dataclass(frozen=True)
class ServersPart:
    """The servers' part of one model.

    Args:
        number: the model's number at the servers; None if they take none of it.
        there: channels to them.
        back: channels from them; () if answers go the same way.
        weights: the transfers of weights that they hold, if workers make local steps.
    """

    number: int | None = None
    there: Sequence[Comm] = ()
    back: Sequence[Comm] = ()
    weights: Sequence[GeoTransfer] = ()

    def tell(self, opening: Opening, engine: Engine) -> Tell:
        """Return the function that tells servers of each step, unless workers make local steps."""
        servers = opening.session.other(Servers)
        if servers is None or self.number is None:
            return tell_nobody
        if self.weights:
            servers.step_alone(self.number, engine, self.weights, len(self.there))
            return tell_nobody
        return servers.tell(self.number, engine, opening.plan.staleness)


def open_servers(opening: Opening, rewritten: Rewritten, served: Sequence[Transfer]) -> ServersPart:
    """Let the servers take their part, if the plan uses them."""
    servers, plan = opening.session.other(Servers), opening.plan
    lanes = min(plan.lanes, len(served))
    if servers is None or not served:
        return ServersPart()
    weights = [transfer for transfer in served if isinstance(transfer, GeoTransfer)]
    if weights:
        number, there = servers.open_weights(weights, lanes, plan.staleness)
        return ServersPart(number, there, (), weights)
    owned = [transfer for transfer in served if isinstance(transfer, OwnedTransfer)]
    _check_for_servers(opening.session, opening.optimizers)
    sites = [
        _served_site(site) for site, _ in rewritten.sites if site.strategy.role.owns_at_servers
    ]
    return ServersPart(*servers.open(sites, owned, opening.optimizers, lanes, plan.staleness))


def open_tables(
    session: Session,
    sites: Sequence[PlacedSite],
    plan: Plan,
    optimizers: Sequence[Optimizer],
) -> Tables | None:
    """Open the way to the tables that the plan leaves to servers; None if there are none."""
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


def _served_site(placed_site: PlacedSite) -> ServedSite:
    """Describe, for servers, a site of which they own a part."""
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


def _check_for_servers(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that servers cannot have (a collective)."""
    agreed(
        session.comm,
        lambda: check_sendable(optimizers),
        "parallelize: checking what servers are given",
    )
