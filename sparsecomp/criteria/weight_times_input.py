"""Magnitude times the size of what a weight reads."""

from torch import Tensor

from sparsecomp.criteria._refitting import OptionalRefit
from sparsecomp.criteria.base import Need, ScoreContext


class WeightTimesInput(OptionalRefit):
    r"""Scores a weight by its magnitude times the root mean square of its input, over the whole network.

        score_ij = |w_ij| sqrt(E[a_i^2])

    Inputs are the im2col columns in a convolution. In eval mode, over as many training batches as the pruner's `Probe`
    allows. Linear and Conv1d-3d layers; others do not show the inputs needed and are refused by name.

    Args:
        refit: Whether kept weights are refitted by least squares after allocation, as those of `Similarity` are.

    Raises:
        TypeError: If `refit` is no bool, or, when scoring, a layer does not show its inputs.

    Reference:
        M. Sun et al.: A simple and effective pruning approach for large language models (Wanda), arXiv 2306.11695.
        Deviation: Wanda compares the weights of one output, and this those of the whole network.

    >>> import torch
    >>> from sparsecomp import prune
    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> _ = net.weight.data.copy_(torch.tensor([[2.0, 3.0]]))
    >>> prune(net, WeightTimesInput(), 0.5, data=[torch.tensor([[2.0, 1.0]])]).masks["weight"].tolist()
    [[True, False]]
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Input moments."""
        return frozenset({Need.INPUT_MOMENTS})

    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """|w| times the root mean square of the input."""
        scores = {}
        for name, layer in context.statistics().items():
            weight = context.weights[name]
            rms = layer.second_moment.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
            d = rms.shape[-1]
            groups = rms.numel() // d
            grouped = weight.double().abs().reshape(groups, -1, d) * rms.reshape(groups, 1, d)
            scores[name] = grouped.reshape(weight.shape)
        return scores
