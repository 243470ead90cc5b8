"""What each input of each unit is worth: forward selection on second moments, cheaper than elimination for wide layers."""

import torch
from torch import Tensor

from sparsecomp.functional import _checked

# Values of the chosen directions that are held at once, at most (64 MiB), unless those of one target are more.
_CHUNK = 2**23
_FLOOR = 1e-9
# Of its variance an input must keep this share beside those already chosen; what is left below is rounding.
_COPY = 1e-9


def forward_selection_cost(weight: Tensor, covariance: Tensor, output_variance: Tensor) -> Tensor:
    r"""Cost of every connection of a layer, from choosing the inputs of each target unit one by one, the best first.

    A unit z = w . a + b is approximated by orthogonal matching pursuit on the Gram matrix G of its inputs: with
    residual r = z - z_S of the fit on the inputs S chosen so far, C_i = cov(r, a_i) and R_i the variance of a_i that S
    does not explain,

        i = argmax C_i^2 / R_i,   the error var(r) falls by C_i^2 / R_i,

    for m = ceil(d / 4) inputs. A chosen input costs the error that is left if it and all that were chosen later go: the
    error before it was chosen. Every other input costs the smaller of C_i^2 / R_i and the error left in the end. Costs
    are divided by var(z_j) + 1e-9 and lie in [0, 1]; the first choice has 1. Weights that are 0 are never chosen and
    cost 0, and so do inputs that the chosen ones explain. Scaling an input (a -> c a, w -> w / c) or a target leaves
    costs unchanged.

    All targets of a layer take a step together, in O(out * d * m^2) operations where `elimination_cost` takes
    O(out * d^3); memory is bounded by taking the targets in chunks.

    Args:
        weight: (out, in, ...); each row is read as d numbers, in the column order of `covariance`.
        covariance: (d, d) E[a a^T] - E[a] E[a]^T of the layer's inputs, divided by n.
        output_variance: (out,) var(z_j), >= 0.

    Returns:
        Costs in the shape of `weight`, float64, >= 0.

    Raises:
        ValueError: If a shape does not fit, a value is not finite, or a variance is below 0.

    Reference:
        Y. Pati, R. Rezaiifar, P. Krishnaprasad: Orthogonal matching pursuit (Asilomar 1993), with the choice that lowers
        the error most, as in S. Chen, S. Billings, W. Luo: Orthogonal least squares (Int. J. Control 50, 1989).
        Its use as a score is our recipe of the idea of arXiv 2606.19941, whose own is not public.

    >>> forward_selection_cost(torch.tensor([[3.0, 1.0]]), torch.eye(2), torch.tensor([10.0]))
    tensor([[1.0000, 0.1000]], dtype=torch.float64)
    """
    rows = _checked.weight_rows(weight)
    out, d = rows.shape
    covariance = _checked.positive(_checked.covariance_of(covariance, d))
    meaning = "the variance of each pre-activation"
    output_variance = _checked.floats("output_variance", output_variance, meaning, (out,), f"({out},)", minimum=0.0)
    picks = -(-d // 4)
    chunks = rows.split(max(_CHUNK // (d * picks), 1))
    cost = torch.cat([_select(chunk, covariance, picks) for chunk in chunks])
    return (cost / (output_variance + _FLOOR).unsqueeze(1)).reshape(weight.shape)


def _select(rows: Tensor, covariance: Tensor, picks: int) -> Tensor:
    """The cost (targets, d) of each input in units of the target's variance."""
    targets, d = rows.shape
    row = torch.arange(targets, device=rows.device)
    residual = rows @ covariance  # (targets, d) cov(r, a_i)
    error = (residual * rows).sum(1).clamp(min=0)
    variance = covariance.diagonal().expand(targets, d).clone()
    least = covariance.diagonal() * _COPY
    open_ = rows != 0
    # Row s of a target is cov(q_s, a), q_s being the part of the s-th choice that is new, scaled to variance 1.
    directions = rows.new_zeros(targets, picks, d)
    cost = torch.zeros_like(rows)
    for pick in range(picks):
        gain = _gains(residual, variance, least, open_)
        best, i = gain.max(1)
        chosen = best > 0
        cost[row[chosen], i[chosen]] = error[chosen]
        before = directions[row, :pick, i].unsqueeze(1)  # (targets, 1, pick)
        direction = covariance[i] - torch.bmm(before, directions[:, :pick]).squeeze(1)
        scale = torch.where(chosen, variance[row, i], 1.0).rsqrt()
        direction = direction * (scale * chosen).unsqueeze(1)
        directions[:, pick] = direction
        along = residual[row, i] * scale * chosen
        residual.addcmul_(direction, along.unsqueeze(1), value=-1)
        variance.addcmul_(direction, direction, value=-1)
        error = (error - along.square()).clamp(min=0)
        open_[row, i] &= ~chosen
    rest = torch.minimum(_gains(residual, variance, least, open_), error.unsqueeze(1))
    return torch.where(open_, rest, cost)


def _gains(residual: Tensor, variance: Tensor, least: Tensor, open_: Tensor) -> Tensor:
    """By how much each open input would lower the error; 0 for one that is explained already."""
    usable = open_ & (variance > least)
    return torch.where(usable, residual.square() / variance, 0.0)
