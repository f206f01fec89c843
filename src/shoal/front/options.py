"""Options: all that a caller asks of `parallelize`, a recipe or the command line, in one record.

of        keywords become the core's choices, and options of features     (core/option.py)
check     the core's choices, when the record is made; each feature checks its own
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.contracts.feature import Feature, Features, check_features
from shoal.core.buckets import MEMORY
from shoal.core.errors import PlanError, UsageError
from shoal.core.numbers import MOST_COUNTED, MOST_RANKS, check_number, check_whole, shown
from shoal.core.option import Flag, Option, option, options_of, read_whole
from shoal.core.placement import BALANCED, POLICIES, Placement
from shoal.core.plan import MICRO_BATCHES, Choice, Plan
from shoal.core.registry import of
from shoal.core.terms import WEIGH
from shoal.core.way import strategy_and_exchange
from shoal.features import Accuracy, Lossy
from shoal.front.carriers import codecs_of
from shoal.planner.options import check_pins, known
from shoal.planner.search_options import DEFAULT, SearchOptions
from shoal.profiling.moving_state import Ways

AUTO = "auto"


def in_a_tuple(names: Any) -> Any:
    """Make a tuple of names, so that they can be read twice. Leave a single name as it is."""
    is_many = isinstance(names, Iterable) and not isinstance(names, str)
    return tuple(names) if is_many else names


def _describe_given(value: Any) -> str:
    return "none" if value is None else "a function"


def in_order_of_patterns(value: Any) -> Any:
    """Return a mapping as ranks compare it: in order, because the last matching pattern wins."""
    return list(value.items()) if isinstance(value, Mapping) else value


def _sort(names: Any) -> Any:
    return "all" if names is None else sorted(names)


def _pairs(pins: Any) -> Any:
    return sorted((pins or {}).items())


def _read_pins(texts: tuple[str, ...]) -> dict[str, str]:
    pins = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(
                f"{text!r} is not LAYER=STRATEGY: write for instance --pin 'classifier.*=factor'"
            )
        pins[name] = value
    return pins


def _read_codecs(texts: tuple[str, ...]) -> str | tuple[str, ...]:
    return "all" if texts == ("all",) else texts


def _read_bytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= MOST_COUNTED:
        raise ValueError(f"{text!r} is not a number of bytes above 0; 2e9 is 2 GB")
    return number


@dataclass(frozen=True)
class Options:
    """Options apart from model, loss, optimizer and sample. `parallelize` explains each of them."""

    plan: Plan | str | Path = option(AUTO, compared=None)
    pins: Mapping[str, str] | None = option(
        None,
        compared=_pairs,
        flag=Flag(
            "Fix a layer's strategy; globs work.",
            "--pin",
            read=_read_pins,
            metavar="LAYER=STRATEGY",
            many=True,
            plans=True,
        ),
    )
    strategies: Iterable[str] | None = option(
        None,
        compared=_sort,
        flag=Flag(
            "Let the planner use only these.",
            "--strategy",
            read=tuple,
            metavar="NAME",
            many=True,
            plans=True,
        ),
    )
    placement: Placement = option(
        BALANCED,
        compared=in_order_of_patterns,
        flag=Flag(
            "How parameters are assigned to owners, where these update them. "
            f'"{BALANCED}" by default.',
            "--placement",
            read=str,
            choices=POLICIES,
            plans=True,
        ),
    )
    memory: str = option(
        MEMORY[0],
        flag=Flag(
            "With low, buckets that owners sum take memory only on their way. "
            f'"{MEMORY[0]}" by default.',
            "--memory",
            read=str,
            choices=MEMORY,
            plans=True,
        ),
    )
    memory_limit: float | None = option(
        None,
        flag=Flag(
            "What a rank may hold between steps; 2e9 is 2 GB.",
            "--memory-limit",
            read=_read_bytes,
            metavar="BYTES",
            plans=True,
        ),
    )
    micro_batches: int | None = option(
        None,
        flag=Flag(
            "Parts of each rank's batch, in a pipeline (by default 1 if it is pinned, else what "
            "the planner finds) or where the end of the model has hosts of its own "
            f"({MICRO_BATCHES} by default).",
            "--micro-batches",
            read=read_whole("micro-batches", 1),
            metavar="NUMBER",
            plans=True,
        ),
    )
    codecs: Any = option(
        (),
        compared=lambda codecs: list(codecs_of(codecs)),
        flag=Flag(
            'Lossy codec that the planner may use where it saves time, or "all".',
            "--codec",
            read=_read_codecs,
            metavar="NAME",
            many=True,
            plans=True,
        ),
    )
    search_options: SearchOptions = option(DEFAULT, compared=repr)
    count: Callable[..., float | Tensor] | None = option(None, compared=_describe_given)
    weigh: str = option(
        WEIGH[0],
        flag=Flag(
            "How ranks count in a gradient: by their rows, or with ranks all alike. "
            f'"{WEIGH[0]}" by default.',
            "--weigh",
            read=str,
            choices=WEIGH,
        ),
    )
    compute_loss: Callable[..., Any] | None = option(None, compared=_describe_given)
    left_alone: tuple[nn.Parameter, ...] = option((), compared=None)
    buffers: Ways = option("agree", compared=in_order_of_patterns)
    features: Features = field(default=())

    def __post_init__(self) -> None:
        _check_memory(self.memory, self.memory_limit)
        if self.micro_batches is not None:
            rule = "micro_batches is a whole number, at least 1"
            check_whole(rule, self.micro_batches, 1, MOST_RANKS, do="give 4, say")
        if not isinstance(self.left_alone, tuple | str):
            raise UsageError(
                "left_alone is of parameters",
                got=shown(self.left_alone),
                do="give for instance left_alone=head.parameters()",
            )
        if self.count is not None and not callable(self.count):
            raise UsageError(
                "count is not a function",
                got=repr(self.count)[:80],
                do="give for instance count=lambda output, y: len(y), or with a compute_loss "
                "count=lambda batch: len(batch)",
            )
        _check_weigh(self.weigh, self.count)
        if not isinstance(self.search_options, SearchOptions):
            raise UsageError(
                "search_options is of another type",
                got=type(self.search_options).__name__,
                do="give shoal.SearchOptions(…), or leave it out",
            )
        check_pins({} if self.pins is None else self.pins)
        known(self.strategies)
        codecs_of(self.codecs)
        if self._codecs_by_word and codecs_of(self.codecs):
            raise UsageError(
                "there are both an accuracy and codecs",
                got=", ".join(codecs_of(self.codecs)),
                do="leave out one of them: accuracy is a word for a list of codecs",
            )
        if self.plan != AUTO:
            self._require_nothing_beside_plan()

    @classmethod
    def of(
        cls,
        asked: Mapping[str, Any],
        lossy: Lossy | None = None,
        features: Iterable[Feature[Any]] = (),
    ) -> Options:
        """Make the record from keywords.

        Args:
            asked: values by keyword of `parallelize`.
            lossy: further keywords.
            features: features with options that are not among the keywords.

        Raises:
            UsageError: a keyword is unknown, or an option is given twice or is not right.
        """
        if lossy is not None and not isinstance(lossy, Lossy):
            raise UsageError(
                "lossy is no shoal.Lossy",
                got=type(lossy).__name__,
                do='give for instance lossy=shoal.Lossy(codecs=["int8"])',
            )
        more = {} if lossy is None else lossy.asked()
        if twice := sorted(asked.keys() & more.keys()):
            raise UsageError(
                f"{twice[0]} is given twice", do="give it as a keyword, or in shoal.Lossy"
            )
        asked = {**asked, **more}
        _check_known(asked)
        given = list(check_features(features))
        for kind in of(Feature).values():
            if not _is_asked(kind, asked):
                continue
            if any(type(other) is kind for other in given):
                raise UsageError(
                    f"{kind.name} is given twice",
                    do="give all its options as keywords, or in features",
                )
            given.append(_feature(kind, asked))
        values = {o.name: asked[o.keyword] for o in options_of(cls) if o.keyword in asked}
        for name in ("strategies", "codecs", "left_alone"):
            if name in values:
                values[name] = in_a_tuple(values[name])
        return cls(**values, features=tuple(given))

    def _require_nothing_beside_plan(self) -> None:
        """Refuse options that a given plan already decides. Pins win over the plan."""
        if self.placement != BALANCED:
            raise PlanError(
                "there are both a plan and a placement", do="write the placement into the plan"
            )
        if self.memory_limit is not None:
            raise PlanError(
                "there are both a plan and a memory_limit",
                do='let plan="auto" make one that keeps it',
            )
        if self.codecs:
            raise PlanError(
                "there are both a plan and codecs",
                do='write a codec behind an exchange of the plan, as "direct+int8"',
            )
        if self._codecs_by_word:
            raise PlanError(
                "there are both a plan and an accuracy",
                do="leave accuracy out: the plan says which codecs there are",
            )
        if self.search_options != DEFAULT:
            raise PlanError(
                "there are both a plan and search_options", do='let plan="auto" search for one'
            )

    @property
    def allowed_codecs(self) -> tuple[str, ...]:
        """Codecs that the planner may use, as plans write them: by name, or by the accuracy."""
        return codecs_of(self.codecs) or self._codecs_by_word

    @property
    def accuracy(self) -> Accuracy:
        """The feature `accuracy`; that of exact training if none is asked for."""
        return next((f for f in self.features if isinstance(f, Accuracy)), Accuracy())

    def for_steps(self, total_steps: int) -> Options:
        """Return a copy for a run of so many steps, if `accuracy` has no number of its own."""
        word = self.accuracy
        if not word.takes_local_steps or word.total_steps is not None:
            return self
        others = tuple(f for f in self.features if not isinstance(f, Accuracy))
        return replace(self, features=(*others, replace(word, total_steps=total_steps)))

    @property
    def _codecs_by_word(self) -> tuple[str, ...]:
        """Codecs that the feature `accuracy` allows."""
        return self.accuracy.codecs

    def given_plan(self) -> Plan | None:
        """Return the given plan, read from its file if need be; None if one must be made.

        Raises:
            PlanError: it is no plan.
        """
        if self.plan == AUTO:
            return None
        plan = Plan.load(self.plan) if isinstance(self.plan, str | Path) else self.plan
        if not isinstance(plan, Plan):
            raise PlanError(
                'plan must be "auto", a Plan or a path',
                got=type(plan).__name__,
                do='give "auto", a Plan or a path',
            )
        if plan is self.plan:  # a plan from a file is checked as it is read
            plan.check("the plan")
        return plan

    def without_codecs(self) -> Options:
        """Return a copy without codecs, also without the codecs in pins or a saved plan."""
        pins = {
            layer: Choice(layer, *strategy_and_exchange(pin)).without_codec().way
            for layer, pin in (self.pins or {}).items()
        }
        plan = self.plan
        if plan != AUTO:
            plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
            plan = replace(plan, choices=tuple(choice.without_codec() for choice in plan.choices))
        features = tuple(f for f in self.features if not isinstance(f, Accuracy))
        return replace(self, plan=plan, pins=pins or None, codecs=(), features=features)


def compared(options: Options, features: Features) -> dict[str, Any]:
    """Return the options that ranks compare, as plain data by keyword."""
    return {
        o.keyword: o.compared(getattr(record, o.name))
        for record in (options, *features)
        for o in options_of(record)
        if o.compared is not None
    }


def _check_memory(memory: Any, limit: Any) -> None:
    if memory not in MEMORY:
        expected = " or ".join(map(repr, MEMORY))
        do = f'give for instance memory="{MEMORY[1]}", or leave it out'
        raise UsageError("unknown memory mode", got=shown(memory), expected=expected, do=do)
    if limit is not None:
        do = "give for instance 2e9, or None"
        check_number("memory_limit is a number of bytes", limit, 1, MOST_COUNTED, do=do)


def _check_weigh(weigh: Any, count: Any) -> None:
    if weigh not in WEIGH:
        expected = " or ".join(map(repr, WEIGH))
        what, do = "nothing weighs ranks like that", f'give weigh="{WEIGH[1]}", or leave it out'
        raise UsageError(what, got=repr(weigh)[:80], expected=expected, do=do)
    if weigh != WEIGH[0] and count is not None:
        raise UsageError(
            'there are both a count and weigh="ranks"',
            do='leave out one of them: with weigh="ranks" every rank counts 1',
        )


def check_keywords(asked: Mapping[str, Any]) -> None:
    """Raise the error of an unknown keyword, or of the first feature that refuses its values."""
    _check_known(asked)
    for kind in of(Feature).values():
        if _is_asked(kind, asked):
            _feature(kind, asked)


def keywords() -> list[str]:
    """List every keyword that `parallelize` takes for an option, also of registered features."""
    kinds = (Options, *of(Feature).values())
    return [o.keyword for kind in kinds for o in options_of(kind)]


def _check_known(asked: Mapping[str, Any]) -> None:
    known_ones = keywords()
    for keyword in asked:
        if keyword not in known_ones:
            near = difflib.get_close_matches(keyword, known_ones, n=1)
            raise UsageError(
                f"parallelize takes no {keyword!r}",
                expected="one of " + ", ".join(sorted(known_ones)),
                do=f"did you mean {near[0]!r}?" if near else "leave it out",
            )


def _is_asked(kind: type[Feature[Any]], asked: Mapping[str, Any]) -> bool:
    """Return whether keywords ask for a feature."""
    options = [o for o in options_of(kind) if o.keyword in asked]
    return not all(_is_off(o, asked[o.keyword]) for o in options)


def _feature(kind: type[Feature[Any]], asked: Mapping[str, Any]) -> Feature[Any]:
    """Make a feature as keywords ask for it."""
    options = list(options_of(kind))
    # if a feature has several options, the ones that the caller leaves out are off
    off = {o.name: o.off for o in options if o.keyword not in asked and o.off is not o.default}
    return kind(**off, **{o.name: asked[o.keyword] for o in options if o.keyword in asked})


def _is_off(of_field: Option, value: Any) -> bool:
    off = of_field.off
    return value is off or (type(value) is type(off) and bool(value == off))
