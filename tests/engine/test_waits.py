"""What lies on a GPU is not looked at where it is not needed: that waits for all that the GPU has
still to do.

Meta tensors stand for it, which have nothing to look at, and raise; a copy to them from the host is
refused, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.threads import ThreadComm
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Round, Rounds, Transfer
from shoal.exchange.allreduce import AllReduce
from shoal.exchange.direct import Direct
from shoal.strategies.replicate import Replicate
from shoal.strategies.sliced import Sliced

pytestmark = pytest.mark.quick


class NothingFromTheHost(TorchDispatchMode):
    """Refuses a copy to the device, which waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        from_host = any(isinstance(each, Tensor) and each.device.type == "cpu" for each in args)
        if (
            from_host
            and isinstance(out, Tensor)
            and out.device.type == "meta"
            and "copy" in func.name()
        ):
            raise AssertionError(f"{func.name()} from the host")
        return out


class Alone(Round, Rounds):
    """The only round, which sends nothing."""

    accumulating = False

    def __init__(self, share: float) -> None:
        self._share = share

    @property
    def share(self) -> float:
        return self._share

    def current(self) -> Round:
        return self

    def ready(self, transfer: Transfer) -> None:
        """It is packed by hand."""

    def make_room(self, transfer: Transfer) -> None:
        """There is nothing else."""


def after_backward(
    strategy: Strategy,
    exchange: AllReduce | Direct,
    share: float = 1.0,
    bias: bool = True,
    dtype: Any = torch.float32,
) -> Transfer:
    """The transfer of a layer on a device, of which backward used all, or not the bias, and whose
    gradients landed.
    """
    model = nn.Linear(3, 2, device="meta", dtype=dtype)
    place = Place(layers={}, parameters=dict(model.named_parameters()), rank=0, ranks=2)
    (transfer,) = strategy.apply(place, exchange, "a bucket")
    backward = Alone(share)
    transfer.connect(backward)
    x = torch.empty(4, 3, device="meta", dtype=dtype)
    with NothingFromTheHost():
        nn.functional.linear(x, model.weight, model.bias if bias else None).sum().backward()
        transfer.pack(backward)
    return transfer


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_exchange_of_the_network_librarys_own(share: float, dtype: torch.dtype) -> None:
    transfer = after_backward(Replicate(), AllReduce(), share, dtype=dtype)
    with NothingFromTheHost():
        transfer.run(ThreadComm())
        transfer.publish()


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("bias", [True, False])
def test_what_backward_does_for_owners(share: float, bias: bool) -> None:
    after_backward(Sliced(), Direct(), share, bias).publish()


def test_where_this_rank_left_a_parameter_out_it_must_look_who_else_used_it() -> None:
    transfer = after_backward(Replicate(), AllReduce(), bias=False)
    transfer.run(ThreadComm())
    with pytest.raises(NotImplementedError, match="meta"):
        transfer.publish()
