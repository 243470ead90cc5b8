"""Similarity-based pruning, connection by connection."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsecomp._checks import check_int, check_number
from sparsecomp.criteria._merging import merge_readers
from sparsecomp.criteria._refitting import least_squares
from sparsecomp.criteria.base import Criterion, Need, ScoreContext
from sparsecomp.functional.similarity import (
    elimination_cost,
    forward_selection_cost,
    input_signature,
    signature_overlap,
    similarity_score,
    unit_credit,
)
from sparsecomp.readers import Readers, find_readers
from sparsecomp.statistics import LayerStatistics

# Inputs of a unit up to which they are eliminated exactly: at 256 that takes seconds a layer, and more than 10 times as
# long as forward selection, with the same accuracy after training in our experiments.
_EXACT_UP_TO = 128


class Similarity(Criterion):
    r"""Scores a connection i -> j by what its target unit loses without it and by what that unit is worth (SP-C).

        score_ij = c_ij * E[(do/dz_j)^2] var(z_j) * overlap_ij ** gamma

    c_ij is the cumulative least-squares cost at which backward elimination removes input i from unit j, over var(z_j)
    (`elimination_cost`); for units of more than 128 inputs it comes from forward selection, which is many times faster
    (`forward_selection_cost`). overlap_ij = sum_k min(u_ki, u_kj) compares on which network inputs k the two units
    depend. After allocation the kept weights of each unit are refitted, so that its pre-activation stays what it was.

    With gamma = 0, the default, similarity finds redundant inputs only: this is layer-wise Optimal Brain Surgeon with
    credits. With gamma > 0 a connection between units that depend on the same network inputs counts more.

    Linear and Conv1d-3d layers, built into anything: attention of Linear modules works, nn.MultiheadAttention and fused
    recurrent layers do not show the inputs needed and are refused by name. Statistics are those of the training
    batches that the pruner's `Probe` allows, in eval mode.

    Args:
        gamma: 0, 1 or 2. 0 for quality; 2 where structure is the goal and network inputs are distinguishable (at most
            64 of them); 0 where every unit reads every input.
        merge: |correlation|, in (0, 1], from which hidden units of a layer merge before scoring: the weights of the
            dropped one go to the kept one in the Linear layer that reads them. Only units that one such layer alone
            reads merge; those of a residual stream have several readers or writers and never do. None, the default,
            merges nothing; .95 rarely finds any in a trained network.

    Raises:
        ValueError: If `gamma` is something else.
        TypeError: If `gamma` is no integer, or, when scoring, a layer does not show its inputs.

    Reference:
        The idea is that of arXiv 2606.19941, whose recipe is not public; this one is ours. Elimination: Optimal Brain
        Surgeon (NeurIPS 1992), row by row as in arXiv 2203.07259. Deviations in convolutions: squared derivatives are
        summed over positions, inputs are the im2col columns.

    >>> from sparsecomp import prune
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> store = prune(net, Similarity(), 0.5, data=[torch.randn(64, 4)])
    >>> store.sparsity
    0.5
    """

    def __init__(self, gamma: int = 0, merge: float | None = None) -> None:
        if check_int("gamma", gamma, "the exponent of the overlap") > 2:
            raise ValueError(f"`gamma` is the exponent of the overlap and must be 0, 1 or 2; got {gamma!r}.")
        if (
            merge is not None
            and not 0.0 < check_number("merge", merge, "the |correlation| of copies", "in (0, 1]") <= 1.0
        ):
            raise ValueError(
                f"`merge` is the |correlation| from which units are copies and must be in (0, 1]; got {merge!r}."
            )
        self.gamma = gamma
        self.merge = merge

    @property
    def needs(self) -> frozenset[Need]:
        """Input moments."""
        return frozenset({Need.INPUT_MOMENTS})

    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """Cost times credit, times overlap ** gamma; 0 for the connections into merged units."""
        statistics = context.statistics(gradients=True, signatures=self.gamma > 0)
        readers = find_readers(context.module, context.selected)
        merged = merge_readers(context, statistics, readers, self.merge)
        scores = {}
        for entry in context.selected:
            layer = statistics[entry.name]
            weight = merged.weights.get(entry.name, context.weights[entry.name])
            variance = layer.output_variance(weight)
            if layer.output_gradient is None:
                raise RuntimeError("statistics were collected without gradients.")
            credit = unit_credit(layer.output_gradient, variance)
            if entry.name in merged.dropped:
                credit = credit.masked_fill(merged.dropped[entry.name], 0.0)
            cost = _cost_by_group(weight, layer.covariance, variance)
            overlap = _overlap(entry.name, statistics, readers) if self.gamma > 0 else None
            score = similarity_score(cost.flatten(1), credit, overlap, gamma=float(self.gamma))
            scores[entry.name] = score.reshape(weight.shape)
        return scores

    def refit(self, context: ScoreContext, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Kept weights by least squares; see `least_squares`."""
        readers = find_readers(context.module, context.selected)
        merged = merge_readers(context, context.statistics(), readers, self.merge)
        return least_squares(context, masks, merged.weights, merged.biases)

    def __repr__(self) -> str:
        return f"Similarity(gamma={self.gamma}, merge={self.merge})"


def _cost_by_group(weight: Tensor, covariance: Tensor, variance: Tensor) -> Tensor:
    cost = elimination_cost if covariance.shape[-1] <= _EXACT_UP_TO else forward_selection_cost
    if covariance.dim() == 2:
        return cost(weight, covariance, variance)
    groups = len(covariance)
    parts = zip(weight.chunk(groups), covariance, variance.chunk(groups), strict=True)
    return torch.cat([cost(*part) for part in parts])


def _overlap(name: str, statistics: Mapping[str, LayerStatistics], readers: Readers) -> Tensor:
    """(out, d) overlap of each target unit's activation with each input of the layer."""
    layer = statistics[name]
    if layer.input_signature is None or layer.output_signature is None:
        raise RuntimeError("statistics were collected without signatures.")
    # Activations are seen where they are read; where no selected layer reads them, pre-activations stand in.
    target = layer.output_signature
    shown = statistics[readers.any[name]].input_signature if name in readers.any else None
    if shown is not None:  # of a convolution the taps of a channel are added
        target = shown.reshape(len(target), -1, target.shape[-1]).sum(1)
    if layer.input_signature.dim() == 2:
        return signature_overlap(input_signature(layer.input_signature), input_signature(target))
    groups = zip(layer.input_signature, target.chunk(len(layer.input_signature)), strict=True)
    return torch.cat([signature_overlap(input_signature(read), input_signature(written)) for read, written in groups])
