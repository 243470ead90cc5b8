"""Which hidden units of a layer say the same, and how one can speak for the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsecomp._checks import check_number
from sparsecomp.functional import _checked

# A unit whose variance is no more than this share of its mean square is constant: sums in float32 cannot tell.
_CONSTANT = 1e-7
# Copies correlate by 1 but for rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class UnitMerge:
    """Which units of a layer stand in for which: a_i is replaced by slope_i * a_{kept_i} + offset_i.

    Attributes:
        kept: (units,) int64. The unit that stands in for unit i; i itself if unit i stays.
        slope: (units,) float64; 1 for a unit that stays.
        offset: (units,) float64; 0 for a unit that stays.
    """

    kept: Tensor
    slope: Tensor
    offset: Tensor

    @property
    def dropped(self) -> Tensor:
        """(units,) bool, True = another unit stands in for this one."""
        return self.kept != torch.arange(len(self.kept), device=self.kept.device)


def merge_units(mean: Tensor, covariance: Tensor, tau: float = 0.95) -> UnitMerge:
    r"""Find units of one layer that are nearly affine functions of one another.

    Unit i may be dropped for unit k if |corr(a_i, a_k)| >= tau. Then, by least squares,

        a_i ~ s a_k + o,   s = cov(a_i, a_k) / var(a_k),   o = E[a_i] - s E[a_k],

    which is exact for duplicates, scaled, negated and shifted copies, and leaves 1 - corr^2 of var(a_i) unexplained
    otherwise. The unit that can stand in for most others is kept first (the first of several such), until each unit is
    kept or has a substitute; a dropped unit then goes to the kept unit that it correlates with most. No unit is replaced
    by one that is dropped itself, and correlation is not taken to be transitive. Scaling, negating or shifting units
    does not change which are kept.

    A unit with var <= 1e-7 * E[a^2] (dead, constant, or constant as far as float32 sums can tell) correlates with
    nothing: it stays and stands in for none. Elimination and `refit` move it into the bias.

    Args:
        mean: (units,) E[a] of the activations.
        covariance: (units, units) E[a a^T] - E[a] E[a]^T, divided by n.
        tau: Smallest |corr| at which units merge, in (0, 1]. Near 1 it rarely finds any in a trained network.

    Returns:
        The `UnitMerge`, for `apply_merge`.

    Raises:
        ValueError: If a shape does not fit, a value is not finite, a variance is below 0 or `tau` is out of range.

    Reference:
        Similarity-based pruning is the idea of arXiv 2606.19941, whose recipe is not public; this one is ours.

    >>> a = torch.tensor([[0.0, 1.0, 1.0, 2.0], [2.0, 5.0, 0.0, 2.0], [1.0, 3.0, 2.0, 2.0]])  # a_1 = 2 a_0 + 1
    >>> merge = merge_units(a.mean(0), torch.cov(a.T, correction=0))
    >>> merge.kept.tolist(), merge.slope.tolist(), merge.offset.tolist()
    ([0, 0, 2, 3], [1.0, 2.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0])
    """
    meaning = "the smallest |correlation| at which units merge"
    tau = check_number("tau", tau, meaning, "in (0, 1]")
    if not 0 < tau <= 1:
        raise ValueError(f"`tau` is {meaning} and must be in (0, 1]; got {tau!r}. To merge nothing, do not call this.")
    mean = _checked.floats("mean", mean, "the mean of each unit", (-1,), "(units,)")
    covariance = _checked.covariance_of(covariance, len(mean))
    variance = covariance.diagonal()
    constant = variance <= _CONSTANT * (variance + mean.square())
    deviation = torch.where(constant, 1.0, variance.clamp(min=0)).sqrt()
    correlation = (covariance / deviation / deviation.unsqueeze(1)).abs()
    correlation = correlation.masked_fill(constant | constant.unsqueeze(1), 0.0).fill_diagonal_(1.0)
    is_kept = _cover(correlation >= tau - _ROUNDING)

    substitute = correlation.masked_fill(~is_kept, -1.0).argmax(1)
    own = torch.arange(len(mean), device=mean.device)
    kept = torch.where(is_kept, own, substitute)
    slope = torch.where(is_kept, 1.0, covariance[own, kept] / deviation[kept].square())
    offset = torch.where(is_kept, 0.0, mean - slope * mean[kept])
    return UnitMerge(kept, slope, offset)


def apply_merge(merge: UnitMerge, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Let kept units speak for dropped ones, in the layer that reads them.

        w'_jk = w_jk + sum_i w_ji s_i,   w'_ji = 0,   b'_j = b_j + sum_i w_ji o_i   over the i dropped for k

    so that the layer's output stays what it was as far as the units are copies.

    Args:
        merge: From `merge_units`.
        weight: (out, units, ...) weight that reads the units. Further dimensions are read alike: the kernel of a
            convolution, or the positions of a channel that was flattened (reshape to (out, channels, positions)). Where
            a convolution reads padding, an offset is not exact.
        bias: (out,), or None for 0.

    Returns:
        New weight and bias in the precision of `weight`. Columns of dropped units are 0. A layer without a bias needs
        the one returned; before a BatchNorm it can be taken off the running mean instead.

    Raises:
        ValueError: If a shape does not fit or a value is not finite.

    >>> merge = UnitMerge(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double())
    >>> apply_merge(merge, torch.tensor([[1.0, 10.0]]))
    (tensor([[21.,  0.]]), tensor([10.]))
    """
    units = len(merge.kept)
    shape = (-1, units, *weight.shape[2:])
    wide = _checked.floats("weight", weight, "what reads the merged units", shape, f"(out, {units}, ...)")
    out = len(wide)
    wide_bias = wide.new_zeros(out) if bias is None else bias
    wide_bias = _checked.floats("bias", wide_bias, "the bias of the layer that reads the units", (out,), f"({out},)")

    kept, slope, offset = (part.to(wide.device) for part in (merge.kept, merge.slope, merge.offset))
    folded = torch.zeros_like(wide)
    folded.index_add_(1, kept, wide * slope.reshape(-1, *(1,) * (wide.dim() - 2)))
    new_bias = wide_bias + wide.reshape(out, units, -1).sum(2) @ offset
    return folded.to(weight.dtype), new_bias.to(weight.dtype)


def _cover(similar: Tensor) -> Tensor:
    """Greedy: the unit similar to most of those not yet covered is kept and covers them, until all are covered."""
    device, similar = similar.device, similar.cpu()  # each step looks at what the last one left
    kept = torch.zeros(len(similar), dtype=torch.bool)
    free = torch.ones_like(kept)
    count = similar.sum(1)
    while free.any():
        # Only a unit not yet covered is kept, so that of two kept units neither could have been dropped for the other.
        leader = int(count.masked_fill(~free, 0).argmax())
        kept[leader] = True
        covered = similar[leader] & free
        count -= similar[:, covered].sum(1)
        free &= ~covered
    return kept.to(device)
