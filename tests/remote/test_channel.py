"""A channel: messages arrive in order, as they were sent, in the bytes that are stated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from wire_sizes import wire_bytes

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import WorldError
from shoal.remote.channel import HEAD_BYTES, Channel, receive, send
from shoal.remote.wire import Data, Message, MessageReader, written
from shoal_tools.testing.byte_counts import TracedComm


class Note(Message):
    number: int
    text: bytes
    tensor: Tensor | None = None


class Other(Message):
    number: int


def exchanged(messages: list[Any], kind: Any = Note) -> tuple[list[Any], int]:
    """What rank 1 gets of what rank 0 posts, and the bytes that this sends."""

    def work(comm: ThreadComm) -> Any:
        traced = TracedComm(comm)
        channel = Channel[Any](traced, 1 - comm.rank, kind)
        if comm.rank == 1:
            return [channel.next() for _ in messages]
        for message in messages:
            channel.post(message)
        channel.settle()
        return traced.counts.bytes_sent

    sent, got = run(2, work, timeout_s=10)
    return got, sent


@pytest.mark.parametrize("length", [0, 1, 20, HEAD_BYTES - 9, HEAD_BYTES, 300, 70_000])
def test_messages_arrive_whole_and_take_the_bytes_that_are_stated(length: int) -> None:
    text = bytes(number % 251 for number in range(length))
    messages = [
        Note(0, text),
        Note(1, text, torch.arange(length)),
        Note(2, b"", torch.tensor(3.0)),
    ]
    got, sent = exchanged(messages)
    assert [(each.number, each.text) for each in got] == [(0, text), (1, text), (2, b"")]
    assert got[0].tensor is None and torch.equal(got[1].tensor, torch.arange(length))
    assert got[2].tensor == 3.0
    assert sent == sum(map(wire_bytes, messages))


def test_a_short_message_is_one_of_the_network() -> None:
    def work(comm: ThreadComm) -> int:
        traced = TracedComm(comm)
        if comm.rank == 0:
            Channel[Note](traced, 1).post(Note(1, b"short"))
        return traced.counts.messages_sent

    assert run(2, work, timeout_s=10)[0] == 1
    assert wire_bytes(Note(1, b"short")) == HEAD_BYTES


@pytest.mark.parametrize("head_bytes", [16, 64, 4096])
def test_heads_of_any_length(head_bytes: int) -> None:
    def work(comm: ThreadComm) -> Any:
        if comm.rank == 0:
            for number in (1, 2):
                list(send(written(Note(number, b"x" * 500)), 1, comm, head_bytes))
            return None
        reader: MessageReader[Note] = MessageReader(Note)
        return [receive(reader, 0, comm, head_bytes) for _ in range(2)]

    first, second = run(2, work, timeout_s=10)[1]
    assert (first.number, second.number, second.text) == (1, 2, b"x" * 500)


def test_answers_are_of_the_type_that_is_asked_for() -> None:
    def work(comm: ThreadComm) -> Any:
        channel = Channel[Note](comm, 1 - comm.rank, Note)
        if comm.rank == 0:
            answers = [channel.ask(Note(1, b""), Tensor), channel.ask(Note(2, b""), Data)]
            return answers[0].tolist(), answers[1].value
        for answer in (torch.arange(3), Data({"exp_avg": (1, None)})):
            channel.next()
            channel.post(answer)
        return None

    assert run(2, work, timeout_s=10)[0] == ([0, 1, 2], {"exp_avg": (1, None)})


def raw(length: int, text: bytes) -> list[Tensor]:
    head = bytearray(length.to_bytes(8, "little") + text[: HEAD_BYTES - 8])
    head.extend(bytes(HEAD_BYTES - len(head)))
    return [
        torch.frombuffer(bytearray(part), dtype=torch.uint8)
        for part in (head, text[HEAD_BYTES - 8 :])
        if part
    ]


@pytest.mark.parametrize(
    "parts",
    [
        raw(3, b"\xff\xff\xff"),
        raw(2**63, b""),
        raw(2**40, b""),
        raw(200, b"\x91" * 200),
        raw(0, b""),
        raw(len(written(Other(1)).text), written(Other(1)).text),  # of another channel
        *(raw(100, random.Random(seed).randbytes(100)) for seed in range(20)),
    ],
)
def test_what_is_no_message_is_an_error_that_names_who_sent_it(parts: list[Tensor]) -> None:
    def work(comm: ThreadComm) -> None:
        if comm.rank == 1:
            for part in parts:
                comm.send(part, 0).wait()
            return
        with pytest.raises(WorldError, match="rank 1 sent what is no message") as caught:
            Channel[Note](comm, 1, Note).next()
        assert caught.value.rank == 1 and "do this:" in str(caught.value)

    run(2, work, timeout_s=10)
