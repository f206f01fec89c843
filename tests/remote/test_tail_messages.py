"""Messages to tail hosts: short ones take one message of the network beside their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.remote.channel import wire_bytes
from shoal.remote.tail_hosts import MicroBatch, backward_message, forward_message, loss_message
from shoal.remote.tail_messages import AnyTailMessage, Modes, Output, TailDone, TailStep
from shoal.remote.wire import MessageReader, written


@pytest.mark.parametrize(
    "message",
    [
        forward_message(torch.zeros(8, 3, 224, 224), None, MicroBatch(1 << 20, 99, 1 << 20)),
        forward_message(None, None, back=False),
        loss_message((torch.zeros(8, dtype=torch.int64),), {}, run=1 << 20),
        backward_message([], [], 0.5, {0: torch.tensor(1.0)}, run=1 << 20),
        Output(1 << 20),
        TailStep(3, None),
        TailDone(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_takes_64_bytes_beside_its_tensors(message: Any) -> None:
    content = written(message)
    assert wire_bytes(message) == 64 + sum(tensor.nbytes for tensor in content.tensors)
    read, tensors = MessageReader[Any](AnyTailMessage).read(content.text)
    assert type(read) is type(message) and read.key == message.key
    assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in content.tensors]


def test_what_is_set_in_the_model_goes_with_the_first_micro_batch() -> None:
    modes = Modes((True, False), (True,), (None, None))
    read, _ = MessageReader[Any](AnyTailMessage).read(written(forward_message(None, modes)).text)
    assert (read.modes.training, read.modes.trainable) == ((True, False), (True,))


def test_messages_about_different_things_have_different_keys() -> None:
    keys = [
        forward_message(None, None, MicroBatch(run, index)).key
        for run in (1, 2)
        for index in (0, 1)
    ]
    keys += [loss_message((), {}, run=1, index=index).key for index in (0, 1)]
    keys += [TailStep(number, None).key for number in (0, 1)]
    assert len(set(keys)) == len(keys)
