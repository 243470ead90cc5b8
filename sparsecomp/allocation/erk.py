"""Erdős-Rényi-kernel densities: small layers stay denser."""

import math
from collections.abc import Mapping

from sparsecomp.allocation.per_layer import PerLayer


class ERK(PerLayer):
    """Drops the lowest scores of each parameter, whose density is proportional to sum(shape) / prod(shape).

    For a convolution of shape (out, in, height, width) the density is eps (out + in + height + width) /
    (out * in * height * width), for a matrix eps (out + in) / (out * in); eps is such that the total is right, and a
    parameter whose density would exceed 1 stays dense.

    Args:
        granularity: "weight", or "unit" for output rows and channels (ranked by the mean of their weights' scores).
        min_keep: Weights (or units) that every parameter keeps, >= 0; the default is that of `Allocation`.

    Reference:
        U. Evci et al.: Rigging the Lottery, arXiv 1911.11134, section 3 (1); the reference lists no rounding, here the
        total is exact.

    >>> densities = ERK().layer_sparsities({"wide": (100, 100), "narrow": (10, 10)}, sparsity=0.9)
    >>> round(densities["wide"], 4), round(densities["narrow"], 4)
    (0.9082, 0.0818)
    """

    name = "erk"

    def layer_sparsities(self, shapes: Mapping[str, tuple[int, ...]], sparsity: float) -> dict[str, float]:
        """1 - density of each parameter."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
        dense: set[str] = set()
        while True:
            budget = (1.0 - sparsity) * sum(sizes.values()) - sum(sizes[name] for name in dense)
            scaled = sum(raw[name] * sizes[name] for name in shapes if name not in dense)
            eps = budget / scaled if scaled else 0.0
            over = {name for name in shapes if name not in dense and eps * raw[name] > 1.0}
            if not over:
                return {name: 0.0 if name in dense else 1.0 - eps * raw[name] for name in shapes}
            dense |= over
