"""`parallelize` without a sample: the first batch of a `compute_loss` is measured.

    1  before    the model is an ordinary one; nothing of it is measured or changed
    2  first     the first call with gradients: its batch is the sample, on every rank
    3  then      calls go to the function that the plan has made

Guarded by tests/equivalence/test_first_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final
from weakref import ref

import torch
from torch import nn

from shoal.contracts.batch_loss import BatchLoss, takes
from shoal.core.eager_methods import eager, keep_eager
from shoal.front.options import Options
from shoal.front.parallel_ranks import job_of, spread
from shoal.front.request import Request
from shoal.optim.extend import extend
from shoal.session.additions import add
from shoal.session.computed_loss import called_instead, own_model
from shoal.session.job import TrainingJob
from shoal.session.pending_model import end_waiting, pending_of, wait_for_batch
from shoal.session.session import Session
from shoal.session.watch import COUNTED


def for_sample(options: Options, sample: Any) -> Options:
    """Return options in which compute_loss and count take the sample as one batch."""
    given = options.compute_loss
    if not callable(given) or isinstance(given, type | BatchLoss):
        return options
    if sample is None:
        return replace(options, compute_loss=BatchLoss(given))
    fits = isinstance(sample, tuple | list) and takes(given, 1 + len(sample))
    if takes(given, 2) or not fits:
        return options
    packed = BatchLoss(given, packed=True)
    return replace(options, compute_loss=packed, count=packed.count(options.count))


def by_first_batch(
    session: Session, job: TrainingJob, request: Request, then: Callable[[], None]
) -> Callable[..., Any]:
    """Return a function that parallelises the model by its first batch, then computes the loss.

    Args:
        session: the ranks.
        job: the model and its optimizers.
        request: the request, which has no sample.
        then: is called once the model is parallelised.
    """
    for optimizer in job.optimizers:
        extend(optimizer, job.left_alone)
    add(job.model, None)
    wait_for_batch(job.model, job.optimizers)
    keep_eager()
    first = _FirstBatch(session, job, request, then)
    function = called_instead(job.loss, first)
    function.__dict__[COUNTED] = first
    return function


@final
class _FirstBatch:
    """Computes losses, the first one with a plan that it makes."""

    def __init__(
        self,
        session: Session,
        job: TrainingJob,
        request: Request,
        then: Callable[[], None],
    ) -> None:
        self._session, self._model = session, ref(job.model)
        self._asked: tuple[TrainingJob, Request] | None = (job, request)
        self._then = then
        self._function: Callable[..., Any] = job.loss  # type: ignore[assignment]  # there is one

    @property
    def weighs(self) -> bool:
        """Whether the function is in use for the model."""
        counted = getattr(self._function, COUNTED, None)
        return self._asked is not None if counted is None else bool(counted.weighs)

    @eager
    def __call__(self, model: nn.Module, /, *batch: Any, **named: Any) -> Any:
        if self._asked is not None and torch.is_grad_enabled():
            asked, own = self._asked, self._model()
            if own is not None and pending_of(own) is not None:
                self._begin(model, batch, named, *asked)
            self._asked = None  # the model has a plan, or is released
        return self._function(model, *batch, **named)

    @torch.inference_mode(False)
    def _begin(
        self,
        model: nn.Module,
        batch: tuple[Any, ...],
        named: dict[str, Any],
        job: TrainingJob,
        request: Request,
    ) -> None:
        """Measure this batch, and follow the plan that it leads to."""
        session, options = self._session, request.options
        own_model(model, job.model)
        assert isinstance(options.compute_loss, BatchLoss)
        compute_loss, sample = options.compute_loss.of(batch, named)
        count = compute_loss.count(options.count)
        options = replace(options, compute_loss=compute_loss, count=count)
        request = replace(request, options=options)
        job = job_of(request, None, job.optimizers)
        self._function = spread(session, job, request, sample)
        pending = pending_of(job.model)
        loaded = {} if pending is None else pending.loaded
        end_waiting(job.model)
        for name, attachment in session.attached[job.model].running.attachments.items():
            if name in loaded:
                attachment.load(loaded[name])
        self._then()
