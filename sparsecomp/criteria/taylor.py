"""Taylor expansion of the loss, to first order."""

from torch import Tensor

from sparsecomp.criteria._refitting import OptionalRefit
from sparsecomp.criteria.base import Need, ScoreContext


class Taylor(OptionalRefit):
    r"""Scores a weight by what the loss changes without it, to first order, batch by batch.

        score = mean over batches of |w * g|,   g the gradient of the loss of a batch

    In eval mode, over as many training batches as the pruner's `Probe` allows. For every kind of parameter; with
    `refit` for Linear and Conv1d-3d layers.

    Args:
        refit: Whether kept weights are refitted by least squares after allocation, as those of `Similarity` are.

    Raises:
        TypeError: If `refit` is no bool.
        ValueError: When scoring, if the loss is not finite or reaches no selected weight.

    Reference:
        P. Molchanov et al.: Importance estimation for neural network pruning, arXiv 1906.10771. Deviations: of single
        weights instead of filters, and absolute values are averaged, not squares.

    >>> import torch
    >>> from sparsecomp import prune
    >>> net = torch.nn.Linear(4, 2)
    >>> store = prune(net, Taylor(), 0.5, data=[torch.randn(64, 4)], loss=lambda net, x: net(x).square().mean())
    >>> store.sparsity
    0.5
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Gradients of the loss; input moments where it refits."""
        return super().needs | {Need.GRADIENTS}

    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """Mean of |w g|."""
        return {name: context.weights[name].abs() * gradient for name, gradient in context.batch_gradients().items()}
