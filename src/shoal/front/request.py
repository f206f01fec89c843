"""What a caller asks of `parallelize`: checked here, and compared among the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.contracts.sample import check_compute_loss
from shoal.contracts.strategy import Strategy
from shoal.core.buckets import MEMORY
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.core.numbers import MOST_RANKS, is_count, is_positive
from shoal.core.outer import Outer
from shoal.core.placement import BALANCED, Placement, check_placement
from shoal.core.plan import MICRO_BATCHES, Plan, strategy_and_exchange
from shoal.core.registry import from_outside, named
from shoal.engine.replicas import EVERY
from shoal.front.carriers import check_most_error, codecs_of
from shoal.front.locally import check_local_steps
from shoal.front.periods import check_update_every
from shoal.front.replanned import check_replan, check_replanned
from shoal.planner.options import check_pins, known, resolve
from shoal.planner.search_options import DEFAULT, SearchOptions
from shoal.profiling.identity import content, trainable_layers
from shoal.profiling.moving import Ways, check_ways
from shoal.rewrite.apply import check
from shoal.servers.servers import Servers
from shoal.session.session import Session
from shoal.session.watch import is_counted
from shoal.strategies.sync_batchnorm import norms_of
from shoal.tensors.cut import is_cut

# of a plan, beside its choices and placement
_COMPARED = (
    "model",
    "bucket_bytes",
    "lanes",
    "staleness",
    "micro_batches",
    "joined",
    "chunks",
    "least_part_bytes",
    "local_steps",
    "outer",
    "update_every",
)
_STATE = "state of optimizer"  # and its number
_ORDER = "call parallelize(model, loss_fn, optimizer, sample=(x, y))"


@dataclass(frozen=True)
class Request:
    """The arguments of `parallelize`, beside model, loss, optimizer and sample."""

    plan: Plan | str | Path
    pins: Mapping[str, str] | None
    strategies: Iterable[str] | None
    count: Callable[..., Any] | None
    staleness: int | None
    memory: str
    placement: Placement
    memory_limit: float | None = None
    micro_batches: int = MICRO_BATCHES
    search_options: SearchOptions = DEFAULT
    left_alone: tuple[nn.Parameter, ...] = ()  # the program's own business
    buffers: Ways = "agree"
    sync_batchnorm: bool = False
    codecs: Any = ()  # see `codecs_of`
    compute_loss: Callable[..., Any] | None = None
    check_every: int = EVERY
    max_error: float | None = None
    local_steps: int | str | None = None
    outer: Outer | None = None
    update_every: Mapping[str, int] | None = None
    replan: bool = False


def in_a_tuple(names: Any) -> Any:
    """Names of any iterable, that they can be looked at twice; a single name as it is."""
    is_many = isinstance(names, Iterable) and not isinstance(names, str)
    return tuple(names) if is_many else names


def checked(
    asked: Request, model: Any, loss_fn: Any, optimizer: Any, session: Session
) -> Plan | None:
    """Refuse what cannot be parallelised; the given plan, None for "auto"."""
    optimizers = listed(optimizer)
    if asked.compute_loss is not None:
        check_compute_loss(asked.compute_loss, loss_fn)
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError("the loss is not callable", got=type(loss_fn).__name__, do=_ORDER)
    if isinstance(loss_fn, type):
        raise UsageError(
            "the loss is a class",
            got=loss_fn.__name__,
            do=f"give an instance: {loss_fn.__name__}()",
        )
    parameters = _check_model(model, session)
    _check_left_alone(asked.left_alone, model)
    loss = asked.compute_loss or loss_fn
    _check_loss(loss, parameters | set(map(id, asked.left_alone)))
    if is_counted(loss):
        raise UsageError(
            "the loss is counted for another model already, and would weigh that one's gradients, "
            "too",
            do="give each model a loss of its own: another instance, or the function that was "
            "given first",
        )
    _check_optimizers(optimizers, parameters)
    _check_limits(asked)
    check_ways(asked.buffers, model, loss)
    _check_norms(asked, model)
    check_pins({} if asked.pins is None else asked.pins)
    known(asked.strategies)
    codecs_of(asked.codecs)
    check_most_error(asked.max_error)
    _check_staleness(asked.staleness, asked, session)
    check_local_steps(
        asked.local_steps,
        asked.outer,
        session,
        pins=asked.pins,
        strategies=asked.strategies,
        placement=asked.placement,
        count=asked.count,
        sync_batchnorm=asked.sync_batchnorm,
    )
    server_hosts = session.other(Servers)
    servers = len(server_hosts.hosts) if server_hosts else 0
    apart = {name: getattr(asked, name) for name in ("staleness", "local_steps", "update_every")}
    check_replan(asked.replan, session, apart)
    if asked.plan == "auto":
        layers = {layer.name: list(layer.parameters) for layer in trainable_layers(model)}
        resolve(asked.pins or {}, list(layers))
        check_update_every(
            asked.update_every,
            list(layers),
            local_steps=asked.local_steps,
            staleness=asked.staleness,
        )
        check_placement(
            asked.placement, layers, session.comm.size, servers, stale=asked.staleness != 0
        )
        return None
    _require_nothing_beside_plan(asked)
    plan = Plan.load(asked.plan) if isinstance(asked.plan, str | Path) else asked.plan
    if not isinstance(plan, Plan):
        raise PlanError(
            "the plan is of a type that is none",
            got=type(plan).__name__,
            do='give "auto", a Plan or a path',
        )
    check(plan, model, session.comm.size, servers)
    _check_staleness(plan.staleness, asked, session)
    if asked.replan:
        check_replanned(plan)
    return plan


def _check_limits(asked: Request) -> None:
    if asked.memory not in MEMORY:
        expected = " or ".join(map(repr, MEMORY))
        raise UsageError(
            "there is no such way to use memory", got=repr(asked.memory), expected=expected
        )
    limit = asked.memory_limit
    if limit is not None and not is_positive(limit):
        raise UsageError(
            "memory_limit is a number of bytes",
            got=repr(limit),
            do="give for instance 2e9, or None",
        )
    if not is_count(asked.micro_batches) or not 1 <= asked.micro_batches <= MOST_RANKS:
        raise UsageError(
            "micro_batches is a whole number, at least 1",
            got=repr(asked.micro_batches),
            do="give 4, say",
        )
    if not is_count(asked.check_every) or asked.check_every < 0:
        raise UsageError(
            "check_every is a whole number of steps, or 0",
            got=repr(asked.check_every)[:80],
            do="give 100, or 0 for no check of replicas",
        )
    if asked.count is not None and not callable(asked.count):
        raise UsageError(
            "count is not a function",
            got=repr(asked.count)[:80],
            do="give for instance count=lambda output, y: len(y), or with a compute_loss "
            "count=lambda batch: len(batch)",
        )
    if not isinstance(asked.search_options, SearchOptions):
        raise UsageError(
            "search_options is of another type",
            got=type(asked.search_options).__name__,
            do="give shoal.SearchOptions(…), or leave it out",
        )


def _check_norms(asked: Request, model: nn.Module) -> None:
    if not isinstance(asked.sync_batchnorm, bool):
        raise UsageError(
            "sync_batchnorm is True or False",
            got=repr(asked.sync_batchnorm)[:80],
            do="give sync_batchnorm=True to normalise by the rows of all ranks",
        )
    norms_of(model, asked.sync_batchnorm)


def _require_nothing_beside_plan(asked: Request) -> None:
    """Refuse wishes beside a given plan, which says all of that itself."""
    if asked.pins:
        raise PlanError(
            "there are both a plan and pins", do='edit the plan, or use pins with plan="auto"'
        )
    if asked.staleness != 0:
        raise PlanError(
            "there are both a plan and a staleness", do="write the staleness into the plan"
        )
    if asked.placement != BALANCED:
        raise PlanError(
            "there are both a plan and a placement", do="write the placement into the plan"
        )
    if asked.local_steps is not None:
        raise PlanError(
            "there are both a plan and local_steps", do="write the local_steps into the plan"
        )
    if asked.update_every is not None:
        raise PlanError(
            "there are both a plan and update_every", do="write the update_every into the plan"
        )
    if asked.memory_limit is not None:
        raise PlanError(
            "there are both a plan and a memory_limit", do='let plan="auto" make one that keeps it'
        )
    if asked.codecs:
        raise PlanError(
            "there are both a plan and codecs",
            do='write a codec behind an exchange of the plan, as "direct+int8"',
        )
    if asked.search_options != DEFAULT:
        raise PlanError(
            "there are both a plan and search_options", do='let plan="auto" search for one'
        )


def _check_staleness(staleness: Any, asked: Request, session: Session) -> None:
    if staleness is not None and (not is_count(staleness) or staleness < 0):
        raise UsageError(
            "staleness is a number of steps, or None", got=repr(staleness), do="give 0 to keep step"
        )
    if staleness == 0:
        return
    pinned = {
        name: named(Strategy, strategy_and_exchange(pin)[0])
        for name, pin in (asked.pins or {}).items()
    }
    other = next(
        (name for name, strategy in pinned.items() if not strategy.role.takes_servers), None
    )
    if other is not None or asked.strategies is not None:
        raise PlanError(
            "with a staleness servers own every layer, so nothing else can be said about layers",
            got=f"a pin of {other!r}" if other is not None else "strategies",
            do='leave out strategies, and pins to others than "server" and "server_rows"',
        )
    if asked.count is not None:
        raise UsageError(
            "where workers run ahead every rank weighs the same", do="leave out count, or staleness"
        )
    if session.other(Servers) is None:
        raise PlanError(
            "there are no servers, which a staleness needs", do="set SHOAL_SERVERS=1 on every rank"
        )


def _check_model(model: Any, session: Session) -> set[int]:
    """Refuse a model that cannot be rewritten; the ids of its trainable parameters."""
    if not isinstance(model, nn.Module):
        raise UsageError("the model is not an nn.Module", got=type(model).__name__, do=_ORDER)
    if model in session.attached:
        raise UsageError("the model is parallelised already", do="call parallelize once a model")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError(
                "the model is compiled already, so a rewrite of its layers would not be seen",
                where=f"module {name or '(model)'}",
                do="parallelise first, then compile block by block: for block in model.children(): "
                "block.compile()",
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise UsageError(
                f"the model is wrapped in {type(module).__name__}",
                where=f"module {name or '(model)'}",
                do="give the bare model",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                "TorchScript cannot be rewritten",
                where=f"module {name or '(model)'}",
                do="give the module that was scripted or traced",
            )
    elsewhere = {id(p) for other in session.attached for p in other.parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        in_use = parameter.requires_grad or is_cut(parameter)
        if in_use and parameter in session.served and id(parameter) not in elsewhere:
            raise UsageError(
                "a parameter was that of a parallelised model, which is gone, and is still served "
                "as there",
                where=f"parameter {name}",
                do="build the model of copies: copy.deepcopy(module), on every rank, while the "
                "other model is there",
            )
        if parameter.requires_grad and id(parameter) in elsewhere:
            raise UsageError(
                "a parameter is that of another parallelised model too, and both would exchange "
                "its gradient",
                where=f"parameter {name}",
                do="parallelise one module that holds both models",
            )
    parameters = {id(p) for p in model.parameters() if p.requires_grad}
    if not parameters:
        raise UsageError(
            "the model has no trainable parameter", do="unfreeze a layer before parallelize"
        )
    return parameters


def _check_left_alone(left_alone: tuple[Any, ...], model: nn.Module) -> None:
    """Refuse what is to be left alone and cannot be."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in left_alone:
        if not isinstance(parameter, nn.Parameter):
            raise UsageError(
                "left_alone is of parameters",
                got=type(parameter).__name__,
                do="give for instance left_alone=head.parameters()",
            )
        if id(parameter) in names:
            raise UsageError(
                "a parameter that is to be left alone is the model's",
                where=f"parameter {names[id(parameter)]}",
                do="give parallelize the part of the model without it, such as the backbone",
            )


def _check_loss(loss_fn: Any, parameters: set[int]) -> None:
    if not isinstance(loss_fn, nn.Module):
        return
    for name, parameter in loss_fn.named_parameters():
        if parameter.requires_grad and id(parameter) not in parameters:
            raise UsageError(
                "the loss has a trainable parameter that is not the model's, whose gradient is not "
                "exchanged",
                where=f"parameter {name} of the loss",
                do="have a module that holds the model and the loss return the loss, and "
                "parallelise that with None; or say left_alone=loss_fn.parameters(), where your "
                "program sees to it",
            )


def _check_optimizers(optimizers: list[Optimizer], parameters: set[int]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS steers by the loss's value, which differs between ranks",
                do="use an optimizer that steps by gradients alone, such as SGD or AdamW",
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in parameters for p in held):
            raise UsageError(
                f"the optimizer {type(optimizer).__name__} holds none of the model's parameters",
                do="build it from model.parameters() of the model you give",
            )


def listed(optimizer: Any) -> list[Optimizer]:
    """One optimizer, or several, as a list."""
    listed = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for item in listed:
        if not isinstance(item, Optimizer):
            raise UsageError(
                "the optimizer is not a torch optimizer", got=type(item).__name__, do=_ORDER
            )
    return listed


def require_same(
    comm: Comm, asked: Request, plan: Plan | None, model: nn.Module, optimizers: list[Optimizer]
) -> None:
    """Raise RanksDiffer where ranks ask for different things; models are compared later."""
    chosen = {} if plan is None else {f"plan for layer {c.layer}": c.way for c in plan.choices}
    other = {} if plan is None else {f"plan's {key}": getattr(plan, key) for key in _COMPARED}
    if plan is not None:
        other["plan's placement"] = _in_order(plan.placement)
    registered = {
        f"{contract.__name__.lower()} {name!r} of its own": place
        for contract in (Strategy, Exchange, Codec)
        for name, place in from_outside(contract).items()
    }
    request = {
        **registered,
        "plan": "auto" if plan is None else "a plan of its own",
        **chosen,
        **other,
        "order of layers in the plan": list(chosen),
        "pins": sorted((asked.pins or {}).items()),
        "strategies": "all" if asked.strategies is None else sorted(asked.strategies),
        "search_options": repr(asked.search_options),
        "count": "none" if asked.count is None else "a function",
        "compute_loss": "none" if asked.compute_loss is None else "a function",
        "local_steps": asked.local_steps,
        "outer": str(asked.outer),
        "update_every": sorted((asked.update_every or {}).items()),
        "staleness": "unbounded" if asked.staleness is None else asked.staleness,
        "memory": asked.memory,
        "memory_limit": asked.memory_limit,
        "micro_batches": asked.micro_batches,
        "placement": _in_order(asked.placement),
        "sync_batchnorm": asked.sync_batchnorm,
        "max_error": asked.max_error,
        "codecs": list(codecs_of(asked.codecs)),
        "replan": asked.replan,
        "check_every": asked.check_every,
        "buffers": asked.buffers if isinstance(asked.buffers, str) else list(asked.buffers.items()),
        **{
            f"optimizer {number}": _settings(optimizer)
            for number, optimizer in enumerate(optimizers)
        },
        **{
            f"{_STATE} {number}": _state(optimizer, model)
            for number, optimizer in enumerate(optimizers)
        },
    }
    first, *other_ranks = comm.gather_objects(request, "parallelize: comparing what was given")
    for rank, theirs in enumerate(other_ranks, start=1):
        for key in [*first, *(name for name in theirs if name not in first)]:
            if theirs.get(key) != first.get(key):
                raise RanksDiffer(
                    f"rank {rank} and rank 0 call parallelize differently: {key}",
                    got=f"rank {rank}: {str(theirs.get(key, 'none'))[:200]}",
                    expected=f"as on rank 0: {str(first.get(key, 'none'))[:200]}",
                    do="load one state on every rank, or make a new optimizer: local steps leave "
                    "each rank a state of its own"
                    if key.startswith(_STATE)
                    else "give the same on every rank",
                    rank=rank,
                )


def _state(optimizer: Optimizer, model: nn.Module) -> str:
    """A digest of an optimizer's state of a model's parameters: it may be a checkpoint's."""
    held = [
        optimizer.state[parameter]
        for parameter in model.parameters()
        if optimizer.state.get(parameter)
    ]
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(held):
        digest.update(content(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
    return f"of {len(held)} parameters, digest {digest.hexdigest()[:12]}" if held else "none"


def _in_order(placement: Placement) -> str | list[tuple[str, int]]:
    """A placement as it is compared: of two patterns that match, the later one wins."""
    return placement if isinstance(placement, str) else list(placement.items())


def _settings(optimizer: Optimizer) -> str:
    """An optimizer as messages show it: its type, and each group's plain settings."""
    groups = [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if isinstance(value, int | float | str | tuple)
            or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"
