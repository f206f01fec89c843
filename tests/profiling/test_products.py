"""Products are measured once for equal layers, at two sizes, and lie on a line with no part below
zero.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.profiling.fit import fit_line
from shoal.profiling.products import ProductCost, ProductShape, measure_products


def test_equal_layers_share_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[ProductShape] = []
    monkeypatch.setattr(
        "shoal.profiling.products._measure",
        lambda product, _: measured.append(product) or ProductCost(1.0, 2.0),
    )
    rows = {"a": 8, "b": 8, "c": 9}
    products = {name: ProductShape.of(nn.Linear(4, 5), k) for name, k in rows.items()}
    costs = measure_products({name: product for name, product in products.items() if product}, 2)
    assert len(measured) == 2 and costs == dict.fromkeys(rows, ProductCost(1.0, 2.0))


def test_what_is_no_product_has_none() -> None:
    assert ProductShape.of(nn.LayerNorm(4), 8) is None
    assert ProductShape.of(nn.Linear(4, 5), 0) is None


def test_work_is_the_gradient_product() -> None:
    linear = ProductShape(False, 8, 4, 5, torch.float64, torch.device("cpu")).work(6)()
    assert (
        isinstance(linear, torch.Tensor)
        and linear.shape == (5, 4)
        and linear.dtype == torch.float64
    )
    table = ProductShape(True, 8, 7, 3, torch.float32, torch.device("cpu")).work(6)()
    assert isinstance(table, torch.Tensor) and table.shape == (7, 3) and 0 < table.sum() < 6 * 3


@pytest.mark.parametrize("embedding", [False, True])
def test_work_done_anew_takes_new_memory_each_time(embedding: bool) -> None:
    product = ProductShape(embedding, 8, 4, 5, torch.float32, torch.device("cpu"))
    kept, anew = product.work(6, product.buffer()), product.work(6)
    results = [kept(), kept(), anew(), anew()]
    pointers = [result.data_ptr() for result in results if isinstance(result, torch.Tensor)]
    assert pointers[0] == pointers[1] and len(set(pointers)) == 3


def test_sizes_are_the_ranks_apart_and_bounded() -> None:
    small = ProductShape(False, 8, 4, 5, torch.float32, torch.device("cpu"))
    assert small.sizes(3) == (8, 24) and small.sizes(1) == (8, 32)
    large = ProductShape(False, 1 << 20, 4096, 4096, torch.float32, torch.device("cpu"))
    low, high = large.sizes(4)
    assert high * 4096 * 4096 <= 2e9 and low == high // 4
    huge = ProductShape(False, 8, 1 << 20, 1 << 20, torch.float32, torch.device("cpu"))
    assert huge.sizes(4) == (1, 4)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({1: 3.0, 3: 7.0}, (1.0, 2.0)),
        ({1: 1.0, 2: 2.0, 4: 4.0}, (0.0, 1.0)),
        ({10: 5.0, 20: 5.0}, (5.0, 0.0)),
        ({10: 5.0}, (5.0, 0.0)),
    ],
)
def test_a_line_through_exact_points(seconds: dict[int, float], line: tuple[float, float]) -> None:
    assert fit_line(seconds) == pytest.approx(line)


def test_no_part_of_a_line_is_below_zero() -> None:
    fixed, slope = fit_line({1: 1.0, 10: 20.0})
    assert fixed == 0 and 1 < slope < 2
    fixed, slope = fit_line({1: 2.0, 10: 1.0})
    assert 1 < fixed < 2 and slope == 0
