"""Values as a matrix of low rank, by its two factors.

    M (rows × columns) ≈ P · Qᵀ      P = orthonormal(M · Q of the round before)    Q = Mᵀ · P
    code   │ P, float32 │ Q, float32 │

One step of the power method a round, which begins where the last one ended, so that rounds find the
largest directions together. A slice has no shape: `columns` gives its matrix that of the layer's
rows, 0 an almost square one. Both factors go in one code, since each rank and each way has its own:
twice the bytes of a scheme whose factors take turns (Zhang et al., ACP-SGD, 2023).
Reference: Vogels et al., "PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.contracts.codec import Codec, State
from shoal.core.errors import UsageError

_BASIS = "basis"


@final
@dataclass(frozen=True)
class LowRank(Codec):
    """Four bytes for each element of the factors."""

    name: ClassVar[str] = "low_rank"
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.95
    hints: ClassVar[tuple[str, ...]] = (_BASIS,)
    rank: int = 4
    columns: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256 or self.columns < 0:
            raise UsageError(
                "low_rank has a rank from 1 to 256, and columns of 0 or more",
                got=str(self),
                do="leave them out: rank is 4, and the matrix almost square",
            )

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
        matrix = pad(values, (0, rows * columns - len(values))).view(rows, columns).float()
        basis = state.get(_BASIS)
        if basis is None or not basis.isfinite().all():
            generator = torch.Generator().manual_seed(columns)
            basis = torch.randn(columns, rank, generator=generator).to(values.device)
        left = torch.linalg.qr(matrix @ basis).Q
        right = matrix.T @ left
        # a direction that is gone now may come again
        state[_BASIS] = right + 1e-6 * basis
        return torch.cat([left.reshape(-1), right.reshape(-1)]).view(torch.uint8)

    def decode(self, code: Tensor, into: Tensor) -> None:
        rows, columns, rank = self._shape(len(into))
        numbers = code.view(torch.float32)
        left, right = (
            numbers[: rows * rank].view(rows, rank),
            numbers[rows * rank :].view(columns, rank),
        )
        into.copy_((left @ right.T).view(-1)[: len(into)])
