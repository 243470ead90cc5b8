"""The same sparsity in every parameter."""

from collections.abc import Mapping

from sparsecomp.allocation.per_layer import PerLayer


class Layerwise(PerLayer):
    """Drops the lowest scores of each parameter, the same fraction everywhere.

    Args:
        granularity: "weight", or "unit" for output rows and channels (ranked by the mean of their weights' scores).
        min_keep: Weights (or units) that every parameter keeps, >= 0; the default is that of `Allocation`.

    >>> import torch
    >>> masks = Layerwise()({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, sparsity=0.5)
    >>> masks["a"].tolist(), masks["b"].tolist()
    ([False, True], [False, True])
    """

    name = "layerwise"

    def layer_sparsities(self, shapes: Mapping[str, tuple[int, ...]], sparsity: float) -> dict[str, float]:
        """The sparsity itself, for each parameter."""
        return dict.fromkeys(shapes, sparsity)
