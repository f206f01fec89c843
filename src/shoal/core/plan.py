"""Plan: data that gives each layer a strategy and an exchange, in the order of the gradients.

You can print, compare and save it as JSON, edit it by hand and give it back. `Plan.sites` says
which parameters travel together, the same on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shoal.core.errors import PlanError
from shoal.core.facts import Cluster
from shoal.core.json_record import check_types, record_of
from shoal.core.numbers import MOST_COUNTED, MOST_RANKS, MOST_SECONDS, how_many, shown
from shoal.core.outer_step import Outer
from shoal.core.pieces import share_out
from shoal.core.placement import BALANCED, Owner, Placement, check_form, owners_of
from shoal.core.regular_files import read_text
from shoal.core.role import Role
from shoal.core.way import bare_and_codec, ranks_in, rows_and_rest

FORMAT = 1
MICRO_BATCHES = 4
MOST_STEPS = 512  # longest period: a sum in 16 bits can count this many shares
_WRITTEN_BY = "shoal.plan"
_SAVED = 'check the path of the file that Plan.save wrote, or give "auto"'
LEAST_PART_BYTES = 1 << 20  # smaller parts would cost more messages than they are worth
_TABLES = 8  # number of layers that send their rows together
_BOUNDS: dict[str, tuple[float, float]] = {
    "ranks": (1, MOST_RANKS),
    "bucket_bytes": (1, MOST_COUNTED),
    "lanes": (1, 64),  # each is a thread, and a connection to every rank
    "micro_batches": (1, MOST_RANKS),
    "chunks": (1, MOST_RANKS),
    "least_part_bytes": (1, MOST_COUNTED),
    "late": (0, MOST_RANKS),
    "local_steps": (0, MOST_COUNTED),
    "predicted_s": (0, MOST_SECONDS),
}


@dataclass(frozen=True)
class Choice:
    """Service of one layer: a strategy, and the exchange that carries its gradients.

    `exchange` is '' if none is needed. If rows of a cut layer cross as codes, it is a plus and the
    codec: "+bfloat16". If the layer is in a pipeline, `exchange` names its rank, or the ranks of a
    group: "2", "0+1", or "+bfloat16:2" if values cross as codes.

    Examples:
        >>> import shoal
        >>> shoal.Choice("classifier.6", "replicate", "ring").way
        'replicate:ring'
    """

    layer: str
    strategy: str
    exchange: str = ""

    @property
    def way(self) -> str:
        """The choice as a pin says it: "factor", or "replicate:ring"."""
        if self.exchange.startswith("+"):
            return self.strategy + self.exchange
        return f"{self.strategy}:{self.exchange}" if self.exchange else self.strategy

    @property
    def way_anywhere(self) -> str:
        """The choice as a pin says it, without the rank of a layer in a pipeline."""
        _, rest = rows_and_rest(self.exchange)
        return self.strategy + self.rows if ranks_in(rest) else self.way

    @property
    def codec(self) -> str:
        """Codec of the exchange, or of the layer's rows as they cross, as a plan writes it.

        '' if there is none.
        """
        return bare_and_codec(self.exchange)[1]

    def without_codec(self) -> Choice:
        """Return this choice without its codec, so that it is exact."""
        return replace(self, exchange=bare_and_codec(self.exchange)[0])

    @property
    def rows(self) -> str:
        """Codec of rows that cross as codes, as an exchange says it: "+bfloat16"; '' for none.

        Examples:
            >>> import shoal
            >>> shoal.Choice("classifier.6", "pipeline", "+bfloat16:2").rows
            '+bfloat16'
        """
        codec, _ = rows_and_rest(self.exchange)
        return f"+{codec}" if codec else ""

    @property
    def holder(self) -> int:
        """Rank of a layer in a pipeline: 2 of "2", or of "+bfloat16:2". Of a group the first."""
        return self.group[0]

    @property
    def group(self) -> tuple[int, ...]:
        """Ranks of a layer in a pipeline, ascending: 0 and 1 of "0+1"."""
        return ranks_in(rows_and_rest(self.exchange)[1])


def _rows_before(choices: Sequence[Choice], rest: str = "") -> str:
    """Return the exchange of a site: rows cross as codes only if all of its layers say so."""
    rows = {choice.rows for choice in choices}
    codec = rows.pop() if len(rows) == 1 else ""
    return f"{codec}:{rest}" if codec and rest else codec + rest


@dataclass(frozen=True)
class Site:
    """Unit that one strategy serves at once: a layer, several in one bucket, or a part of one.

    A part is one of `parts` equal parts of the layer's parameters, laid end to end.
    """

    layers: tuple[str, ...]
    strategy: str
    exchange: str
    part: int = 0
    parts: int = 1
    every: int = 1  # steps from one update of its parameters to the next

    def spans(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the site's spans of parameters of these sizes, as (index, start, stop)."""
        return share_out(sizes, (1 / self.parts,) * self.parts)[self.part]


def _site(layers: Sequence[str], strategy: str, exchange: str, every: int) -> Site:
    return Site(tuple(layers), strategy, exchange, every=every)


@dataclass(frozen=True)
class Layout:
    """Layout of a model's layers: choices, in the order in which backward finishes the layers.

    Args:
        ranks: number of ranks that train.
        model: digest of the model that the layout was made for.
        choices: one choice for every layer with parameters.
        bucket_bytes: bytes that are put into one bucket. A larger layer is a bucket of its own. If
            owners update it, it is cut.
        lanes: number of exchanges in flight at once.
        predicted_s: step time in seconds that the planner expects.
        placement: owners of parameters: a policy's name, or ranks by dotted name or glob.
        micro_batches: number of parts that each rank's batch is cut into, if the layers are in a
            pipeline.
        joined: a field of older plans, without effect. Earlier releases read plans that have it.
        chunks: number of chunks in which layers that are cut over ranks receive their rows.
        late: this many of the last sites that go to servers come back first. The others come when
            forward needs them.
        least_part_bytes: bytes of the smallest part of a layer that has owners and is cut.
    """

    ranks: int
    model: str
    choices: tuple[Choice, ...]
    bucket_bytes: int
    lanes: int
    predicted_s: float = 0.0
    placement: Placement = BALANCED
    micro_batches: int = MICRO_BATCHES
    joined: bool = True
    chunks: int = 1
    late: int = 0
    least_part_bytes: int = LEAST_PART_BYTES

    def __post_init__(self) -> None:
        if isinstance(self.choices, list):
            object.__setattr__(self, "choices", tuple(self.choices))

    def period(self, layer: str) -> int:
        """Return the number of steps from one update of a layer to the next."""
        return 1

    def sites(
        self,
        nbytes: Mapping[str, int],
        roles: Mapping[str, Role],
        *,
        placed: bool = False,
    ) -> Iterator[Site]:
        """Cut the layers into sites, in the order in which their last gradients come.

        * Layers join until their bucket is full if their strategy takes an exchange, and if they
          have the same strategy, exchange and update period. A layer that has owners and fills more
          than one bucket is cut into parts of about one bucket each.
        * Layers that send rows join by eights.
        * All layers of a pipeline are one site.
        * Any other layer is a site of its own.

        Args:
            nbytes: the bytes of each layer's gradients.
            roles: the role of each strategy that the plan names.
            placed: whether owners have whole parameters, so that no layer is cut into parts. The
                plan's own placement may say so, too.
        """
        placed = placed or self.placement not in (BALANCED, {})
        for site in self._join_sites(nbytes, roles):
            parts = 1
            if roles[site.strategy].has_owners and len(site.layers) == 1 and not placed:
                parts = max(
                    1, round(nbytes[site.layers[0]] / max(self.bucket_bytes, self.least_part_bytes))
                )
            for part in range(parts):
                yield replace(site, part=part, parts=parts) if parts > 1 else site

    def _join_sites(self, nbytes: Mapping[str, int], roles: Mapping[str, Role]) -> Iterator[Site]:
        open_: dict[tuple[str, str, int], list[str]] = {}
        filled: dict[tuple[str, str, int], int] = {}
        used = {choice.strategy: roles[choice.strategy] for choice in self.choices}
        joining = {name for name, role in used.items() if role.joins_layers}
        carried = {name for name, role in used.items() if role.takes_exchange}
        ranked = {name for name, role in used.items() if role.names_ranks}
        on_ranks = [choice for choice in self.choices if choice.strategy in ranked]
        if on_ranks:
            holders = ",".join("+".join(map(str, choice.group)) for choice in on_ranks)
            names = tuple(choice.layer for choice in on_ranks)
            yield Site(names, on_ranks[0].strategy, _rows_before(on_ranks, holders))
        for choice in self.choices:
            key = (choice.strategy, choice.exchange, self.period(choice.layer))
            if choice.strategy in ranked:
                continue
            if choice.strategy not in joining:
                yield _site([choice.layer], *key)
                continue
            size = self.bucket_bytes // _TABLES
            if choice.strategy in carried:
                size = nbytes[choice.layer]
            if open_.get(key) and filled[key] + size > self.bucket_bytes:
                yield _site(open_.pop(key), *key)
            if key not in open_:
                open_[key], filled[key] = [], 0
            open_[key].append(choice.layer)
            filled[key] += size
            if filled[key] >= self.bucket_bytes:
                yield _site(open_.pop(key), *key)
        for key, layers in open_.items():
            yield _site(layers, *key)

    def owners(self, names: Mapping[str, Sequence[str]]) -> dict[str, Owner]:
        """Return the owners of whole parameters by dotted name. `names` has each layer's names."""
        return owners_of(
            self.placement, {choice.layer: names[choice.layer] for choice in self.choices}
        )

    def choice(self, layer: str) -> Choice:
        """Return the choice for a layer (KeyError if there is none)."""
        for choice in self.choices:
            if choice.layer == layer:
                return choice
        raise KeyError(layer)

    def with_choice(self, choice: Choice) -> Self:
        """Return a copy with another choice for one layer."""
        return replace(
            self, choices=tuple(choice if c.layer == choice.layer else c for c in self.choices)
        )


@dataclass(frozen=True)
class Plan(Layout):
    """A layout with the additions of features: everything that a run follows.

    `Layout` has the fields that come first.

    Args:
        staleness: steps that a worker may be ahead of the slowest, with servers; None: any number.
        local_steps: steps that ranks make by themselves; 0: gradients are exchanged in every step.
        outer: the rule by which ranks come together after local steps.
        update_every: steps from one update to the next, by the name of a layer that is not updated
            in each step.
        features: options of other features, by the feature's name, as plain data.

    Examples:
        >>> import shoal
        >>> choice = shoal.Choice("fc", "replicate", "ring")
        >>> plan = shoal.Plan(ranks=2, model="", choices=(choice,), bucket_bytes=1 << 20, lanes=3)
        >>> print(plan.with_choice(shoal.Choice("fc", "factor")))
        plan for 2 ranks, buckets of 1 MiB, 3 in flight
          fc  factor
    """

    staleness: int | None = 0
    local_steps: int = 0
    outer: Outer | None = None
    update_every: dict[str, int] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)

    def period(self, layer: str) -> int:
        return self.update_every.get(layer, 1)

    @property
    def periods(self) -> Mapping[str, int]:
        """Update periods in steps, by the name of each layer that has one."""
        return self.update_every

    def with_periods(self, periods: Mapping[str, int]) -> Self:
        """Return a copy with these periods."""
        return replace(self, update_every=dict(periods))

    def without_local_steps(self) -> Self:
        """Return the plan with an exchange of gradients in every step."""
        return replace(self, local_steps=0, outer=None)

    @property
    def runs_ahead(self) -> bool:
        """Whether workers run ahead of one another."""
        return self.staleness != 0

    def with_feature(self, name: str, options: Mapping[str, Any]) -> Plan:
        """Return a copy with a feature's options, as plain data."""
        return replace(self, features={**self.features, name: dict(options)})

    @property
    def is_local(self) -> bool:
        """Whether ranks step by themselves, and come together every so many steps."""
        return self.local_steps > 0

    @property
    def in_step(self) -> bool:
        """Whether all ranks exchange gradients in each step, and wait for one another."""
        return self.staleness == 0 and not self.local_steps

    @property
    def steps_per_exchange(self) -> int:
        """Steps from one exchange of all layers to the next."""
        return self.local_steps or 1

    @property
    def is_plain(self) -> bool:
        """Whether one process trains as the plan says: ranks differ only in the rows they have."""
        return not (self.is_local or self.update_every or self.features)

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster, noting whether workers run ahead of one another or step alone."""
        apart = bool(self.local_steps and cluster.servers)
        return replace(cluster, ahead=apart or self.staleness != 0, apart=apart)

    @property
    def locally(self) -> str:
        """Local steps and their rule, in words; '' if gradients are exchanged."""
        return f"{self.local_steps} local steps, {self.outer}" if self.local_steps else ""

    def __str__(self) -> str:
        """Write a head line with everything that holds for all layers, then a line per layer."""
        head = [
            f"plan for {how_many(self.ranks, 'rank')}",
            f"buckets of {self.bucket_bytes / (1 << 20):g} MiB, {self.lanes} in flight",
        ]
        head += [f"a predicted step of {self.predicted_s * 1e3:.1f} ms"] if self.predicted_s else []
        head += [f"rows of cut layers in {self.chunks} chunks"] if self.chunks > 1 else []
        if self.micro_batches > 1 and any(c.way != c.way_anywhere for c in self.choices):
            head += [f"rows of a rank in {self.micro_batches} parts"]
        head += [f"placement {self.placement}"] if self.placement != BALANCED else []
        head += [f"staleness {self.staleness}"] if self.staleness != 0 else []
        head += [self.locally] if self.local_steps else []
        width = max((len(choice.layer) for choice in self.choices), default=0)
        often = {name: f", every {every} steps" for name, every in self.update_every.items()}
        rows = [
            f"  {choice.layer:{width}}  {choice.way}{often.get(choice.layer, '')}"
            for choice in self.choices
        ]
        return "\n".join([", ".join(head), *rows])

    def to_json(self) -> str:
        """Return the plan as JSON text, one layer a line."""
        head = {k: v for k, v in asdict(self).items() if k != "choices"}
        if not self.features:  # earlier releases can read a plan without these fields
            del head["features"]
        if self.outer is not None:
            head["outer"] = self.outer.in_file(head["outer"])
        lines = ["{", f'  "format": {FORMAT},', f'  "written_by": "{_WRITTEN_BY}",']
        lines += [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        rows = ",\n".join("    " + json.dumps(asdict(choice)) for choice in self.choices)
        return "\n".join([*lines, '  "choices": [', rows, "  ]", "}"]) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (PlanError if it cannot be written)."""
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(
                f"the plan cannot be saved as {path}", got=str(error), do="give another path"
            ) from error

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> Plan:
        """Read a plan from JSON text.

        Raises:
            PlanError: the text is not a plan, or a field is missing, unknown or of the wrong type.
        """
        redo = "save it again with Plan.save, or make a new one with `shoal plan`"
        try:
            data = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # includes numbers of thousands of digits
            got = str(error)[:200]
            raise PlanError(f"{source} is not JSON of a plan", got=got, do=redo) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise PlanError(
                f"{source} is not a plan of format {FORMAT}", got=text.strip()[:80], do=redo
            )
        data.pop("written_by", None)
        rows = data.pop("choices", None)
        if not isinstance(rows, list):
            raise PlanError(
                f"{source} has no list of choices", expected='"choices": [{"layer": …}]', do=redo
            )
        choices = tuple(
            record_of(Choice, row, f"{source}, choice {i}") for i, row in enumerate(rows)
        )
        if data.get("outer") is not None:
            data["outer"] = record_of(Outer, data["outer"], f"{source}, outer")
        plan = record_of(cls, {**data, "choices": choices}, source)
        plan._check_values(source, redo)
        return plan

    def check(self, source: str) -> None:
        """Raise PlanError if a field has a wrong type or value, as one made by hand may have."""
        check_types(type(self), vars(self), source)
        for number, choice in enumerate(self.choices):
            if not isinstance(choice, Choice):
                raise PlanError(
                    f"{source}, choice {number} is no shoal.Choice",
                    got=shown(choice),
                    do='give for instance shoal.Choice("head", "factor")',
                )
            check_types(Choice, vars(choice), f"{source}, choice {number}")
        self._check_values(source, "make it with shoal.plan, and change that")

    def _check_values(self, source: str, redo: str) -> None:
        if bool(self.local_steps) != (self.outer is not None):
            raise PlanError(f"{source}: local_steps and outer go together", do=redo)
        check_periods(self.update_every, source)
        check_form(self.placement, f"{source}: the placement")
        if self.staleness is not None and not 0 <= self.staleness <= MOST_COUNTED:
            raise PlanError(
                f"{source}: staleness is a number of steps, or null for no bound", do=redo
            )
        if self.late < 0:
            raise PlanError(f"{source}: late is a number of sites", got=str(self.late), do=redo)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most:g}"
                raise PlanError(f"{source}: {name} is {bound}", got=shown(value), do=redo)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote (PlanError if the file is missing or not a plan)."""
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:  # includes a NUL in the path, and other bytes
            raise PlanError(
                f"the plan file {path} cannot be read", got=str(error), do=_SAVED
            ) from None
        return cls.from_json(text, source=str(path))


def check_periods(update_every: Any, source: str) -> None:
    """Raise PlanError unless the value maps names to numbers of steps."""
    form = 'write for instance {"classifier.*": 4}'
    if not isinstance(update_every, Mapping):
        raise PlanError(
            f"{source}: update_every is not a mapping from layers to steps",
            got=repr(update_every)[:80],
            do=form,
        )
    for pattern, every in update_every.items():
        if not isinstance(pattern, str):
            raise PlanError(
                f"{source}: update_every is by the name of a layer, or a glob",
                got=repr(pattern)[:80],
                do=form,
            )
        if type(every) is not int or not 1 <= every <= MOST_STEPS:
            raise PlanError(
                f"{source}: the update period of {pattern!r} is no number of steps",
                got=repr(every)[:80],
                expected=f"a whole number from 1 to {MOST_STEPS}",
                do=form,
            )


def _no_constant(name: str) -> float:
    """Refuse NaN and Infinity, which Python's reader takes although JSON has neither."""
    raise ValueError(f"{name} is no number of JSON's")
