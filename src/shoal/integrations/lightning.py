"""Lightning's Trainer on all ranks: `Trainer(strategy=ShoalStrategy())`.

    1  setup          joins the ranks; the model and its optimizers wait for the first batch
    2  loaders        every loader is dealt by `shoal.shard`, unless it is dealt already
    3  first batch    `training_step` is measured on it, unseen by logs and metrics; then the plan
    4  each step      `training_step` is the compute_loss. In manual optimisation, which has many
                      losses, each loss is weighed by the batch as its backward begins
    5  teardown       the model is an ordinary one again

Why a ParallelStrategy: Lightning puts a DistributedSampler into the loaders of a DDPStrategy. It
borrows the methods of DDPStrategy that only ask torch.distributed. Guarded by tests/trainers/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.comm.rendezvous import is_rank
from shoal.contracts.sample import computed_loss
from shoal.contracts.strategy import Strategy
from shoal.core.errors import UsageError
from shoal.core.no_operation import nothing
from shoal.core.registry import of
from shoal.data.sharded import ShardedBatches, ShardedLoader
from shoal.features import SyncBatchNorm
from shoal.front.parallel import parallelize
from shoal.front.plan_queries import plan_of
from shoal.front.release import unparallelize
from shoal.front.session_start import init
from shoal.integrations.checks import OPTIONS, check_model, names_on_meta
from shoal.integrations.lightning_loaders import EpochLoader, check_beside, epoch_loader
from shoal.integrations.lightning_package import DDPStrategy, distributed, pl
from shoal.integrations.untraced_steps import silent, still, unseen

__all__ = ["EpochLoader", "ShoalStrategy"]

_Parallel: Any = pl.strategies.ParallelStrategy


@final
class ShoalStrategy(_Parallel):
    """A strategy of Lightning's Trainer that trains on all ranks by a plan of Shoal.

    Start the script by torchrun, or let `Trainer(devices=N)` start N processes.

    Args:
        batch: as for `shoal.shard`. "rank": a batch of your loaders is for one rank, as with DDP.
            "global": it is for all ranks together.
        options: all other options of `shoal.parallelize`, such as `pins`, `plan`, `count` or
            `weigh`. The loss is that of `training_step`.

    Raises:
        UsageError: there is no such option.

    Examples:
        trainer = Trainer(strategy=ShoalStrategy(pins={"*head": "head"}), devices=2)
    """

    strategy_name = "shoal"
    is_distributed = True  # else `log(sync_dist=True)` does nothing

    def __init__(self, *, batch: str = "rank", **options: Any) -> None:
        super().__init__()
        _check_options(batch, options)
        self._num_nodes = 1
        self._start_method, self._timeout, self._process_group_backend = "popen", None, None
        self._batch, self._options = batch, options
        self._deals: bool | None = None  # whether loaders are dealt here
        self._loss: Callable[..., Any] | None = None  # weighs, once there is one
        self._planned = False
        self._frozen: list[nn.Parameter] = []  # parameters that the plan leaves out
        self._manual = _ManualLoss(self)
        self._blocks, self._has_blocked = 0, False  # open contexts; whether this step had one
        self._unsent: tuple[Any, Any] | None = None  # arguments of a step that was not sent

    # Methods of DDPStrategy that ask torch.distributed, or name the processes of a start
    root_device = DDPStrategy.root_device
    num_nodes = DDPStrategy.num_nodes
    num_processes = DDPStrategy.num_processes
    set_world_ranks = DDPStrategy.set_world_ranks
    setup_distributed = DDPStrategy.setup_distributed
    model_to_device = DDPStrategy.model_to_device
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids
    barrier = DDPStrategy.barrier
    broadcast = DDPStrategy.broadcast
    _configure_launcher = DDPStrategy._configure_launcher
    _get_process_group_backend = DDPStrategy._get_process_group_backend

    def setup_environment(self) -> None:
        """Join the ranks. A process group of Lightning's own launchers is used as it is."""
        super().setup_environment()
        if is_rank() or self.world_size == 1:
            init()
        if self.world_size > 1:
            self.setup_distributed()
        size = init().size
        if size != self.world_size:
            raise UsageError(
                "every rank of a Trainer trains, so there can be no servers and no tail hosts",
                got=f"{size} of {self.world_size} ranks train",
                do="unset SHOAL_SERVERS and SHOAL_TAIL",
            )

    def setup(self, trainer: Any) -> None:
        """Prepare the model as Lightning does, then let it wait for its first batch."""
        connector, module = trainer._accelerator_connector, self.lightning_module
        if self._deals is None:
            self._deals = bool(connector.use_distributed_sampler)
        connector.use_distributed_sampler = False
        _check_module(module)
        super().setup(trainer)
        self._planned = False
        if trainer.state.fn != "fit":
            if self.world_size > 1:
                distributed._sync_module_states(module)
            return
        if self._layer_sync is not None:
            self._options.setdefault(SyncBatchNorm.name, True)
        self.precision_plugin.clip_grad_by_norm = _clip
        if module.automatic_optimization:
            self._loss = self._parallelize(self._training_step)
        else:
            self._options = _without_pipeline(self._options)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Deal a loader to the ranks, unless the script or its sampler does so itself."""
        if not self._deals and not isinstance(dataloader, ShardedLoader | ShardedBatches):
            return dataloader
        batch, size = self._batch, getattr(dataloader, "batch_size", None)
        if not self.lightning_module.trainer.training and size is not None:
            batch = "rank" if size < self.world_size else batch  # batches of one row, to test
        return epoch_loader(dataloader, batch, self.world_size)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Plan anew at the start of an epoch if frozen layers train now, as by BaseFinetuning."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 and self._planned and any(p.requires_grad for p in self._frozen):
            module = self.lightning_module
            self._send_rest(module)
            unparallelize(module)
            self._loss, self._planned, self._unsent = None, False, None
            if module.automatic_optimization:
                self._loss = self._parallelize(self._training_step)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch, weighed by its rows. The first one makes the plan."""
        self._has_blocked = self._blocks > 0
        if not self._planned:
            self._look_at_first()
        with self.precision_plugin.train_step_context():
            if self.lightning_module.automatic_optimization:
                assert self._loss is not None
                output = self._loss(self.lightning_module, *args, **kwargs)
            else:
                output = self._manual.step(*args, **kwargs)
        self._planned = True
        self._unsent = (args, kwargs) if self._has_blocked else None
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward. A loss of manual optimisation is weighed first."""
        if not self.lightning_module.automatic_optimization:
            if self._manual.records(closure_loss):
                return closure_loss.detach()
            closure_loss = self._manual.weigh(closure_loss)
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step. The first closure runs before, because its batch makes the plan."""
        if self._manual.is_measuring:
            return closure()
        if not self._planned:
            closure = _CalledOnce(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Send nothing in the backwards inside, as they are not the last of their step."""
        with ExitStack() as stack:
            for optimizer in self._own_optimizers():
                if (accumulate := getattr(optimizer, "accumulate", None)) is not None:
                    stack.enter_context(accumulate())
            self._has_blocked = True
            self._blocks += 1
            try:
                yield
            finally:
                self._blocks -= 1

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as DDPStrategy does, but for a mean of whole numbers, which is not rounded.

        Lightning divides by such a mean of row counts, and ranks may have unlike numbers of rows.
        """
        is_whole = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_whole and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return DDPStrategy.reduce(self, tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the model as it is. Other ranks may not be there any more to release it with."""
        self._loss = None

    def teardown(self) -> None:
        """Make the model an ordinary one, whole on every rank, then clean up as Lightning does."""
        module = self.lightning_module
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        if module is not None and self._loss is not None:
            self._send_rest(module)
            unparallelize(module)
        self._loss, self._unsent = None, None
        if module is not None and names_on_meta(module):
            self._lightning_module = None  # else moving it to the CPU would hide the error
        super().teardown()

    def _look_at_first(self) -> None:
        """Look at the loaders and at frozen parameters, before the first batch makes the plan."""
        module = self.lightning_module
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        if self.world_size > 1 and self._options.get("weigh") != "ranks":
            check_beside(pl.utilities.CombinedLoader(module.trainer.train_dataloader).flattened)

    def _send_rest(self, module: Any) -> None:
        """Send gradients of a window that no step has ended, by a backward that adds nothing."""
        if self._unsent is None or self._loss is None or self.world_size == 1:
            return
        args, kwargs = self._unsent
        if not module.automatic_optimization:  # the other arguments are known
            args, kwargs = args[:1], {}
        with (
            torch.enable_grad(),
            unseen(module, pl.LightningModule),
            self.precision_plugin.train_step_context(),
        ):
            output = self._loss(module, *args, **kwargs)
        (computed_loss(output) * 0.0).backward()

    def _own_optimizers(self) -> list[Any]:
        """Return the optimizers without Lightning's wrapper."""
        return [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]

    def _parallelize(self, compute_loss: Callable[..., Any], sample: Any = None) -> Any:
        """Parallelise the model, and return the function that weighs."""
        optimizers = self._own_optimizers()
        _, loss, _ = parallelize(
            self.lightning_module,
            None,
            optimizers if len(optimizers) > 1 else optimizers[0],
            sample=sample,
            compute_loss=compute_loss,
            **self._options,
        )
        return loss

    def _training_step(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `training_step`, silent while there is no plan."""
        if self._planned or plan_of(module) is not None or self.world_size == 1:
            output = module.training_step(*args, **kwargs)
        else:
            with silent(module, pl.LightningModule):
                output = module.training_step(*args, **kwargs)
        if output is None and self.world_size > 1:
            raise UsageError(
                "training_step returned None, and the other ranks have gradients to exchange",
                where=f"{type(module).__name__}.training_step",
                do="return a loss that weighs nothing, as loss * 0.0, or skip the batch in the "
                "dataset",
            )
        return output


@final
class _ManualLoss:
    """The losses of a `training_step` that calls backward itself.

    For the measurement its losses are added up, and its steps do nothing. In training each loss
    goes through the counted function as it is, so that it is weighed by the rows of the batch.
    """

    def __init__(self, strategy: ShoalStrategy) -> None:
        self._strategy = strategy
        self._losses: list[Tensor] | None = None  # losses of the measured step that runs
        self._batch: Any = None
        self._loss: Tensor | None = None  # loss that is being weighed

    @property
    def is_measuring(self) -> bool:
        """Whether a measured step runs."""
        return self._losses is not None

    def records(self, loss: Tensor) -> bool:
        """Note a loss as its backward begins, if the step is measured only."""
        if self._losses is not None:
            self._losses.append(loss)
        return self._losses is not None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. The first one is measured before."""
        strategy = self._strategy
        module, self._batch = strategy.lightning_module, args[0] if args else None
        if strategy._loss is None:
            rest = args[1:]

            def compute_loss(_: nn.Module, batch: Any) -> Tensor:
                if self._loss is not None:
                    return self._loss
                return self._measure(batch, *rest, **kwargs)

            strategy._loss = strategy._parallelize(compute_loss, sample=self._batch)
        try:
            return module.training_step(*args, **kwargs)
        finally:
            self._batch = None

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the same loss, weighed by the rows of the batch."""
        strategy = self._strategy
        if strategy._loss is None or self._batch is None:
            return loss
        self._loss = loss
        try:
            weighed: Tensor = strategy._loss(strategy.lightning_module, self._batch)
        finally:
            self._loss = None
        return weighed

    def _measure(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of the losses of a step that leaves no trace."""
        strategy = self._strategy
        module, self._losses = strategy.lightning_module, []
        try:
            wrappers = strategy._lightning_optimizers
            schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
            optimizers = strategy._own_optimizers()
            with silent(module, pl.LightningModule), still(optimizers, [*schedulers, *wrappers]):
                for wrapper in wrappers:  # they count steps
                    wrapper._on_before_step = wrapper._on_after_step = nothing
                module.training_step(*args, **kwargs)
            losses = self._losses
        finally:
            self._losses = None
        if not losses:
            raise UsageError(
                "training_step called no backward on the first batch, so nothing can be measured",
                where=f"{type(module).__name__}.training_step",
                do="call self.manual_backward(loss) in every step, on every rank",
            )
        return torch.stack([loss.reshape(()) for loss in losses]).sum()


@final
class _CalledOnce:
    """A closure that has been called. Its first call here returns that result."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self._results = [closure()]

    def __call__(self) -> Any:
        return self._results.pop() if self._results else self._closure()


def _clip(optimizer: Any, clip_val: float) -> None:
    """Clip gradients by their norm: the whole one, of which cut layers send one number."""
    if hasattr(optimizer, "clip_grad_norm_"):  # else a step is measured, without gradients
        optimizer.clip_grad_norm_(clip_val)


def _check_options(batch: str, options: Mapping[str, Any]) -> None:
    """Refuse options that `parallelize` does not have, or that are Lightning's to give."""
    if batch not in ("rank", "global"):
        raise UsageError("unknown kind of batch", got=repr(batch), expected='"rank" or "global"')
    known = OPTIONS - {"compute_loss"}
    for name in options:
        if name not in known:
            raise UsageError(
                f"ShoalStrategy has no option {name}",
                expected="batch, or an option of shoal.parallelize: " + ", ".join(sorted(known)),
                do="leave it out. The loss is that of training_step"
                if name in ("compute_loss", "sample")
                else "leave it out",
            )


def _check_module(module: Any) -> None:
    """Refuse a model that has no values yet, or that is parallelised already."""
    check_model(module, first="in configure_model")
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise UsageError(
            "training_step takes dataloader_iter, which has no rows to measure and to weigh",
            where=f"{type(module).__name__}.training_step",
            do="let it take the batch: training_step(self, batch, batch_idx)",
        )


def _without_pipeline(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without pipelines, which replay one loss: manual optimisation has many."""
    pinned = [str(pin).partition(":")[0] for pin in (options.get("pins") or {}).values()]
    if "pipeline" in pinned:
        raise UsageError(
            "a pipeline replays one loss, and manual optimisation has losses of its own",
            got=f"pins={options['pins']}",
            do='leave "pipeline" out of the pins',
        )
    names = options.get("strategies") or of(Strategy)
    return {**options, "strategies": [name for name in names if name != "pipeline"]}
