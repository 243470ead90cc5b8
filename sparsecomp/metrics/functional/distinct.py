"""How many different functions the hidden units compute."""

from torch import Tensor

_SAME = 0.99


def distinct_functions(correlation: Tensor) -> int:
    """Number of connected components of the graph that joins units with |r| >= .99, over units of all hidden layers.

    Copies, negatives and affine images of a unit are one function with it. As components are transitive, the ends of a
    chain of similar units may differ.

    Args:
        correlation: (d, d) correlations of the live units.

    Invariant to a permutation of units and to rescaling one.

    >>> import torch
    >>> distinct_functions(torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, 0.5], [0.5, 0.5, 1.0]]))
    2
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    same = csr_matrix((correlation.abs() >= _SAME).cpu().numpy())
    return int(connected_components(same, directed=False)[0])
