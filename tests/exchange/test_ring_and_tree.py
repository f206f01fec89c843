"""Ring and tree: their rounds, and the chunks that they send."""

from __future__ import annotations

import pytest
import torch
from performed import (
    RANKS,
    distinct,
    perform,
    same_bits,
)

from shoal.contracts.exchange import Bucket
from shoal.core.errors import UsageError
from shoal.exchange.ring import Ring
from shoal.exchange.tree import Tree

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("ranks", "busiest"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)]
)
def test_the_busiest_rank_of_a_tree(ranks: int, busiest: int) -> None:
    assert Tree().traffic(Bucket(1000, 4), distinct(ranks)).worst == busiest * 4000


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 11), (3, 11), (4, 13), (7, 13), (8, 15)])
def test_rounds_of_a_tree_are_its_levels_and_its_chunks(ranks: int, rounds: int) -> None:
    assert Tree(chunk_bytes=400).traffic(Bucket(1000, 4), distinct(ranks)).rounds == rounds


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 10), (3, 10), (4, 10)])
def test_rounds_of_a_ring_are_its_steps_and_its_further_chunks(ranks: int, rounds: int) -> None:
    assert Ring(chunk_bytes=200).traffic(Bucket(500, 4), distinct(ranks)).rounds == rounds


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", [Ring, Tree])
def test_the_size_of_a_chunk_does_not_change_a_bit(kind: type[Ring | Tree], ranks: int) -> None:
    whole, chunked = (
        perform(kind(chunk_bytes=size), ranks, 1000, torch.float32) for size in (1 << 20, 100)
    )
    assert same_bits(whole[0].after_gather, chunked[0].after_gather)
    assert ranks == 1 or chunked[0].counts.messages_sent > whole[0].counts.messages_sent


@pytest.mark.parametrize("kind", [Ring, Tree])
def test_no_chunks_are_refused(kind: type[Ring | Tree]) -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        kind(chunk_bytes=0)


def test_a_small_bucket_goes_up_and_down_a_tree_in_chunks_where_it_stands_for_a_large_one() -> None:
    small, large = 256 << 10, 4 << 20
    assert Tree().scaled(large) == Tree()
    assert Tree().scaled(small) == Tree(chunk_bytes=small // 4)
    assert Tree(chunk_bytes=1024).scaled(small) == Tree(chunk_bytes=1024)
    assert Ring().scaled(small) == Ring()
