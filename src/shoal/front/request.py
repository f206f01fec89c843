"""The request: all arguments of `parallelize`, checked here and compared among the ranks.

Options that do not go together are refused in one place, by a plan. Before anything is measured
that plan is a draft: a given plan, or one that has the pinned layers only, with the additions of
features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.contracts.batch_loss import given_loss
from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.contracts.feature import (
    Feature,
    Features,
    PlanFacts,
    accepts,
    in_order,
    of_plan,
    planned,
    refuse,
)
from shoal.contracts.sample import check_compute_loss
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError, RanksDiffer, UsageError
from shoal.core.facts import Cluster
from shoal.core.names import by_known_names
from shoal.core.placement import check_placement
from shoal.core.plan import Choice, Plan
from shoal.core.registry import from_outside
from shoal.front.options import Options, compared, in_order_of_patterns
from shoal.optim.checks import check_optimizer
from shoal.optim.closure_loss import check_updated_everywhere
from shoal.planner.options import check_able, known, micro_batches_of, resolve, with_pins
from shoal.profiling.identity import content, model_digest, other_names, trainable_layers
from shoal.profiling.moving_state import check_ways
from shoal.remote.tail_hosts import TailHosts
from shoal.rewrite.apply import check
from shoal.servers.servers import Servers
from shoal.session.pending_model import pending_of
from shoal.session.session import Session, current
from shoal.session.watch import is_counted
from shoal.tensors.cut import is_cut

# fields of a plan that ranks do not compare here; choices and placement are compared apart
_NOT_COMPARED = ("choices", "placement", "predicted_s")
_STATE = "state of optimizer"  # its number follows
_ORDER = "call parallelize(model, loss_fn, optimizer, sample=(x, y))"


@dataclass(frozen=True)
class Request:
    """A checked request: options, features, draft of a plan, and facts.

    Args:
        options: the options as they were given.
        features: features of training, in their order: asked for, of the given plan, or always
            there.
        draft: the given plan, or the pinned layers, with the additions of features.
        facts: the facts that are known before anything is measured.
        usable: names of the strategies that the planner may use: no feature refuses them.
    """

    options: Options
    features: Features
    draft: Plan
    facts: PlanFacts
    usable: tuple[str, ...] = ()

    @property
    def given_plan(self) -> Plan | None:
        """The given plan; None if one must be made."""
        return None if self.options.plan == "auto" else self.draft

    def is_nothing_for_one(self) -> bool:
        """Return whether one process trains by itself as it would without Shoal.

        On one rank Shoal's own features do nothing that the plan does not say. Others may.
        """
        strangers = from_outside(Feature)
        return self.draft.is_plain and not any(f.name in strangers for f in self.features)

    def without_model(self) -> Request:
        """Return the request without its model, for a record that hangs on the model."""
        return self.of_model(nn.Identity())

    def of_model(self, model: nn.Module) -> Request:
        """Return the request for this model."""
        return replace(self, facts=replace(self.facts, model=model))


def checked(
    options: Options, model: Any, loss_fn: Any, optimizer: Any, session: Session
) -> Request:
    """Refuse arguments that cannot be parallelised. Otherwise return the request."""
    optimizers = listed(optimizer)
    check_functions(options, loss_fn)
    loss = given_loss(options.compute_loss, loss_fn)
    parameters = _check_model(model, session)
    _check_left_alone(options.left_alone, model)
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    own = parameters | set(map(id, options.left_alone))
    if isinstance(options.compute_loss, nn.Module) or session.other(TailHosts) is not None:
        _check_loss(loss, own)
    if isinstance(loss_fn, nn.Module):
        parameters |= held & {id(parameter) for parameter in loss_fn.parameters()}
    _check_optimizers(optimizers, parameters)
    check_ways(options.buffers, model, loss)
    request = request_of(options, model, facts_for(options, model, None))
    check_updated_everywhere(optimizers, model, request.draft)
    return request


def request_of(options: Options, model: nn.Module, facts: PlanFacts) -> Request:
    """Make the request for a model. Refuse a plan or options that do not go together."""
    options = _by_known_names(options, model)
    given = options.given_plan()
    if given is not None and options.pins:
        given = with_pins(given, options.pins)
    if given is None:
        layers = {layer.name: list(layer.parameters) for layer in trainable_layers(model)}
        features = in_order(options.features)
        draft = planned(_draft(options, model, list(layers), facts), features, facts)
        ahead = draft.runs_ahead
        check_placement(options.placement, layers, facts.topology.size, facts.servers, stale=ahead)
    else:
        check_beside(given, options.features, facts)
        check(given, model, facts.topology.size, facts.servers, facts.tail_hosts)
        features = of_plan(given, options.features)
        draft = planned(given, features, facts)
    usable = _usable(options, features, draft, facts)
    if given is None:
        modules = {layer.name: layer.module for layer in trainable_layers(model)}
        pinned = {choice.layer: choice.strategy for choice in draft.choices}
        check_able(modules, pinned, usable, facts.servers, facts.tail_hosts)
    return Request(options, features, draft, facts, usable)


def _by_known_names(options: Options, model: nn.Module) -> Options:
    """Return the options, in which a head that is tied to a table has the table's name.

    A plan knows a tied parameter by the first layer that holds it.
    """
    others = other_names(model)
    if not others.layers and not others.parameters:
        return options
    layers = {layer.name: list(layer.parameters) for layer in trainable_layers(model)}
    pins, placement = options.pins, options.placement
    if pins:
        pins = by_known_names(pins, layers, others.layers)
    if isinstance(placement, dict):
        names = [*layers, *(name for own in layers.values() for name in own)]
        further = {**others.parameters, **others.layers}
        placement = by_known_names(placement, names, further)
    return replace(options, pins=pins, placement=placement)


def _usable(options: Options, features: Features, draft: Plan, facts: PlanFacts) -> tuple[str, ...]:
    """Return the names of the strategies that no feature refuses for every layer.

    Raises:
        PlanError: features refuse every strategy that is asked for.
    """
    layers = [layer.name for layer in trainable_layers(facts.model)]

    def drafts(name: str) -> Iterator[Plan]:
        return (replace(draft, choices=(Choice(layer, name),)) for layer in layers)

    names = known(options.strategies)
    found = [name for name in names if any(accepts(each, features, facts) for each in drafts(name))]
    if not found:
        refuse(next(drafts(names[0])), features, facts)
    return tuple(found)


def check_beside(given: Plan, asked: Features, facts: PlanFacts) -> None:
    """Refuse a feature that contradicts the given plan."""
    for feature in asked:
        if feature.plan(given, facts) != given:
            raise PlanError(
                f"there are both a plan and {feature.name}",
                do=f"write {feature.name} into the plan",
            )


def facts_for(options: Options, model: nn.Module, cluster: Cluster | None) -> PlanFacts:
    """Return the facts about a model and its ranks that are known before anything is measured.

    Args:
        options: the options that are asked for.
        model: the module.
        cluster: ranks that are only imagined; None: the session's ranks.
    """
    counted = options.count is not None
    if cluster is not None:
        servers, tail = len(cluster.servers), len(cluster.tail)
        return PlanFacts(model, cluster.topology, servers, tail, counted)
    session = current()
    others, ends = session.other(Servers), session.other(TailHosts)
    servers, tail = len(others.hosts) if others else 0, len(ends.hosts) if ends else 0
    return PlanFacts(model, session.comm.topology, servers, tail, counted)


def _draft(options: Options, model: nn.Module, layers: Sequence[str], facts: PlanFacts) -> Plan:
    """Make a plan of the pinned layers, which are known before the search."""
    pinned = resolve(options.pins or {}, layers)
    return Plan(
        facts.topology.size,
        model_digest(model),
        tuple(Choice(layer, *way) for layer, way in pinned.items()),
        options.search_options.start_bytes,
        lanes=1,
        placement=options.placement,
        micro_batches=micro_batches_of(options.micro_batches, [way for way, _ in pinned.values()]),
    )


def check_functions(options: Options, loss_fn: Any) -> None:
    """Refuse a loss that is no function, or that is another model's."""
    if options.compute_loss is not None:
        check_compute_loss(options.compute_loss, loss_fn)
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError("the loss is not callable", got=type(loss_fn).__name__, do=_ORDER)
    if isinstance(loss_fn, type):
        raise UsageError(
            "the loss is a class",
            got=loss_fn.__name__,
            do=f"give an instance: {loss_fn.__name__}()",
        )
    if is_counted(given_loss(options.compute_loss, loss_fn)):
        raise UsageError(
            "the loss is counted for another model already, and would weigh that one's gradients, "
            "too",
            do="give each model a loss of its own: another instance, or the function that was "
            "given first",
        )


def _check_model(model: Any, session: Session) -> set[int]:
    """Refuse a model that cannot be rewritten; return the ids of its trainable parameters."""
    if not isinstance(model, nn.Module):
        raise UsageError("the model is not an nn.Module", got=type(model).__name__, do=_ORDER)
    if model in session.attached or pending_of(model) is not None:
        raise UsageError("the model is parallelised already", do="call parallelize once a model")
    for name, module in model.named_modules():
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
    others = [*session.attached, *filter(pending_of, session.optimizers)]
    elsewhere = {id(p) for other in others for p in other.parameters() if p.requires_grad}
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
            "the model has no trainable parameter",
            do="unfreeze a layer before parallelize. To use the model without training give None "
            "for the optimizer",
        )
    return parameters


def _check_left_alone(left_alone: tuple[Any, ...], model: nn.Module) -> None:
    """Refuse parameters that cannot be left alone."""
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
                do="before parallelize make it a part of the model: model.loss = loss_fn. Or say "
                "left_alone=loss_fn.parameters(), if your program sees to it",
            )


def _check_optimizers(optimizers: list[Optimizer], parameters: set[int]) -> None:
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in parameters for p in held):
            raise UsageError(
                f"the optimizer {type(optimizer).__name__} holds none of the model's parameters",
                do="build it from model.parameters() of the model you give",
            )


def listed(optimizer: Any) -> list[Optimizer]:
    """Return one optimizer, or several, as a list."""
    listed = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for item in listed:
        check_optimizer(item)
    return listed


def require_same(
    comm: Comm, request: Request, model: nn.Module, optimizers: list[Optimizer]
) -> None:
    """Raise RanksDiffer if ranks ask for different things. Models are compared later."""
    own = _parts_to_compare(request, model, optimizers)
    first, *other_ranks = comm.gather_objects(own, "parallelize: comparing what was given")
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


def _parts_to_compare(
    request: Request, model: nn.Module, optimizers: list[Optimizer]
) -> dict[str, Any]:
    """Return the parts of a request that ranks compare, by their names in messages."""
    plan, given = request.draft, request.given_plan is not None
    of_plan: dict[str, Any] = {"plan": "a plan of its own" if given else "auto"}
    if given:
        of_plan |= {f"plan for layer {choice.layer}": choice.way for choice in plan.choices}
        names = [field.name for field in fields(plan) if field.name not in _NOT_COMPARED]
        of_plan |= {f"plan's {name}": in_order_of_patterns(getattr(plan, name)) for name in names}
        of_plan["plan's placement"] = in_order_of_patterns(plan.placement)
        of_plan["order of layers in the plan"] = [choice.layer for choice in plan.choices]
    return {
        **{
            f"{contract.__name__.lower()} {name!r} of its own": place
            for contract in (Strategy, Exchange, Codec, Feature)
            for name, place in from_outside(contract).items()
        },
        **compared(request.options, request.features),
        **of_plan,
        "features": [feature.name for feature in request.features],
        **{f"optimizer {n}": _settings(optimizer) for n, optimizer in enumerate(optimizers)},
        **{f"{_STATE} {n}": _state(optimizer, model) for n, optimizer in enumerate(optimizers)},
    }


def _state(optimizer: Optimizer, model: nn.Module) -> str:
    """Digest an optimizer's state of a model's parameters. It may be a checkpoint's state."""
    held = [
        optimizer.state[parameter]
        for parameter in model.parameters()
        if optimizer.state.get(parameter)
    ]
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(held):
        digest.update(content(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
    return f"of {len(held)} parameters, digest {digest.hexdigest()[:12]}" if held else "none"


def _settings(optimizer: Optimizer) -> str:
    """Describe an optimizer for messages: its type, and each group's plain settings."""
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
