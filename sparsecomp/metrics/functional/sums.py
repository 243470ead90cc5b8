"""Sums over samples of units and their products, which add over batches and ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Below this share of E[h^2] a variance is none.
_LIVE = 1e-7


class UnitSums(NamedTuple):
    """Sums over rows of d units, side by side.

    Attributes:
        counts: (d,) number of rows.
        totals: (d,) sum of h.
        products: (d, d) sum of h_i h_j; 0 where the two were not seen on the same rows.
    """

    counts: Tensor
    totals: Tensor
    products: Tensor


def unit_sums(layers: Sequence[Tensor]) -> UnitSums:
    """Sums, in float64, of layers (rows, units) that follow each other in the result.

    Only layers with equally many rows have products: a unit of an 8 x 8 picture has no partner in a 4 x 4 one.

    >>> counts, totals, products = unit_sums([torch.tensor([[1.0], [2.0]]), torch.ones(2, 1)])
    >>> counts.tolist(), totals.tolist(), products.tolist()
    ([2.0, 2.0], [3.0, 2.0], [[5.0, 3.0], [3.0, 2.0]])
    """
    counts = torch.cat([layer.new_full((layer.shape[1],), len(layer), dtype=torch.float64) for layer in layers])
    totals = torch.cat([layer.sum(0, dtype=torch.float64) for layer in layers])
    products = totals.new_zeros(len(totals), len(totals))
    for rows in {len(layer) for layer in layers}:
        chosen = (counts == rows).nonzero().flatten()
        joined = torch.cat([layer for layer in layers if len(layer) == rows], dim=1).double()
        products[chosen[:, None], chosen] = joined.T @ joined
    return UnitSums(counts, totals, products)


def live_units(counts: Tensor, totals: Tensor, squares: Tensor) -> Tensor:
    """Which units vary: var(h) > 1e-7 E[h^2], (d,) bool, from the number of rows, sum h and sum h^2.

    >>> live_units(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([4.0, 2.0]))  # (0, 2) and (1, 1)
    tensor([ True, False])
    """
    counts = counts.clamp(min=1)
    second = squares / counts
    return second - (totals / counts).square() > _LIVE * second


def correlation(sums: UnitSums) -> Tensor:
    """(d, d) Pearson correlations in [-1, 1]; 0 with a unit that is not live, and between units of other rows.

    >>> h = torch.tensor([[1.0, -2.0, 5.0], [2.0, -4.0, 5.0]])
    >>> correlation(unit_sums([h])).round(decimals=6).tolist()
    [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    counts, mean = sums.counts.clamp(min=1), sums.totals / sums.counts.clamp(min=1)
    covariance = sums.products / counts - mean[:, None] * mean
    live = live_units(sums.counts, sums.totals, sums.products.diagonal())
    scale = torch.where(live, covariance.diagonal(), 1).sqrt()
    together = live[:, None] & live & (sums.counts[:, None] == sums.counts)
    return torch.where(together, covariance / scale[:, None] / scale, 0).clamp(-1, 1)
