"""Do hidden units compute the nodes of the true graph."""

from torch import Tensor


def node_alignment(correlation: Tensor) -> float:
    """Mean |correlation| of the true nodes with the units they are matched with one to one, in [0, 1].

        max over one-to-one matches m of (1 / nodes) sum_k |corr(node_k, unit_m(k))|

    A node that is left over because there are fewer units counts 0. This is recall: it says nothing of further units, and
    it rises with the number of units for no good reason.

    Args:
        correlation: (nodes, units) of the internal nodes without the outputs, and the live units of all hidden layers.

    Invariant to a permutation of units and to rescaling one.

    >>> import torch
    >>> round(node_alignment(torch.tensor([[0.9, -0.8, 0.0], [0.9, 0.1, 0.0]])), 3)  # -0.8 and 0.9
    0.85
    """
    from scipy.optimize import linear_sum_assignment

    strength = correlation.abs().cpu().numpy()
    return float(strength[linear_sum_assignment(strength, maximize=True)].sum() / len(strength))
