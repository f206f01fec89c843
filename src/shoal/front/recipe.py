"""A recipe: a Python file with four functions that tell the command line what to train.

    data()             a training DataLoader, or (training, test), in which test may be None
    model()            an nn.Module
    loss()             loss(output, target) -> scalar: a module or a function; None if the model
                       returns its own loss
    optimizer(params)  a torch.optim.Optimizer over them

Optional are `accuracy(output, target) -> (correct, total)` for the test data,
`count(output, target)`, which gives the number of terms that the loss is a mean over, `EPOCHS`, a
whole number, and `OPTIONS`, keywords of `shoal.parallelize` as {"check_every": 50}.
`SYNC_BATCHNORM = True` stands for {"sync_batchnorm": True}. In place of loss() a recipe may have
`compute_loss(model, batch)`, for a batch as the DataLoader gives it. Its accuracy then takes
(model, batch), and its count (batch).

Caffe2's data_parallel_model took builders in the same way, so that each process makes its own
model. Shoal checks the functions when it loads the file, and their results when it calls them.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import symtable
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.contracts.batch import mapped
from shoal.contracts.sample import Objective
from shoal.contracts.versions import install_shoal
from shoal.core.errors import UsageError
from shoal.front.options import check_keywords

CPU = torch.device("cpu")
_BUILDERS = {
    "data": "data() -> DataLoader, or (train, test)",
    "model": "model() -> nn.Module",
    "loss": "loss() -> a loss module or function, or compute_loss(model, batch) -> loss",
    "optimizer": "optimizer(params) -> torch optimizer",
}
_OPTIONAL = {
    "accuracy": "accuracy(output, target) -> (correct, total)",
    "count": "count(output, target) -> number of terms of the loss",
}
_OF_BATCH = {
    "compute_loss": "compute_loss(model, batch) -> loss",
    "accuracy": "accuracy(model, batch) -> (correct, total)",
    "count": "count(batch) -> number of terms of the loss",
}


@dataclass(frozen=True)
class Recipe:
    """Contents of a recipe file. A method calls the builder of its name and checks the result.

    Models, losses and batches come on `device`.
    """

    path: Path
    builders: Mapping[str, Callable[..., Any]]
    accuracy: Callable[[Any, Any], tuple[float, int]] | None = None
    epochs: int = 1
    device: torch.device = CPU
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    count: Callable[..., float | Tensor] | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)  # keywords of `parallelize`

    def on(self, device: torch.device) -> Recipe:
        """Return a copy with models, losses and batches on this device."""
        return replace(self, device=device)

    def data(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """Return the training loader, and the test loader or None."""
        built = self.builders["data"]()
        train, test = (
            built if isinstance(built, (tuple, list)) and len(built) == 2 else (built, None)
        )
        if not isinstance(train, DataLoader) or not isinstance(test, DataLoader | None):
            raise self._wrong("data", built)
        return train, test

    def model(self) -> nn.Module:
        """Return a new model."""
        built = self.builders["model"]()
        if not isinstance(built, nn.Module):
            raise self._wrong("model", built)
        return built if self.device == CPU else built.to(self.device)

    def loss(self) -> Callable[..., Tensor] | None:
        """Return the loss of an output and a target; None if a compute_loss replaces it."""
        if self.compute_loss is not None:
            return None
        built = self.builders["loss"]()
        if built is not None and not callable(built):
            raise self._wrong("loss", built)
        return built.to(self.device) if isinstance(built, nn.Module) else built

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Return a new optimizer over these parameters."""
        built = self.builders["optimizer"](params)
        if not isinstance(built, Optimizer):
            raise self._wrong("optimizer", built)
        return built

    def objective(self) -> Objective:
        """Return the functions that compute the loss of a batch."""
        return Objective(self.loss(), self.compute_loss)

    def batch(self, batch: Any) -> Any:
        """Return a loader's batch as a sample: (x, y), or (x, None) if it is no pair.

        With a compute_loss the batch stays as it is.
        """
        if self.compute_loss is not None:
            return mapped(batch, self._move)
        is_pair = isinstance(batch, list | tuple) and len(batch) == 2
        return mapped(tuple(batch) if is_pair else (batch, None), self._move)

    def right(self, model: nn.Module, batch: Any) -> tuple[float, int]:
        """Return the correct answers in a batch, and all answers, if there is an accuracy."""
        assert self.accuracy is not None
        if self.compute_loss is not None:
            return self.accuracy(model, batch)
        x, y = batch
        return self.accuracy(model(x), y)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _wrong(self, builder: str, built: Any) -> UsageError:
        do = f"return that from {builder} in {self.path}"
        got = (
            f"({', '.join(type(part).__name__ for part in built)})"
            if isinstance(built, tuple)
            else type(built).__name__
        )
        return UsageError(
            f"{builder}() returned something else", got=got, expected=_BUILDERS[builder], do=do
        )


def load(path: str | Path) -> Recipe:
    """Load a recipe from a Python file. It may import files in its folder, as a script may.

    Args:
        path: the file.

    Raises:
        UsageError: the file is missing, does not run, lacks a builder, or has a builder with other
            arguments.
    """
    path = Path(path)
    _require_recipe(path)
    module = execute(path)
    there = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }
    own = [
        name for name, value in there.items() if getattr(value, "__module__", "") == module.__name__
    ]
    given = {name: usage for name, usage in _BUILDERS.items() if not _replaces(name, there)}
    if "loss" in there and "compute_loss" in there:
        raise UsageError(
            "the recipe has both loss() and compute_loss(model, batch)",
            where=str(path),
            do="leave one of them out",
        )
    for name, usage in given.items():
        if name not in there:
            raise _missing(path, own, name, usage)
    optional = _OF_BATCH if "compute_loss" in there else _OPTIONAL
    for name, usage in (_BUILDERS | optional).items():
        if name in there and (name != "count" or name in own):
            _check_call(path, there[name], name, usage)
    epochs = getattr(module, "EPOCHS", 1)
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise UsageError("EPOCHS is a whole number, at least 1", where=str(path), got=repr(epochs))
    asked = getattr(module, "OPTIONS", {})
    if not isinstance(asked, Mapping) or not all(isinstance(name, str) for name in asked):
        do = 'write for instance OPTIONS = {"check_every": 50}'
        raise UsageError("OPTIONS is not a mapping", where=str(path), got=repr(asked)[:80], do=do)
    if hasattr(module, "SYNC_BATCHNORM"):
        asked = {"sync_batchnorm": module.SYNC_BATCHNORM, **asked}
    try:
        check_keywords(asked)
    except UsageError as error:
        raise error.struck(str(path)) from error
    return Recipe(
        path,
        {name: there[name] for name in given},
        there.get("accuracy"),
        epochs,
        compute_loss=there.get("compute_loss"),
        count=there.get("count") if "count" in own else None,
        asked=asked,
    )


def _replaces(builder: str, there: Container[str]) -> bool:
    """Return whether a recipe replaces a builder."""
    return builder == "loss" and "compute_loss" in there


def _require_recipe(path: Path) -> None:
    """Refuse a file that is no recipe before it runs: a script would train first."""
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [file.name for file in path.parent.glob("*.py")], n=1
        )
        do = f"did you mean {path.parent / near[0]}?" if near else "give the path of a Python file"
        raise UsageError("there is no such recipe", got=str(path), do=do)
    try:
        source = path.read_text(encoding="utf-8")
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError, OSError):
        return  # running the file gives a better error
    bound = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    }
    own = [symbol.get_name() for symbol in symbols if symbol.is_namespace()]
    for name, usage in _BUILDERS.items():
        if name not in bound and not _replaces(name, bound) and "import *" not in source:
            raise _missing(path, own, name, usage)


def execute(path: Path) -> ModuleType:
    """Run the file as a module of its own."""
    name = f"shoal_recipe_{path.stem}"  # a prefix, because a recipe may have the name of a library
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(
            "a recipe is a Python file", got=str(path), expected="a name that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # the folder stays in the path, because a builder may import when it is called
        sys.path.insert(0, folder)
    # classes defined in the file are looked up there, e.g. by pickle and dataclasses
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        where, got = f"{error.filename}, line {error.lineno}", (error.text or "").strip()
        raise UsageError(f"the recipe is not Python: {error.msg}", where=where, got=got) from error
    except Exception as error:
        del sys.modules[name]
        raise UsageError(
            "the recipe fails while it is loaded",
            where=line_in(path, error),
            got=f"{type(error).__name__}: {error}",
            do=f"install {error.name}; for Shoal's examples {install_shoal('examples')}"
            if isinstance(error, ModuleNotFoundError)
            else f"see that `python {path}` runs",
        ) from error
    return module


def line_in(path: Path, error: BaseException) -> str:
    """Return the recipe's own last line on the way to the error."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).resolve() == path.resolve():
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{path}, line {line}"


def _missing(path: Path, own: list[str], name: str, usage: str) -> UsageError:
    near = difflib.get_close_matches(name, own, n=1)
    return UsageError(
        f"the recipe has no function {name}",
        where=str(path),
        got="it has " + (", ".join(own) or "no functions"),
        expected=", ".join(_BUILDERS.values()),
        do=f"rename {near[0]} to {name}" if near else f"define {usage}",
    )


def _check_call(path: Path, builder: Callable[..., Any], name: str, usage: str) -> None:
    """Refuse a builder that cannot be called as `usage` says."""
    if isinstance(builder, nn.Module):
        got = f"a {type(builder).__name__}, built already"
        raise UsageError(
            f"{name} in the recipe is not a function",
            where=str(path),
            got=got,
            do=f"define {usage}",
        )
    try:
        arguments = usage.partition("(")[2].partition(")")[0]
        inspect.signature(builder).bind(*filter(None, arguments.split(",")))
    except TypeError as error:
        problem = f"{name} in the recipe takes other arguments"
        raise UsageError(problem, where=str(path), got=str(error), do=f"define {usage}") from error
    except ValueError:
        pass  # written in C: its signature cannot be seen
