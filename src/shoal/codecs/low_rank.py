"""Values as a matrix of low rank, by its two factors.

    M (rows × columns) ≈ P · Qᵀ      P = orthonormal(M · Q of the round before)    Q = Mᵀ · P
    code   │ Pᵀ, float32 │ Qᵀ, float32 │

Each round makes one step of the power method from the last round's result, so that over rounds the
largest directions are found. A slice has no shape: if `columns` is the length of the layer's rows,
its matrix is the layer's. 0 makes an almost square matrix. Both factors go in one code, because
each rank and each way has its own.

If an exchange adds on its way, ranks have a common basis, and a matrix is the layer's own:

    even turns   P = M · B       sent, added: ΣP      ΣM ≈ ΣP · Bᵀ      B = orthonormal(ΣP)
    odd turns    Q = Mᵀ · B      sent, added: ΣQ      ΣM ≈ B · ΣQᵀ      B = orthonormal(ΣQ)

So a turn has one product and one factor. A basis lies in memory row by row, in `rank` long rows:
with another layout torch takes 4 to 15 times as long for products.
Reference: Vogels et al., "PowerSGD", NeurIPS 2019; Zhang et al., "Evaluation and Optimization of
Gradient Compression for Distributed Deep Learning" (ACP-SGD), ICDCS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isqrt
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.ranges import MOST
from shoal.contracts.codec import LinearCodec, State
from shoal.contracts.learning import LATER, LearningPrice
from shoal.core.numbers import check_whole

_BASIS = "basis"


@final
@dataclass(frozen=True)
class LowRank(LinearCodec):
    """Four bytes for each element of the factors."""

    name: ClassVar[str] = "low_rank"
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.95
    learning: ClassVar[LearningPrice] = LearningPrice(1.79, LATER)
    learning_added: ClassVar[LearningPrice] = LearningPrice(1.59, LATER)
    hints: ClassVar[tuple[str, ...]] = (_BASIS,)
    rank: int = 4
    columns: int = 0

    def __post_init__(self) -> None:
        rule = "low_rank has a rank from 1 to 256, and columns of 0 or more"
        do = "leave them out: rank is 4, and the matrix almost square"
        check_whole(rule, self.rank, 1, 256, do=do)
        check_whole(rule, self.columns, 0, do=do)

    def _shape(self, numel: int) -> tuple[int, int, int]:
        """Return the rows, columns and rank of the matrix that holds so many values."""
        columns = min(self.columns or isqrt(numel - 1) + 1, numel)
        rows = -(-numel // columns)
        return rows, columns, min(self.rank, rows, columns)

    def nbytes(self, numel: int, itemsize: int) -> int:
        rows, columns, rank = self._shape(numel)
        return 4 * rank * (rows + columns)

    def encode(self, values: Tensor, state: State) -> Tensor:
        rows, columns, rank = self._shape(len(values))
        basis = _basis(state, rank, columns, values)
        left, right = _factors(values.float(), basis, rows)
        if not isfinite(peak := float(right.abs().amax())):
            left, right = _factors_of_large(values, basis, rows)
            peak = float(right.abs().amax())
        # keep a little of the old basis, because a direction without values now may return
        state[_BASIS] = right.add(basis, alpha=1e-6 * peak) if peak else basis
        return torch.cat([left.view(-1), right.view(-1)]).view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        self._read(code, into, keep=0, factor=1)

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        self._read(code, into, keep=1, factor=1)

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        self._read(code, into, keep=1, factor=-1)

    def _read(self, code: Tensor, into: Tensor, keep: int, factor: int) -> None:
        """Multiply values by `keep` in place, and add `factor` times the decoded ones."""
        rows, columns, rank = self._shape(len(into))
        left, right = code.view(torch.float32).to(into.dtype).split([rank * rows, rank * columns])
        left, right = left.view(rank, rows), right.view(rank, columns)
        matrix, rest = _whole_rows(into, columns)
        matrix.addmm_(left[:, : len(matrix)].T, right, beta=keep, alpha=factor)
        if len(rest):
            rest.addmv_(right[:, : len(rest)].T, left[:, -1], beta=keep, alpha=factor)

    def num_terms(self, rows: int, columns: int, turn: int) -> int:
        rank = min(self.rank, rows, columns)
        if (rows + columns) * rank >= rows * columns:
            return rows * columns
        return rank * (columns if turn % 2 else rows)

    def to_terms(self, matrix: Tensor, state: State, turn: int) -> Tensor:
        basis = self._common(matrix, state, turn)
        return (basis @ matrix if turn % 2 else matrix @ basis.T).view(-1)

    def subtract_terms(self, terms: Tensor, matrix: Tensor, state: State, turn: int) -> None:
        matrix.addmm_(*self._factors(terms, matrix, state, turn), alpha=-1)

    def from_sums(self, sums: Tensor, into: Tensor, state: State, turn: int) -> None:
        factors = self._factors(sums, into, state, turn)
        torch.mm(*factors, out=into)
        if sums.sum().isfinite():
            state[_BASIS] = _orthonormal(factors[1].T if turn % 2 else factors[0])
        else:  # the sums are not finite, on all ranks: they start with a new basis
            del state[_BASIS]

    def _factors(
        self, terms: Tensor, matrix: Tensor, state: State, turn: int
    ) -> tuple[Tensor, Tensor]:
        basis = self._common(matrix, state, turn)
        if turn % 2:
            return basis.T, terms.view(len(basis), -1)
        return terms.view(-1, len(basis)), basis

    def _common(self, matrix: Tensor, state: State, turn: int) -> Tensor:
        """Return the basis of a turn, rank × rows or columns: the same on all ranks."""
        rows, columns = matrix.shape
        length, rank = rows if turn % 2 else columns, min(self.rank, rows, columns)
        if _BASIS not in state:
            state[_BASIS] = _orthonormal(_basis(state, rank, length, matrix).to(matrix.dtype).T)
        return state[_BASIS]


def _factors(values: Tensor, basis: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the values' matrix, rank × rows and rank × columns."""
    rank, columns = basis.shape
    matrix, rest = _whole_rows(values, columns)
    left = matrix.new_empty(rows, rank)
    torch.mm(matrix, basis.T, out=left[: len(matrix)])
    if len(rest):
        torch.mv(basis[:, : len(rest)], rest, out=left[-1])
    left = _orthonormal(left)
    right = left[:, : len(matrix)] @ matrix
    if len(rest):
        right[:, : len(rest)].addr_(left[:, -1], rest)
    return left, right


def _factors_of_large(values: Tensor, basis: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the factors of values with products beyond float32's largest.

    They are factors of a part of the values, if need be. NaN stays NaN.
    """
    peak = values.abs().amax()
    left, right = _factors((values / peak).float(), basis, rows)
    # a number of the product is at most the length of a column of the matrix
    return left, right.mul_(min(float(peak), MOST / (2 * rows**0.5)))


def _whole_rows(values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Split values into the rows that they fill, as a matrix, and the rest."""
    whole = len(values) // columns * columns
    return values[:whole].view(-1, columns), values[whole:]


def _basis(state: State, rank: int, length: int, like: Tensor) -> Tensor:
    """Return the earlier round's basis, rank × length.

    At first, and after numbers that were not finite, it has random directions, the same on all
    ranks.
    """
    basis = state.get(_BASIS)
    if basis is not None and isfinite(peak := float(basis.abs().amax())) and peak:
        basis = basis / peak
    else:
        generator = torch.Generator("cpu").manual_seed(length)
        shape, numbers = (rank, length), torch.float32
        basis = torch.randn(shape, generator=generator, dtype=numbers, device="cpu").to(like.device)
    return basis


def _orthonormal(thin: Tensor) -> Tensor:
    """Return the directions of the columns, as rows of one block of memory."""
    directions: Tensor = torch.linalg.qr(thin).Q
    return directions.T.contiguous()
