"""What lies on a GPU is not looked at where it is not needed: that waits for all that the GPU has still to do.

Meta tensors stand for it, which have nothing to look at, and raise.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.comm.threads import ThreadComm
from shoal.core.contracts import OwnedTransfer, Place, Strategy, Transfer
from shoal.exchange.allreduce import AllReduce
from shoal.exchange.direct import Direct
from shoal.strategies.replicate import Replicate
from shoal.strategies.sliced import Sliced


def after_backward(strategy: Strategy, exchange: AllReduce | Direct, bias: bool = True) -> tuple[nn.Linear, Transfer]:
    """A layer on a device, of which backward used all, or not the bias; and its transfer, on which gradients landed."""
    model = nn.Linear(3, 2, device="meta")
    place = Place(layers={}, parameters=dict(model.named_parameters()), rank=0, ranks=2)
    (transfer,) = strategy.apply(place, exchange, "a bucket")
    transfer.ready = lambda _: None
    if isinstance(transfer, OwnedTransfer):
        transfer.settle = lambda: None
    nn.functional.linear(torch.empty(4, 3, device="meta"), model.weight, model.bias if bias else None).sum().backward()
    return model, transfer


def test_a_whole_exchange_of_the_network_librarys_own() -> None:
    model, transfer = after_backward(Replicate(), AllReduce())
    transfer.pack()
    transfer.run(ThreadComm())
    transfer.publish()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_backward_does_for_owners(share: float) -> None:
    _, transfer = after_backward(Sliced(), Direct())
    transfer.share = share
    transfer.pack()
    transfer.publish()


def test_where_this_rank_left_a_parameter_out_it_must_look_who_else_used_it() -> None:
    _, transfer = after_backward(Replicate(), AllReduce(), bias=False)
    transfer.pack()
    transfer.run(ThreadComm())
    with pytest.raises(NotImplementedError, match="meta"):
        transfer.publish()
