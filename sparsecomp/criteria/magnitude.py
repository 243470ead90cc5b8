"""Large weights matter."""

from torch import Tensor

from sparsecomp.criteria.base import Criterion, ScoreContext


class Magnitude(Criterion):
    """Scores a weight by its absolute value, |w|.

    Scaling a whole parameter changes its rank against the others under a global allocation, not under a layerwise one.

    Reference:
        S. Han et al.: Learning both Weights and Connections for Efficient Neural Networks, arXiv 1506.02626. There the
        threshold of each layer is a multiple of its standard deviation; here the allocation sets the number.

    >>> import torch
    >>> weights = {"weight": torch.tensor([[0.5, -2.0]])}
    >>> Magnitude().score(ScoreContext(torch.nn.Linear(2, 1), weights, masks={}))
    {'weight': tensor([[0.5000, 2.0000]])}
    """

    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """Return |w|."""
        return {name: weight.abs() for name, weight in context.weights.items()}
