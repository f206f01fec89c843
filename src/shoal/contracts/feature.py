"""Feature: one feature of training, in one file. Its parts, in the order in which they are used:

    1  options     its fields: keyword, flag, check and help line of each     (core/option.py)
    2  plan        adds its part to a plan
    3  refuses     refuses a plan that it does not go together with. Asked before anything is
                   measured, and once more of the plan that is followed
    4  measuring   changes the model while it is profiled
    5  attach      takes part in one model that is parallelised: an `Attachment`, which starts once
                   the engine runs
    6  state       adds its part to a checkpoint, from which any number of ranks can go on, and
                   checks it before they do
    7  release     ends the attachment, as `unparallelize` does
    8  line        describes the feature in a report

If two features do not go together, the later one in the registry's order refuses
(tests/features/test_pairs.py lists all pairs). parallelize, attach, save, load, release and explain
are loops over features. `tests/contracts/test_toy_feature.py` is a feature in one file.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, ModelProfile, Topology
from shoal.core.plan import Plan
from shoal.core.registry import Contract, class_by_name, of

Opening = TypeVar("Opening", contravariant=True)
Running = TypeVar("Running", contravariant=True)
DROPPED = "the checkpoint has a state of {}, which is dropped: it is not asked for here"
Profiled = Callable[[ModelProfile], ModelProfile]


@dataclass(frozen=True)
class PlanFacts:
    """Facts that are known when a plan is made or judged.

    Args:
        model: the module.
        topology: the hosts of the ranks.
        servers: number of hosts that own parameters and do not train.
        tail_hosts: number of hosts that run the end of the model and do not train.
        counted: whether the caller counts the terms of the loss by `count=`.
        profile: the model as it was measured; None before that.
        cluster: the ranks and their links as they were measured; None before that.
    """

    model: nn.Module
    topology: Topology
    servers: int = 0
    tail_hosts: int = 0
    counted: bool = False
    profile: ModelProfile | None = None
    cluster: Cluster | None = None


def check_buffers(facts: PlanFacts, ranks: str, remedy: str) -> None:
    """Refuse ranks that cannot agree on buffers, if training changes some (PlanError).

    Args:
        facts: the facts.
        ranks: the ranks, for the message.
        remedy: the other way out than buffers of each rank's own.
    """
    if facts.profile is not None and facts.profile.moving:
        raise PlanError(
            f"training changes buffers on each rank otherwise, and {ranks} cannot agree on them",
            where=", ".join(state.name for state in facts.profile.moving[:3]),
            do=f'{remedy}, or buffers="local", with which each rank keeps its own',
        )


class Attachment(Generic[Running]):
    """A feature's part in one parallelised model. Every method may be left as it is.

    It must not keep the model alive.
    """

    def start(self, running: Running) -> None:
        """Begin, now that the engine runs (`session.running.Running`), on every rank alike."""

    def is_whole(self) -> bool:
        """Return whether a checkpoint would have all that was learned, as on every rank."""
        return True

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which model and optimizers hold the values for a checkpoint."""
        return nullcontext()  # save 2

    def state(self) -> Any:
        """Return state for a checkpoint, or None if there is nothing to keep (a collective).

        The state is tensors and plain data, whole, keyed by no rank. All ranks return the same.
        """
        return None  # save 10

    def problem(self, state: Any) -> str:
        """Say why a checkpoint's state cannot be one that `state` returned; '' if it can.

        Every rank is asked before any object takes anything, so nothing may change here.
        """
        return ""

    def load(self, state: Any) -> None:
        """Go on from a state that `state` returned, on any number of ranks (a collective).

        The state is None if the checkpoint has nothing of this feature.
        """

    def finish(self) -> None:
        """Report work that is left undone, as training ends with the program."""

    def release(self, *, goes_on: bool) -> None:
        """Undo `start`: the model becomes an ordinary one (a collective).

        Args:
            goes_on: whether the model follows another plan next, with this feature's state.
        """


class Feature(Contract, ABC, Generic[Opening]):
    """One feature of training: a frozen dataclass of its options, with defaults, found by name."""

    package: ClassVar[str] = "shoal.features"
    group: ClassVar[str] = "shoal.features"
    judges: ClassVar[bool] = False  # comes after the others, because it refuses their additions

    @classmethod
    def unasked(cls) -> Feature[Any] | None:
        """Return the feature as it is by default; None if it is only there on request."""
        return None

    @classmethod
    def of_plan(cls, plan: Plan) -> Feature[Any] | None:
        """Return the feature as a plan says it; None if the plan leaves it to the caller."""
        said = plan.features.get(cls.name)
        try:
            return None if said is None else cls(**said)
        except TypeError as error:
            raise PlanError(
                f"the plan's options of {cls.name} do not fit",
                got=repr(said)[:200],
                do="save the plan again, or leave that feature out of it",
            ) from error

    def plan(self, plan: Plan, facts: PlanFacts) -> Plan:
        """Return the plan with this feature's part in it.

        Called for the plan before the search, which has the pinned layers only, and for the plan to
        follow, with all facts. `written` adds the feature's options.
        """
        return plan

    def refuses(self, plan: Plan, facts: PlanFacts) -> None:
        """Raise PlanError or UsageError if the feature does not go together with the plan."""

    def measuring(self, model: nn.Module) -> AbstractContextManager[Profiled]:
        """Return a context for profiling the model. It yields a function of the profile."""
        return nullcontext(_as_it_is)

    def attach(self, opening: Opening) -> Attachment[Any] | None:
        """Take part in one model, before its engine starts (`session.opening.Opening`)."""
        return None

    @classmethod
    def dropped(cls, state: Any) -> str:
        """Return a warning about a checkpoint's state that no such feature takes here; '': none.

        Args:
            state: the state that `Attachment.state` returned.
        """
        return DROPPED.format(cls.name)

    def line(self, plan: Plan) -> str:
        """Return one line about the feature for a report; '' for none."""
        return ""

    def written(self, plan: Plan) -> Plan:
        """Return the plan with this feature's options in it, from which `of_plan` reads them."""
        return plan.with_feature(self.name, asdict(self))  # type: ignore[call-overload]


def _as_it_is(profile: ModelProfile) -> ModelProfile:
    return profile


Features = tuple[Feature[Any], ...]


def in_order(asked: Iterable[Feature[Any]]) -> Features:
    """Return all features of a model: the ones asked for, and the others as `unasked` has them.

    All loops over features use this order: by name, and last the features that judge.
    """
    by_name = {feature.name: feature for feature in asked}
    found = []
    for name, kind in sorted(of(Feature).items(), key=lambda known: known[1].judges):
        feature = by_name[name] if name in by_name else kind.unasked()
        found += [] if feature is None else [feature]
    return tuple(found)


def of_plan(plan: Plan, asked: Features) -> Features:
    """Return the features of a plan: as the plan says itself, the rest as they are asked for."""
    for name in plan.features:
        class_by_name(Feature, name)  # PlanError if there is none
    said = [kind.of_plan(plan) for kind in of(Feature).values()]
    by_name = {feature.name: feature for feature in (*asked, *filter(None, said))}
    return in_order(by_name.values())


def planned(plan: Plan, features: Features, facts: PlanFacts) -> Plan:
    """Return the plan with the parts of all features, unless one of them refuses it."""
    for feature in features:
        plan = feature.plan(plan, facts)
    refuse(plan, features, facts)
    return plan


def refuse(plan: Plan, features: Features, facts: PlanFacts) -> None:
    """Raise the error of the first feature that does not go together with a plan."""
    for feature in features:
        feature.refuses(plan, facts)


def accepts(plan: Plan, features: Features, facts: PlanFacts) -> bool:
    """Return whether no feature refuses a plan."""
    try:
        refuse(plan, features, facts)
    except PlanError:
        return False
    return True


def lines_of(plan: Plan) -> tuple[str, ...]:
    """Return the lines that reports show about a plan's features."""
    found = (kind.of_plan(plan) for kind in of(Feature).values())
    return tuple(filter(None, (feature.line(plan) for feature in found if feature is not None)))


def check_features(features: Any) -> Features:
    """Check a caller's `features=`: instances of registered classes, each class once.

    Raises:
        PlanError: one is no feature, is not registered, or is given twice.
    """
    given = list(features) if isinstance(features, Iterable) else [features]
    names: Mapping[str, type[Any]] = of(Feature)
    for feature in given:
        if not isinstance(feature, Feature):
            raise PlanError(
                "features is a list of features",
                got=repr(feature)[:80],
                expected=", ".join(kind.__name__ for kind in names.values()),
                do="give instances, such as features=[shoal.SyncBatchNorm()]",
            )
        if names.get(feature.name) is not type(feature):
            raise PlanError(
                f"the feature {type(feature).__name__} is not registered",
                do="write @shoal.register above its class, on every rank",
            )
    twice = _first_twice(feature.name for feature in given)
    if twice is not None:
        raise PlanError(f"the feature {twice!r} is given twice", do="give it once")
    return tuple(given)


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
