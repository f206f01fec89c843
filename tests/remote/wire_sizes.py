"""The bytes that a message takes on the wire."""

from __future__ import annotations

from typing import Any

from shoal.remote.channel import HEAD_BYTES
from shoal.remote.wire import written

LENGTH_BYTES = 8  # of the text's length


def wire_bytes(content: Any) -> int:
    """Bytes that a message, or an answer, takes on the wire."""
    message = written(content)
    rest = max(0, len(message.text) - (HEAD_BYTES - LENGTH_BYTES))
    return HEAD_BYTES + rest + sum(tensor.nbytes for tensor in message.tensors)
