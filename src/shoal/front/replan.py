"""`replan`: the plan made anew from measurements of training, and followed if it is faster.

    1  compare   every rank names the same model, and has no reason to leave its plan alone
    2  measure   each rank tells the times of its steps; a few messages test the links again
    3  plan      rank 0 makes a plan from these facts, and predicts the present one by them, too
    4  switch    if the step gets a tenth shorter, all ranks release the model and follow the new
                 plan, in place: between two steps, so that results stay equal to one process

Each epoch costs rank 0 a search, and costs all ranks the seconds of that search.
Guarded by tests/front/test_replan.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final
from weakref import ref

import torch
from torch import nn

from shoal.codecs.carrier_memory import coded_carriers
from shoal.comm.agreement import agreed, from_first
from shoal.core.errors import UsageError
from shoal.core.outcome import Outcome, Spending
from shoal.core.plan import Plan
from shoal.front.outcomes import links_now, spending
from shoal.front.parallel_ranks import Found, chosen, follow, job_of
from shoal.front.plan_queries import attached_of
from shoal.front.release import give_back, require_same_model
from shoal.front.request import Request
from shoal.front.rounding import warn_of_rounding
from shoal.front.stages import Stages
from shoal.front.text import summary
from shoal.optim.extend import release as release_optimizer
from shoal.planner.measured_steps import correct_facts, outcome_of
from shoal.planner.search import predict_again
from shoal.profiling.identity import model_digest
from shoal.rewrite.apply import check
from shoal.session.additions import remove
from shoal.session.compiled_models import without_compilation
from shoal.session.replan_record import Again, kept
from shoal.session.session import Attached, Session, current

_WORTH = 0.1  # share of the step that another plan must gain
_FEWEST = 3  # steps that must have been measured
_CALL = "replan"


@torch.inference_mode(False)
def replan(model: nn.Module) -> bool:
    """Make the plan anew from measurements of training, and follow it if it is a tenth faster.

    A collective: every rank calls it, between a step and the next forward, as at the end of an
    epoch. With `parallelize(…, replan=True)` a loader of `shoal.shard` calls it at the end of each
    pass that was trained on. Model, optimizer and loss stay the same objects, and results stay
    equal to one process. If no other plan is predicted to take a tenth less time, nothing changes.

    Each rank needs memory for the whole model and the optimizer's state while the plan changes.

    Args:
        model: a model that `parallelize` was given with `replan=True`.

    Returns:
        Whether the model follows another plan now, the same on every rank.

    Raises:
        UsageError: the model is not parallelised, or was so without `replan=True`.
        RanksDiffer: another rank names another model.
        WorldError: a rank was lost; then start again from a checkpoint.

    Examples:
        >>> import torch, shoal
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> _ = shoal.parallelize(model, None, optimizer, replan=True)
        >>> shoal.replan(model)  # one process has no plan
        False
    """
    session, model = current(), without_compilation(model)
    session.comm.reached("replan: comparing what the ranks were given")
    again = agreed(session.comm, lambda: _record_of(session, model), "replan: checking the model")
    if again is None:
        return False
    attached = session.attached[model]
    require_same_model(session, attached.running, _CALL, _CALL)  # 1
    stages = Stages(speaks=session.comm.rank == 0)
    outcome = _measure(session, model, attached, stages)  # 2
    if outcome is None:
        return False
    profile, cluster = correct_facts(attached.profile, attached.cluster, outcome)
    present, request = Found(attached.plan, profile, cluster), again.asked.of_model(model)
    plan = from_first(session.comm, Plan, lambda: _better(present, request, outcome))  # 3
    if plan == attached.plan:
        stages.done("making the plan anew: it stays")
        return False
    with torch.inference_mode(False), torch.enable_grad():  # an epoch may end under no_grad
        _switch(session, model, again, Found(plan, profile, cluster))  # 4
    stages.done("making the plan anew")
    stages.say(f"from here on: {summary(plan, profile.moving, profile.norms)}")
    return True


def _record_of(session: Session, model: nn.Module) -> Again[Request] | None:
    """Return the record that the model keeps for `replan`; None if this process is alone."""
    if attached_of(model) is None and model not in session.released:
        return None
    again = kept(model)
    if again is None:
        raise UsageError(
            "the model's plan is not to be made anew",
            got="parallelize without replan=True, or undone since",
            do="call parallelize(…, replan=True)",
        )
    return again


def _measure(
    session: Session, model: nn.Module, attached: Attached, stages: Stages
) -> Outcome | None:
    """Return the measured step, the same on every rank; None if a rank must keep its plan."""
    comm = session.comm
    why_not = comm.gather_objects(_why_not(session, model), "replan: whether it can be")
    ranks = comm.gather_objects(spending(attached), "replan: what steps took", Spending)
    links = links_now(session, attached)
    few = [rank for rank, spent in enumerate(ranks) if spent.steps < _FEWEST]
    reasons = [f"rank {rank}: {why}" for rank, why in enumerate(why_not) if why]
    reasons += [f"rank {rank} has measured fewer than {_FEWEST} steps under it" for rank in few]
    if reasons:
        stages.say(f"the plan stays as it is: {reasons[0]}")
        return None
    return outcome_of(attached.plan, attached.profile, attached.cluster, ranks, links)


def _why_not(session: Session, model: nn.Module) -> str:
    """Say why this rank cannot follow another plan now; '' if it can."""
    attached = session.attached[model]
    try:
        attached.running.check_release(model)
    except UsageError as error:
        return error.what
    if attached.engine.spent.is_called:
        return "the model was called, and its backward has not come yet"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (parameter in session.served):
            return f"parameters were frozen, or changed, since: {name}"
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            return f"module {name or '(model)'} is compiled, and would run as it was compiled"
    return ""


def _better(present: Found, asked: Request, outcome: Outcome) -> Plan:
    """Return the best plan by the facts if it gains enough, or else the present one."""
    profile, cluster = present.profile, present.cluster
    facts = replace(asked.facts, topology=cluster.topology, profile=profile, cluster=cluster)
    made = chosen(asked, facts, anew=True)
    predicted_s = predict_again(present.plan, profile, cluster).predicted_s
    present_s = min(predicted_s, outcome.measured_s)
    return made if made.predicted_s <= (1 - _WORTH) * present_s else present.plan


def _switch(session: Session, model: nn.Module, again: Again[Request], found: Found) -> None:
    """Release the model, and follow another plan (a collective)."""
    attached, size = session.attached[model], session.comm.size
    running = attached.running
    if session.comm.rank == 0:
        warn_of_rounding(session.comm.topology, found.plan)
    # cut layers have other shapes until they are released, so names and ways are compared here
    check(replace(found.plan, model=model_digest(model)), model, size)
    running.engine.settle()
    states = {name: kept.state() for name, kept in running.attachments.items()}
    given_up = {
        name for carrier in coded_carriers(running.engine.transfers) for name in carrier.given_up
    }
    loaded = session.usual_rows.pop(model, None)
    if (usual := running.weigher.usual) is not None:
        session.usual_rows[model] = {size: usual}
    optimizers = session.optimizers[model]
    for optimizer in optimizers:
        release_optimizer(optimizer, running.engine)
    give_back(session, model, running, goes_on=True)
    remove(model)
    job = job_of(again.asked.of_model(model), again.loss_fn, optimizers)
    # ranks have the same values already, except buffers that each keeps for itself
    follow(session, job, found, again, {}, attached.watched)
    for name, kept_now in session.attached[model].running.attachments.items():
        kept_now.load(states.get(name))
    for carrier in coded_carriers(session.attached[model].engine.transfers):
        carrier.give_up([name for name in carrier.bucket.numels if name in given_up])
    session.comm.gather_objects(None, "replan: all follow the new plan")  # or all hear of an error
    session.usual_rows.pop(model, None)
    if loaded is not None:
        session.usual_rows[model] = loaded


@final
class EpochEnds:
    """New plans as epochs end, for all models of a session that were parallelised so.

    It is called on every rank alike, because all their loaders give as many batches.
    """

    def __init__(self, session: Session) -> None:
        self._session = ref(session)
        self._models: list[ref[nn.Module]] = []  # all ranks have these models in the same order

    def add(self, model: nn.Module) -> None:
        """Make this model's plan anew, too, from here on."""
        if not any(listed() is model for listed in self._models):
            self._models.append(ref(model))

    def __call__(self) -> None:
        """Make plans anew when an epoch has ended, on the thread that trains."""
        session = self._session()
        if session is None or not self._models:
            return
        models = [model() for model in self._models]
        there = [
            number
            for number, model in enumerate(models)
            if model is not None and model in session.attached and kept(model) is not None
        ]
        everywhere = session.comm.gather_objects(there, "replan: at the end of an epoch")
        for number in sorted(set.intersection(*map(set, everywhere))):
            model = models[number]
            assert model is not None
            replan(model)


def at_epoch_ends(session: Session, model: nn.Module) -> None:
    """Register a model for a new plan at epoch ends (on every rank)."""
    if not isinstance(session.passes.at_end, EpochEnds):
        session.passes.at_end = EpochEnds(session)
    session.passes.at_end.add(model)
