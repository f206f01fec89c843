"""A script's model for the commands that take a recipe: the arguments of its `parallelize`.

    train.py          runs until its call of `shoal.parallelize`, and gives the arguments. It goes
                      no further, so it trains no step
    train.py:make     make() returns the arguments: a dict of model, loss_fn, optimizer and sample,
                      and any options of `parallelize`

The result is a Recipe. Its batches are the sample, and its models and optimizers are copies of the
script's own. Guarded by tests/tools/commands/test_script_model.py.
script's. Guarded by tests/tools/commands/test_script_model.py.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shoal.contracts.batch import mapped, tensors_of
from shoal.contracts.batch_loss import BatchLoss
from shoal.core.errors import ShoalError, UsageError
from shoal.core.numbers import how_many
from shoal.core.option import options_of
from shoal.front import parallel
from shoal.front.first_batch import for_sample
from shoal.front.options import Options
from shoal.front.recipe import Recipe, execute, line_in, load
from shoal.front.request import listed
from shoal.front.session_start import init
from shoal.front.stages import Stages
from shoal.session.compiled_models import without_compilation
from shoal.session.session import world

_BUILDERS = {"data", "model", "loss", "compute_loss", "optimizer"}
_RECIPE = 2  # so many builders make a file a recipe, even an incomplete one
_NUM_BATCHES = 1 << 12
_ARGUMENTS = '{"model": model, "loss_fn": loss_fn, "optimizer": optimizer, "sample": (x, y)}'


@dataclass(frozen=True)
class ParallelizeCall:
    """The arguments of one call of `parallelize`."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizer: Any
    sample: Any
    options: Options


@dataclass(frozen=True)
class ScriptModel(Recipe):
    """A recipe of a script's model.

    call: the arguments.
    compares: whether several models are compared. Then each is a copy, and each batch has other
        rows of the sample, for each rank and step.
    """

    call: ParallelizeCall | None = None
    compares: bool = False

    @property
    def given(self) -> ParallelizeCall:
        """The arguments."""
        assert self.call is not None
        return self.call

    def on(self, device: torch.device) -> Recipe:
        """Return the same: a script chooses its device itself."""
        return self

    def data(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """Return a loader of the sample."""
        batches = _SampleBatches(self.given.sample, redraws=self.compares)
        return DataLoader(batches, batch_size=None, collate_fn=_as_is), None

    def model(self) -> nn.Module:
        """Return the script's model, or a copy of it."""
        model = self.given.model
        return copy.deepcopy(without_compilation(model)) if self.compares else model

    def loss(self) -> Callable[..., Tensor] | None:
        """Return the script's loss_fn."""
        return self.given.loss_fn

    def optimizer(self, params: Iterable[nn.Parameter]) -> Any:
        """Return the script's optimizer, or a copy of it for other parameters in the same order."""
        if not self.compares:
            return self.given.optimizer
        own = list(without_compilation(self.given.model).parameters())
        like = {id(old): new for old, new in zip(own, params, strict=True)}
        (optimizer,) = listed(self.given.optimizer)
        return copy.deepcopy(optimizer, like)

    def batch(self, batch: Any) -> Any:
        """Return a batch unchanged."""
        return batch


class _SampleBatches(Dataset[Any]):
    """The sample, again and again, or random rows of it."""

    def __init__(self, sample: Any, *, redraws: bool) -> None:
        self._sample, self._redraws = sample, redraws

    def __len__(self) -> int:
        return _NUM_BATCHES

    def __getitem__(self, number: int) -> Any:
        return redrawn(self._sample, number) if self._redraws else self._sample


def redrawn(sample: Any, seed: int) -> Any:
    """Draw as many rows of a sample, with repeats and in their order.

    If its tensors do not all have the same number of rows, its rows are not known, and it stays as
    it is.
    """
    rows = {len(tensor) for tensor in tensors_of(sample) if tensor.dim()}
    if len(rows) != 1:
        return sample
    (count,) = rows
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (count,), generator=draw).sort().values
    return mapped(sample, lambda t: t[drawn.to(t.device)] if t.dim() else t)


def _as_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class ModelSource:
    """A recipe's or a script's name on the command line.

    Args:
        name: a file, or a file and a function of it as "train.py:make".
        words: the script's own arguments.
        number: number of the call of `parallelize` to take, from 1 on; None for the first.
    """

    name: str
    words: tuple[str, ...] = ()
    number: int | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.name.rpartition(":")[0] if self.function else self.name)

    @property
    def function(self) -> str:
        """The function that returns the arguments; "" without one."""
        file, _, function = self.name.rpartition(":")
        return function if file.endswith(".py") and not Path(self.name).exists() else ""

    def checked(self) -> Recipe | None:
        """Return the recipe, or None for a script that exists. No script runs here."""
        if not self.path.is_file():
            return load(self.path)  # raises
        if self.function:
            self._require_function()
        elif not self._is_script():
            if self.words or self.number is not None:
                raise UsageError(
                    "a recipe takes no arguments, and does not call parallelize itself",
                    got=" ".join(self.words) or f"--call {self.number}",
                    do="leave them out",
                )
            return load(self.path)
        return None

    def taken(self, *, compares: bool = False) -> ScriptModel:
        """Take the script's model as a recipe, on a rank (a collective).

        Args:
            compares: whether several copies of it are made and compared.
        """
        init()
        call = self._call_function() if self.function else self._run()
        options = for_sample(call.options, call.sample)
        compute_loss, count = options.compute_loss, options.count
        if isinstance(compute_loss, BatchLoss) and not compute_loss.packed:
            compute_loss = compute_loss.function
        call = replace(call, options=replace(options, compute_loss=None, count=None))
        _check(call, self.name, compares=compares)
        return ScriptModel(
            self.path,
            {},
            compute_loss=compute_loss,
            count=count,
            call=call,
            compares=compares,
        )

    def _is_script(self) -> bool:
        """Return whether the file calls Shoal and is no recipe, not even an incomplete one."""
        try:
            source = self.path.read_text(encoding="utf-8")
            symbols = symtable.symtable(source, str(self.path), "exec").get_symbols()
        except (SyntaxError, ValueError, OSError):
            return False  # loading the file reports the error better
        there = {s.get_name() for s in symbols if s.is_namespace() or s.is_imported()}
        if len(there & _BUILDERS) >= _RECIPE:
            return False
        return "shoal" in source or self.number is not None

    def _require_function(self) -> None:
        try:
            source = self.path.read_text(encoding="utf-8")
            symbols = symtable.symtable(source, str(self.path), "exec").get_symbols()
        except (SyntaxError, ValueError, OSError):
            return
        there = [s.get_name() for s in symbols if s.is_assigned() or s.is_imported()]
        if self.function not in there and "import *" not in source:
            own = [s.get_name() for s in symbols if s.is_namespace()]
            near = difflib.get_close_matches(self.function, there, n=1)
            raise UsageError(
                f"the script has no function {self.function}",
                where=str(self.path),
                got="it has " + (", ".join(own) or "no functions"),
                do=f"did you mean {self.path}:{near[0]}?"
                if near
                else f"define {self.function}(), which returns {_ARGUMENTS}",
            )

    def _call_function(self) -> ParallelizeCall:
        """Call the function for the arguments."""
        if self.words:
            raise UsageError(
                "a function takes no arguments of the command line",
                got=" ".join(self.words),
                do=f"leave them out, or let the script run: {self.path} -- {' '.join(self.words)}",
            )
        make = getattr(execute(self.path), self.function)
        if isinstance(make, nn.Module) or not callable(make):
            raise self._no_arguments(f"{self.function} is a {type(make).__name__}")
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise self._no_arguments(f"it takes arguments: {error}") from error
        made = make()
        if isinstance(made, tuple | list) and len(made) == 4:
            made = dict(zip(("model", "loss_fn", "optimizer", "sample"), made, strict=True))
        if not isinstance(made, Mapping):
            raise self._no_arguments(f"a {type(made).__name__}")
        if lacks := [name for name in ("model", "optimizer") if made.get(name) is None]:
            raise self._no_arguments(f"no {' and no '.join(lacks)}")
        options = dict(made)
        model, optimizer = options.pop("model"), options.pop("optimizer")
        loss_fn, sample = options.pop("loss_fn", None), options.pop("sample", None)
        lossy, features = options.pop("lossy", None), options.pop("features", ())
        return ParallelizeCall(
            model, loss_fn, optimizer, sample, Options.of(options, lossy, features)
        )

    def _no_arguments(self, got: str) -> UsageError:
        return UsageError(
            f"{self.function} does not return the arguments of parallelize",
            where=str(self.path),
            got=got,
            do=f"return {_ARGUMENTS}",
        )

    def _run(self) -> ParallelizeCall:
        """Run the script until it calls parallelize, and print which call is taken."""
        taker = _Taker(self.number or 1)
        try:
            with taker.taking(), _as_main(self.path, self.words) as module:
                source = self.path.read_text(encoding="utf-8")
                exec(compile(source, str(self.path), "exec"), module.__dict__)
        except _CallTaken as taken:
            where = line_in(self.path, taken)
            more = "" if self.number else "; --call 2 takes the next one"
            Stages(speaks=world().is_main).say(
                f"taken: call {taker.calls} of parallelize ({where}){more}"
            )
            return taken.call
        except ShoalError:
            raise
        except SystemExit as error:
            raise self._ended_error(taker, f"sys.exit({error.code!r})", error) from error
        except Exception as error:
            raise self._ended_error(taker, f"{type(error).__name__}: {error}", error) from error
        raise UsageError(
            f"the script calls parallelize {_times(taker.calls)}",
            where=str(self.path),
            do=f"give --call {taker.calls} or less"
            if taker.calls
            else "call shoal.parallelize in it, or name a function that returns its arguments: "
            f"{self.path}:make",
        )

    def _ended_error(self, taker: _Taker, got: str, error: BaseException) -> UsageError:
        behind = f"shoal … {self.path} -- ARGUMENTS"
        return UsageError(
            f"the script ends before the call of parallelize that is to be taken; it made "
            f"{how_many(taker.calls, 'call')}",
            where=line_in(self.path, error),
            got=got,
            do=f"see that it runs by itself; its own arguments stand behind --: {behind}",
        )


def with_flags(options: Options, given: Mapping[str, Any]) -> Options:
    """Return a script's options, replaced by the command line's where that gives some.

    Args:
        options: the options of the script's call.
        given: values of flags by keyword of `parallelize`.
    """
    if not given:
        return options
    own = Options.of(given)
    core = {o.name: getattr(own, o.name) for o in options_of(Options) if o.keyword in given}
    kinds = {type(feature) for feature in own.features}
    kept = (feature for feature in options.features if type(feature) not in kinds)
    return replace(options, **core, features=(*kept, *own.features))


class _CallTaken(BaseException):
    """Ends the script at the call that is taken. No `except Exception` in the script stops it."""

    def __init__(self, call: ParallelizeCall) -> None:
        super().__init__("the arguments of parallelize are taken")
        self.call = call


class _Taker:
    """Takes one of a script's calls of `parallelize`. Earlier calls change nothing.

    Args:
        number: number of the call to take, from 1 on.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.calls = 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take calls of `shoal.parallelize` from any caller, also from a trainer."""
        real = parallel.by_options
        parallel.by_options = self._take
        try:
            yield
        finally:
            parallel.by_options = real

    def _take(
        self,
        options: Callable[[], Options],
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Any,
        sample: Any,
    ) -> tuple[Any, Any, Any]:
        self.calls += 1
        asked = options()
        if self.calls < self._number:
            return model, loss_fn if asked.compute_loss is None else asked.compute_loss, optimizer
        call = ParallelizeCall(model, loss_fn, optimizer, sample, asked)
        if sample is not None or asked.compute_loss is None:
            raise _CallTaken(call)

        def first_batch(_: nn.Module, *batch: Any, **named: Any) -> NoReturn:
            """Take the first batch as the sample."""
            assert asked.compute_loss is not None
            function, own = BatchLoss(asked.compute_loss).of(batch, named)
            options = replace(asked, compute_loss=function, count=function.count(asked.count))
            raise _CallTaken(replace(call, sample=own, options=options))

        return model, first_batch, optimizer


@contextmanager
def _as_main(path: Path, words: tuple[str, ...]) -> Iterator[ModuleType]:
    """Make a file the program that Python runs, with these arguments."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    argv, main, folder = sys.argv, sys.modules["__main__"], str(path.resolve().parent)
    sys.argv, sys.modules["__main__"] = [str(path), *words], module
    if folder not in sys.path:
        sys.path.insert(0, folder)  # it stays, because a model may import when it is called
    try:
        yield module
    finally:
        sys.argv, sys.modules["__main__"] = argv, main


def _check(call: ParallelizeCall, name: str, *, compares: bool) -> None:
    """Raise UsageError if a call has no training step, or cannot be copied although it must."""
    optimizers = listed(call.optimizer) if call.optimizer is not None else []
    if not optimizers:
        raise UsageError(
            "the model is not trained, so there is no step to look at",
            where=name,
            got="optimizer=None",
            do="take another call (--call 2), or give parallelize an optimizer",
        )
    if not isinstance(call.model, nn.Module):
        raise UsageError(
            "the model is no nn.Module", where=name, got=type(call.model).__name__, do="return one"
        )
    if call.sample is None:
        raise UsageError(
            "there is no sample, and no compute_loss whose first batch is one",
            where=name,
            do="give sample=(x, y)",
        )
    if not compares:
        return
    do = "shoal simulate and shoal plan take it"
    if len(optimizers) > 1:
        raise UsageError(
            "models are compared that have one optimizer each",
            where=name,
            got=f"{len(optimizers)} optimizers",
            do=do,
        )
    own = set(without_compilation(call.model).parameters())
    held = [p for group in optimizers[0].param_groups for p in group["params"]]
    if not set(held) <= own:
        raise UsageError(
            "the optimizer has parameters that are not the model's, so there is no copy of both",
            where=name,
            got=f"{len(set(held) - own)} of {len(held)} parameters",
            do=do,
        )


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")
