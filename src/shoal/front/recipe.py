"""A recipe: a Python file whose four functions say what to train, for the command line.

    data()             a training DataLoader, or (training, test) with test None where there is none
    model()            an nn.Module
    loss()             loss(output, target) -> scalar: a module or a function; None where the model
                       returns its own loss
    optimizer(params)  a torch.optim.Optimizer over them

and, where wanted, `accuracy(output, target) -> (correct, total)` for the test data and `EPOCHS`, a
whole number. Caffe2's data_parallel_model took builders in the same way, so that each process makes
a model of its own. The functions are checked when the file is loaded, what they return when they
are called.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from shoal.core.errors import UsageError

CPU = torch.device("cpu")
_BUILDERS = {
    "data": "data() -> DataLoader, or (train, test)",
    "model": "model() -> nn.Module",
    "loss": "loss() -> a loss module or function",
    "optimizer": "optimizer(params) -> torch optimizer",
}
_OPTIONAL = {"accuracy": "accuracy(output, target) -> (correct, total)"}
_NUM_ARGUMENTS = {"data": 0, "model": 0, "loss": 0, "optimizer": 1, "accuracy": 2}


@dataclass(frozen=True)
class Recipe:
    """What a recipe file offers. A method calls the builder of its name and checks the result.

    Models, losses and batches come on `device`.
    """

    path: Path
    builders: Mapping[str, Callable[..., Any]]
    accuracy: Callable[[Any, Any], tuple[float, int]] | None = None
    epochs: int = 1
    device: torch.device = CPU

    def on(self, device: torch.device) -> Recipe:
        """The same, with models, losses and batches on this device."""
        return replace(self, device=device)

    def data(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """The training loader, and the test loader or None."""
        built = self.builders["data"]()
        train, test = (
            built if isinstance(built, (tuple, list)) and len(built) == 2 else (built, None)
        )
        if not isinstance(train, DataLoader) or not isinstance(test, DataLoader | None):
            raise self._wrong("data", built)
        return train, test

    def model(self) -> nn.Module:
        """A new model."""
        built = self.builders["model"]()
        if not isinstance(built, nn.Module):
            raise self._wrong("model", built)
        return built if self.device == CPU else built.to(self.device)

    def loss(self) -> Callable[..., Tensor] | None:
        """The loss as a function of output and target."""
        built = self.builders["loss"]()
        if built is not None and not callable(built):
            raise self._wrong("loss", built)
        return built.to(self.device) if isinstance(built, nn.Module) else built

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """A new optimizer over these parameters."""
        built = self.builders["optimizer"](params)
        if not isinstance(built, Optimizer):
            raise self._wrong("optimizer", built)
        return built

    def batch(self, batch: Any) -> tuple[Any, Any]:
        """A loader's batch as (x, y); one that is not a pair is all x."""
        is_pair = isinstance(batch, list | tuple) and len(batch) == 2
        x, y = batch if is_pair else (batch, None)
        return pytree.tree_map_only(Tensor, self._moved, x), pytree.tree_map_only(
            Tensor, self._moved, y
        )

    def _moved(self, tensor: Tensor) -> Tensor:
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
    """Load a recipe from a Python file, which may import what lies beside it, as a script may.

    Args:
        path: the file.

    Raises:
        UsageError: the file is missing, does not run, lacks a builder, or has one that takes other
            arguments.
    """
    path = Path(path)
    _require_recipe(path)
    module = _execute(path)
    there = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }
    own = [
        name for name, value in there.items() if getattr(value, "__module__", "") == module.__name__
    ]
    for name, usage in _BUILDERS.items():
        if name not in there:
            raise _missing(path, own, name, usage)
    for name, usage in (_BUILDERS | _OPTIONAL).items():
        if name in there:
            _check_call(path, there[name], name, usage)
    epochs = getattr(module, "EPOCHS", 1)
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise UsageError("EPOCHS is a whole number, at least 1", where=str(path), got=repr(epochs))
    return Recipe(path, {name: there[name] for name in _BUILDERS}, there.get("accuracy"), epochs)


def _require_recipe(path: Path) -> None:
    """Refuse what is no recipe before it runs: a script would train first."""
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [file.name for file in path.parent.glob("*.py")], n=1
        )
        do = f"did you mean {path.parent / near[0]}?" if near else "give the path of a Python file"
        raise UsageError("there is no such recipe", got=str(path), do=do)
    try:
        source = path.read_text()
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError):
        return  # running it says it better
    bound = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    }
    own = [symbol.get_name() for symbol in symbols if symbol.is_namespace()]
    for name, usage in _BUILDERS.items():
        if name not in bound and "import *" not in source:
            raise _missing(path, own, name, usage)


def _execute(path: Path) -> ModuleType:
    """Run the file as a module of its own."""
    name = f"shoal_recipe_{path.stem}"  # not the bare stem: a recipe may be called as a library is
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(
            "a recipe is a Python file", got=str(path), expected="a name that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # stays: a builder may import when it is called
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
            where=_line_in(path, error),
            got=f"{type(error).__name__}: {error}",
            do=f"install {error.name}; for Shoal's examples: pip install -e '.[examples]'"
            if isinstance(error, ModuleNotFoundError)
            else f"see that `python {path}` runs",
        ) from error
    return module


def _line_in(path: Path, error: BaseException) -> str:
    """The recipe's own last line on the way to the error."""
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
        inspect.signature(builder).bind(*range(_NUM_ARGUMENTS[name]))
    except TypeError as error:
        problem = f"{name} in the recipe takes other arguments"
        raise UsageError(problem, where=str(path), got=str(error), do=f"define {usage}") from error
    except ValueError:
        pass  # written in C: its signature cannot be seen
