"""`ShoalAccelerator`: Accelerate, with Shoal in place of DistributedDataParallel.

    1  init      Shoal joins the ranks before Accelerate does
    2  prepare   a DataLoader goes through `shoal.shard`. A model stays as it is, and waits. Its
                 optimizer and scheduler are wrapped as ever
    3  first     the model's first call with gradients is the sample: it parallelises the model
    4  window    `accumulate` sends as a window ends. The loader says which batch is the last
    5  free      `free_memory`, `clear` and `end_training` give ordinary models back

Nothing looks at a batch before the loop does. Guarded by tests/trainers/.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final
from weakref import WeakKeyDictionary, ref

import accelerate
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import (
    DistributedType,
)
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.sample import Sample, called, own_loss
from shoal.core.errors import UsageError
from shoal.data.sharded import Positioned
from shoal.front.forward_only import mean_of_output
from shoal.front.parallel import parallelize
from shoal.front.plan_queries import is_parallelized
from shoal.front.rank_values import gather
from shoal.front.release import unparallelize
from shoal.front.session_start import init
from shoal.front.shard import shard
from shoal.integrations.accelerate_loaders import (
    PreparedLoader,
    in_accelerate_s_order,
    prepare_loader,
    skipping,
)
from shoal.integrations.checks import OPTIONS, check_model, check_version
from shoal.optim.extend import extend
from shoal.profiling.untraced_runs import without_traces
from shoal.session.additions import add
from shoal.session.compiled_models import without_compilation
from shoal.session.session import world

check_version("accelerate", accelerate.__version__, (1, 15), (2,))

_ITSELF = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


class ShoalAccelerator(Accelerator):
    """An `Accelerator` that trains on all ranks by Shoal's plan.

    It takes all arguments of `Accelerator`, and the options of `shoal.parallelize`, such as `pins`.
    Start the script by torchrun or `accelerate launch`.

    A loader's rows are dealt by `shoal.shard`: none comes twice. With `split_batches` its batch is
    that of all ranks. If the model's output has a loss, that tells which terms each rank has. Else
    ranks are weighed by their rows, or give `weigh="ranks"`.

    Examples:
        >>> accelerator = ShoalAccelerator(cpu=True, pins={"*": "sliced"})
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(8, 4)).mean())
        >>> optimizer.step()
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        own = {name: options.pop(name) for name in OPTIONS & options.keys()}
        if init().size > 1 and not args and not torch.accelerator.is_available():
            options.setdefault("cpu", True)  # else Accelerate takes each process for one alone
        super().__init__(*args, **options)
        self.take_options(own)

    def take_options(self, options: Mapping[str, Any]) -> None:
        """Take options of `parallelize`. A trainer that has made its accelerator calls it."""
        if self.distributed_type in _ITSELF or self.parallelism_config is not None:
            config = self.parallelism_config
            raise UsageError(
                "Accelerate is to shard the model itself, and so is Shoal",
                got=self.distributed_type.value if config is None else type(config).__name__,
                do="leave the plugin, the parallelism_config and `accelerate launch --use_…` out. "
                "Shoal cuts layers by its plan: pins={'*': 'sliced'}",
            )
        place = world()
        if place.size > 1 and not torch.distributed.is_initialized():
            raise UsageError(
                "the ranks have left one another, so nothing can be trained on them any more",
                where="end_training, or destroy_process_group",
                do="call accelerator.free_memory() between two trainings, and end_training once, "
                "at the end of the script",
            )
        if place.size != self.num_processes:
            raise UsageError(
                "Accelerate counts other processes than those that train",
                got=f"num_processes={self.num_processes}",
                expected=f"{place.size}, as torchrun has started and as train",
                do="unset SHOAL_SERVERS and SHOAL_TAIL, as every rank trains here; without a GPU "
                "say cpu=True, or use_cpu=True in TrainingArguments",
            )
        self.shoal_options = dict(options)
        self.first_calls = list[_FirstCall]()
        self.functions = WeakKeyDictionary[nn.Module, Callable[..., Any]]()

    # 2  prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, as `Accelerator.prepare` does."""
        args = tuple(
            self.prepare_data_loader(each) if isinstance(each, Positioned) else each
            for each in args
        )
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._own_optimizers():
            extend(optimizer)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model: precision, device and compilation at once, the rest with a batch."""
        check_model(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        known = [call.model() for call in self.first_calls]
        if trains and not evaluation_mode and not any(prepared is each for each in known):
            add(without_compilation(prepared), None)
            self.first_calls.append(_FirstCall(prepared, self._begin))
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, **options: Any
    ) -> Any:
        """Deal a loader's rows by `shoal.shard`, unless they are dealt already."""
        if isinstance(data_loader, PreparedLoader):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        is_own = isinstance(data_loader, Positioned)
        prepared_before = getattr(data_loader, "_is_accelerate_prepared", False) and not is_own
        if prepared_before or self.dispatch_batches:
            return super().prepare_data_loader(data_loader, device_placement, **options)
        if not is_own:
            loader = in_accelerate_s_order(data_loader, self.dataloader_config)
            data_loader = shard(loader, batch="global" if self.split_batches else "rank")
        places = self.device_placement if device_placement is None else device_placement
        prepared = prepare_loader(
            data_loader, self.device if places else None, self.dataloader_config
        )
        self._dataloaders.append(prepared)
        return prepared

    # 3  first

    def _own_optimizers(self) -> list[Optimizer]:
        return [_inner(optimizer) for optimizer in self._optimizers]

    def compute_loss(self, model: Any, *batch: Any, **named: Any) -> Any:
        """Compute the loss of a batch by the `compute_loss` that this accelerator was given.

        A plan may then have a cut head or a pipeline, since it knows the loss.
        """
        function = self.functions.get(without_compilation(model))
        if function is None:
            options = dict(self.shoal_options)
            if (function := options.pop("compute_loss", None)) is None:
                raise UsageError(
                    "accelerator.compute_loss has no function to call",
                    do="give one: ShoalAccelerator(compute_loss=f), with f(model, batch)",
                )
            if torch.is_grad_enabled():
                function = self.begin_with(model, function, **options)
        return function(model, *batch, **named)

    def begin_with(self, model: Any, compute_loss: Callable[..., Any], **options: Any) -> Any:
        """Have a model parallelised by the first batch of a function. Return it, to train by."""
        own = without_compilation(model)
        optimizers = self._optimizers_of(own)
        for call in self.first_calls:
            if call.model() is model:
                call.end()
        given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
        _, function, _ = parallelize(model, None, given, compute_loss=compute_loss, **options)
        self.step_anew(optimizers)
        self.functions[own] = function
        return function

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Parallelise a model by a call of it."""
        own, options = without_compilation(model), dict(self.shoal_options)
        if is_parallelized(own):  # the program itself has done it
            return
        if options.pop("compute_loss", None) is not None:
            raise UsageError(
                "a model is called beside the compute_loss that was given, so its loss is another",
                got=type(own).__name__,
                do="call loss = accelerator.compute_loss(model, batch) in place of the model",
            )
        optimizers = self._optimizers_of(own)
        x = _as_sample(own, args, kwargs)
        with without_traces(Sample(own, mean_of_output, x, None), optimizers) as sample:
            sample.renew()
            loss = own_loss(called(own, x))
            is_loss = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
            del loss
        loss_fn = None if is_loss else mean_of_output
        if loss_fn is not None and options.get("count") is not None:
            raise UsageError(
                "there is a count, and the model's output has no loss that it could count for",
                got=type(own).__name__,
                do="give the loss, too: ShoalAccelerator(compute_loss=f, count=g), and call "
                "loss = accelerator.compute_loss(model, batch)",
            )
        given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
        parallelize(model, loss_fn, given, sample=(x, None), **options)
        self.step_anew(optimizers)

    def _optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        parameters = set(model.parameters())
        optimizers = [
            optimizer
            for optimizer in self._own_optimizers()
            if any(p in parameters for group in optimizer.param_groups for p in group["params"])
        ]
        if not optimizers:
            raise UsageError(
                "a model trains, and no optimizer of its parameters was prepared",
                got=type(model).__name__,
                do="give both to prepare: model, optimizer = accelerator.prepare(model, optimizer)."
                " If the model does not train, freeze it, or call it under torch.no_grad()",
            )
        return optimizers

    def step_anew(self, optimizers: Iterable[Optimizer]) -> None:
        """Let scalers step optimizers by the methods that these have now."""
        for prepared in self._optimizers:
            if _inner(prepared) in list(optimizers) and prepared.scaler is not None:
                step = prepared.optimizer.step
                prepared._optimizer_original_step_method = step
                prepared._optimizer_patched_step_method = patch_optimizer_step(prepared, step)

    # 4  window

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> Iterator[None]:
        """Do nothing: every rank has as many batches."""
        yield

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out its first batches in its next pass."""
        if not isinstance(dataloader, PreparedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        return skipping(dataloader, num_batches)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of whole gradients. For all of an optimizer's, only norms are sent."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {p for p in parameters if p.requires_grad}
        for optimizer in self._own_optimizers():
            held = {p for group in optimizer.param_groups for p in group["params"]}
            if wanted == {p for p in held if p.requires_grad} and hasattr(optimizer, _CLIP):
                self.unscale_gradients()
                return getattr(optimizer, _CLIP)(float(max_norm), float(norm_type))
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all ranks, which may have unlike numbers of rows."""
        with torch.no_grad():
            return recursively_apply(gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values of each row once, also in a last batch that is short."""
        active = self.gradient_state.active_dataloader
        if isinstance(active, PreparedLoader) and not use_gather_object:
            with contextlib.suppress(TypeError):  # objects, which are gathered as they are
                input_data = recursively_apply(active.cut, input_data, error_on_other_type=True)
        return super().gather_for_metrics(input_data, use_gather_object)

    # 5  free

    def free_memory(self, *objects: Any) -> Any:
        """Give ordinary models back, and forget all that was prepared."""
        self.release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Give ordinary models back, and end trackers and the process group."""
        self.release()
        super().end_training()

    def release(self) -> None:
        """Undo all that was done with models and optimizers (a collective)."""
        for call in self.first_calls:
            call.end()
            model = call.model()
            if model is not None and is_parallelized(model):
                unparallelize(model)
        self.step_anew(self._own_optimizers())
        self.first_calls.clear()
        self.functions.clear()


_CLIP = "clip_grad_norm_"


@final
class _FirstCall:
    """A call of a model that parallelises it first, once gradients are on. It ends with that."""

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self.model = ref(model)
        self._begin = begin
        self._before = model.__dict__.get(_CALL)
        # torch calls it in place of hooks and forward, and copies and pickles leave it behind
        model.__dict__[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        assert model is not None
        if torch.is_grad_enabled():
            self.end()
            self._begin(model, args, kwargs)
            return model(*args, **kwargs)
        return (self._before or model._call_impl)(*args, **kwargs)

    def end(self) -> None:
        """Let calls go to the model itself."""
        model = self.model()
        if model is None or model.__dict__.get(_CALL) is not self:
            return
        if self._before is None:
            del model.__dict__[_CALL]
        else:
            model.__dict__[_CALL] = self._before


_CALL = "_compiled_call_impl"  # torch looks there for the code of a module's call


def _inner(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _as_sample(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as the x of a sample."""
    if not kwargs:
        return args
    if not args:
        return kwargs
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    if bound.args and any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        for parameter in bound.signature.parameters.values()
    ):
        raise UsageError(
            "the model's first call has arguments with and without names, and some take no name",
            got=str(bound.signature),
            do="call the model by positional arguments alone, or by names alone",
        )
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named
