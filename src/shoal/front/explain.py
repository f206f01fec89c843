"""`explain`: the reasons for a parallelised model's plan, from the figures of `parallelize`."""

from __future__ import annotations

from torch import nn

from shoal.front import text
from shoal.front.outcomes import outcome
from shoal.front.plan_queries import attached_of
from shoal.planner.explain import explain as explain_plan
from shoal.session.compiled_models import without_compilation
from shoal.session.pending_model import pending_of

_NO_PLAN_YET = (
    "no plan yet: there was no sample, so the model is measured and planned at its first batch"
)


def explain(model: nn.Module) -> str:
    """Explain why each layer of a parallelised model is served as it is, as text to print.

    The text has a table of the layers, with the bytes that each sends in a step. Then it lists for
    each layer the other strategies, with their bytes and the predicted step. `shoal plan --explain`
    prints the same for a recipe. After some steps, it also compares them with the prediction, as
    `shoal.outcome` does. Each rank can ask for itself.

    Returns:
        The text. '' if a process trains the model by itself. A model without a sample has no
        plan before its first batch, and the text says so.

    Raises:
        UsageError: the model was not parallelised, or before `init`.

    Examples:
        >>> import shoal, torch
        >>> alone = shoal.init().size == 1
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = shoal.parallelize(
        ...     model, loss_fn, optimizer, sample=(torch.ones(8, 4), torch.zeros(8, 2))
        ... )
        >>> (shoal.explain(model) == "") == alone
        True
    """
    attached = attached_of(model)
    if attached is None:
        return _NO_PLAN_YET if pending_of(without_compilation(model)) is not None else ""
    explanation = explain_plan(attached.plan, attached.profile, attached.cluster)
    reasons, measured = text.plain(text.explained(explanation, reasons=True)), outcome(model)
    return reasons if measured is None else f"{reasons}\n{measured}"
