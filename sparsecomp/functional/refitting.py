"""Kept weights that make up for removed ones."""

import torch
from torch import Tensor

from sparsecomp._checks import check_number
from sparsecomp.functional import _checked

# Values of the matrices of one batch of solves, at most (2 MiB, which caches hold), unless a single one is larger.
_CHUNK = 2**18
_FLOOR = 1e-8
# Directions of the kept inputs with less than this share of the largest eigenvalue of their correlations are noise.
_NOISE = 1e-6


def refit(
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    mean: Tensor,
    covariance: Tensor,
    *,
    ridge: float = 1e-4,
    exact_below: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    r"""Fit the kept weights of each unit by least squares, so that its pre-activation stays what it was.

    For a unit z = w . a + b with kept inputs S, and G the covariance of a,

        v_S = (G_SS + r I)^-1 G_S: w,   r = ridge * trace(G_SS) / |S| + 1e-8,   b' = b + (w - v) . E[a].

    The mean of z is reproduced exactly, also where nothing is kept. Two kinds of rows are not shrunk by the ridge, as
    there is nothing to guard against: a row that loses no weight other than 0 stays as it is, and where the kept inputs
    determine z (the least-squares v without ridge, of smallest norm in standardised inputs, leaves at most `exact_below`
    of var(z)) that v is taken. So removed inputs that are linear combinations of kept ones cost nothing.

    A kept weight of a constant input becomes 0 where its row is fitted: its part goes into the bias.

    Args:
        weight: (out, in, ...) before the removal; each row is read as d numbers, in the column order of `covariance`.
        bias: (out,), or None for 0.
        mask: Bool, in the shape of `weight`, True = kept.
        mean: (d,) E[a] of the layer's inputs.
        covariance: (d, d) E[a a^T] - E[a] E[a]^T, divided by n. Of fewer samples than inputs they make each row look
            determined; then pass `exact_below=0.0`.
        ridge: Share of the mean kept variance added to each, >= 0.
        exact_below: Share of var(z) in [0, 1); 0 fits all rows with the ridge.

    Returns:
        New weight and bias in the precision of `weight`; removed weights are 0. A layer without a bias needs the one
        returned; before a BatchNorm it can be taken off the running mean instead.

    Raises:
        TypeError: If `mask` is not bool.
        ValueError: If a shape does not fit, a value is not finite, or an argument is out of range.

    Reference:
        Adapting kept weights by the inverse second moments is Optimal Brain Surgeon (B. Hassibi, D. Stork, NeurIPS
        1992); here all removals of a row are made up for at once. Similarity-based pruning is the idea of arXiv
        2606.19941, whose recipe is not public; this one is ours.

    >>> x = torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 5.0]]).double()  # x_1 = 2 x_0 + 1
    >>> mask = torch.tensor([[True, False]])
    >>> weight, bias = refit(torch.tensor([[1.0, 1.0]]), None, mask, x.mean(0), torch.cov(x.T, correction=0))
    >>> weight, bias
    (tensor([[3., 0.]]), tensor([1.]))
    """
    ridge = check_number("ridge", ridge, "the share of the mean kept variance added to each", ">= 0")
    if ridge < 0:
        raise ValueError(
            f"`ridge` is the share of the mean kept variance added to each and must be >= 0; got {ridge!r}."
        )
    meaning = "the share of a unit's variance below which it counts as determined"
    exact_below = check_number("exact_below", exact_below, meaning, "in [0, 1)")
    if not 0 <= exact_below < 1:
        raise ValueError(f"`exact_below` is {meaning} and must be in [0, 1); got {exact_below!r}.")
    rows = _checked.weight_rows(weight)
    out, d = rows.shape
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"`mask` says what is kept and must be bool, True = kept; got {mask.dtype}. Pass `mask.bool()`."
        )
    if mask.shape != weight.shape:
        raise ValueError(
            f"`mask` says what is kept and must have the shape of `weight`, {tuple(weight.shape)}; got {tuple(mask.shape)}."
        )
    mean = _checked.floats("mean", mean, "the mean of each input", (d,), f"({d},)")
    covariance = _checked.positive(_checked.covariance_of(covariance, d))
    wide_bias = rows.new_zeros(out) if bias is None else bias
    wide_bias = _checked.floats("bias", wide_bias, "the bias of the layer", (out,), f"({out},)")

    kept = mask.reshape(out, d)
    fitted = rows * kept
    loses = ((rows != 0) & ~kept).any(1).nonzero().squeeze(1)
    # Rows with about as many kept inputs are solved together, each cut to what it keeps.
    loses = loses[kept[loses].sum(1).argsort(descending=True)]
    start = 0
    while start < len(loses):
        width = int(kept[loses[start]].sum())
        chunk = loses[start : start + max(_CHUNK // max(width, 1) ** 2, 1)]
        fitted[chunk] = _fit(rows[chunk], kept[chunk], covariance, width, ridge, exact_below)
        start += len(chunk)
    new_bias = wide_bias + (rows - fitted) @ mean
    return fitted.reshape(weight.shape).to(weight.dtype), new_bias.to(weight.dtype)


def _fit(rows: Tensor, kept: Tensor, covariance: Tensor, width: int, ridge: float, exact_below: float) -> Tensor:
    """Least squares of rows (n, d) that keep at most `width` inputs each; 0 elsewhere."""
    if width == 0:
        return torch.zeros_like(rows)
    index = kept.long().argsort(dim=1, descending=True, stable=True)[:, :width]
    there = kept.gather(1, index)
    gram = covariance[index.unsqueeze(2), index.unsqueeze(1)]
    if not bool(there.all()):
        gram *= there.unsqueeze(2) & there.unsqueeze(1)
    moment = rows @ covariance
    variance = (rows * moment).sum(1)
    moment = moment.gather(1, index) * there

    shrink = ridge * gram.diagonal(dim1=1, dim2=2).sum(1) / there.sum(1).clamp(min=1) + _FLOOR
    damped = gram.clone()
    damped.diagonal(dim1=1, dim2=2).add_(shrink.unsqueeze(1))
    factor = _checked.factor(damped, "ridge", ridge)
    solution = torch.cholesky_solve(moment.unsqueeze(2), factor).squeeze(2)
    if exact_below > 0:
        few = _may_be_determined(gram, moment, variance, exact_below).nonzero().squeeze(1)
        of, to = gram[few], moment[few]
        exact = _smallest(of, to)
        left = variance[few] - 2 * (exact * to).sum(1) + (exact * (of @ exact.unsqueeze(2)).squeeze(2)).sum(1)
        chosen = (left <= exact_below * variance[few]).unsqueeze(1)
        solution[few] = torch.where(chosen, exact, solution[few])
    return torch.zeros_like(rows).scatter(1, index, solution * there)


def _may_be_determined(gram: Tensor, moment: Tensor, variance: Tensor, exact_below: float) -> Tensor:
    """(n,) bool, False where what the kept inputs leave of the unit is certainly more than `exact_below` of its variance.

    A Cholesky factor takes a tenth of the time of the eigenvectors that `_smallest` needs. With t added to the diagonal
    of standardised inputs what is left grows, but of what directions above the noise explain only by
    t / _NOISE = 0.1%.
    """
    inverse = _inverse_deviation(gram)
    standardised = gram * inverse.unsqueeze(2) * inverse.unsqueeze(1)
    standardised.diagonal(dim1=1, dim2=2).add_(1e-3 * _NOISE + (inverse == 0))
    lower, info = torch.linalg.cholesky_ex(standardised)
    half = torch.linalg.solve_triangular(lower, (moment * inverse).unsqueeze(2), upper=False).squeeze(2)
    left = variance - half.square().sum(1)
    certain: Tensor = (info == 0) & (left > (exact_below + 2e-3) * variance)
    return ~certain


def _inverse_deviation(gram: Tensor) -> Tensor:
    """One over the standard deviation of each input (n, width); 0 for a constant or absent one."""
    deviation = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    return torch.where(deviation > 0, 1 / deviation, 0.0)


def _smallest(gram: Tensor, moment: Tensor) -> Tensor:
    """The least-squares solutions of smallest norm in standardised inputs, without directions that are noise."""
    inverse = _inverse_deviation(gram)
    values, vectors = torch.linalg.eigh(gram * inverse.unsqueeze(2) * inverse.unsqueeze(1))
    values = torch.where(values > _NOISE * values[:, -1:], 1 / values, 0.0).unsqueeze(2)
    standardised = (moment * inverse).unsqueeze(2)
    solution = torch.bmm(vectors, values * torch.bmm(vectors.transpose(1, 2), standardised))
    return solution.squeeze(2) * inverse
