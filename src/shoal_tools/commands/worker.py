"""Work of every rank for `shoal train`, `check`, `plan` and `probe`.

Each function is a collective: all ranks call it with the same arguments, and rank 0 prints.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from shoal.contracts.batch import mapped
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.numbers import how_many
from shoal.core.outcome import Outcome
from shoal.core.plan import Plan
from shoal.features import SyncBatchNorm, global_weights
from shoal.front import text
from shoal.front.carriers import all_codecs
from shoal.front.cluster import measured_cluster, with_codings
from shoal.front.codec_report import codec_report
from shoal.front.options import Options
from shoal.front.outcomes import outcome_of_ranks
from shoal.front.parallel import by_options
from shoal.front.parallel_ranks import chosen, job_of, profile_options, profiled
from shoal.front.recipe import Recipe
from shoal.front.request import Request, facts_for, listed, request_of
from shoal.front.session_start import init, is_tail_host, serve_and_end
from shoal.front.shard import dealt
from shoal.front.stages import Stages
from shoal.planner.explain import explain
from shoal.profiling.identity import model_digest
from shoal.profiling.profile_file import Measured
from shoal.rewrite.apply import cuts
from shoal.session.memory import memory, of_one_process
from shoal.session.session import Session, current, world
from shoal_tools.commands.run import Run, num_rows, time_step
from shoal_tools.commands.run_record import History, report_training
from shoal_tools.report.peer_words import as_ddp
from shoal_tools.simulate import ddp_step_s

CRITERION = 1e-10  # largest relative difference in float64 that counts as the same
# the others wait while rank 0 trains on all rows; a rank that dies is noticed anyway
_CHECK_S = 3600.0
_SEED = 0
_DROPOUT = nn.modules.dropout._DropoutNd
_BATCHNORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class TrainingRun:
    """A training run as the command line asks for it. Rank 0 writes the files.

    Args:
        save_plan: file for the plan.
        epochs: passes over the data; None: the recipe's own number.
        max_steps: steps after which training ends, however many passes they take.
        checkpoint: folder of the run's checkpoints. The run goes on from the newest one there.
        every_s: seconds from one checkpoint to the next.
        reasons: whether to print why each layer is served as it is.
        report: file for a page about the run, or for its record if the name ends in .json.
        json_path: file for the time of a step, the predicted time, and the plan.
    """

    save_plan: Path | None = None
    epochs: int | None = None
    max_steps: int | None = None
    checkpoint: Path | str | None = None
    every_s: float = 600.0
    reasons: bool = False
    report: Path | None = None
    json_path: Path | None = None


def train(recipe: Recipe, options: Options, wanted: TrainingRun = TrainingRun()) -> None:
    """Train the recipe on all ranks.

    Rank 0 prints the plan, progress, predicted and measured step times, memory and the test
    accuracy.

    Args:
        recipe: the model and its data.
        options: options of the plan and of features.
        wanted: the length of training, and the files to write.
    """
    # 1  join the others, and take a share of the data
    init()
    recipe = at_own_device(recipe)
    torch.manual_seed(_SEED)
    training_data, test_data = recipe.data()
    loader = dealt(training_data)
    epochs, num_steps = _length(recipe, loader, wanted.epochs, wanted.max_steps)
    # 2  spread the model over the ranks
    model, objective = recipe.model(), recipe.objective()
    optimizer = recipe.optimizer(model.parameters())
    sample = recipe.batch(next(iter(loader)))
    asked = replace(options, compute_loss=objective.compute_loss, count=recipe.count)
    asked = asked.for_steps(num_steps)
    model, loss, optimizer = by_options(lambda: asked, model, objective.loss_fn, optimizer, sample)
    objective = objective.by(loss)
    _show_plan(model, wanted.save_plan, reasons=wanted.reasons)
    share = _show_batch(num_rows(sample))
    # 3  the ordinary loop
    history = History(model) if wanted.report else None
    run = Run(recipe, loader, model, objective, optimizer, history, share)
    trained = run.train(epochs, num_steps, wanted.checkpoint, wanted.every_s)
    # 4  results
    if trained is not None:
        outcome = _show_outcome(model, trained.median_step_s, wanted.json_path)
        if wanted.report and history:
            report_training(wanted.report, recipe.path, model, history, outcome)
    if test_data is not None:
        _show_accuracy(recipe, model, test_data)
    if trained is not None and world().rank == 0:
        text.console().print(trained.totals)
    current().finish()  # it warns, and needs the model for that


def _length(
    recipe: Recipe, loader: DataLoader[Any], epochs: int | None, max_steps: int | None
) -> tuple[int, int]:
    """Return the largest number of epochs, and the number of steps in all."""
    try:
        num_batches = len(loader)
    except TypeError as error:
        if max_steps is None:
            raise UsageError(
                "nobody knows when the recipe's stream ends, and no number of steps is given",
                got=str(error),
                do="say when to end: shoal train … --steps 1000; or give the dataset a __len__",
            ) from error
        return epochs or max_steps, max_steps
    if epochs is None:
        epochs = math.ceil(max_steps / num_batches) if max_steps else recipe.epochs
    num_steps = epochs * num_batches
    return epochs, min(num_steps, max_steps or num_steps)


def _show_plan(model: nn.Module, save: Path | None, *, reasons: bool) -> None:
    """Print the plan that a model follows, on rank 0, and write it to `save` if that is given."""
    attached = current().attached.get(model)
    if attached is None:
        if save:
            raise UsageError(
                "one process trains without a plan, so there is none to save", do="add --ranks 2"
            )
    elif world().rank == 0:
        explanation = explain(
            attached.plan, attached.profile, attached.cluster, alternatives=reasons
        )
        text.console().print(text.explained(explanation, reasons=reasons))
        if save:
            attached.plan.save(save)


def _show_beside_ddp(plan: Plan, profile: ModelProfile, cluster: Cluster, *, reasons: bool) -> None:
    """Print a plan with its reasons, and whether DDP would do as well."""
    explanation = explain(plan, profile, cluster, alternatives=reasons)
    text.console().print(text.explained(explanation, reasons=reasons))
    if plan.ranks > 1 and explanation.step.total_s and not (cluster.servers or cluster.tail):
        ddp_s = ddp_step_s(profile, cluster)
        if ddp_s is not None:
            text.console().print(as_ddp(explanation.step.total_s, ddp_s))


def _show_batch(own_rows: int) -> float:
    """Print the batch of a rank and of all ranks, on rank 0. Return this rank's part of it."""
    comm = current().comm
    rows: list[int] = comm.gather_objects(own_rows, "train: rows of a batch")
    if comm.size > 1 and comm.rank == 0:
        text.console().print(text.batch(rows))
    return own_rows / sum(rows) if own_rows else 1 / comm.size


def _show_outcome(model: nn.Module, median_step_s: float, json_path: Path | None) -> Outcome | None:
    """Print the predicted and the measured step, memory, and a line on codecs, on rank 0."""
    outcome = outcome_of_ranks(model)
    if world().rank > 0:
        return None
    console, attached = text.console(), current().attached.get(model)
    if outcome is None and attached is not None:  # there was one step only
        outcome = Outcome(attached.plan.predicted_s, median_step_s, 1)
    if outcome is not None:
        console.print(str(outcome), soft_wrap=True)
    else:
        console.print(f"median step {median_step_s * 1e3:.1f} ms")
    if json_path is not None:
        told = {
            "command": ["shoal", *sys.argv[1:]],
            "ranks": world().size,
            "median_step_s": median_step_s,
            "outcome": outcome and outcome.to_json(),
            "plan": json.loads(attached.plan.to_json()) if attached is not None else None,
        }
        json_path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    console.print(f"memory of this rank: {memory(model)}")
    if attached is not None:
        console.print(f"one process would hold: {of_one_process(attached.profile)}")
        report = codec_report(model)
        if report.rows:
            console.print(report.summary)
    return outcome


def _show_accuracy(recipe: Recipe, model: nn.Module, test_data: DataLoader[Any]) -> None:
    """Print the accuracy, on rank 0. If the model is cut, all ranks must compute it together."""
    attached = current().attached.get(model)
    is_cut = attached is not None and cuts(attached.plan)
    if recipe.accuracy is None or (world().rank > 0 and not is_cut):
        return
    with global_weights(model):
        accuracy = _accuracy(recipe, model, test_data)
    if world().rank == 0:
        text.console().print(f"test accuracy {accuracy:.2%}")


def at_own_device(recipe: Recipe) -> Recipe:
    """Move the recipe to a GPU if there is one. The ranks of a host take its GPUs in turn."""
    if not torch.cuda.is_available():
        return recipe
    comm = current().comm
    number = comm.topology.local_ranks[comm.rank] % torch.cuda.device_count()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return recipe.on(device)


@torch.no_grad()
def _accuracy(recipe: Recipe, model: nn.Module, test: DataLoader[Any]) -> float:
    """Return the share of right answers over all test data."""
    model.eval()
    counts = [recipe.right(model, batch) for batch in map(recipe.batch, test)]
    model.train()
    return sum(right for right, _ in counts) / sum(total for _, total in counts)


@dataclass(frozen=True)
class Comparison:
    """A comparison with one process, as the command line asks for it.

    Args:
        steps: number of steps that are trained.
        dtype: type of weights and numbers.
        within: the largest relative difference that counts as the same.
        json_path: file for the difference of each parameter. Rank 0 writes it.
    """

    steps: int = 5
    dtype: torch.dtype = torch.float64
    within: float = CRITERION
    json_path: Path | None = None


def check(recipe: Recipe, options: Options, wanted: Comparison = Comparison()) -> float:
    """Return the largest relative difference after a few steps on all ranks and on one process.

    For a parameter it is max|a−b| / max(max|a|, learning rate). Some layers are local on purpose:
    dropout's random numbers, and BatchNorm's statistics unless ranks share them. They are set to
    evaluation in both.
    """
    init(timeout_s=_CHECK_S)
    comm = current().comm
    recipe = at_own_device(recipe)
    torch.manual_seed(_SEED)
    loader = dealt(recipe.data()[0])
    model, objective = recipe.model(), recipe.objective()
    # convert before the optimizer sees the parameters
    options = replace(options, plan=_convert(options.plan, model, wanted.dtype))
    optimizer = recipe.optimizer(model.parameters())
    batches = [_as_type(batch, wanted.dtype) for batch in _take(recipe, loader, wanted.steps)]
    local = _set_to_evaluation(model, options)
    asked = replace(options, compute_loss=objective.compute_loss, count=recipe.count)
    _, loss, _ = by_options(lambda: asked, model, objective.loss_fn, optimizer, batches[0])
    single = copy.deepcopy(model)  # taken after the ranks were aligned; a copy is an ordinary model
    attached = current().attached.get(model)
    if comm.rank == 0 and attached is not None:
        _show_beside_ddp(attached.plan, attached.profile, attached.cluster, reasons=False)
    for batch in batches:
        time_step(model, objective.by(loss), optimizer, batch, checked=comm.size > 1)
    with global_weights(model):
        trained = [parameter.detach() for parameter in model.parameters()]
    everyone = comm.gather_objects(
        pytree.tree_map_only(Tensor, Tensor.cpu, batches), "comparing with one process: batches"
    )
    worst = 0.0
    if comm.rank == 0:
        rows = _differences(recipe, single, everyone, trained)
        worst = max(row.difference for row in rows)
        _show_comparison(rows, local, wanted)
    differences: list[float] = comm.gather_objects(worst, "comparing with one process: differences")
    return max(differences)


def _set_to_evaluation(model: nn.Module, options: Options) -> list[str]:
    """Set layers that are local on purpose to evaluation, and return their kinds."""
    is_shared = any(isinstance(feature, SyncBatchNorm) for feature in options.features)
    kinds = _DROPOUT if is_shared else _DROPOUT | _BATCHNORM
    local = [module for module in model.modules() if isinstance(module, kinds)]
    for module in local:
        module.eval()
    return sorted({type(module).__name__ for module in local})


def _show_comparison(rows: list[_Compared], local: list[str], wanted: Comparison) -> None:
    """Print the difference of each parameter and the largest, and write them to the file."""
    console, worst = text.console(), max(row.difference for row in rows)
    console.print(text.differences([(row.name, row.difference) for row in rows]))
    if local:
        console.print(
            f"{', '.join(local)}: local to a rank in training, so set to evaluation for this check"
        )
    ranks = current().comm.size
    is_judged = wanted.dtype == torch.float64 or wanted.within != CRITERION
    verdict = "the same" if worst <= wanted.within else "not the same"
    console.print(
        f"{how_many(ranks, 'rank')} against one process, {how_many(wanted.steps, 'step')} in "
        f"{str(wanted.dtype).removeprefix('torch.')}: "
        f"largest relative difference {worst:.1e}" + (f" ({verdict})" if is_judged else "")
    )
    if ranks == 1:
        console.print("one rank is one process: add --ranks 2 to compare several")
    if wanted.json_path is not None:
        told = {"ranks": ranks, "parameters": [row._asdict() for row in rows]}
        wanted.json_path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


class _Compared(NamedTuple):
    """A parameter after training: its difference from one process, and its change in that process.

    Both are relative, for the number that differs most.
    """

    name: str
    difference: float
    moved: float


def _differences(
    recipe: Recipe, single: nn.Module, everyone: list[Any], trained: list[Tensor]
) -> list[_Compared]:
    """Train one process on all ranks' batches, and compare each parameter."""
    optimizer = recipe.optimizer(single.parameters())
    before = [parameter.detach().clone() for parameter in single.parameters()]
    for parts in zip(*everyone, strict=True):
        time_step(single, recipe.objective(), optimizer, recipe.batch(_join(parts)))
    rate = max(float(group["lr"]) for group in optimizer.param_groups)

    def relative(a: Tensor, b: Tensor) -> float:
        return float((a.detach() - b).abs().max()) / max(float(a.detach().abs().max()), rate)

    return [
        _Compared(name, relative(after, on_ranks), relative(after, at_first))
        for (name, after), on_ranks, at_first in zip(
            single.named_parameters(), trained, before, strict=True
        )
    ]


def _convert(plan: Plan | str | Path, model: nn.Module, dtype: torch.dtype) -> Plan | str | Path:
    """Convert the model, and return the plan for it: a saved plan names the model's digest."""
    before = model_digest(model)
    model.to(dtype)
    if plan == "auto":
        return plan
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    return replace(loaded, model=model_digest(model)) if loaded.model == before else loaded


def plan(
    recipe: Recipe,
    options: Options,
    cluster: Cluster | None,
    *,
    save: Path | None = None,
    save_profile: Path | None = None,
    reasons: bool = False,
) -> Plan:
    """Plan the recipe, and print the plan on rank 0.

    Args:
        recipe: the model and its data.
        options: options of the plan.
        cluster: the ranks and their links; None for the ranks that call this.
        save: file for the plan.
        save_profile: file for all measurements, which `shoal simulate` reads.
        reasons: whether to print why each layer is served as it is.
    """
    stages, request, found = measured(recipe, options, cluster)
    profile, where = found.profile, found.cluster
    made = chosen(request, replace(request.facts, profile=profile, cluster=where))
    stages.done("planning")
    if is_first():
        _show_beside_ddp(made, profile, where, reasons=reasons)
        text.console().print(text.summary(made))
        if save:
            made.save(save)
        if save_profile:
            found.save(save_profile)
    return made


def measured(
    recipe: Recipe, options: Options, cluster: Cluster | None = None
) -> tuple[Stages, Request, Measured]:
    """Measure the recipe's model, and the links between the ranks that call this.

    If a `cluster` is given, its links count as measured.
    """
    init()
    session = current()
    recipe = at_own_device(recipe)
    torch.manual_seed(_SEED)
    model = recipe.model()
    sample = recipe.batch(next(iter(dealt(recipe.data()[0]))))
    optimizer = recipe.optimizer(model.parameters())
    _stay_behind(session)
    stages = Stages(speaks=session.comm.rank == 0)
    objective = recipe.objective()
    asked = replace(options, compute_loss=objective.compute_loss, count=recipe.count)
    request = request_of(asked, model, facts_for(asked, model, cluster))
    job = job_of(request, objective.loss_fn, listed(optimizer))
    how = profile_options(request)
    profile = profiled(job, sample, session.comm, request.features, how)
    stages.done("measuring the model")
    stages.say(request.note)
    wanted = all_codecs(None, request.options.pins, options.allowed_codecs)
    where = (
        with_codings(cluster, session.comm, wanted)
        if cluster
        else measured_cluster(session, codecs=wanted)
    )
    stages.done("measuring the links")
    return stages, request, Measured(profile, where)


def is_first() -> bool:
    """Return whether this is the rank that prints."""
    return world().is_main


def probe() -> Cluster:
    """Measure the links between the ranks, and print them."""
    init()
    _stay_behind(current())
    cluster = measured_cluster(current())
    if world().rank == 0:
        text.console().print(text.measured_cluster(cluster))
    return cluster


def _stay_behind(session: Session) -> None:
    """Serve and exit if this is a tail host, because no model is parallelised here."""
    if is_tail_host(session):
        serve_and_end(session)


def _take(recipe: Recipe, loader: DataLoader[Any], count: int) -> list[Any]:
    """Return the first `count` batches, and begin again if the loader is shorter."""

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    return [recipe.batch(batch) for batch, _ in zip(forever(), range(count), strict=False)]


def _as_type(batch: Any, dtype: torch.dtype) -> Any:
    return mapped(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _join(parts: tuple[Any, ...]) -> Any:
    """Join the ranks' batches."""
    return pytree.tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts
    )
