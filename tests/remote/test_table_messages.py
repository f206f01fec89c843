"""Messages about tables: short ones take one message of the network, in 64 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.remote.channel import wire_bytes
from shoal.remote.table_messages import (
    AnyTableMessage,
    Pull,
    Push,
    ReadTableGradient,
    ReadTableState,
    ReadTableValues,
    TableDone,
    TableNorm,
    TableScale,
    TableStep,
    WriteTableGradient,
    WriteTableValues,
)
from shoal.remote.wire import MessageReader, written

ROWS, LAST = 1 << 30, 1 << 20  # of a table; the number of the last one


@pytest.mark.parametrize(
    "message",
    [
        Pull(LAST, True, torch.empty(ROWS, dtype=torch.int64, device="meta")),
        Push(
            LAST,
            False,
            torch.empty(ROWS, dtype=torch.int64, device="meta"),
            torch.empty(ROWS, 1 << 16, device="meta"),
        ),
        TableStep(LAST, True, None),
        ReadTableValues(LAST, True),
        ReadTableGradient(LAST, True),
        ReadTableState(LAST, True, 3),
        WriteTableValues(LAST, True, torch.empty(ROWS, 1 << 16, device="meta")),
        WriteTableGradient(LAST, True, None),
        TableNorm(LAST, True, 2.0),
        TableScale(LAST, True, torch.tensor(0.5)),
        TableDone(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_takes_64_bytes_beside_its_tensors(message: Any) -> None:
    content = written(message)
    assert wire_bytes(message) == 64 + sum(tensor.nbytes for tensor in content.tensors)
    if not any(tensor.is_meta for tensor in content.tensors):
        read, _ = MessageReader[Any](AnyTableMessage).read(content.text)
        assert type(read) is type(message)
