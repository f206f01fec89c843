"""`update_every`: layers that are updated once in so many steps, by the mean over the steps.

Until then each rank adds up its gradients (contracts/period.py). A checkpoint has their sums over
all ranks, each gradient times its rows. So any number of ranks may go on: rank 0 keeps them all.
Training that ends within a period drops them, and says so.

The mathematics is not that of one process, so the plan and the report say it. Guarded by
tests/equivalence/test_update_every.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import StateDict
from shoal.contracts.feature import Attachment, Feature, PlanFacts, Profiled
from shoal.contracts.period import Period
from shoal.contracts.state_dicts import unlike_tensors
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import ModelProfile
from shoal.core.names import by_known_names, first_names, matched
from shoal.core.numbers import how_many, whole
from shoal.core.option import Flag, option
from shoal.core.plan import Plan, check_periods
from shoal.core.registry import named
from shoal.engine.weights import Weigher
from shoal.profiling.identity import other_names, trainable_layers
from shoal.session.opening import Opening
from shoal.session.running import Running

_SUM, _ROWS, _STEPS = "accumulated", "rows", "steps"
_log = logging.getLogger("shoal")


def _read(texts: tuple[str, ...]) -> dict[str, int] | None:
    periods: dict[str, int] = {}
    for text in texts:
        name, _, steps = text.rpartition("=")
        if not name or (every := whole(steps)) is None:
            raise ValueError(
                f"{text!r} is not LAYER=STEPS: write for instance --update-every 'classifier.*=4'"
            )
        periods[name] = every
    return periods or None


def _compared(periods: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(periods.items())


@final
@dataclass(frozen=True)
class UpdateEvery(Feature[Opening]):
    """Layers that are updated once in so many steps. Until then their `.grad` is None.

    Args:
        periods: number of steps by dotted layer name or glob, as {"classifier.*": 4}. If several
            patterns match, the last one wins.

    Raises:
        PlanError: `periods` is not such a mapping.

    Examples:
        >>> from shoal.features.update_every import UpdateEvery
        >>> UpdateEvery({"classifier.*": 4}).periods
        {'classifier.*': 4}
    """

    name: ClassVar[str] = "update_every"
    periods: Mapping[str, int] = option(
        {},
        keyword="update_every",
        off=None,
        compared=_compared,
        flag=Flag(
            "Update layers of that name or glob once in so many steps, by the mean of these. This "
            "changes the mathematics.",
            "--update-every",
            read=_read,
            metavar="LAYER=STEPS",
            many=True,
        ),
    )

    def __post_init__(self) -> None:
        check_periods(self.periods, "parallelize")

    @classmethod
    def unasked(cls) -> UpdateEvery:
        return cls()

    @classmethod
    def of_plan(cls, plan: Plan) -> UpdateEvery | None:
        return cls(plan.update_every) if plan.update_every else None

    def plan(self, plan: Plan, facts: PlanFacts) -> Plan:
        return replace(plan, update_every=self._by_layer(facts.model))

    def _by_layer(self, model: nn.Module) -> dict[str, int]:
        """Return the period in steps by layer name, of layers not updated in each step."""
        names = [layer.name for layer in trainable_layers(model)]
        periods: dict[str, int] = {}
        known = by_known_names(self.periods, names, other_names(model).layers)
        for pattern, every in known.items():
            periods |= dict.fromkeys(matched(pattern, names, "update_every of", "layer"), every)
        return {name: every for name, every in periods.items() if every > 1}

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        if not plan.update_every:
            return
        if not plan.in_step:
            other = "local_steps" if plan.is_local else "a staleness"
            raise PlanError(
                f"update_every and {other} do not go together: periods are of ranks that keep step",
                do="leave out one of them",
            )
        for choice in plan.choices:
            often = plan.update_every.get(choice.layer, 1) > 1
            if often and not named(Strategy, choice.strategy).role.waits_for_updates:
                raise PlanError(
                    "an update period goes with layers that replicate or sliced serve",
                    where=f"layer {choice.layer}",
                    got=f"{choice.strategy}, every {plan.update_every[choice.layer]} steps",
                    do="serve it by one of these, or take it out of update_every",
                )

    @contextmanager
    def measuring(self, model: nn.Module) -> Iterator[Profiled]:
        """Have the search price layers by how often they are updated."""

        def with_periods(profile: ModelProfile) -> ModelProfile:
            return profile.updated(self._by_layer(model))

        yield with_periods

    def attach(self, opening: Opening) -> Attachment[Running]:
        begin_momentum(opening.plan.update_every, opening.model, opening.optimizers)
        return _Periods(opening)

    def line(self, plan: Plan) -> str:
        seldom = how_many(len(plan.update_every), "layer")
        return f"{seldom} not updated in every step: this changes the mathematics"


@final
class _Periods(Attachment[Running]):
    """Gradients of one model that wait for the end of their period.

    Args:
        opening: the model that is attached.
    """

    def __init__(self, opening: Opening) -> None:
        self._comm: Comm = opening.comm
        self._update_every = dict(opening.plan.update_every)
        self._running: Running | None = None

    def start(self, running: Running) -> None:
        self._running = running

    @property
    def _periods(self) -> tuple[Period, ...]:
        assert self._running is not None
        return self._running.engine.periods

    @property
    def _weigher(self) -> Weigher:
        assert self._running is not None
        return self._running.weigher

    def state(self) -> StateDict | None:
        """Return the gradients that all ranks keep, by parameter name (a collective).

        None between periods. "accumulated" is the sum over ranks and steps of gradients times rows,
        flat, in the order of the parameter's memory. "rows" and "steps" count the rows and the
        steps of that sum.
        """
        found: StateDict = {}
        usual = self._weigher.usual or 1.0
        for period in self._periods:
            if not period.steps:  # every rank skips it
                continue
            rows = _number(period.share * usual)
            self._comm.all_reduce(rows)
            for name, parameter in period.parameters.items():
                total = period.sum_of(parameter)
                total = (total.float() if total.itemsize < 4 else total).mul_(usual)
                self._comm.all_reduce(total)
                found[name] = {_SUM: total, _ROWS: rows.clone(), _STEPS: _number(period.steps)}
        return found or None

    def problem(self, state: Any) -> str:
        if unlike := unlike_tensors(state, flat=(_SUM,), numbers=(_ROWS, _STEPS)):
            return unlike
        begun = all(float(kept[_STEPS]) >= 1 for kept in state.values())
        return "" if begun else "gradients of no step"

    def load(self, state: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Have ranks keep the gradients of a checkpoint. Without any, periods begin anew.

        Gradients are dropped, with a warning on rank 0, if the layer has no such period here, or
        shares it with layers that have gradients of other steps, or none.
        """
        state, taken = state or {}, set[str]()
        if self._periods:
            for period in self._periods:
                taken |= self._give(period, state)
            assert self._running is not None
            self._running.engine.renew()
        dropped = [name for name in state if name not in taken]
        if dropped and self._comm.rank == 0:
            _log.warning(
                "%s: the checkpoint has gradients of steps before their update (update_every), "
                "which are dropped: %d parameters have no such period here, or share it with "
                "parameters that have gradients of other steps",
                ", ".join(dropped[:3]),
                len(dropped),
            )

    def _give(self, period: Period, state: Mapping[str, Mapping[str, Tensor]]) -> set[str]:
        """Have this rank keep its part. Return the names of the parameters that are kept."""
        period.begin()
        own = {
            name: kept
            for name, kept in state.items()
            if name in period.parameters
            and len(kept[_SUM]) == period.parameters[name].numel()
            and float(kept[_STEPS]) < period.every
        }
        # a period has one mean, so its parameters must all have gradients of the same steps
        alike = {(float(kept[_STEPS]), float(kept[_ROWS])) for kept in own.values()}
        if len(own) < len(period.parameters) or len(alike) != 1:
            return set()
        steps, rows = alike.pop()
        period.steps = int(steps)
        if self._weigher.usual is None:
            self._weigher.go_on(rows / period.steps / self._comm.size or 1.0)
        if self._comm.rank == 0:
            usual = self._weigher.usual or 1.0
            period.share = rows / usual
            for name, kept in own.items():
                period.put(period.parameters[name], kept[_SUM] / usual)
        return set(own)

    def finish(self) -> None:
        """Drop the kept gradients as training ends. A warning on rank 0 names the layers."""
        unfinished = [period for period in self._periods if period.steps]
        for period in unfinished:
            layers = [name for name, every in self._update_every.items() if every == period.every]
            if self._comm.rank == 0:
                _log.warning(
                    "training ends at step %d of %d of a period (update_every): the gradients that "
                    "were kept of layer %s were not applied. End with a period, or go on from a "
                    "checkpoint, which has them",
                    period.steps,
                    period.every,
                    first_names(layers, most=3),
                )
            period.begin()
        if unfinished:
            assert self._running is not None
            self._running.engine.renew()


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device="cpu")


def begin_momentum(
    update_every: Mapping[str, int], model: nn.Module, optimizers: Iterable[Optimizer]
) -> None:
    """Give layers that are updated later than others a momentum of 0, if a fused SGD has them.

    torch's kernel takes the momentum of all parameters of a group, or of none. A momentum of 0
    changes nothing without a dampening. With one it would, because a first step leaves the
    dampening out.

    Raises:
        PlanError: there is a dampening.
    """
    modules = dict(model.named_modules())
    seldom = {
        p for name in update_every for p in modules.get(name, model).parameters(recurse=False)
    }
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            late = [p for p in group["params"] if p in seldom and not optimizer.state.get(p)]
            if not (isinstance(optimizer, SGD) and group["fused"] and group["momentum"] and late):
                continue
            if group["dampening"]:
                raise PlanError(
                    "a fused SGD with a dampening cannot begin with some parameters later than "
                    "with others (update_every)",
                    where=f"group {number} of the optimizer",
                    do="give SGD fused=False",
                )
            for parameter in late:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
