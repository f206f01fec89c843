"""The layers of a model, the owners of its parameters, and a digest to compare models by.

A *layer* is a module that directly owns a trainable parameter. A parameter that several modules
share belongs to the first of them in `named_parameters()` order. Every rank must see the same
layers, so this is also where two ranks' models are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.probe import Layer
from shoal.core.errors import RanksDiffer

ROOT = "(model)"  # the name of the layer that the root module's own parameters make


def trainable_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Return the layers in registration order, without modules that train no parameter."""
    layers: list[Layer] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own: dict[str, nn.Parameter] = {}
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                own[f"{prefix}.{leaf}" if prefix else leaf] = parameter
            seen.add(id(parameter))
        if own:
            layers.append(Layer(prefix or ROOT, module, own))
    return tuple(layers)


def tied_modules(model: nn.Module, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the modules that hold a layer's parameter and have none of their own.

    A head with the weight of an embedding is one.
    """
    names = {layer.name for layer in layers}
    owned = {id(p) for layer in layers for p in layer.parameters.values()}
    return tuple(
        Layer(prefix or ROOT, module, {})
        for prefix, module in model.named_modules()
        if (prefix or ROOT) not in names
        and any(id(parameter) in owned for parameter in module._parameters.values())
    )


@dataclass(frozen=True)
class OtherNames:
    """Further names of a layer or a parameter that a plan knows by its first name."""

    layers: Mapping[str, str]
    parameters: Mapping[str, str]


def other_names(model: nn.Module) -> OtherNames:
    """Return the further names of tied layers and parameters, each with the name to use."""
    layers, parameters = dict[str, str](), dict[str, str]()
    known = trainable_layers(model)
    names = {layer.name for layer in known}
    owners = {
        id(parameter): (layer.name, name)
        for layer in known
        for name, parameter in layer.parameters.items()
    }
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            layer_name, name = owners.get(id(parameter), ("", ""))
            full = f"{prefix}.{leaf}" if prefix else leaf
            if name and full != name:
                parameters[full] = name
            if name and (prefix or ROOT) not in names:
                layers.setdefault(prefix or ROOT, layer_name)
    return OtherNames(layers, parameters)


def layer_signatures(model: nn.Module) -> dict[str, str]:
    """Return the type of each module that owns tensors, with their names, shapes and types.

    Two ranks with equal signatures have the same model as far as a plan can tell.
    """
    signatures: dict[str, str] = {}
    seen: dict[int, str] = {}
    for prefix, module in model.named_modules():
        parts: list[str] = []
        for leaf, parameter in module.named_parameters(recurse=False):
            first = seen.setdefault(id(parameter), f"{prefix}.{leaf}")
            frozen = "" if parameter.requires_grad else " frozen"
            tied = "" if first == f"{prefix}.{leaf}" else f" tied to {first}"
            parts.append(f"{leaf} {_form(parameter)}{frozen}{tied}")
        parts += [
            f"{leaf} {_form(buffer)} buffer" for leaf, buffer in module.named_buffers(recurse=False)
        ]
        if parts:
            signatures[prefix or ROOT] = f"{type(module).__name__}: " + ", ".join(parts)
    return signatures


def model_digest(model: nn.Module) -> str:
    """Return a digest of the signatures, in hex: the same in every process and on every machine."""
    return hashlib.sha256(json.dumps(sorted(layer_signatures(model).items())).encode()).hexdigest()


def require_same_model(model: nn.Module, comm: Comm) -> None:
    """Compare the ranks' models layer by layer, and the kinds of devices that they are on.

    Raises:
        RanksDiffer: on every rank. The error names the first layer that differs, and its rank.
    """
    signatures = layer_signatures(model)
    devices = ", ".join(sorted({parameter.device.type for parameter in model.parameters()}))
    told = comm.gather_objects((model_digest(model), devices), "parallelize: comparing models")
    for rank, (_, theirs) in enumerate(told):
        if theirs != told[0][1]:  # a GPU's gradients are scaled after the sum, others before it
            raise RanksDiffer(
                f"rank {rank} has its model on another kind of device than rank 0",
                where=f"rank {rank}",
                got=theirs,
                expected=told[0][1],
                do="move the model to the same kind of device on every rank",
                rank=rank,
            )
    if len({digest for digest, _ in told}) == 1:
        return
    first, *other_ranks = comm.gather_objects(signatures, "parallelize: comparing parts of models")
    for rank, other in enumerate(other_ranks, start=1):
        for name in [*first, *(name for name in other if name not in first)]:
            if first.get(name) != other.get(name):
                raise RanksDiffer(
                    f"rank {rank} has another model than rank 0: layer {name} differs",
                    where=f"rank {rank}, layer {name}",
                    got=other.get(name, "no such layer"),
                    expected=first.get(name, "no such layer"),
                    do="build the same model on every rank; if its shape depends on data, "
                    "broadcast that first",
                    rank=rank,
                )


def content(tensor: Tensor) -> Any:
    """Return a tensor's bytes for a digest; a sparse tensor's indices and values."""
    if tensor.layout is not torch.strided:
        return b"".join(content(part) for part in _parts(tensor))
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that make up a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
