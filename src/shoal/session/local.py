"""Models whose ranks step by themselves: what they have in common.

    global_weights   the model has what all ranks have in common, for a while: to evaluate
    latest_weights   the same, with what is under way: to save
    outer_state      the outer rule's, for checkpoints: by parameter, of any number of ranks
    begin_anew       a round begins with what was loaded
    mean_state       an optimizer's state is each rank's own: a checkpoint has the mean

Where servers have the weights, all ranks meet before anybody looks at them, and once more behind
it: so all see one moment, in which all that was pushed has been added.

As long as all ranks exchange gradients, in the warm-up, all of them have everything.

Guarded by tests/equivalence/test_local_steps.py and test_geo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import StateDict
from shoal.contracts.state import states
from shoal.core.errors import UsageError
from shoal.session.additions import uncompiled
from shoal.session.session import Attached, current, found
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.local import LocalTransfer
from shoal.strategies.moving import OfState


def _on_local_steps(model: nn.Module) -> Attached | None:
    """What runs a model on local steps, also in their warm-up."""
    session = found()
    attached = None if session is None else session.attached.get(uncompiled(model))
    return attached if attached is not None and attached.plan.local_steps else None


def _attached(model: nn.Module) -> Attached | None:
    """What runs a model, if its ranks step by themselves now."""
    attached = _on_local_steps(model)
    rounds = None if attached is None else attached.running.rounds
    return None if rounds is None or rounds.is_exact else attached


def _transfers(attached: Attached) -> list[LocalTransfer]:
    return [t for t in attached.engine.transfers if isinstance(t, LocalTransfer)]


def _at_servers(attached: Attached) -> list[GeoTransfer]:
    return [t for t in attached.engine.transfers if isinstance(t, GeoTransfer)]


def _ask_servers(
    attached: Attached, ask: Callable[[GeoTransfer, Comm], None], purpose: str
) -> None:
    """Have each transfer ask servers something while nobody pushes (a collective).

    Args:
        attached: what runs the model.
        ask: `GeoTransfer.look` or `GeoTransfer.put`.
        purpose: the same in words, before "the weights".
    """
    if at_servers := _at_servers(attached):
        comm = current().comm
        comm.gather_objects(None, f"local steps: before ranks {purpose} the weights")
        for transfer in at_servers:
            attached.engine.routes.later(
                transfer, partial(ask, transfer), f"{purpose} the weights of"
            )
        for transfer in at_servers:
            attached.engine.routes.settle(transfer)
        comm.gather_objects(None, f"local steps: ranks {purpose} the weights")


def check_in_step(models: Iterable[nn.Module]) -> None:
    """Refuse models whose ranks step by themselves."""
    if any(_on_local_steps(model) for model in models):
        raise UsageError(
            "torch.distributed.checkpoint does not have what local steps need to go on: the "
            "outer rule's state",
            do="save with shoal.save or shoal.Checkpoints",
        )


def settle(model: nn.Module) -> None:
    """Wait for what is under way, and take it over (a collective)."""
    if (attached := _attached(model)) is not None:
        attached.engine.settle()


@contextmanager
def latest_weights(model: nn.Module) -> Iterator[None]:
    """As `global_weights`, with what is under way, which is waited for (a collective).

    The outer rule's state, and what codecs owe, are of that moment, too.
    """
    attached = _attached(model)
    if attached is None:
        yield
        return
    attached.engine.wait()
    _ask_servers(attached, GeoTransfer.look, "look at")
    common = _common(attached, latest=True)
    for transfer in _at_servers(attached):
        transfer.forget()
    with _having(model, common):
        yield


@contextmanager
def global_weights(model: nn.Module) -> Iterator[None]:
    """Within it a model has the weights that all ranks have in common: to evaluate, or to look.

    With `local_steps` a rank's own weights differ from them until a round ends. Here they are those
    with which the running round began, and buffers too. Nothing is sent, so one rank may do it
    alone. Behind it this rank has its own weights again. With any other plan nothing happens.

    Args:
        model: a parallelised one, between a step and the next forward. Not to be trained inside.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> with shoal.global_weights(model):
        ...     output = model(torch.ones(3, 4))
    """
    attached = _attached(model)
    if attached is None:
        yield
        return
    with _having(model, _common(attached)):
        yield


@contextmanager
def _having(model: nn.Module, common: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it a model has those values, and behind it its own again."""
    held = _tensors(model)
    own = {name: held[name].detach().clone() for name in common}
    with torch.no_grad():
        for name, value in common.items():
            held[name].copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in own.items():
                held[name].copy_(value)


def take_global(model: nn.Module) -> None:
    """Have the model keep the weights that all ranks have in common (a collective)."""
    if (attached := _attached(model)) is not None:
        attached.engine.settle()
        _ask_servers(attached, GeoTransfer.look, "look at")
        held = _tensors(model)
        with torch.no_grad():
            for name, value in _common(attached, latest=True).items():
                held[name].copy_(value)


def _common(attached: Attached, *, latest: bool = False) -> dict[str, Tensor]:
    """What all ranks have in common, by name in the model."""
    common: dict[str, Tensor] = {}
    for transfer in attached.engine.transfers:
        if isinstance(transfer, LocalTransfer):
            common |= transfer.common(latest=latest)
        elif isinstance(transfer, GeoTransfer):
            for name, piece in transfer.pieces.items():
                common.setdefault(name, torch.empty_like(piece.parameter).detach())
            transfer.global_into(common, latest=latest)
        elif isinstance(transfer, OfState) and transfer.local is not None:
            common |= transfer.common()
    return common


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, as they are now."""
    model = uncompiled(model)
    of_state = {name: s.tensor for name, s in states(model, None).items()}
    return {
        **dict(model.named_parameters()),
        **{name: tensor for name, tensor in of_state.items() if tensor is not None},
    }


def outer_state(model: nn.Module) -> StateDict:
    """The outer rule's state by parameter name; {} where there is none (a collective)."""
    attached = _attached(model)
    found_state: StateDict = {}
    for transfer in _transfers(attached) if attached is not None else ():
        found_state |= transfer.state(current().comm)
    return found_state


def begin_anew(
    model: nn.Module, state: Mapping[str, Mapping[str, Tensor]], warmup_steps: int | None = 0
) -> None:
    """Begin a round with the weights that were loaded, and the outer rule's state.

    Args:
        model: any.
        state: as `outer_state` gives it.
        warmup_steps: exact steps that were made before; None for as many as are to be.

    Raises:
        UsageError: it is another model's.
    """
    if (attached := _on_local_steps(model)) is None:
        return
    own = {name for transfer in _transfers(attached) for name in transfer.parameters}
    own |= {name for transfer in _at_servers(attached) for name in transfer.pieces}
    if unknown := sorted(state.keys() - own):
        raise UsageError(
            "the outer rule's state is that of another model",
            where=f"parameter {unknown[0]}",
            got=f"{len(unknown)} parameters that this model does not train",
            do="load a checkpoint of this model",
        )
    assert attached.running.rounds is not None
    attached.running.rounds.begin(state, warmup_steps)
    _ask_servers(attached, GeoTransfer.put, "give servers")


def mean_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer as a checkpoint has it: where ranks step by themselves, the mean.

    An island counts as one rank. Of a parameter that not every rank has a state of it is rank 0's.

    Args:
        optimizer: any.
        state: its state_dict.
    """
    session = found()
    trained = [] if session is None else session.optimizers.items()
    of_this = [model for model, of_model in trained if optimizer in of_model]
    attached = next(filter(None, map(_attached, of_this)), None)
    if attached is None:
        return state
    comm, parts = current().comm, _parts(attached)
    own = state["state"]
    listed = {number: list(values) for number, values in own.items()}
    everywhere = comm.gather_objects(listed, "optimizer.state_dict()")
    mean = dict(own)
    for number, names in everywhere[0].items():
        if all(other.get(number) == names for other in everywhere):
            mean[number] = {
                name: _mean(value, parts, comm.all_reduce) for name, value in own[number].items()
            }
    return {**state, "state": mean}


def _parts(attached: Attached) -> int:
    """Of how many parts this rank has one, in a mean over those who step by themselves."""
    comm, outer = current().comm, attached.plan.outer
    if outer is None or not outer.islands:
        return comm.size
    hosts = comm.topology.ranks_on
    return len(hosts) * len(hosts[comm.topology.hosts[comm.rank]])


def _mean(value: Any, parts: int, all_reduce: Callable[[Tensor], None]) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    total = value.detach().clone(memory_format=torch.preserve_format).div_(parts)
    flat = total.reshape(-1).contiguous()
    all_reduce(flat)
    return total.copy_(flat.view(total.shape))
