"""Selectivity: does a unit respond to one factor of the input, and is the basis of the units privileged in that."""

import math

import torch
from torch import Tensor

from sparsecomp._checks import check_int

_LEAST = 1e-12


def selectivity(maps: Tensor) -> Tensor:
    r"""How far each unit responds to one factor of two, or to their interaction alone.

        1 - H(S_x, S_y, S_xy) / log 3,   S_x = var_x(E_y h) / var(h),  S_y = var_y(E_x h) / var(h),  S_xy the rest,

    the shares of the main effects and of the interaction in the variance over a full grid of the two factors (Sobol
    indices), clipped at 1e-12 and normalised. 1 if one of the three has all, 0 if they are equal.

    Args:
        maps: (rows, columns, units), each unit's response at each pair of values of the two factors.

    Returns:
        (units,) float64 in [0, 1]; NaN for a unit that does not vary.

    Raises:
        ValueError: If `maps` is no such tensor.

    Invariant to a permutation of units, and to scaling and shifting one. It does not see whether the function is right,
    and a unit of one factor may still be a mixture of features of it.

    Reference:
        I. M. Sobol: Sensitivity estimates for nonlinear mathematical models (1993). The entropy is ours.

    >>> x, y = torch.meshgrid(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9), indexing="ij")
    >>> selectivity(torch.stack([x, x * y, x + y], dim=2)).round(decimals=2).tolist()
    [1.0, 1.0, 0.37]
    """
    if maps.dim() != 3 or min(maps.shape[:2]) < 2:
        raise ValueError(
            "`maps` is the response of each unit over a grid and must be (rows, columns, units), at least 2 x 2; got "
            f"{tuple(maps.shape)}."
        )
    h = maps.detach().double()
    variance = h.var((0, 1), correction=0)
    rows = h.mean(1).var(0, correction=0) / variance
    columns = h.mean(0).var(0, correction=0) / variance
    shares = torch.stack([rows, columns, (1 - rows - columns).clamp(min=0)]).clamp(min=_LEAST)
    shares = shares / shares.sum(0)
    found = 1 - torch.special.entr(shares).sum(0) / math.log(3)
    return torch.where(variance > 0, found, math.nan)


def selectivity_gain(maps: Tensor, generator: torch.Generator, rotations: int = 5) -> float:
    """Mean selectivity of the units of a layer, minus that of random rotations of the same standardised layer.

    Above 0 the units are a better basis than chance: a random mixture of the same responses is less selective. What
    the responses span is the same in both terms and cancels.

    Args:
        maps: (rows, columns, units) of the active units of one layer.
        generator: Draws the rotations (the orthogonal factor of a Gaussian matrix).
        rotations: How many are averaged, >= 1.

    Returns:
        In [-1, 1]; NaN with fewer than two units that vary.

    Raises:
        ValueError: If a shape does not fit or `rotations` is not positive.

    Invariant to rescaling a unit, and in expectation to a permutation. It does not see whether the function is right.

    >>> x, y = torch.meshgrid(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9), indexing="ij")
    >>> maps, generator = torch.stack([x, y], dim=2), torch.Generator().manual_seed(0)
    >>> selectivity_gain(maps, generator) > 0.2
    True
    """
    check_int("rotations", rotations, "the number of random rotations", minimum=1)
    own = selectivity(maps)
    vary = ~own.isnan()
    if int(vary.sum()) < 2:
        return math.nan
    h = maps.detach().double()[..., vary]
    standardised = (h - h.mean((0, 1))) / h.std((0, 1), correction=0)
    units = standardised.shape[2]
    chance = 0.0
    for _ in range(rotations):
        gaussian = torch.randn(units, units, generator=generator, dtype=torch.float64).to(h.device)
        chance += float(selectivity(standardised @ torch.linalg.qr(gaussian).Q).nanmean()) / rotations
    return float(own[vary].mean()) - chance
