"""Work of every rank for `shoal test` and `shoal features`: it runs a trained model over data.

Each rank has the whole model and its own rows. No row comes twice and none is lost, for any number
of ranks. These are CaffeOnSpark's two other modes, without Spark.
Guarded by tests/tools/commands/test_evaluation.py.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shoal.contracts.sample import called
from shoal.contracts.versions import install_shoal
from shoal.core.errors import UsageError
from shoal.front import text
from shoal.front.rank_values import gather, mean
from shoal.front.recipe import Recipe
from shoal.front.session_start import init
from shoal.front.shard import shard
from shoal.session.session import world
from shoal_tools.commands.run import num_rows
from shoal_tools.commands.weights import load_weights
from shoal_tools.commands.worker import at_own_device


@torch.no_grad()
def test(recipe: Recipe, weights: Path | None) -> tuple[float, float | None]:
    """Compute the loss and the accuracy over all test data. Rank 0 prints them.

    Args:
        recipe: the model and its test data.
        weights: path of the weights; None for the weights that the recipe's model begins with.

    Returns:
        The mean loss over all rows, and the share of right answers if the recipe counts them.
    """
    recipe, model, loader = _prepare(recipe, weights, of_training=False)
    objective = recipe.objective()
    loss, rows, right, total = 0.0, 0, 0.0, 0
    for batch in map(recipe.batch, shard(loader)):
        count = num_rows(batch)
        loss += float(objective.loss(model, batch)) * count
        rows += count
        if recipe.accuracy is not None:
            own_right, own_total = recipe.right(model, batch)
            right, total = right + float(own_right), total + int(own_total)
    of_all = mean(loss / max(rows, 1), weight=rows)
    accuracy = mean(right / max(total, 1), weight=total) if recipe.accuracy is not None else None
    all_rows = int(gather(torch.tensor([rows], device="cpu")).sum())
    if world().rank == 0:
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        text.console().print(f"{all_rows} rows: loss {of_all:.4f}{shown}")
    return of_all, accuracy


@torch.no_grad()
def features(
    recipe: Recipe, weights: Path | None, layers: Sequence[str], out: Path, *, of_training: bool
) -> None:
    """Write the outputs of layers for each row into a Parquet file, on rank 0.

    Args:
        recipe: the model and its data.
        weights: as in `test`.
        layers: dotted names.
        out: the file: `id`, the row's number in the data, and a list of numbers for each layer.
        of_training: whether to take the training data.

    Raises:
        UsageError: there is no such layer, or its output is no tensor with the rows first.
    """
    recipe, model, loader = _prepare(recipe, weights, of_training=of_training)
    outputs = _watch_layers(model, layers)
    numbered = shard(_number(loader))
    with _Parquet(out, layers) as file:
        for ids, batch in numbered:
            sample = recipe.batch(batch)
            if recipe.compute_loss is None:
                called(model, sample[0])
            else:
                recipe.compute_loss(model, sample)
            rows = {name: gather(_flat(name, outputs[name], len(ids))) for name in layers}
            file.write(gather(ids), rows)
    if world().rank == 0:
        text.console().print(f"{file.count} rows of {', '.join(layers)}: {out}", soft_wrap=True)


def _prepare(
    recipe: Recipe, weights: Path | None, *, of_training: bool
) -> tuple[Recipe, nn.Module, DataLoader[Any]]:
    """Return the model with its weights, and its data."""
    init()
    recipe = at_own_device(recipe)
    torch.manual_seed(0)
    training, testing = recipe.data()
    loader = training if of_training else testing
    if loader is None:
        raise UsageError(
            "the recipe has no test data",
            got="data() returns the training loader alone",
            do="return (train, test) from it, or for features add --data train",
        )
    model = recipe.model()
    if weights is not None:
        load_weights(model, weights)
    return recipe, model.eval(), loader


def _watch_layers(model: nn.Module, layers: Sequence[str]) -> dict[str, Any]:
    """Watch layers; return a dict where each call leaves a layer's output under its name."""
    outputs: dict[str, Any] = {}
    modules = dict(model.named_modules())

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[name] = output

        return hook

    for name in layers:
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=3)
            raise UsageError(
                f"the model has no layer {name}",
                got=", ".join(filter(None, modules))[:400],
                do=f"did you mean {' or '.join(near)}?" if near else "give a name of these",
            )
        modules[name].register_forward_hook(keep(name))
    return outputs


def _flat(name: str, output: Any, rows: int) -> Tensor:
    """Return a layer's output as a matrix with one line for each row."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor) or first.dim() == 0 or len(first) != rows:
        raise UsageError(
            f"what the layer {name} gives has no line for each row",
            got=f"{tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__,
            expected=f"a tensor whose first dimension is the {rows} rows of the batch",
            do="give another layer",
        )
    return first.detach().float().cpu().reshape(rows, -1)


def _number(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same rows in their order, each batch with its rows' numbers."""
    dataset: Any = loader.dataset
    stream = isinstance(dataset, IterableDataset)
    collate = loader.collate_fn
    return DataLoader(
        _NumberedStream(dataset) if stream else _NumberedRows(dataset),
        batch_size=loader.batch_size or 1,
        num_workers=0 if stream else loader.num_workers,
        collate_fn=lambda items: (
            torch.tensor([number for number, _ in items], device="cpu"),
            collate([row for _, row in items]),
        ),
    )


@final
class _NumberedRows(Dataset[tuple[int, Any]]):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


@final
class _NumberedStream(IterableDataset[tuple[int, Any]]):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self._dataset)


@final
class _Parquet:
    """The file, written on rank 0. It is there whole or not at all."""

    def __init__(self, path: Path, layers: Sequence[str]) -> None:
        self._path, self._layers = path, layers
        self._part = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        self._writer: Any = None
        self.count = 0
        if world().rank == 0:
            try:
                self._arrow, self._parquet = map(
                    importlib.import_module, ("pyarrow", "pyarrow.parquet")
                )
            except ImportError as error:
                raise UsageError(
                    "Parquet files are written by pyarrow, which is not installed",
                    do=install_shoal("features"),
                ) from error

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if world().rank > 0:
            return
        if kind is None:
            self._part.rename(self._path)
        else:
            with suppress(FileNotFoundError):
                self._part.unlink()

    def write(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Add some rows, in the order of their ids."""
        self.count += len(ids)
        if world().rank > 0:
            return
        order = ids.argsort()
        columns = {"id": self._arrow.array(ids[order].numpy())}
        for name in self._layers:
            values = rows[name][order].contiguous()
            flat = self._arrow.array(values.view(-1).numpy())
            columns[name] = self._arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
        table = self._arrow.table(columns)
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._part, table.schema)
        self._writer.write_table(table)
