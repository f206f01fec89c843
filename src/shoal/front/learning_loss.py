"""A loss with parameters of its own (a temperature, ArcFace, learned weights): a second model.

    1  output    the model runs once, so that the loss has a sample: (output, target)
    2  loss      the loss is parallelised as a model that returns its own loss, with its optimizers
    3  model     follows, with that loss. Each gradient is weighed once (engine/border.py)

So its gradients are exchanged, and it is saved, clipped and released as every model.
Guarded by tests/equivalence/test_learning_loss.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.comm.agreement import agreed
from shoal.contracts.sample import Sample
from shoal.contracts.strategy import Strategy
from shoal.core.errors import SampleError, UsageError
from shoal.core.registry import named
from shoal.core.terms import INPUT, TARGET, LossOfParts, Targets, Terms
from shoal.features import UpdateEvery
from shoal.front.forward_only import run_here
from shoal.front.options import AUTO, Options
from shoal.front.parallel_ranks import job_of, spread
from shoal.front.request import Request, request_of
from shoal.planner.options import known
from shoal.profiling.terms import SampleTerms, agreed_terms, seen
from shoal.profiling.untraced_runs import without_traces
from shoal.session.job import TrainingJob
from shoal.session.session import Session
from shoal.strategies.copies import StaysBehind, leaves_behind

_SLOT = "_shoal_learning_loss"
_RUNNING = "parallelize: running the model for its loss"


def learning_loss(job: TrainingJob, session: Session) -> nn.Module | None:
    """Return a loss that has parameters of its own in an optimizer; None if it learns nothing."""
    loss = job.loss_fn
    if not isinstance(loss, nn.Module) or loss in session.attached:
        return None
    own = {id(p) for p in loss.parameters() if p.requires_grad}
    own -= {id(p) for p in (*job.model.parameters(), *job.left_alone)}
    return loss if any(_holds(optimizer, own) for optimizer in job.optimizers) else None


def spread_loss(
    session: Session, job: TrainingJob, request: Request, sample: Any, loss: nn.Module
) -> tuple[TrainingJob, Request]:
    """Parallelise a loss as a model. Return the job and the request for the model itself."""
    options = _of_model(request, loss)
    listed = known(options.strategies)
    request = replace(request, usable=tuple(n for n in request.usable if n in listed))
    output, y = _output(session, job, sample)
    terms = _terms(session, loss, output, y)
    own = {id(parameter) for parameter in loss.parameters()}
    asked = replace(
        options,
        plan=AUTO,
        pins=None,
        count=None,
        left_alone=(),
        buffers="agree",
        features=tuple(f for f in options.features if not isinstance(f, UpdateEvery)),
    )
    facts = replace(request.facts, model=loss)
    holding = [optimizer for optimizer in job.optimizers if _holds(optimizer, own)]
    of_loss = request_of(asked, loss, facts)
    spread(session, job_of(of_loss, None, holding), of_loss, ((output, y), None), terms)
    session.optimizers[loss] = tuple(holding)
    session.released.discard(loss)
    leaves_behind(type(job.model))
    job.model.__dict__[_SLOT] = _LearningLoss(loss)
    of_model = {id(parameter) for parameter in job.model.parameters()}
    optimizers = [optimizer for optimizer in job.optimizers if _holds(optimizer, of_model)]
    return replace(job, optimizers=optimizers), replace(request, options=options)


def taken_loss(model: nn.Module) -> nn.Module | None:
    """Take the loss off a model that learns with it, and return it."""
    learning: _LearningLoss | None = model.__dict__.pop(_SLOT, None)
    return None if learning is None else learning.loss


@final
class _LearningLoss(StaysBehind):
    """The loss that is parallelised with a model."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss


def _of_model(request: Request, loss: nn.Module) -> Options:
    """Return options for the model by which every rank computes the loss."""
    usable = run_here(request.options.strategies)
    pinned = [named(Strategy, choice.strategy).role for choice in request.draft.choices]
    if not usable or any(role.names_ranks for role in pinned):
        raise UsageError(
            "the loss has a trainable parameter that is not the model's, and other ranks or hosts "
            "compute the loss",
            where=f"parameter {next(name for name, _ in loss.named_parameters())} of the loss",
            do="leave a pipeline out, or make it a part of the model before parallelize: "
            "model.loss = loss_fn, and give the optimizer model.parameters()",
        )
    return replace(request.options, strategies=usable)


def _output(session: Session, job: TrainingJob, sample: Any) -> tuple[Any, Any]:
    """Run the model on the sample, without a trace. Return its output, and the target."""

    def run() -> tuple[Any, Any]:
        checked = Sample.of(job.model, job.loss_fn, sample)
        with without_traces(checked, job.optimizers) as checked, torch.no_grad():
            output = checked.output()
            return pytree.tree_map(_detach, output), checked.y

    return agreed(session.comm, run, _RUNNING, SampleError)


def _detach(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _terms(session: Session, loss: nn.Module, output: Any, y: Any) -> Terms:
    """Return the rows of the model's calls, as the loss sees them.

    A count, or a sum, then comes in by the model's border, and must not come in twice.
    """

    def run() -> SampleTerms:
        sample = Sample(nn.Identity(), loss, output, y)
        with without_traces(Sample(loss, None, (output, y), None)):
            return seen(sample, counted=True, rank=session.comm.rank)

    here = agreed(session.comm, run, _RUNNING, SampleError)
    kinds = (SampleTerms, Terms, Targets, LossOfParts)
    found = agreed_terms(session.comm.gather_objects(here, f"{_RUNNING}: rows", *kinds))
    if found.source == TARGET:
        raise SampleError(
            "the loss has a trainable parameter, and rows that only its target shows",
            do="before parallelize make it a part of the model: model.loss = loss_fn",
        )
    return replace(found, source=INPUT, summed=False, targets=None, unlike=None)


def _holds(optimizer: Optimizer, parameters: set[int]) -> bool:
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
