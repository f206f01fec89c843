"""What a search is told to try, it tries, and nothing else."""

from __future__ import annotations

import pytest
from made_up import cluster, layer, linear, model

from shoal.core.errors import UsageError
from shoal.planner.plan_details import plan_for
from shoal.planner.search_options import SearchOptions

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "start"),
    [
        ((MIB, 25 * MIB), MIB),
        ((100,), 100),
        ((8 * MIB, 16 * MIB), 8 * MIB),
        ((MIB, 4 * MIB), 4 * MIB),
    ],
)
def test_a_search_begins_with_buckets_of_about_four_mib(sizes: tuple[int, ...], start: int) -> None:
    assert SearchOptions(bucket_bytes=sizes).start_bytes == start


def test_sizes_within_a_limit_or_the_least() -> None:
    options = SearchOptions(bucket_bytes=(10, 20, 30))
    assert options.sizes_within(25) == (10, 20)
    assert options.sizes_within(5) == (10,)


@pytest.mark.parametrize(
    "wrong", [{"bucket_bytes": ()}, {"chunks": ()}, {"chunks": (0,)}, {"least_part_bytes": 0}]
)
def test_what_leaves_nothing_to_try_is_refused(wrong: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="search"):
        SearchOptions(**wrong)  # type: ignore[arg-type]


def test_a_plan_keeps_what_the_search_was_told() -> None:
    net = model(linear("cut", 1.0, 8192, 8192, rows=256, product_s=1.0), layer("conv", 2.0, 10_000))
    options = SearchOptions(bucket_bytes=(1000,), least_part_bytes=10, chunks=(2,))
    plan = plan_for(net, cluster(4, 1e7), pins={"cut": "column"}, options=options)
    assert (plan.bucket_bytes, plan.least_part_bytes, plan.chunks) == (1000, 10, 2)
