"""Checks that all adapters make: versions of trainers, options, and models that cannot train."""

from __future__ import annotations

import re
from inspect import Parameter, signature

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import UsageError
from shoal.features import Older
from shoal.front.parallel import parallelize
from shoal.front.plan_queries import is_parallelized

# Options of parallelize. The sample is left out, as it is a trainer's first batch.
OPTIONS = frozenset(
    {
        *Older.__annotations__,
        *(
            name
            for name, parameter in signature(parallelize).parameters.items()
            if parameter.kind is Parameter.KEYWORD_ONLY
        ),
    }
    - {"sample"}
)


def check_version(
    package: str, version: str, least: tuple[int, ...], below: tuple[int, ...]
) -> None:
    """Raise UsageError if a package's version is outside of a range.

    >>> check_version("accelerate", "1.15.0", (1, 15), (2,))
    """
    numbers = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
    if not least <= numbers < below:
        low, high = (".".join(map(str, bound)) for bound in (least, below))
        raise UsageError(
            f"this adapter was not made for this version of {package}",
            got=f"{package} {version}",
            expected=f"at least {low}, and below {high}",
            do=f"pip install '{package}>={low},<{high}'",
        )


def check_model(model: nn.Module, *, first: str = "first") -> None:
    """Refuse a model that is wrapped or parallelised already, or has no values.

    Args:
        model: the model that a trainer was given.
        first: word that says when its parameters get their values.

    Raises:
        UsageError: it cannot train by Shoal.
    """
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"{type(model).__name__} is around the model already",
            do="give the trainer the module itself",
        )
    if is_parallelized(model) and not getattr(model, "_is_accelerate_prepared", False):
        raise UsageError(
            "the model is parallelised already, and this trainer's adapter would do it again",
            got=type(model).__name__,
            do="leave shoal.parallelize out, and give the adapter its options; or call "
            "shoal.unparallelize(model)",
        )
    if on_meta := names_on_meta(model):
        raise UsageError(
            "the model has parameters on a meta device, which have no values to train",
            got=", ".join(on_meta[:5]),
            do=f'give them memory and values {first}: model.to_empty(device="cpu"), then '
            "reset_parameters() of its layers, or its weights",
        )


def names_on_meta(model: nn.Module) -> list[str]:
    """Return the names of parameters without values."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]
