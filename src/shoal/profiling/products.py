"""The cost to compute the gradient of one weight: over k rows, and as autograd computes it.

A strategy that rebuilds gradients (factor) computes them over the rows of all P ranks instead of
its own K. So the cost is measured at two sizes, in the ratio P, with a line through both. For an
nn.Linear it is the product dyᵀ·x into an existing buffer. For an nn.Embedding, k rows are added
into a table of zeros, and zeroing the table is the fixed part. Autograd takes memory for every
gradient. If that memory is new to the process, the kernel of a CPU zeroes its pages, which costs as
much as the product. The allocator decides whether it is new, and page faults tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from shoal.contracts.probe import Layer, MeasuredLayer, Probe, Trial
from shoal.core.facts import Excerpt, Facts, LayerProfile
from shoal.profiling.fit import fit_line
from shoal.profiling.processor import page_faults
from shoal.profiling.sparse import says_sparse
from shoal.profiling.timeline import DeviceClock
from shoal.profiling.weight_use import UNUSED, WeightUse, matrix_of, weight_uses

# limit on multiplications in one measurement: more would take longer and show the same
_MOST_WORK = 1e9
_MOST_ELEMENTS = 1 << 23  # limit on elements of an operand and of a result: they exceed caches


@dataclass(frozen=True)
class ProductFacts(Facts):
    """Seconds of a weight's gradient product over k rows, `fixed_s` + k · `s_per_row`.

    They are measured into existing memory.
    """

    fixed_s: float = 0.0
    s_per_row: float = 0.0
    # seconds over the layer's own K rows as autograd computes it, in part into new memory
    own_s: float = 0.0

    def seconds(self, rows: float) -> float:
        """Return seconds of the product over `rows` rows."""
        return self.fixed_s + self.s_per_row * rows

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> ProductFacts:
        more_rows = layer.rows * (excerpt.rows - 1)
        return replace(self, own_s=self.own_s + self.s_per_row * more_rows)


@final
class ProductProbe(Probe):
    """Times the products of all layers' weight gradients."""

    def measure(self, layer: Layer, trial: Trial) -> ProductFacts:
        costs, anew = trial.once(_costs)
        if layer.name not in costs:
            return ProductFacts()
        cost, watched = costs[layer.name], trial.step.layers[layer.name]
        use = weight_uses(trial).get(layer.name, UNUSED)
        outputs = shape_of(layer.module, use)[1]
        product_s = cost.fixed_s + cost.s_per_row * rows_of(watched, outputs)
        # the gradient of x costs as much as the weight's
        is_linear = isinstance(layer.module, nn.Linear) or use.served
        others_s = product_s if watched.input_grad and is_linear else 0.0
        # limit the page faults' time by the time that was measured
        most_s = max(product_s, watched.backward_s - others_s)
        return ProductFacts(
            cost.fixed_s, cost.s_per_row, own_s=min(product_s + anew * cost.anew_s, most_s)
        )


def _costs(trial: Trial) -> tuple[dict[str, ProductCost], float]:
    """Measure each layer's product, and the share of gradient memory that was new each step."""
    products = {}
    for layer in (*trial.layers, *trial.tied):
        use = weight_uses(trial).get(layer.name, UNUSED)
        rows = rows_of(trial.step.layers[layer.name], shape_of(layer.module, use)[1])
        products[layer.name] = ProductShape.of(layer.module, rows, use)
    real = {name: product for name, product in products.items() if product}
    costs = trial.known.figure(
        "products", dict[str, ProductCost], lambda: measure_products(real, trial.ranks)
    )
    known = sum(cost.page_faults for cost in costs.values())
    # an upper limit, because backward takes other memory too
    return costs, min(1.0, trial.step.page_faults / known) if known else 1.0


def shape_of(module: nn.Module, use: WeightUse) -> tuple[int, int]:
    """Return M and N of the layer as a product, (0, 0) if it is none."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, _ConvNd):
        return module.weight.numel() // module.out_channels, module.out_channels
    weight = matrix_of(module, use)
    if weight is None:
        return 0, 0
    first, second = weight.shape
    return (first, second) if use.turned else (second, first)


def rows_of(watched: MeasuredLayer, outputs: int) -> int:
    """Return K: the number of rows of N elements in the layer's output."""
    return watched.output_elements // outputs if outputs else 0


@dataclass(frozen=True)
class ProductShape:
    """Sizes and type of one product; equal layers share one measurement."""

    embedding: bool
    rows: int  # K
    inputs: int  # M, or the rows of the table
    outputs: int  # N
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, module: nn.Module, rows: int, use: WeightUse = UNUSED) -> ProductShape | None:
        """Return a module's weight gradient as a product. None if it is none, or was not run."""
        weight: Tensor | None = matrix_of(module, use)
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight
        if rows == 0 or weight is None:
            return None
        # a weight without elements, or with sparse gradients, has no product
        if weight.numel() == 0 or says_sparse(module):
            return None
        is_table, shape = isinstance(module, nn.Embedding), shape_of(module, use)
        return cls(is_table, rows, *shape, weight.dtype, weight.device)

    def sizes(self, ranks: int) -> tuple[int, int]:
        """Return two numbers of rows to measure at: K and P·K, or both scaled down."""
        factor = ranks if ranks > 1 else 4
        per_row = self.outputs * (1 if self.embedding else self.inputs)
        widest = self.outputs if self.embedding else max(self.inputs, self.outputs)
        most = min(_MOST_WORK / per_row, _MOST_ELEMENTS / widest)
        high = min(self.rows * factor, max(int(most), factor))
        return max(1, high // factor), high

    def buffer(self) -> Tensor:
        """Return a buffer that has the product's shape."""
        shape = (self.inputs, self.outputs) if self.embedding else (self.outputs, self.inputs)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def work(self, rows: int, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Return the product over that many rows, into a buffer or into new memory."""
        dy = torch.rand(rows, self.outputs, dtype=self.dtype, device=self.device)
        if self.embedding:
            ids = torch.randint(self.inputs, (rows,), device=self.device)
            if into is None:
                return lambda: dy.new_zeros(self.inputs, self.outputs).index_add_(0, ids, dy)
            return lambda: into.zero_().index_add_(0, ids, dy)
        x = torch.rand(rows, self.inputs, dtype=self.dtype, device=self.device)
        if into is None:
            return lambda: torch.mm(dy.T, x)
        return lambda: torch.mm(dy.T, x, out=into)


@dataclass(frozen=True)
class ProductCost:
    """Seconds of a product over k rows, `fixed_s` + k · `s_per_row`, and the cost of new memory."""

    fixed_s: float = 0.0
    s_per_row: float = 0.0
    anew_s: float = 0.0
    page_faults: int = 0


def measure_products(products: Mapping[str, ProductShape], ranks: int) -> dict[str, ProductCost]:
    """Measure the cost of each layer's product. All ranks call this at the same time."""
    costs = {product: _measure(product, ranks) for product in dict.fromkeys(products.values())}
    return {name: costs[product] for name, product in products.items()}


@torch.no_grad()
def _measure(product: ProductShape, ranks: int) -> ProductCost:
    clock, times = DeviceClock(product.device), 1.0
    if not product.embedding and product.inputs * product.outputs > _MOST_ELEMENTS:
        part = replace(product, outputs=max(1, _MOST_ELEMENTS // product.inputs))
        product, times = part, product.outputs / part.outputs
    low, high = product.sizes(ranks)
    buffer = product.buffer()
    low_s = clock.usual(product.work(low, buffer))
    high_s = clock.usual(product.work(high, buffer), warm=True)
    fixed_s, s_per_row = fit_line({low: low_s, high: high_s})
    del buffer
    faults: list[int] = []
    anew = product.work(low)

    def counted() -> None:
        before = page_faults()
        anew()
        faults.append(page_faults() - before)

    anew_s = max(0.0, clock.usual(counted) - fixed_s - s_per_row * low)
    return ProductCost(
        times * fixed_s, times * s_per_row, times * anew_s, round(times * faults[-1])
    )
