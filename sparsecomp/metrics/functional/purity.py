"""Do hidden units stay within one subtree of the true graph."""

import torch
from torch import Tensor


def pure_units(supports: Tensor, layers: Tensor, leaves: Tensor, levels: Tensor) -> Tensor:
    """Which hidden units depend on inputs of one subtree only; a node of level l is a subtree for the units of layer l.

    Args:
        supports: (units, inputs) bool, the inputs that each unit depends on through the masks.
        layers: (units,) the layer of each unit, 1 for the first hidden one.
        leaves: (nodes, inputs) bool, the inputs that each node below the outputs depends on.
        levels: (nodes,) the level of each node, 1 for those that read inputs only.

    Returns:
        (units,) float64: 1 for a pure unit, 0 for another one, NaN in a layer that has no level below the outputs.

    >>> leaves = torch.tensor([[True, True, False, False], [False, False, True, True]])
    >>> supports = torch.tensor([[True, False, False, False], [False, True, True, False], [True, True, True, True]])
    >>> pure_units(supports, torch.tensor([1, 1, 2]), leaves, torch.tensor([1, 1])).tolist()
    [1.0, 0.0, nan]
    """
    same_level = layers[:, None] == levels
    inside = supported_inside(supports, leaves).T & same_level
    return torch.where(same_level.any(1), inside.any(1).double(), torch.nan)


def purity(pure: Tensor, live: Tensor) -> float:
    """Share of pure units among the live ones of layers that have a level, in [0, 1]; NaN if there are none.

    Args:
        pure: (units,) as `pure_units` returns it.
        live: (units,) bool.

    >>> purity(torch.tensor([1.0, 0.0, 0.0, torch.nan]), torch.tensor([True, True, False, True]))
    0.5
    """
    return float(pure[live].nanmean())


def supported_inside(supports: Tensor, leaves: Tensor) -> Tensor:
    """(nodes, units) bool: whether all inputs of the unit are leaves of the node."""
    return (supports.float() @ (~leaves).float().T == 0).T
