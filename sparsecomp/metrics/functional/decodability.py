"""Can the nodes of the true graph be read from the units that should know them."""

import torch
from torch import Tensor

from sparsecomp.metrics.functional.sums import UnitSums, correlation, live_units

# Added to the correlation matrix of the units.
_RIDGE = 1e-4


def decodability(fit: UnitSums, held_out: UnitSums, inside: Tensor) -> Tensor:
    """Held-out R^2 of each node from a linear readout of the live units that depend on inputs of its subtree only.

    The readout is ridge regression on the standardised units, with 1e-4 added to the diagonal of their correlations:

        beta = (R + 1e-4 I)^-1 r,    R^2 = 1 - sum (y - mean_fit(y) - beta . z)^2 / sum (y - mean y)^2 on held-out rows.

    Args:
        fit: Sums of the units and then the nodes, over the rows that the readout is fitted on.
        held_out: The same of other rows.
        inside: (nodes, units) bool: whether all that the unit depends on is within the subtree of the node.

    Returns:
        (nodes,) float64, <= 1; 0 without any unit, and a readout worse than the mean is below 0.

    Invariant to a permutation of units and to rescaling one.

    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> from sparsecomp.metrics.functional.sums import unit_sums
    >>> units, nodes = x, torch.stack([x[:, 0] + 1, x[:, 0] + x[:, 1]], dim=1)
    >>> fit, held_out = unit_sums([units[:100], nodes[:100]]), unit_sums([units[100:], nodes[100:]])
    >>> decodability(fit, held_out, torch.tensor([[True, True], [False, False]])).round(decimals=3).tolist()
    [1.0, 0.0]
    """
    nodes, units = inside.shape
    mean = fit.totals / fit.counts.clamp(min=1)
    variance = (fit.products.diagonal() / fit.counts.clamp(min=1) - mean.square()).clamp(min=0)
    scale = torch.where(variance > 0, variance, 1).sqrt()
    related = correlation(fit)
    # Sums of squares and products of the held-out rows, in the units of the fitted ones.
    shift = held_out.totals[:, None] * mean
    spread = (held_out.products - shift - shift.T + held_out.counts * mean[:, None] * mean) / scale[:, None] / scale
    offset = (held_out.totals - held_out.counts * mean) / scale
    live = live_units(fit.counts, fit.totals, fit.products.diagonal())[:units]
    scores = fit.totals.new_zeros(nodes)
    for k in range(nodes):
        y, chosen = units + k, (inside[k].to(live.device) & live).nonzero().flatten()
        if not len(chosen):
            continue
        block = related[chosen[:, None], chosen]
        beta = torch.linalg.solve(block + _RIDGE * torch.eye(len(chosen)).to(block), related[chosen, y])
        error = spread[y, y] - 2 * beta @ spread[chosen, y] + beta @ spread[chosen[:, None], chosen] @ beta
        scores[k] = 1 - error / (spread[y, y] - offset[y].square() / held_out.counts[y])
    return scores
