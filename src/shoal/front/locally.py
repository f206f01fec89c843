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
from shoal.core.placement import BALANCED, Placement
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
    pins: Mapping[str, str] | None,
    strategies: Iterable[str] | None,
    placement: Placement,
    count: Any,
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
    if session.other(TailHosts) is not None:
        raise PlanError(
            "local steps are among workers, or with servers, and there are tail hosts",
            do="start without tail hosts, or leave out local_steps",
        )
    if sync_batchnorm:
        raise _no_norms("sync_batchnorm=True")
    if session.other(Servers) is None:
        _check_alone(pins, strategies)
    else:
        _check_at_servers(outer, pins, strategies, placement, count)


def _check_at_servers(
    outer: Outer | None,
    pins: Mapping[str, str] | None,
    strategies: Iterable[str] | None,
    placement: Placement,
    count: Any,
) -> None:
    """Refuse what is not served where workers step by themselves, and push to servers."""
    others = [pin for pin in (pins or {}).values() if pin not in ("server", "server:direct")]
    others += [name for name in strategies or () if name != "server"]
    if others:
        raise PlanError(
            "with local steps and servers these have the weights of every layer, exactly",
            got=others[0],
            do="leave out pins and strategies; or start without servers",
        )
    if outer is not None and outer.rule != "average":
        raise PlanError(
            "servers add what workers have learned: they know no other outer rule",
            got=f'rule="{outer.rule}"',
            do='give outer=shoal.Outer(rule="average"), or leave it out; or start without servers',
        )
    if outer is not None and (outer.islands or outer.warmup_steps):
        raise PlanError(
            "to servers each worker pushes by itself, from the first step on",
            got=str(outer),
            do="leave out islands and warmup_steps, or start without servers",
        )
    if placement not in (BALANCED, {}):
        raise PlanError(
            "with local steps every server has an equal share of the weights",
            got=f"placement={placement!r}"[:80],
            do="leave out placement",
        )
    if count is not None:
        raise UsageError(
            "servers weigh what each worker has learned the same",
            do="leave out count, or start without servers",
        )


def _check_alone(pins: Mapping[str, str] | None, strategies: Iterable[str] | None) -> None:
    """Refuse what is not served where ranks step by themselves."""
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
