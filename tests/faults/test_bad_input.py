"""Bad input as data: every rank hears, before the first step, what is wrong, where, and what to
do.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_cases import RANKS, Case, batch, model, only, option, sgd, told
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.sample import Sample
from shoal.core.errors import PlanError, RanksDiffer, SampleError, UsageError, WorldError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front import session_start
from shoal.front.session_start import using
from shoal.profiling.identity import model_digest

# TorchScript's registry of classes is the process's: ranks that are threads take turns
_SCRIPTING = threading.Lock()


def partly_scripted(whole: Any) -> nn.Module:
    with _SCRIPTING:
        whole.hidden = torch.jit.script(whole.hidden)
    return whole


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.scale, target)


class Unset(torch.optim.Optimizer):
    """A wrapper as many packages have it, which torch's own `__init__` never sets up."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optimizer = inside

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Held:
    """A wrapper that is no optimizer of torch's."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optim = inside


class ByMethods(nn.Module):
    """A model whose loss is made by a method, as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), y)


class TakesAction(ByMethods):
    """A model whose forward is for acting alone."""

    def forward(self, observation: Tensor, *, action: Tensor) -> Tensor:
        raise AssertionError("it lacks an action")


class NeverRun(nn.Module):
    """A model that must be refused before anybody runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was run")


PLAN = shoal.Plan(
    ranks=RANKS,
    model=model_digest(model()),
    choices=tuple(shoal.Choice(layer, "replicate", "ring") for layer in ("head", "hidden", "norm")),
    bucket_bytes=1 << 20,
    lanes=2,
)


def only_one_resumed(bad_rank: int) -> Callable[[int, Any], Any]:
    def make(rank: int, own: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(own.parameters())
        if rank == bad_rank:
            for parameter in own.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    return make


PLANS = {
    "a pin that matches nothing": Case(
        PlanError, ("'hiden'", "such as hidden"), options=option(pins={"hiden": "factor"})
    ),
    "a glob that matches nothing": Case(
        PlanError,
        ("'classifier.*'", "norm, hidden, head"),
        options=option(pins={"classifier.*": "factor"}),
    ),
    "a pin to no strategy": Case(
        PlanError, ("'fctor'", "did you mean 'factor'"), options=option(pins={"hidden": "fctor"})
    ),
    "a pin to no exchange": Case(
        PlanError,
        ("'rign'", "did you mean 'ring'"),
        options=option(pins={"hidden": "replicate:rign"}),
    ),
    "a pin with an exchange too many": Case(
        PlanError,
        ("factor", "layer hidden", "takes no exchange"),
        options=option(pins={"hidden": "factor:ring"}),
    ),
    "a pin to a strategy that cannot": Case(
        PlanError,
        ("factor cannot serve layer norm", "LayerNorm"),
        options=option(pins={"norm": "factor"}),
    ),
    "a plan with a strategy that cannot": Case(
        PlanError,
        ("factor cannot serve layer norm", "LayerNorm", "replicate"),
        options=option(plan=PLAN.with_choice(shoal.Choice("norm", "factor"))),
    ),
    "no strategy that can, before measuring": Case(
        PlanError,
        ("no allowed strategy serves layer", "embedding: it serves nn.Embedding", "replicate"),
        model=lambda rank: NeverRun(),
        options=option(strategies=["embedding"]),
    ),
    "strategies without their hosts, before measuring": Case(
        PlanError,
        ("no allowed strategy serves layer", "server: there are no servers"),
        model=lambda rank: NeverRun(),
        options=option(strategies=["server", "stage"]),
    ),
    "a pin to a strategy that cannot, before measuring": Case(
        PlanError,
        ("factor cannot serve layer norm", "LayerNorm", "pin of norm"),
        model=lambda rank: NeverRun(),
        options=option(pins={"norm": "factor"}),
    ),
    "a plan with a strategy that cannot, before measuring": Case(
        PlanError,
        ("row cannot serve layer norm", "LayerNorm", "replicate"),
        model=lambda rank: NeverRun(),
        options=option(
            plan=replace(
                PLAN,
                model=model_digest(NeverRun()),
                choices=(shoal.Choice("norm", "row"), shoal.Choice("hidden", "row")),
            )
        ),
    ),
    "pins as a list": Case(
        PlanError, ("not a mapping", "['0']", "pins={"), options=option(pins=["0"])
    ),
    "a pin of a number": Case(
        PlanError, ("pin of 'hidden'", "got: 7"), options=option(pins={"hidden": 7})
    ),
    "a pin by a number": Case(
        PlanError, ("by the name of a layer", "got: 0"), options=option(pins={0: "factor"})
    ),
    "a number of strategies": Case(
        PlanError, ("a list of names", "got: 5"), options=option(strategies=5)
    ),
    "strategies that are numbers": Case(
        PlanError, ("a list of names", "1, 2"), options=option(strategies=[1, 2])
    ),
    "no strategies": Case(PlanError, ("at least one",), options=option(strategies=[])),
    "a memory that is none": Case(
        UsageError, ("'lo'", "'fast' or 'low'"), options=option(memory="lo")
    ),
    "strategies as one name": Case(
        PlanError, ("a list of names", "'factor'"), options=option(strategies="factor")
    ),
    "a strategy that is none": Case(
        PlanError, ("'fctor'", "'factor'"), options=option(strategies=["fctor"])
    ),
    "a plan that names another layer": Case(
        PlanError,
        ("'hidden.0'", "lacks", "expected: hidden"),
        options=option(
            plan=replace(
                PLAN, choices=(*PLAN.choices, shoal.Choice("hidden.0", "replicate", "ring"))
            )
        ),
    ),
    "a plan that leaves a layer out": Case(
        PlanError,
        ("leaves out 'norm'",),
        options=option(plan=replace(PLAN, choices=PLAN.choices[:2])),
    ),
    "a plan for other ranks": Case(
        PlanError,
        ("got: a plan for 4 ranks", "expected: one for 3"),
        options=option(plan=replace(PLAN, ranks=4)),
    ),
    "a plan for another model": Case(
        PlanError,
        ("made for another model", f"got: a plan for model {PLAN.model[:12]}"),
        model=lambda rank: model(9),
        options=option(plan=PLAN),
    ),
    "a plan that is nowhere": Case(
        PlanError, ("nowhere.json", "check the path"), options=option(plan="nowhere.json")
    ),
    "a plan that is none": Case(PlanError, ("NoneType",), options=option(plan=None)),
    "a placement that is none": Case(
        PlanError, ("'robin'", "round-robin", "hash"), options=option(placement="robin")
    ),
    "memory that is no number": Case(
        UsageError, ("memory_limit", "nan"), options=option(memory_limit=float("nan"))
    ),
    "micro-batches that are a truth": Case(
        UsageError, ("micro_batches", "True"), options=option(micro_batches=True)
    ),
    "search options that are none": Case(
        UsageError, ("search_options", "NoneType"), options=option(search_options=None)
    ),
    "no memory": Case(UsageError, ("memory_limit", "-1", "2e9"), options=option(memory_limit=-1)),
    "too little memory": Case(
        PlanError,
        ("limit of memory", "memory_limit=10", "bytes a rank", "more ranks"),
        options=option(memory_limit=10),
    ),
    "a plan beside a limit": Case(
        PlanError, ("plan and a memory_limit",), options=option(plan=PLAN, memory_limit=1e9)
    ),
    "a placement of nothing": Case(
        PlanError, ("placement of 'hed.*'", "such as head"), options=option(placement={"hed.*": 0})
    ),
    "a placement at no rank": Case(
        PlanError,
        ("head.bias", "rank 3", "ranks 0 … 2"),
        options=option(placement={"head.bias": 3}),
    ),
    "a placement beside owners": Case(
        PlanError,
        ("factor cannot serve layer head", "head.weight to rank 1"),
        options=option(placement={"head.*": 1}, pins={"head": "factor"}),
    ),
    "a plan's placement beside owners": Case(
        PlanError,
        ("replicate cannot serve layer hidden", "no owners", "hidden.bias to rank 1"),
        options=option(plan=replace(PLAN, placement={"hidden.bias": 1})),
    ),
    "a plan's placement at no rank": Case(
        PlanError, ("rank 5", "ranks 0 … 2"), options=option(plan=replace(PLAN, placement={"*": 5}))
    ),
    "a plan and a placement": Case(
        PlanError,
        ("write the placement into the plan",),
        options=option(plan=PLAN, placement="hash"),
    ),
}
RANKS_THAT_DIFFER = {
    "models": Case(
        RanksDiffer,
        ("rank 2", "layer hidden", "(9, 6)", "(8, 6)"),
        model=lambda rank: model(8 + rank // 2),
    ),
    "a plan's layer": Case(
        RanksDiffer,
        ("rank 2", "layer hidden", "replicate:tree", "replicate:ring"),
        options=lambda rank: {
            "plan": only(2, PLAN.with_choice(shoal.Choice("hidden", "replicate", "tree")), PLAN)(
                rank
            )
        },
    ),
    "a plan's lanes": Case(
        RanksDiffer,
        ("rank 1", "lanes", "3"),
        options=lambda rank: {"plan": replace(PLAN, lanes=2 + rank % 2)},
    ),
    "a plan's order": Case(
        RanksDiffer,
        ("rank 1", "order of layers"),
        options=lambda rank: {
            "plan": only(1, replace(PLAN, choices=PLAN.choices[::-1]), PLAN)(rank)
        },
    ),
    "a plan on one rank": Case(
        RanksDiffer, ("rank 1", "auto"), options=lambda r: {"plan": only(1, PLAN, "auto")(r)}
    ),
    "pins": Case(
        RanksDiffer,
        ("rank 1", "pins", "factor"),
        options=lambda r: {"pins": only(1, {"hidden": "factor"}, None)(r)},
    ),
    "memory": Case(
        RanksDiffer,
        ("rank 1", "memory", "low"),
        options=lambda r: {"memory": only(1, "low", "fast")(r)},
    ),
    "placements": Case(
        RanksDiffer,
        ("rank 1", "placement", "hash"),
        options=lambda r: {"placement": only(1, "hash", "round-robin")(r)},
    ),
    "the order of a placement": Case(
        RanksDiffer,
        ("rank 1", "plan's placement"),
        options=lambda r: {
            "plan": replace(PLAN, placement=only(1, {"*": 1, "head": 0}, {"head": 0, "*": 1})(r)),
        },
    ),
    "strategies": Case(
        RanksDiffer,
        ("rank 2", "replicate"),
        options=lambda r: {"strategies": only(2, ["replicate"], None)(r)},
    ),
    "count": Case(
        RanksDiffer,
        ("rank 1", "count"),
        options=lambda r: {"count": only(1, lambda o, t: 4.0, None)(r)},
    ),
    "optimizers": Case(
        RanksDiffer,
        ("rank 1", "'lr': 0.2", "'lr': 0.1"),
        optimizer=lambda rank, model: torch.optim.SGD(
            model.parameters(), lr=only(1, 0.2, 0.1)(rank)
        ),
    ),
    "a checkpoint of the optimizer": Case(
        RanksDiffer,
        ("rank 1", "state of optimizer 0", "of 6 parameters", "none", "a new optimizer"),
        optimizer=only_one_resumed(1),
    ),
    "the same batch": Case(RanksDiffer, ("same batch", "shoal.shard"), batch=lambda rank: batch(0)),
}
SAMPLES = {
    "no sample": Case(
        SampleError, ("there is no sample", "sample=(x, y)"), options=option(sample=None)
    ),
    "not a pair": Case(
        SampleError, ("not a pair", "float32 (4, 6)"), options=option(sample=batch(0)[0])
    ),
    "a triple": Case(SampleError, ("not a pair",), options=option(sample=(*batch(0), 1))),
    "a model without forward": Case(
        SampleError,
        ('missing the required "forward"', "give compute_loss=f", "(model, batch)"),
        model=lambda rank: ByMethods(),
    ),
    "a model with a forward for something else": Case(
        SampleError,
        ("does not take the sample", "try loss_fn", "give compute_loss=f"),
        model=lambda rank: TakesAction(),
    ),
    "no rows": Case(
        SampleError, ("no rows",), options=option(sample=(torch.empty(0, 6), torch.empty(0)))
    ),
    "a wrong shape": Case(
        SampleError,
        ("(4, 7)", "normalized_shape", "try loss_fn"),
        options=option(sample=(torch.ones(4, 7), batch(0)[1])),
    ),
    "wrong keys": Case(
        SampleError,
        ("'inputs'", "{inputs: "),
        options=option(sample=({"inputs": batch(0)[0]}, batch(0)[1])),
    ),
    "a wrong target": Case(
        SampleError,
        ("loss_fn does not take", "float32 (4,)"),
        options=option(sample=(batch(0)[0], torch.ones(4))),
    ),
    "a loss of many": Case(
        SampleError,
        ("(4,)", "not a scalar", ".mean()"),
        loss=lambda rank: nn.CrossEntropyLoss(reduction="none"),
    ),
    "a loss that is a number": Case(
        SampleError, ("no loss", "got: 1.0"), loss=lambda rank: lambda o, t: 1.0
    ),
    "a loss of nothing": Case(
        SampleError,
        ("does not depend",),
        loss=lambda rank: lambda o, t: torch.ones((), requires_grad=False),
    ),
    "a target without a loss": Case(
        SampleError, ("no loss_fn to take it",), loss=lambda rank: None
    ),
    "a model without its loss": Case(
        SampleError,
        ("(4, 3)", ".loss"),
        loss=lambda rank: None,
        options=option(sample=(batch(0)[0], None)),
    ),
}
OTHERS = {
    "no optimizer": Case(
        UsageError, ("not a torch optimizer", "str"), optimizer=lambda rank, model: "sgd"
    ),
    "a wrapper that torch never set up": Case(
        UsageError,
        ("not set up", "got: Unset", "as wrapper.optimizer"),
        optimizer=lambda rank, model: Unset(sgd(model.parameters())),
    ),
    "a wrapper beside its inside": Case(
        UsageError,
        ("not set up", "as wrapper.optimizer"),
        optimizer=lambda rank, model: [base := sgd(model.parameters()), Unset(base)],
    ),
    "a wrapper of another type": Case(
        UsageError,
        ("not a torch optimizer", "as wrapper.optim,"),
        optimizer=lambda rank, model: Held(sgd(model.parameters())),
    ),
    "optimizers by name": Case(
        UsageError,
        ("not a torch optimizer", "list(optimizers.values())"),
        optimizer=lambda rank, model: {"all": sgd(model.parameters())},
    ),
    "another model's optimizer": Case(
        UsageError, ("holds none",), optimizer=lambda rank, other: sgd(model().parameters())
    ),
    "a model that is none": Case(
        UsageError,
        ("not an nn.Module", "str"),
        model=lambda r: "model",
        optimizer=lambda r, _: sgd(model().parameters()),
    ),
    "a frozen model": Case(
        UsageError,
        ("no trainable parameter",),
        model=lambda rank: model().requires_grad_(False),
        optimizer=lambda rank, _: sgd(model().parameters()),
    ),
    "a model in TorchScript": Case(
        UsageError, ("TorchScript", "module hidden"), model=lambda rank: partly_scripted(model())
    ),
    "a class as loss": Case(
        UsageError, ("the loss is a class", "MSELoss()"), loss=lambda rank: nn.MSELoss
    ),
    "a count that is none": Case(
        UsageError, ("count is not a function", "got: 4"), options=option(count=4)
    ),
    "a count of no number": Case(
        UsageError, ("count gives", "got: None"), options=option(count=lambda o, t: None)
    ),
    "a count of nan": Case(
        UsageError, ("count gives", "got: nan"), options=option(count=lambda o, t: float("nan"))
    ),
    "a count under 0": Case(
        UsageError, ("count gives", "got: -1"), options=option(count=lambda o, t: -1)
    ),
    "a count without an end": Case(
        UsageError,
        ("count gives", "inf"),
        options=option(count=lambda o, t: torch.tensor(torch.inf)),
    ),
}
ALL = {
    **PLANS,
    **{f"ranks with different {name}": each for name, each in RANKS_THAT_DIFFER.items()},
    **SAMPLES,
    **OTHERS,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_every_rank_hears_what_is_wrong_before_the_first_step(case: Case) -> None:
    for error in told(case):
        assert type(error) is case.error
        for words in case.said:
            assert words in str(error)


@pytest.mark.parametrize(
    "case",
    [
        Case(
            SampleError,
            ("(4, 7)",),
            options=lambda r: {"sample": (torch.ones(4, only(1, 7, 6)(r)), batch(r)[1])},
        ),
        Case(
            UsageError,
            ("not a torch optimizer",),
            optimizer=lambda r, m: only(1, "sgd", sgd(m.parameters()))(r),
        ),
        Case(
            PlanError, ("'7'",), options=lambda rank: {"pins": only(1, {"7": "factor"}, None)(rank)}
        ),
        Case(SampleError, ("no loss_fn",), loss=only(1, None, nn.CrossEntropyLoss())),
    ],
    ids=["sample", "optimizer", "pin", "loss"],
)
def test_what_is_wrong_on_one_rank_only_is_told_on_all_with_its_name(case: Case) -> None:
    first, its_own, last = told(case)
    assert type(its_own) is case.error
    for error in (first, last):
        assert isinstance(error, UsageError)
        assert str(error).startswith("rank 1 ")
        assert error.rank == 1
        for words in case.said:
            assert words in str(its_own) and words in str(error)


@pytest.mark.parametrize(
    "name",
    [
        "a pin that matches nothing",
        "a pin to no strategy",
        "a pin to no exchange",
        "a pin with an exchange too many",
        "pins as a list",
        "no strategies",
        "a strategy that is none",
        "a plan for other ranks",
        "a plan that names another layer",
        "a frozen model",
        "a count that is none",
    ],
)
def test_a_process_alone_hears_the_same(name: str) -> None:
    case = ALL[name]
    (error,) = told(case, ranks=1)
    assert type(error) is case.error


def test_a_plan_file_that_was_edited_wrongly_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(
        PLAN.to_json().replace('"strategy": "replicate"', '"strategie": "replicate"', 1)
    )
    for error in told(Case(PlanError, (), options=option(plan=str(path)))):
        assert f"{path}, choice 0 has unknown fields" in str(error)
        assert "strategie" in str(error)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (shoal.Choice("hidden", "fctor"), "did you mean 'factor'"),
        (shoal.Choice("hidden", "replicate", "rign"), "did you mean 'ring'"),
        (shoal.Choice("hidden", "factor", "ring"), "takes no exchange"),
    ],
    ids=["strategy", "exchange", "exchange too many"],
)
def test_a_plan_that_names_what_there_is_not_is_refused_alone_too(
    choice: shoal.Choice, said: str
) -> None:
    plan = replace(PLAN.with_choice(choice), ranks=1)
    (error,) = told(Case(PlanError, (), options=option(plan=plan)), ranks=1)
    assert said in str(error)


class Greedy(nn.Module):
    """A model for which there is no memory."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lack_of_memory_is_no_mistake_in_the_sample(error: Exception) -> None:
    sample = Sample.of(Greedy(error), nn.CrossEntropyLoss(), batch(0))
    with pytest.raises(WorldError, match=r"memory ran out(.|\n)*smaller batch"):
        sample.loss()


def test_an_error_of_shoals_within_a_model_is_shown_as_it_is() -> None:
    error = UsageError("read me", do="as I am")
    with pytest.raises(UsageError) as raised:
        Sample.of(Greedy(error), nn.CrossEntropyLoss(), batch(0)).loss()
    assert raised.value is error


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300, "5", True], ids=repr)
def test_time_outs_that_are_none_are_refused(seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_start, "found", lambda: None)
    for name in ("timeout_s", "start_timeout_s"):
        with pytest.raises(UsageError, match="a time-out is more than 0 s"):
            shoal.init(**{name: seconds})


def test_a_rank_is_not_lost_before_its_beats_can_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_start, "found", lambda: None)
    with pytest.raises(UsageError, match=r"lost_after_s is at least 3 s(.|\n)*give 3 or more"):
        shoal.init(lost_after_s=0.1)


def test_ranks_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `timeout_s=None` stands for a deadline from the prediction."""
    monkeypatch.setattr(session_start, "found", lambda: None)
    with pytest.raises(UsageError, match="a time-out is more than 0 s"):
        shoal.init(start_timeout_s=None)  # type: ignore[arg-type]


def test_a_wrapper_steps_the_optimizer_that_was_given() -> None:
    """As the error for a wrapper says: the weights are those of one process."""
    torch.manual_seed(0)
    first = nn.Linear(6, 3).double()

    def work(comm: ThreadComm) -> Tensor:
        with using(comm) as session:
            session.cluster = Cluster(Topology(("one", "other")), Link(1e-4, 1e8))
            net = copy.deepcopy(first)
            wrapper = Unset(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
            x, y = batch(comm.rank)
            _, loss_fn, _ = shoal.parallelize(
                net, nn.CrossEntropyLoss(), wrapper.optimizer, sample=(x.double(), y)
            )
            for _ in range(2):
                wrapper.optimizer.zero_grad()
                loss_fn(net(x.double()), y).backward()
                wrapper.step()
            return net.state_dict()["weight"].clone()

    alone = copy.deepcopy(first)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    xs, ys = zip(*map(batch, range(2)), strict=True)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(torch.cat(xs).double()), torch.cat(ys)).backward()
        optimizer.step()
    for weight in run(2, work, timeout_s=20):
        torch.testing.assert_close(weight, alone.weight.detach(), rtol=0, atol=1e-10)
