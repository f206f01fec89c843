"""A channel: typed messages between this rank and another, in the order in which they were sent.

    1  head       the length of the text, in 8 bytes, and as much of the text as fits beside it
    2  rest       the part of the text that did not fit, if any
    3  tensors    each by itself, but for empty ones

A message that is short takes 64 bytes, and one message of the network. Orders to servers take a
longer head, since each message of theirs waits behind gradients. Guarded by
tests/remote/test_channel.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast, final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal.core.errors import WorldError
from shoal.remote.wire import Message, MessageReader, Written, written

HEAD_BYTES = 64
_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 28  # length limit of a text: more is no message
_UNDER_WAY = 1024
M = TypeVar("M")
T = TypeVar("T")


def send(
    content: Written, to: int, comm: Comm, head_bytes: int = HEAD_BYTES
) -> Iterator[tuple[Pending, Tensor]]:
    """Start sending a message: each pending send, and its tensor, which must not change."""
    beside = head_bytes - _LENGTH_BYTES
    # 1  head
    text = bytearray(len(content.text).to_bytes(_LENGTH_BYTES, "little") + content.text)
    if len(text) < head_bytes:
        text.extend(bytes(head_bytes - len(text)))
    words = torch.frombuffer(text, dtype=torch.uint8)
    parts = [words[:head_bytes]]
    # 2  rest
    if len(content.text) > beside:
        parts.append(words[head_bytes:])
    # 3  tensors
    parts += [tensor for tensor in content.tensors if tensor.numel()]
    for part in parts:
        yield comm.send(part, to), part


def receive(reader: MessageReader[M], source: int, comm: Comm, head_bytes: int = HEAD_BYTES) -> M:
    """Wait for a message.

    Raises:
        WorldError: something else came than a message that the reader knows.
    """
    # 1  head
    head = torch.empty(head_bytes, dtype=torch.uint8, device="cpu")
    comm.receive(head, source).wait()
    words = head.numpy().tobytes()
    length = int.from_bytes(words[:_LENGTH_BYTES], "little")
    if length > _MOST_BYTES:
        raise _no_message(source, comm, f"a text of {length} bytes")
    text = words[_LENGTH_BYTES:][:length]
    # 2  rest
    if length > len(text):
        rest = torch.empty(length - len(text), dtype=torch.uint8, device="cpu")
        comm.receive(rest, source).wait()
        text += rest.numpy().tobytes()
    # 3  tensors
    try:
        message, tensors = reader.read(text)
    except ValueError as error:
        raise _no_message(source, comm, str(error)) from error
    comm.finish([comm.receive(tensor, source) for tensor in tensors if tensor.numel()])
    return message


def _no_message(source: int, comm: Comm, got: str) -> WorldError:
    return WorldError(
        f"rank {source} sent what is no message",
        where=f"rank {comm.rank}",
        got=got[:200],
        do="start every rank with the same version of Shoal",
        rank=source,
    )


@final
class Channel(Generic[M]):
    """This rank's end of the way to another one.

    Args:
        comm: a channel. No other thread takes its messages between the two ranks.
        peer: the other rank.
        incoming: the type of message that comes, or a union of some.
        most: tensors at most that were posted and have not gone yet; a post waits for that.
    """

    def __init__(self, comm: Comm, peer: int, incoming: Any = None, most: int = _UNDER_WAY) -> None:
        self.comm, self.peer, self._most = comm, peer, most
        self._reader: MessageReader[M] = MessageReader(incoming)
        self._answers: dict[Any, MessageReader[Any]] = {}
        self._under_way: deque[tuple[Pending, Tensor]] = deque()

    def post(self, content: Any) -> None:
        """Start sending a message, or an answer; `settle` waits until all have gone."""
        while len(self._under_way) >= self._most:
            self._under_way.popleft()[0].wait()
        self._under_way.extend(send(written(content), self.peer, self.comm))

    def post_rows(self, tensor: Tensor) -> None:
        """Start sending a tensor by itself, to a peer that knows its form."""
        if tensor.numel():
            self._under_way.append((self.comm.send(tensor, self.peer), tensor))

    def receive(self, tensor: Tensor) -> Pending:
        """Start receiving a tensor that comes by itself."""
        return self.comm.receive(tensor, self.peer)

    def settle(self) -> None:
        """Wait until all that was posted has gone."""
        self.comm.finish([pending for pending, _ in self._under_way])
        self._under_way.clear()

    def next(self) -> M:
        """Wait for the next message.

        Raises:
            WorldError: something else came, or the peer was lost.
        """
        return receive(self._reader, self.peer, self.comm)

    def answer(self, kind: type[T]) -> T:
        """Wait for the answer to the last message, which is of this type."""
        if kind not in self._answers:
            self._answers[kind] = MessageReader(kind)
        return cast(T, receive(self._answers[kind], self.peer, self.comm))

    def ask(self, message: Message, kind: type[T]) -> T:
        """Post a message, and wait for the answer."""
        self.post(message)
        return self.answer(kind)
