"""Outer: the rule that joins the steps which each rank has made by itself ("local steps").

Every H steps the ranks know θ_old, from which all began, and the mean of their θ, weighted by rows.
Let Δ = θ_old − mean θ, and v = 0 at first:

    average     θ_new = θ_old − lr·Δ                    lr 1: the mean
    nesterov    v = momentum·v + Δ                      θ_new = θ_old − lr·(Δ + momentum·v)
    slowmo      v = momentum·v·(γ / γ_before) + Δ       θ_new = θ_old − lr·v
    bmuf        v = momentum·v + lr·Δ                   θ_new = θ_old − v

γ is the optimizer's learning rate of that parameter as the round ends. SlowMo keeps v / γ.

References: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023 (nesterov); Wang et al., "SlowMo", ICLR 2020, algorithm 1; Chen and Huo, "Scalable Training of
Deep Learning Machines by Incremental Block Training with Intra-Block Parallel Optimization and
Blockwise Model-Update Filtering", ICASSP 2016, classical block momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shoal.core.errors import UsageError
from shoal.core.facts import Topology
from shoal.core.numbers import MOST_SECONDS, check_number, check_truth, check_whole
from shoal.core.option import Flag, option, read_whole

# learning rate and momentum of each rule; None: 1 − 1/N for N ranks
RULES: dict[str, tuple[float, float | None]] = {
    "average": (1.0, 0.0),
    "bmuf": (1.0, None),
    "nesterov": (0.7, 0.9),
    "slowmo": (1.0, 0.7),
}

_RATES = 1e-6, 1e3  # bounds of the outer learning rate
_MOST_MOMENTUM = 1 - 1e-6
_LEAST_QUORUM = 1e-9


@dataclass(frozen=True)
class Outer:
    """Rule by which ranks that step by themselves come together (`local_steps`).

    Args:
        lr: the outer learning rate, from 1e-6 to 1,000. The default depends on the rule: 0.7 for
            "nesterov", 1 for the others.
        momentum: momentum of the outer steps, from 0 to below 1. The default is 0.9 for "nesterov",
            0.7 for "slowmo", 1 − 1/N for "bmuf" on N ranks. "average" has none.
        rule: "nesterov" (DiLoCo), "average", "slowmo" or "bmuf" (block momentum).
        lag: steps from when weights are sent until the result is taken over, while training goes
            on. Buckets then take turns. 0 waits. By default as many as hide it where `local_steps`
            is "auto", or where the exchange of all weights lasts longer than a step; else 0.
        islands: whether the ranks of one host step together, as one rank: they exchange gradients
            in each step, and hosts come together every H steps. By default where there are several
            hosts, of which any has several ranks.
        warmup_steps: exact steps before the first round, in which all ranks exchange gradients as
            without local steps.
        grows: whether the first rounds are short: of 1 step, then 2, 4 and so on, up to
            `local_steps`. Each of them waits for its exchange.
        quorum: the share of the ranks, over 0 and at most 1, that closes a round once `grace_s` is
            over. A rank that comes later keeps its own steps for the next round. By default a round
            waits for all ranks.
        grace_s: seconds, from 0 on, for which a round waits for further ranks once there is a
            quorum.

    Raises:
        UsageError: there is no such rule, or a number is out of its bounds.

    Examples:
        >>> import shoal
        >>> shoal.Outer(rule="average").lr
        1.0
    """

    lr: float | None = None
    momentum: float | None = None
    rule: str = option(
        "nesterov",
        flag=Flag(
            "The rule by which ranks come together, with --local-steps.",
            "--outer",
            read=str,
            choices=tuple(sorted(RULES)),
        ),
    )
    lag: int | None = None
    islands: bool | None = option(
        None,
        flag=Flag(
            "Whether the ranks of a host step together, with --local-steps. By default where "
            "there are several hosts.",
            "--islands",
            no=True,
        ),
    )
    warmup_steps: int = option(
        0,
        flag=Flag(
            "Exact steps of all ranks first, with --local-steps.",
            "--warmup-steps",
            read=read_whole("steps"),
            metavar="STEPS",
        ),
    )

    grows: bool = option(
        False,
        flag=Flag(
            "Begin with rounds of 1, 2, 4 steps and so on, with --local-steps.", "--grow", no=True
        ),
    )
    quorum: float | None = None
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or self.rule not in RULES:
            raise UsageError(
                "there is no such outer rule",
                got=repr(self.rule)[:80],
                expected="one of " + ", ".join(RULES),
                do='give for instance shoal.Outer(rule="nesterov")',
            )
        lr, momentum = RULES[self.rule]
        object.__setattr__(self, "lr", lr if self.lr is None else self.lr)
        object.__setattr__(self, "momentum", momentum if self.momentum is None else self.momentum)
        rule = "the outer learning rate is a number above 0"
        check_number(rule, self.lr, *_RATES, do="give 0.7")
        self._check_momentum()
        if self.lag is not None:
            check_whole("the lag is a number of steps", self.lag, 0, do="give 0 to wait")
        if self.islands is not None:
            check_truth(
                "islands is True or False, or None for what suits the hosts",
                self.islands,
                do="give islands=True to have the ranks of a host step as one",
            )
        check_whole(
            "warmup_steps is a number of steps, at least 0",
            self.warmup_steps,
            0,
            do="give 100, or leave it out to begin with local steps",
        )
        check_truth("grows is True or False", self.grows, do="give grows=True for short rounds")
        self._check_quorum()

    def _check_quorum(self) -> None:
        rule = "grace_s is a number of seconds, from 0 on"
        check_number(rule, self.grace_s, 0, MOST_SECONDS, do="give 5.0")
        if self.quorum is None:
            return
        rule = "the quorum is a share of the ranks, over 0 and at most 1"
        check_number(rule, self.quorum, _LEAST_QUORUM, 1, do="give 0.75, or leave it out")
        for is_asked, words, way_out in (
            (self.lag, "a lag", "leave out lag"),
            (self.islands, "islands", "leave out islands: each rank steps by itself"),
            (self.grows, "rounds that grow", "give warmup_steps in place of grows"),
        ):
            if is_asked:
                raise UsageError(
                    f"a round with a quorum does not go together with {words}",
                    got=str(self),
                    do=f"{way_out}, or leave out the quorum",
                )

    def _check_momentum(self) -> None:
        momentum: Any = self.momentum
        if momentum is None:
            return
        rule = "the outer momentum is a number from 0 to below 1"
        check_number(rule, momentum, 0, _MOST_MOMENTUM, do="give 0.9")
        if momentum and self.rule == "average":
            raise UsageError(
                'the outer rule "average" has no momentum',
                got=repr(momentum)[:80],
                do='leave momentum out, or give rule="nesterov"',
            )

    def on(self, topology: Topology) -> Outer:
        """Return the rule with all defaults that depend on the hosts of the ranks."""
        hosts, ranks = len(topology.ranks_on), topology.size
        islands = hosts > 1 if self.islands is None else self.islands
        # with a quorum each rank is one of its own
        islands = (
            islands and hosts < ranks and self.quorum is None
        )  # otherwise each rank is an island
        workers = hosts if islands else ranks
        momentum = 1 - 1 / workers if self.momentum is None else self.momentum
        return replace(self, momentum=momentum, islands=islands)

    def __str__(self) -> str:
        momentum = "" if self.momentum is None else f", momentum={self.momentum:g}"
        lag = f", lag={self.lag}" if self.lag else ""
        islands = ", islands=True" if self.islands else ""
        warmup = f", warmup_steps={self.warmup_steps}" if self.warmup_steps else ""
        grows = ", grows=True" if self.grows else ""
        quorum = "" if self.quorum is None else f", quorum={self.quorum:g}"
        quorum += f", grace_s={self.grace_s:g}" if quorum else ""
        return f"{self.rule}(lr={self.lr:g}{momentum}{lag}{islands}{warmup}{grows}{quorum})"

    def in_file(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that a plan's file has: options that are off have none."""
        off = [] if self.grows else ["grows"]
        off += ["quorum", "grace_s"] if self.quorum is None else []
        return {name: value for name, value in fields.items() if name not in off}

    def step(self, old: Tensor, difference: Tensor, momentum: Tensor) -> Tensor:
        """Return new values, from the old ones and their difference to the mean over ranks.

        Args:
            old: old values, flat; they are not changed.
            difference: old values minus the mean; they may be changed.
            momentum: v of these values, changed in place.
        """
        assert self.lr is not None and self.momentum is not None, "Outer.on was not called"
        if self.rule == "average":
            return old - self.lr * difference
        if self.rule == "nesterov":
            momentum.mul_(self.momentum).add_(difference)
            return old - self.lr * (difference + self.momentum * momentum)
        if self.rule == "slowmo":
            momentum.mul_(self.momentum).add_(difference)
            return old - self.lr * momentum
        momentum.mul_(self.momentum).add_(difference, alpha=self.lr)
        return old - momentum
