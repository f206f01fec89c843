"""A model's step on any number of hosts: whether more hosts are worth it, and which changes help.

    measured profile ─▶ imagined hosts ─▶ plan (search.py) ─▶ timeline (step.py), four times:
        usual        all compute as long as the slowest of them in the median step      step
        unlucky      … as in one step of twenty                                          p95
        alike        no host slower than another                  usual − alike  = stragglers
        free link    links without limit                          alike − free   = link
        one host     nothing is sent                              free − alone   = owners, and the
                                                                  processor time of bytes; or a
                                                                  pipeline's bubble

Every step waits for the slowest of P hosts: the largest of P draws of a normal law. A profile comes
from the slowest of the ranks that measured it, so the draws are counted from there.

Costs a search for each number of hosts (some seconds; 20 for 500 layers at 1,024 hosts), and 8
predictions.
Guarded by tests/tools/test_simulate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from shoal.codecs.coded_exchange import read_codec
from shoal.core.errors import PlanError, UsageError
from shoal.core.explanation import Explanation
from shoal.core.facts import Cluster, Excerpt, ModelProfile
from shoal.core.foresight import (
    BUBBLE,
    COMPUTE,
    LINK,
    OWNERS,
    STRAGGLERS,
    Foresight,
    Help,
    Question,
    Scale,
)
from shoal.core.plan import Choice, Plan
from shoal.planner.explain import explain
from shoal.planner.holders import is_dealt
from shoal.planner.imagined_hosts import imagined, stretch
from shoal.planner.lossy_plans import ways
from shoal.planner.plan_details import plan_for
from shoal.planner.step import Timeline
from shoal.planner.timeline import Predictor, with_settings_of

_MEDIAN, _UNLUCKY = 0.5, 0.95
_AS_DDP = "replicate:allreduce"
_FREE = 1e6  # times the link's speed, which no longer limits anything
_FASTER, _MORE_ROWS, _CODECS = 2.0, 2.0, ("bfloat16", "int8")  # changes that may help


def simulate(
    profile: ModelProfile, measured: Cluster, hosts: Sequence[int], question: Question
) -> Foresight:
    """Foresee a step on each number of hosts.

    Args:
        profile: the model.
        measured: the ranks that measured it.
        hosts: numbers of hosts, each once.
        question: the network, the stragglers and the plans to assume.

    Raises:
        UsageError: a number is not at least 1.
    """
    if not hosts or min(hosts) < 1:
        raise UsageError(
            "a simulation is of one host or more",
            got=f"hosts {list(hosts)}",
            do="write for instance --hosts 1,2,4,8",
        )
    model = _Model(profile, measured, question)
    scales = [model.scale(number) for number in sorted(set(hosts))]
    return Foresight(question, model.alone_s, tuple(scales), tuple(model.helps(scales)))


def explained(
    profile: ModelProfile, measured: Cluster, answer: Foresight
) -> tuple[Explanation, Timeline, Cluster] | None:
    """Explain the plan for the most hosts: reasons, a step, and the hosts; None for one host alone.

    Other ways to serve layers are left out, because they take long for many hosts.

    Args:
        profile: the model that was simulated.
        measured: the ranks that measured it.
        answer: the result of `simulate`.
    """
    last = answer.scales[-1]
    if last.hosts == 1:
        return None
    model = _Model(profile, measured, answer.question)
    # the profile of `scale`, so that a page shows the same seconds for the same step
    own, cluster = model.usual(last.hosts), model.hosts(last.hosts)
    timeline = Predictor(with_settings_of(own, last.plan), cluster).as_is(last.plan)
    return explain(last.plan, own, cluster, alternatives=False), timeline, cluster


def ddp_step_s(
    profile: ModelProfile, cluster: Cluster, usual: ModelProfile | None = None
) -> float | None:
    """Predict a step with an all-reduce of all layers, as in DDP; None if no such plan exists.

    Args:
        profile: the model; buckets are chosen by it.
        cluster: the ranks.
        usual: the profile of the slowest rank, if that is another one.
    """
    try:
        made = plan_for(profile, cluster, strategies=["replicate"], pins={"*": _AS_DDP})
    except PlanError:
        return None
    return Predictor(with_settings_of(usual or profile, made), cluster).as_is(made).step_s


class _Model:
    """One model and one question, for any number of hosts."""

    def __init__(self, profile: ModelProfile, measured: Cluster, question: Question) -> None:
        self._profile, self._measured, self._question = profile, measured, question
        self.alone_s = self._stretch(profile, 1, _MEDIAN).step_s

    def hosts(self, number: int) -> Cluster:
        """Imagine so many hosts."""
        return imagined(self._measured, number, self._question.network)

    def profile_on(self, hosts: int) -> ModelProfile:
        """Return the model's profile on one of so many hosts."""
        return self._of_rows(1 / hosts if self._question.strong else 1)

    def usual(self, hosts: int) -> ModelProfile:
        """Return the model on the slowest of so many hosts, in the median step."""
        return self._stretch(self.profile_on(hosts), hosts, _MEDIAN)

    def scale(self, hosts: int, plan: Plan | None = None) -> Scale:
        """Foresee a step on so many hosts, under a plan made for them."""
        question, profile = self._question, self.profile_on(hosts)
        if hosts == 1:
            unlucky_s = self._stretch(profile, 1, _UNLUCKY).step_s
            none = Plan(1, profile.digest, (), 1, 1, predicted_s=self.alone_s)
            return Scale(1, self.alone_s, unlucky_s, 1.0, {COMPUTE: self.alone_s}, none)
        cluster = self.hosts(hosts)
        how = dict(question.how or {})
        made = plan or plan_for(profile, cluster, codecs=question.codecs, **how)

        def step_s(own: ModelProfile, where: Cluster = cluster) -> float:
            return Predictor(with_settings_of(own, made), where).as_is(made).step_s

        usual_s, unlucky_s = (
            step_s(self._stretch(profile, hosts, chance)) for chance in (_MEDIAN, _UNLUCKY)
        )
        alike = self._stretch(profile, 1, _MEDIAN)
        # each step is at most as long as the one before, so that the limits add up to the step
        alike_s = min(step_s(alike), usual_s)
        free_s = min(step_s(alike, _free(cluster)), alike_s)
        compute_s = min(alike.step_s, free_s)
        limits = {
            COMPUTE: compute_s,
            LINK: alike_s - free_s,
            BUBBLE if is_dealt(made) else OWNERS: free_s - compute_s,
            STRAGGLERS: usual_s - alike_s,
        }
        rows = 1 if question.strong else hosts  # count all rows, in units of one host's
        times = rows * self.alone_s / usual_s
        ddp_s = None if plan else self._ddp_s(profile, cluster)
        return Scale(hosts, usual_s, unlucky_s, times, limits, made, ddp_s)

    def _ddp_s(self, profile: ModelProfile, cluster: Cluster) -> float | None:
        """Predict a step with an all-reduce of all layers; None if no such plan exists."""
        return ddp_step_s(profile, cluster, self._stretch(profile, cluster.size, _MEDIAN))

    def helps(self, scales: Sequence[Scale]) -> list[Help]:
        """List the changes that help most at the largest number of hosts, under a similar plan."""
        last, question = scales[-1], self._question
        if last.hosts == 1:
            return []
        cluster = self.hosts(last.hosts)
        faster = replace(question.network, bytes_per_s=cluster.link.bytes_per_s * _FASTER)
        network = replace(faster, oversubscription=1.0)
        changes = {
            f"links {_FASTER:g} times as fast": (replace(question, network=network), last.plan),
            "hosts that are all alike": (replace(question, straggler=0.0), last.plan),
        }
        for codec in () if question.codecs else _CODECS:
            changes[f"codec {codec}"] = question, self._with_codec(last.plan, cluster, codec)
        found = [
            Help(
                change,
                last.step_s
                / _Model(self._profile, self._measured, asked).scale(last.hosts, plan).step_s,
            )
            for change, (asked, plan) in changes.items()
        ]
        more = _Model(self._of_rows(_MORE_ROWS), self._measured, question)
        more_s = more.scale(last.hosts, last.plan).step_s / _MORE_ROWS
        found.append(Help(f"{_MORE_ROWS:g} times the rows a host", last.step_s / more_s))
        best = max(scales, key=lambda scale: scale.times)
        if best.hosts < last.hosts:
            found.append(Help(f"only {best.hosts} hosts", best.times / last.times))
        return sorted(found, key=lambda help: -help.gain)

    def _with_codec(self, plan: Plan, cluster: Cluster, codec: str) -> Plan:
        """Return the plan with a codec for every layer that its strategy allows one."""
        predictor = Predictor(with_settings_of(self._profile, plan), cluster)

        def coded(choice: Choice) -> Choice:
            layer = predictor.layer(choice.layer)
            if predictor.role(choice.strategy).names_ranks:
                may = read_codec(codec).by_value
                return replace(choice, exchange=f"+{codec}:{choice.holder}") if may else choice
            able = ways(predictor, layer, read_codec(codec))
            alike = [way for way in able if way.strategy == choice.strategy]
            same = [way for way in alike if way.without_codec() == choice]
            return next(iter(same or alike), choice)

        return replace(plan, choices=tuple(map(coded, plan.choices)))

    def _of_rows(self, times: float) -> ModelProfile:
        """Return the profile with so many times the rows, and so many times their seconds."""
        if times == 1:
            return self._profile
        names = tuple(layer.name for layer in self._profile.layers)
        part = self._profile.excerpt(Excerpt(names, times))
        return replace(
            part,
            forward_s=self._profile.forward_s * times,
            backward_s=self._profile.backward_s * times,
            moving=self._profile.moving,
            norms=self._profile.norms,
            terms=self._profile.terms,
        )

    def _stretch(self, profile: ModelProfile, hosts: int, chance: float) -> ModelProfile:
        """Return the slowest of so many hosts, at this quantile of its step times."""
        sigma = self._question.straggler
        measured = slowest(self._measured.size, _MEDIAN, sigma)
        return stretch(profile, slowest(hosts, chance, sigma) / measured)


def slowest(hosts: int, chance: float, sigma: float) -> float:
    """Return the step time of the slowest host at a quantile, where a host's mean is 1.

    Examples:
        >>> round(slowest(1, 0.5, sigma=0.1), 3), round(slowest(64, 0.5, sigma=0.1), 3)
        (1.0, 1.23)
    """
    return max(0.0, 1 + sigma * NormalDist().inv_cdf(chance ** (1 / hosts)))


def _free(cluster: Cluster) -> Cluster:
    """Return the same hosts on links without limit: only processors take time."""
    paces = {
        name: replace(pace, wall=replace(pace.wall, round_s=0.0, byte_s=pace.wall.byte_s / _FREE))
        for name, pace in cluster.paces.items()
    }
    moves = cluster.moves and replace(
        cluster.moves, wall=replace(cluster.moves.wall, round_s=0.0, byte_s=0.0)
    )
    link = replace(cluster.link, latency_s=0.0, bytes_per_s=cluster.link.bytes_per_s * _FREE)
    return replace(cluster, link=link, paces=paces, moves=moves)
