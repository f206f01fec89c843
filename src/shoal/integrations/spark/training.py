"""What an estimator's ranks run, and what its model does with rows. Nothing here needs Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import UsageError
from shoal.front.checkpoints import Checkpoints
from shoal.front.parallel import parallelize
from shoal.front.together import mean
from shoal.session.session import world

OUTPUT = ""  # the name of the model's own output among the layers


@dataclass(frozen=True)
class Parts:
    """What a user's own functions make: these, and no objects, are sent to the executors.

    Args:
        model: makes the module.
        loss: makes the loss, of (output, target).
        optimizer: makes the optimizer, of the parameters.
        to_input: makes the model's input of the features of a batch, a tensor or a list. By default
            those themselves, as float32 where they are numbers.
        metric: of (output, target): how many are right, of how many.
        options: for `shoal.parallelize`, as {"strategies": ["factor"]}.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[], Any] = nn.CrossEntropyLoss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    to_input: Callable[[Any], Any] | None = None
    metric: Callable[[Tensor, Any], tuple[float, float]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def input_of(self, features: Any) -> Any:
        """What the model is called with."""
        if self.to_input is not None:
            return self.to_input(features)
        return features.float() if isinstance(features, Tensor) else features


@dataclass(frozen=True)
class Training:
    """What every rank of `fit` does, as a function of its loader."""

    parts: Parts
    features: str
    label: str
    epochs: int
    seed: int
    checkpoints: str  # a folder, or ""

    def batch(self, columns: dict[str, Any]) -> tuple[Any, Any]:
        """What the loader gives."""
        return self.parts.input_of(columns[self.features]), columns[self.label]

    def __call__(self, loader: Any) -> tuple[dict[str, Tensor] | None, list[float]]:
        """The weights, from rank 0, and the mean loss of each epoch."""
        torch.manual_seed(self.seed)
        model, loss_fn = self.parts.model(), self.parts.loss()
        optimizer, losses, first = self.parts.optimizer(model.parameters()), list[float](), 0
        with ExitStack() as stack:
            checkpoints = self._checkpoints(stack, model, optimizer)
            if checkpoints is not None:
                values = checkpoints.resume()
                first, losses = values["epoch"], list(values["losses"])
            loader.set_epoch(first)
            options = dict(self.parts.options)
            if first < self.epochs:
                sample = next(iter(loader))
                model, loss_fn, optimizer = parallelize(
                    model, loss_fn, optimizer, sample=sample, **options
                )
            for epoch in range(first, self.epochs):
                losses.append(_epoch(loader, model, loss_fn, optimizer))
                if checkpoints is not None:
                    checkpoints.step(epoch=epoch + 1, losses=losses)
                    checkpoints.save()
            state = {name: value.cpu() for name, value in model.state_dict().items()}
        return (state if world().rank == 0 else None), losses

    def _checkpoints(self, stack: ExitStack, *trained: Any) -> Checkpoints | None:
        if not self.checkpoints:
            return None
        model, optimizer = trained
        plain: dict[str, Any] = {"epoch": 0, "losses": []}
        return stack.enter_context(
            Checkpoints(self.checkpoints, model=model, optimizer=optimizer, **plain)
        )


def _epoch(loader: Any, model: nn.Module, loss_fn: Any, optimizer: Any) -> float:
    """The mean loss over the rows of all ranks."""
    total, rows = 0.0, 0
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        total, rows = total + float(loss.detach()) * len(y), rows + len(y)
    return mean(total / max(rows, 1), weight=rows)


@dataclass(frozen=True)
class Trained:
    """A model with its weights, by which rows are computed."""

    parts: Parts
    state: Mapping[str, Tensor]

    @property
    def is_double(self) -> bool:
        """Whether it computes in float64."""
        return any(value.dtype == torch.float64 for value in self.state.values())

    def model(self) -> nn.Module:
        """The module, to evaluate."""
        model = self.parts.model()
        model.load_state_dict(dict(self.state))
        return model.eval()

    def check_layers(self, names: Iterable[str]) -> None:
        """Look whether the model has these layers.

        Raises:
            UsageError: it lacks one.
        """
        there = {name for name, _ in self.parts.model().named_modules()}
        absent = [name for name in names if name not in there]
        if absent:
            raise UsageError(
                "the model has no such layer",
                got=", ".join(map(repr, absent)),
                expected='"" for the output, or of ' + ", ".join(sorted(there - {""})),
                do="correct the name, as model.named_modules() gives it",
            )

    def computed(
        self, model: nn.Module, features: Any, names: Sequence[str], batch_size: int
    ) -> dict[str, Tensor]:
        """Outputs of layers, by name: a tensor of shape (rows, values of a row) each."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                found[name].append(
                    output.detach().flatten(1) if output.dim() > 1 else output[:, None]
                )

            return hook

        layers = dict(model.named_modules())
        handles = [layers[name].register_forward_hook(keep(name)) for name in names]
        try:
            with torch.no_grad():
                for start in range(0, len(features), batch_size):
                    model(self.parts.input_of(features[start : start + batch_size]))
        finally:
            for handle in handles:
                handle.remove()
        return {name: torch.cat(parts) for name, parts in found.items()}

    def sums(self, features: Any, target: Any, batch_size: int) -> tuple[float, float, float, int]:
        """Over these rows: of losses, of what is right, of how many, and rows."""
        model, loss_fn, metric = self.model(), self.parts.loss(), self.parts.metric
        losses, right, of_all = 0.0, 0.0, 0.0
        with torch.no_grad():
            for start in range(0, len(features), batch_size):
                rows = slice(start, start + batch_size)
                output = model(self.parts.input_of(features[rows]))
                losses += float(loss_fn(output, target[rows])) * len(target[rows])
                if metric is not None:
                    hits, num = metric(output, target[rows])
                    right, of_all = right + hits, of_all + num
        return losses, right, of_all, len(features)
