"""The diagonal empirical Fisher information: Optimal Brain Damage."""

from torch import Tensor

from sparsecomp.criteria._refitting import OptionalRefit
from sparsecomp.criteria.base import Need, ScoreContext
from sparsecomp.moments import widened


class Fisher(OptionalRefit):
    r"""Scores a weight by what the loss rises without it, to second order with a diagonal curvature.

        score = w^2 E[g^2],   g the gradient of the loss of one sample

    In eval mode, over as many training batches as the pruner's `Probe` allows. The loss of a batch must be a mean over
    its samples, and these the first dimension of what each layer reads. Linear and Conv1d-3d layers; others do not show
    the inputs needed and are refused by name. With `refit`, this is the "OBD + refit" that similarity-based pruning
    should be compared with.

    Args:
        refit: Whether kept weights are refitted by least squares after allocation, as those of `Similarity` are.

    Raises:
        TypeError: If `refit` is no bool, or, when scoring, a layer does not show its inputs.
        ValueError: When scoring, if the loss is not finite or reaches no selected weight, or a layer reads another number
            of rows than the batch has samples.

    Reference:
        Y. LeCun, J. Denker, S. Solla: Optimal Brain Damage (NeurIPS 1989). Deviations: the empirical Fisher information
        stands for the second derivative, and the factor 1/2 is left out.

    >>> import torch
    >>> from sparsecomp import prune
    >>> net = torch.nn.Linear(4, 2)
    >>> store = prune(net, Fisher(), 0.5, data=[torch.randn(64, 4)], loss=lambda net, x: net(x).square().mean())
    >>> store.sparsity
    0.5
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Gradients of the loss; input moments where it refits."""
        return super().needs | {Need.GRADIENTS}

    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """Mean of (w g)^2."""
        squares = context.squared_sample_gradients()
        return {name: widened(context.weights[name]).square() * square for name, square in squares.items()}
