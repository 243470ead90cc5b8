"""Symmetry purity: does each unit take a side on a transformation that the target knows."""

from torch import Tensor


def symmetry_purity(responses: Tensor, transformed: Tensor) -> Tensor:
    r"""How near each unit is to even or odd under a transformation of the input.

        (1 + |corr(h(x), h(T x))|) / 2

    1 if h(T x) is h(x) or -h(x), up to an affine map; 0.5 if the two have nothing in common.

    Args:
        responses: (n, units) responses to n inputs.
        transformed: (n, units) responses to the same inputs transformed, row by row.

    Returns:
        (units,) float64 in [0.5, 1]; NaN for a unit that does not vary on one of the two.

    Raises:
        ValueError: If the shapes differ or are not (n, units).

    Invariant to a permutation of units, and to scaling and shifting one. It does not see whether the function is right,
    and needs a transformation that the target is symmetric under.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> symmetry_purity(torch.cat([x, x**2], 1), torch.cat([-x, x**2], 1)).round(decimals=6).tolist()
    [1.0, 1.0]
    """
    if responses.dim() != 2 or responses.shape != transformed.shape:
        raise ValueError(
            "`responses` and `transformed` are those of the same units to n inputs before and after and must be "
            f"(n, units) both; got {tuple(responses.shape)} and {tuple(transformed.shape)}."
        )
    a, b = (part.detach().double() - part.detach().double().mean(0) for part in (responses, transformed))
    correlation = (a * b).sum(0) / (a.square().sum(0) * b.square().sum(0)).sqrt()
    return (1 + correlation.abs().clamp(max=1)) / 2
