"""Make the columns of matrices orthonormal."""

from __future__ import annotations

import torch

_QR_ABOVE_COLUMNS = 2
# Projecting out the earlier columns shortens a column. The column counts as linearly dependent if the new length is at most
# this number, times the dtype's epsilon, times the old length.
_DEPENDENT = 32


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """Make the columns of each matrix orthonormal.

    Matrices with one or two columns use Gram-Schmidt, twice for each column ("twice is enough": Giraud, Langou, Rozloznik,
    2005). Other matrices use Householder QR. A column that depends linearly on earlier columns is replaced, so the result has
    full rank. A matrix with NaN or infinity becomes NaN. With Gram-Schmidt, a matrix also becomes NaN if the length of a column
    overflows (in float32, from about 2e19 on).

    Args:
        matrices: [batch, rows, columns] with columns <= rows, of a floating-point dtype; not changed. 16-bit matrices are
            computed in float32.
        epsilon: 0 or above. Gram-Schmidt divides each column by its length plus epsilon. QR ignores epsilon, as in torch.

    Returns:
        The matrices with orthonormal columns, in the shape and dtype of `matrices`.

    Extra memory: one or two copies of `matrices`.
    """
    work = matrices.float() if matrices.dtype in (torch.float16, torch.bfloat16) else matrices
    if matrices.shape[2] > _QR_ABOVE_COLUMNS:
        return _by_qr(work).to(matrices.dtype)
    return _by_gram_schmidt(work, epsilon).to(matrices.dtype)


def _by_qr(matrices: torch.Tensor) -> torch.Tensor:
    columns: torch.Tensor = torch.linalg.qr(matrices).Q
    # LAPACK does not define its result for NaN. Adding the sum times 0 makes the result NaN: 0 * NaN is NaN.
    return columns + 0 * matrices.sum(dim=(1, 2), keepdim=True)


def _by_gram_schmidt(matrices: torch.Tensor, epsilon: float) -> torch.Tensor:
    done = torch.empty_like(matrices)
    tiny = _DEPENDENT * torch.finfo(matrices.dtype).eps
    for number in range(matrices.shape[2]):
        column, earlier = matrices[:, :, number : number + 1], done[:, :, :number]
        left = _project_out(column, earlier)
        length = _length(left)
        # The first column has no earlier columns: it is dependent only if it is zero.
        original = _length(column) if number > 0 else length
        # A column with NaN or infinity is not replaced, so that its matrix becomes NaN.
        lost = (length <= tiny * original) & original.isfinite()
        # Reading `lost` from a GPU would stall the GPU, so on a GPU the replacement is always computed.
        if not lost.is_cpu or bool(lost.any()):
            spare = _project_out(_spare_column(matrices, number), earlier)
            left, length = torch.where(lost, spare, left), torch.where(lost, _length(spare), length)
        torch.div(left, length + epsilon if epsilon else length, out=done[:, :, number : number + 1])
    return done


def _project_out(column: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    if earlier.shape[2] == 0:
        return column
    for _ in range(2):
        column = column - torch.bmm(earlier, torch.bmm(earlier.transpose(1, 2), column))
    return column


def _length(column: torch.Tensor) -> torch.Tensor:
    length: torch.Tensor = torch.linalg.vector_norm(column, dim=1, keepdim=True)
    # A division by an infinite length would make a column of zeros, without a sign of the overflow.
    return length.masked_fill(length.isinf(), torch.nan)


def _spare_column(matrices: torch.Tensor, number: int) -> torch.Tensor:
    """Return the column that replaces a column which depends linearly on earlier columns. All ranks get the same column.

    Gradients hardly ever have the direction of this column.
    """
    rows = torch.arange(1, matrices.shape[1] + 1, dtype=matrices.dtype, device=matrices.device)
    return torch.cos(rows * (number + 1)).view(1, -1, 1).expand(matrices.shape[0], -1, 1)
