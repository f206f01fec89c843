"""Bad input as data: every rank hears, before the first step, what is wrong, where, and what to
do.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, RanksDiffer, SampleError, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.profiling.identity import model_digest
from shoal.runtime.session import using

RANKS = 3


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def model(hidden: int = 8) -> nn.Module:
    layers = {
        "norm": nn.LayerNorm(6),
        "hidden": nn.Linear(6, hidden),
        "relu": nn.ReLU(),
        "head": nn.Linear(hidden, 3),
    }
    return nn.Sequential(OrderedDict(layers))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


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


PLAN = shoal.Plan(
    ranks=RANKS,
    model=model_digest(model()),
    choices=tuple(shoal.Choice(layer, "replicate", "ring") for layer in ("head", "hidden", "norm")),
    bucket_bytes=1 << 20,
    lanes=2,
)


@dataclass(frozen=True)
class Case:
    """What each rank gives, as functions of the rank, and what every rank is told."""

    error: type[Exception]
    said: tuple[str, ...]
    model: Callable[[int], Any] = lambda rank: model()
    loss: Callable[[int], Any] = lambda rank: nn.CrossEntropyLoss()
    optimizer: Callable[[int, Any], Any] = lambda rank, model: sgd(model.parameters())
    options: Callable[[int], dict[str, Any]] = field(default=lambda rank: {})
    # what the loop feeds; a case that gets there fails at its first forward
    batch: Callable[[int], Any] = batch


def only(bad_rank: int, bad: Any, good: Any) -> Callable[[int], Any]:
    return lambda rank: bad if rank == bad_rank else good


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


def option(**options: Any) -> Callable[[int], dict[str, Any]]:
    return lambda rank: options


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
    "no strategy that can": Case(
        PlanError,
        ("no allowed strategy serves layer norm", "LayerNorm"),
        options=option(strategies=["factor"]),
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
        PlanError, ("3 ranks", "expected: 4"), options=option(plan=replace(PLAN, ranks=4))
    ),
    "a plan for another model": Case(
        PlanError,
        ("made for another model",),
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
    "a plan and pins": Case(
        PlanError, ("both",), options=option(plan=PLAN, pins={"hidden": "factor"})
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
        ("rank 2", "layer hidden", "replicate tree", "replicate ring"),
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
        ("rank 1", "state of optimizer 0", "of 6 parameters", "none"),
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
    "a loss that learns": Case(
        UsageError, ("parameter scale of the loss", "None"), loss=lambda rank: Scaled()
    ),
    "a compiled model": Case(
        UsageError,
        ("compiled already", "block"),
        model=lambda rank: torch.compile(model(), backend="eager"),
    ),
}


def told(case: Case, ranks: int = RANKS) -> list[Exception]:
    """What every rank hears as it parallelises and makes one step."""

    def work(comm: ThreadComm) -> Exception:
        with using(comm) as session:
            hosts = tuple(f"h{rank}" for rank in range(ranks))
            # so no links are measured
            session.cluster = Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)
            its_model = case.model(comm.rank)
            optimizer = case.optimizer(comm.rank, its_model)
            options = {"sample": batch(comm.rank), **case.options(comm.rank)}
            try:
                its_model, loss, optimizer = shoal.parallelize(
                    its_model, case.loss(comm.rank), optimizer, **options
                )
                x, y = case.batch(comm.rank)
                loss(its_model(x), y).backward()
            except UsageError as error:
                return error
        raise AssertionError(f"rank {comm.rank} went on")

    return run(ranks, work, timeout_s=20)


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
    ["a pin that matches nothing", "no strategies", "a plan for other ranks", "a frozen model"],
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


def test_the_same_model_twice() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8))):
            its_model = model()
            for _ in range(2):
                shoal.parallelize(
                    its_model,
                    nn.CrossEntropyLoss(),
                    sgd(its_model.parameters()),
                    sample=batch(comm.rank),
                )

    with pytest.raises(UsageError, match="parallelised already"):
        run(2, work)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.functional.mse_loss], ids=["module", "function"])
def test_a_loss_that_counts_for_two_models_is_refused(loss: Any) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8), 1.0)):
            first, second = nn.Linear(6, 3), nn.Linear(6, 3)
            sample = torch.full((2, 6), 1.0 + comm.rank), torch.ones(2, 3)

            def parallelized(model: nn.Module, loss_fn: Any) -> Any:
                options = {"sample": sample, "count": lambda output, y: len(y)}
                return shoal.parallelize(model, loss_fn, sgd(model.parameters()), **options)[1]

            used = parallelized(first, copy.deepcopy(loss))
            with pytest.raises(UsageError, match="counted for another model already"):
                parallelized(second, used)
            with pytest.raises(UsageError, match="counted for another model already"):
                shoal.parallelize(second, used, sgd(second.parameters()), sample=sample)
            parallelized(second, copy.deepcopy(used) if isinstance(used, nn.Module) else loss)

    run(2, work, timeout_s=20)


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda p: p.register_hook(lambda grad: grad if grad is None else grad.clamp(-1, 1)),
    "accumulated": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize(
    ("way", "hook"),
    [("factor", "gradient"), ("factor", "accumulated"), ("replicate", "accumulated")],
)
def test_a_gradient_hook_put_on_later_is_refused_where_it_would_see_no_global_gradient(
    way: str, hook: str
) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8))):
            its_model, (x, y) = model(), batch(comm.rank)
            _, loss_fn, _ = shoal.parallelize(
                its_model,
                nn.CrossEntropyLoss(),
                sgd(its_model.parameters()),
                sample=(x, y),
                pins={"head": way},
            )
            HOOKS[hook](its_model.head.weight)
            loss_fn(its_model(x), y).backward()

    with pytest.raises(UsageError, match=r"gradient hook was put|hook on the accumulated gradient"):
        run(2, work)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"start_timeout_s": -1}])
def test_time_outs_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="more than 0 s"):
        shoal.init(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor", "column"])
def test_a_module_of_a_model_that_was_parallelised_is_refused_and_its_copy_is_not(way: str) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("h0", "h1")), Link(1e-4, 1e8), 1.0)):
            torch.manual_seed(0)
            encoder, loss = nn.Linear(6, 6), nn.CrossEntropyLoss()
            first = nn.Sequential(encoder, nn.Linear(6, 3))
            shoal.parallelize(
                first,
                loss,
                sgd(first.parameters()),
                sample=batch(comm.rank),
                pins={"0": way, "1": "replicate"},
            )
            copied = copy.deepcopy(encoder)
            del first
            gc.collect()
            second = nn.Sequential(encoder, nn.Linear(6, 3))
            with pytest.raises(UsageError, match="was that of a parallelised model") as caught:
                shoal.parallelize(second, loss, sgd(second.parameters()), sample=batch(comm.rank))
            assert "parameter 0.weight" in str(caught.value)
            third = nn.Sequential(copied, nn.Linear(6, 3))
            shoal.parallelize(third, loss, sgd(third.parameters()), sample=batch(comm.rank))
            loss(third(batch(comm.rank)[0]), batch(comm.rank)[1]).backward()

    run(2, work, timeout_s=20)


def test_a_parameter_of_two_parallelised_models_is_refused() -> None:
    def work(comm: ThreadComm) -> str:
        with using(comm, Cluster(Topology(("h0", "h1")), Link(1e-4, 1e8), 1.0)):
            body = nn.Linear(6, 6)
            actor, critic = (
                nn.Sequential(body, nn.Linear(6, 3)),
                nn.Sequential(body, nn.Linear(6, 3)),
            )
            loss = nn.CrossEntropyLoss()
            shoal.parallelize(actor, loss, sgd(actor.parameters()), sample=batch(comm.rank))
            with pytest.raises(UsageError, match="another parallelised model too") as caught:
                shoal.parallelize(critic, loss, sgd(critic.parameters()), sample=batch(comm.rank))
            return str(caught.value)

    assert all("parameter 0.weight" in told for told in run(2, work, timeout_s=20))
