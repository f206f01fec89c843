"""A trained model, which computes outputs and losses of rows. Nothing here needs Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.sample import called, describe
from shoal.core.errors import UsageError
from shoal_tools.spark.parts import Parts, Sums, summed

OUTPUT = ""  # the name of the model's own output among the layers


@dataclass(frozen=True)
class TrainedModel:
    """Trained weights, and the functions that make their model and its batches."""

    parts: Parts
    state: Mapping[str, Tensor]

    @property
    def is_double(self) -> bool:
        """Whether it computes in float64."""
        return any(value.dtype == torch.float64 for value in self.state.values())

    def model(self) -> nn.Module:
        """Make the module with its weights, in evaluation mode."""
        model = self.parts.model()
        model.load_state_dict(dict(self.state))
        return model.eval()

    def check_layers(self, names: Iterable[str]) -> None:
        """Check that the model has these layers.

        Raises:
            UsageError: it lacks a layer.
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
        """Compute outputs of layers, by name: each is a tensor of shape (rows, values of a row)."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        now: dict[str, list[Any]] = {}  # outputs for one batch, one for each call of the layer

        def keep(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                now[name].append(output)

            return hook

        layers = dict(model.named_modules())
        handles = [layers[name].register_forward_hook(keep(name)) for name in names]
        try:
            with torch.no_grad():
                for start in range(0, len(features), batch_size):
                    now |= {name: [] for name in names}
                    rows = features[start : start + batch_size]
                    called(model, self.parts.input_of(rows))
                    for name in names:
                        found[name].append(_flat(now[name], name, len(rows)))
        finally:
            for handle in handles:
                handle.remove()
        return {name: torch.cat(parts) for name, parts in found.items()}

    def sums(self, columns: dict[str, Any], features: str, label: str, batch_size: int) -> Sums:
        """Sum losses and metrics over these rows."""
        objective = self.parts.objective()
        model = self.model()
        count = self.parts.options_for(model).get("count")
        batches = self._batches(columns, features, label, batch_size)
        return summed(self.parts, objective, model, batches, count)

    def _batches(
        self, columns: dict[str, Any], features: str, label: str, batch_size: int
    ) -> Iterator[tuple[int, Any]]:
        num = len(next(iter(columns.values())))
        for start in range(0, num, batch_size):
            part = {name: column[start : start + batch_size] for name, column in columns.items()}
            yield min(batch_size, num - start), self.parts.batch_of(part, features, label)


Trained = TrainedModel  # the class's former name, which older saved models have


def _flat(outputs: list[Any], name: str, rows: int) -> Tensor:
    """Return the layer's one output, flattened to (rows, values of a row)."""
    fits = [
        each for each in outputs if isinstance(each, Tensor) and each.dim() and len(each) == rows
    ]
    if len(outputs) != 1 or not fits:
        raise UsageError(
            "a column is made of a layer that gives one tensor, with a row for each row",
            where=f"layer {name!r}" if name else "the model's own output",
            got=f"{describe(tuple(outputs))} for {rows} rows",
            do='choose another layer: setOutputCols({"layer": "column"})',
        )
    output = fits[0].detach()
    return output.flatten(1) if output.dim() > 1 else output[:, None]
