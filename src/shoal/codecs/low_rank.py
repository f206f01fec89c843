"""Values as a matrix of low rank, by its two factors.

    M (rows × columns) ≈ P · Qᵀ      P = orthonormal(M · Q of the round before)    Q = Mᵀ · P
    code   │ Pᵀ, float32 │ Qᵀ, float32 │

One step of the power method a round, which begins where the last one ended, so that rounds find the
largest directions together. A slice has no shape: `columns` gives its matrix that of the layer's
rows, 0 an almost square one. Both factors go in one code, since each rank and each way has its own.

Where an exchange adds on its way, ranks have a basis in common, and a matrix is the layer's own:

    even turns   P = M · B       sent, added: ΣP      ΣM ≈ ΣP · Bᵀ      B = orthonormal(ΣP)
    odd turns    Q = Mᵀ · B      sent, added: ΣQ      ΣM ≈ B · ΣQᵀ      B = orthonormal(ΣQ)

So one product and one factor a turn. A basis lies row by row, `rank` long rows: products with one
that lies otherwise take torch 4 to 15 times as long.
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
        """Rows, columns and rank of the matrix that holds so many values."""
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
        # a direction that is gone now may come again
        state[_BASIS] = right.add(basis, alpha=1e-6 * peak) if peak else basis
        return torch.cat([left.view(-1), right.view(-1)]).view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        self._read(code, into, keep=0, factor=1)

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        self._read(code, into, keep=1, factor=1)

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        self._read(code, into, keep=1, factor=-1)

    def _read(self, code: Tensor, into: Tensor, keep: int, factor: int) -> None:
        """Have `keep` times what is there and `factor` times what the code stands for, in place."""
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
        else:  # on all ranks: they begin anew
            del state[_BASIS]

    def _factors(
        self, terms: Tensor, matrix: Tensor, state: State, turn: int
    ) -> tuple[Tensor, Tensor]:
        basis = self._common(matrix, state, turn)
        if turn % 2:
            return basis.T, terms.view(len(basis), -1)
        return terms.view(-1, len(basis)), basis

    def _common(self, matrix: Tensor, state: State, turn: int) -> Tensor:
        """The basis of a turn, rank × rows or columns: the same on all ranks."""
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
    """Return the same where products are beyond float32's largest: of a part of the values, if
    need be. NaN stays NaN.
    """
    peak = values.abs().amax()
    left, right = _factors((values / peak).float(), basis, rows)
    # no number of the product is larger than a column of the matrix is long
    return left, right.mul_(min(float(peak), MOST / (2 * rows**0.5)))


def _whole_rows(values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Those rows that values fill, as a matrix, and the rest."""
    whole = len(values) // columns * columns
    return values[:whole].view(-1, columns), values[whole:]


def _basis(state: State, rank: int, length: int, like: Tensor) -> Tensor:
    """What the round before left, rank × length; at first, and after numbers that were not finite,
    random directions, the same everywhere.
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
    """Directions of the columns, as rows of one piece of memory."""
    directions: Tensor = torch.linalg.qr(thin).Q
    return directions.T.contiguous()
