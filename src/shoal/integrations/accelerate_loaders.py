"""Loaders that Accelerate is given: dealt by `shoal.shard`, and known to Accelerate as its own.

Guarded by tests/trainers/test_accelerate.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin, SeedableRandomSampler, get_sampler
from accelerate.state import GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    broadcast_object_list,
    find_batch_size,
    send_to_device,
)
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from shoal.data.sharded import Positioned


class PreparedLoader(DataLoaderStateMixin):
    """A sharded loader that moves batches to a device, and tells Accelerate where it is."""

    def begin(self) -> None:
        """Tell that a pass begins. No row comes twice, so none is left over at its end."""
        self.reset()
        self.remainder = 0
        self.gradient_state._add_dataloader(self)

    def __iter__(self) -> Iterator[Any]:
        batches: Any = super().__iter__()  # the class beside has it
        self.begin()
        try:
            for number, batch in enumerate(batches):
                self.end_of_dataloader = batches.is_last
                self.rows = find_batch_size(batch)
                if number >= self.skip_batches:
                    if self.device is not None:
                        batch = send_to_device(batch, self.device, non_blocking=self.non_blocking)
                    yield batch
        finally:
            self.end()

    def cut(self, tensor: Tensor) -> Tensor:
        """Leave out rows that a short batch does not have, as where a loss is repeated."""
        is_long = tensor.dim() > 0 and len(tensor) == getattr(self, "batch_size", None)
        return tensor[: self.rows] if is_long and self.rows is not None else tensor


@cache
def _class_of(kind: type[Positioned[Any]]) -> type[Any]:
    return type(f"Prepared{kind.__name__}", (PreparedLoader, kind), {})


def prepare_loader(
    loader: Any, device: torch.device | None, config: DataLoaderConfiguration
) -> Any:
    """Return a sharded loader, the same pass for pass, that tells Accelerate where it is."""
    prepared = object.__new__(_class_of(type(loader)))  # type: ignore[arg-type]  # it has a hash
    vars(prepared).update(
        vars(loader),
        device=device,
        non_blocking=config.non_blocking,
        gradient_state=GradientState(),
        skip_batches=0,
        rows=None,
        use_stateful_dataloader=config.use_stateful_dataloader,  # save_state saves the position
    )
    return prepared


def in_accelerate_s_order(loader: Any, config: DataLoaderConfiguration) -> Any:
    """Return a loader that shuffles by the seed that Accelerate was given, and in its order.

    With `use_seedable_sampler`, as Hugging Face's Trainer has it, one process of Accelerate has the
    same order.
    """
    sampler = get_sampler(loader) if isinstance(loader, DataLoader) else None
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return loader
    if not config.use_seedable_sampler:
        if config.data_seed is not None and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(config.data_seed)
        return loader
    (seed,) = broadcast_object_list([torch.random.initial_seed()])
    seeded = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        data_seed=seed if config.data_seed is None else config.data_seed,
    )
    own, batches = copy(loader), copy(loader.batch_sampler)
    vars(batches)["sampler"] = seeded
    vars(own).update(sampler=seeded, batch_sampler=batches)  # torch sets them only as it makes one
    return own


def skipping(loader: Any, num_batches: int) -> Any:
    skipping = object.__new__(type(loader))
    vars(skipping).update(vars(loader), skip_batches=num_batches)
    return skipping
