r"""Similarity-based pruning (SP-C) as pure functions: merge, eliminate, score, refit.

    score_ij = cost_ij * E[(do / dz_j)^2] var(z_j) * overlap_ij^gamma

of the connection from unit i to unit j, larger = keep. Inputs are means and covariances, which stream; G is centred and
divided by n throughout.

Reference:
    Similarity-based pruning is the idea of arXiv 2606.19941, whose recipe is not public. This recipe is ours.
"""

import torch
from torch import Tensor

from sparsecomp._checks import check_number
from sparsecomp.functional import _checked
from sparsecomp.functional.elimination import elimination_cost
from sparsecomp.functional.forward_selection import forward_selection_cost
from sparsecomp.functional.merging import UnitMerge, apply_merge, merge_units
from sparsecomp.functional.refitting import refit

__all__ = [
    "UnitMerge",
    "apply_merge",
    "elimination_cost",
    "forward_selection_cost",
    "input_signature",
    "merge_units",
    "refit",
    "signature_overlap",
    "similarity_score",
    "unit_credit",
]


def unit_credit(output_gradient: Tensor, output_variance: Tensor) -> Tensor:
    r"""What the network's outputs lose, to first order, if a unit is replaced by its mean.

        credit_j = E[(do / dz_j)^2] var(z_j)

    Scaling a unit (z -> c z, read by w / c) leaves it unchanged.

    Args:
        output_gradient: (units,) E[(do / dz_j)^2], summed over outputs o and, in a convolution, over positions; >= 0.
        output_variance: (units,) var(z_j), divided by n; >= 0.

    Returns:
        (units,) float64, in squared units of the output.

    Raises:
        ValueError: If a shape does not fit, or a value is not finite or below 0.

    Reference:
        A diagonal Gauss-Newton term as in Y. LeCun et al.: Optimal Brain Damage (NeurIPS 1989), of units, not weights,
        and of outputs, not the loss. Its place in the score is our recipe of the idea of arXiv 2606.19941.

    >>> unit_credit(torch.tensor([4.0, 0.0]), torch.tensor([0.5, 3.0]))
    tensor([2., 0.], dtype=torch.float64)
    """
    meaning = "E[(do / dz_j)^2] of each unit"
    gradient = _checked.floats("output_gradient", output_gradient, meaning, (-1,), "(units,)", minimum=0.0)
    units = len(gradient)
    meaning = "the variance of each pre-activation"
    variance = _checked.floats("output_variance", output_variance, meaning, (units,), f"({units},)", minimum=0.0)
    return gradient * variance


def input_signature(squared_derivative: Tensor, input_variance: Tensor | None = None) -> Tensor:
    r"""Which inputs of the network a unit depends on, as shares that add up to 1.

        u_k = E[(da / dx_k)^2] var(x_k) / sum of the same over the inputs k

    Scaling a unit or an input leaves it unchanged. A unit that depends on no input has zeros.

    Args:
        squared_derivative: (units, inputs) E[(da_i / dx_k)^2], >= 0.
        input_variance: (inputs,) var(x_k), >= 0; None if `squared_derivative` is multiplied by it already.

    Returns:
        (units, inputs) float64, in [0, 1].

    Raises:
        ValueError: If a shape does not fit, or a value is not finite or below 0.

    Reference:
        Our recipe of the idea of arXiv 2606.19941. E[(da / dx)^2] is the derivative-based sensitivity measure of I. Sobol
        and S. Kucherenko (Mathematics and Computers in Simulation 79, 2009).

    >>> input_signature(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([3.0, 1.0]))
    tensor([[0.7500, 0.2500],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    meaning = "E[(da_i / dx_k)^2] of each unit and network input"
    raw = _checked.floats("squared_derivative", squared_derivative, meaning, (-1, -1), "(units, inputs)", minimum=0.0)
    if input_variance is not None:
        inputs = raw.shape[1]
        meaning = "the variance of each network input"
        raw = raw * _checked.floats("input_variance", input_variance, meaning, (inputs,), f"({inputs},)", minimum=0.0)
    total = raw.sum(1, keepdim=True)
    return torch.where(total > 0, raw / total, 0.0)


def signature_overlap(signature: Tensor, target_signature: Tensor) -> Tensor:
    r"""How far two units depend on the same inputs of the network: overlap_ij = sum_k min(u_ki, u_kj).

    Args:
        signature: (d, inputs) of the units i of a layer, from `input_signature`.
        target_signature: (out, inputs) of the units j that read them, of what they put out (after the activation
            function).

    Returns:
        (out, d) float64, the form of a weight: 1 for the same signature, 0 for disjoint inputs.

    Raises:
        ValueError: If a shape does not fit, or a value is not finite or below 0.

    Reference:
        Histogram intersection (M. Swain, D. Ballard: Color indexing, 1991). Its use here is our recipe of the idea of
        arXiv 2606.19941.

    >>> signature_overlap(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    meaning = "the input signatures of a layer's units"
    source = _checked.floats("signature", signature, meaning, (-1, -1), "(d, inputs)", minimum=0.0)
    inputs = source.shape[1]
    meaning = "the input signatures of the units that read them"
    shape = (-1, inputs)
    target = _checked.floats("target_signature", target_signature, meaning, shape, f"(out, {inputs})", minimum=0.0)
    overlap = source.new_zeros(len(target), len(source))
    for k in range(inputs):
        overlap += torch.minimum(target[:, k].unsqueeze(1), source[:, k])
    return overlap


def similarity_score(cost: Tensor, credit: Tensor, overlap: Tensor | None = None, *, gamma: float = 0.0) -> Tensor:
    r"""Score of each connection of a layer, larger = keep, comparable between layers of a network.

        score_ij = cost_ij * credit_j * overlap_ij^gamma

    Args:
        cost: (out, in, ...) from `elimination_cost` or `forward_selection_cost`.
        credit: (out,) from `unit_credit`.
        overlap: (out, d) from `signature_overlap`, or in the shape of `cost`; not read where `gamma` is 0.
        gamma: In [0, 4). 0 is best for accuracy on real data; 2 favours structure where inputs can be told apart. Our
            experiments advise against 4 and above, which are refused.

    Returns:
        Scores in the shape of `cost`, float64.

    Raises:
        ValueError: If a shape does not fit, a value is not finite or below 0, `gamma` is out of range, or is above 0
            without `overlap`.

    Reference:
        Our recipe of the idea of arXiv 2606.19941, whose own is not public. With gamma = 0 it is layer-wise Optimal
        Brain Surgeon with credits.

    >>> similarity_score(torch.tensor([[1.0, 0.5]]), torch.tensor([2.0]), torch.tensor([[0.5, 1.0]]), gamma=2.0)
    tensor([[0.5000, 1.0000]], dtype=torch.float64)
    """
    meaning = "the exponent of the overlap"
    gamma = check_number("gamma", gamma, meaning, "in [0, 4)")
    if not 0 <= gamma < 4:
        raise ValueError(
            f"`gamma` is {meaning} and must be in [0, 4); got {gamma!r}. Use 0 for quality, 2 for structure."
        )
    if gamma and overlap is None:
        raise ValueError(
            f"`overlap` is what `gamma` is the exponent of and must be given where gamma is above 0; got None with gamma "
            f"{gamma!r}. Pass `signature_overlap(...)`."
        )
    rows = _checked.floats("cost", cost.reshape(len(cost), -1), "what a removal costs", (-1, -1), "(out, in, ...)", 0.0)
    out, d = rows.shape
    credit = _checked.floats("credit", credit, "what each target unit is worth", (out,), f"({out},)", minimum=0.0)
    score = rows * credit.unsqueeze(1)
    if gamma and overlap is not None:
        flat = overlap.reshape(len(overlap), -1)
        meaning = "how far units depend on the same inputs"
        score = score * _checked.floats("overlap", flat, meaning, (out, d), f"({out}, {d})", minimum=0.0).pow(gamma)
    return score.reshape(cost.shape)
