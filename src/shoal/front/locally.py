"""`local_steps`: what is asked is checked, and refused where it does not go with the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.codecs.coded import exchange_named
from shoal.contracts.exchange import SplitExchange
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import SyncNorm
from shoal.core.numbers import is_count
from shoal.core.outer import Outer
from shoal.core.plan import Plan, strategy_and_exchange
from shoal.remote.tail_hosts import TailHosts
from shoal.servers.servers import Servers
from shoal.session.session import Session

_MOST = 1 << 20


def check_local_steps(
    steps: Any,
    outer: Any,
    session: Session,
    *,
    staleness: int | None,
    pins: Mapping[str, str] | None,
    strategies: Iterable[str] | None,
    sync_batchnorm: bool,
) -> None:
    """Refuse local steps that are none, or that do not go with what else is asked."""
    if outer is not None and not isinstance(outer, Outer):
        raise UsageError(
            "the outer rule is no shoal.Outer",
            got=type(outer).__name__,
            do="give for instance outer=shoal.Outer(lr=0.7, momentum=0.9): its momentum is kept by "
            "the ranks, so no optimizer of torch is given",
        )
    if steps is None:
        if outer is not None:
            raise UsageError(
                "there is an outer rule, and no local_steps", do='give local_steps="auto", or 16'
            )
        return
    if steps != "auto" and (not is_count(steps) or not 1 <= steps <= _MOST):
        raise UsageError(
            'local_steps is a number of steps, at least 1, or "auto"',
            got=repr(steps)[:80],
            do="give 16, or leave it out to exchange gradients in every step",
        )
    lag = outer.lag if outer is not None else None
    if steps != "auto" and lag is not None and lag > steps:
        raise UsageError(
            "the lag is longer than the local steps, so weights would be sent again before their "
            "result is there",
            got=f"{steps} local steps, a lag of {lag}",
            do=f"give a lag of {steps} at most",
        )
    if staleness != 0:
        raise PlanError(
            "local steps and a staleness do not go together",
            got=f"{steps} local steps, a staleness of {staleness}",
            do="leave out one of them",
        )
    _check_alone(session, pins, strategies, sync_batchnorm=sync_batchnorm)


def _check_alone(
    session: Session,
    pins: Mapping[str, str] | None,
    strategies: Iterable[str] | None,
    *,
    sync_batchnorm: bool,
) -> None:
    """Refuse what is not served where ranks step by themselves."""
    for kind, name in ((Servers, "servers"), (TailHosts, "tail hosts")):
        if session.other(kind) is not None:
            raise PlanError(
                f"local steps are among workers only, and there are {name}",
                do=f"start without {name}, or leave out local_steps",
            )
    others = [pin for pin in (pins or {}).values() if strategy_and_exchange(pin)[0] != "replicate"]
    others += [name for name in strategies or () if name != "replicate"]
    if others:
        raise PlanError(
            "with local steps every rank has all of every layer",
            got=others[0],
            do='pin layers to "replicate" and an exchange only, as "replicate:ring", and leave out '
            "strategies",
        )
    for pin in (pins or {}).values():
        exchange = strategy_and_exchange(pin)[1]
        if exchange and not isinstance(exchange_named(exchange), SplitExchange):
            raise PlanError(
                "with local steps an exchange of two halves carries weights",
                got=pin,
                do='pin to "replicate:direct" or "replicate:ring", a codec behind it or none',
            )
    if sync_batchnorm:
        raise _no_norms("sync_batchnorm=True")


def check_local_norms(plan: Plan, norms: Sequence[SyncNorm]) -> None:
    """Refuse norms over the rows of all ranks where these step by themselves."""
    if plan.local_steps and norms:
        raise _no_norms(", ".join(norm.name for norm in norms[:3]))


def _no_norms(got: str) -> PlanError:
    return PlanError(
        "ranks that step by themselves cannot normalise by the rows of all",
        got=got,
        do="leave out sync_batchnorm, and use nn.BatchNorm in place of nn.SyncBatchNorm",
    )
