"""The internal nodes of a target function, and their subtrees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsecomp.functions import TargetFunction
from sparsecomp.metrics.functional.undefined import UndefinedError


@dataclass(frozen=True, eq=False)
class Subtrees:
    """The internal nodes of a target function without its outputs.

    Attributes:
        names: Their names, level by level.
        columns: (nodes,) their columns in `TargetFunction.node_values`.
        levels: (nodes,) their levels, 1 for those that read inputs only.
        leaves: (nodes, in_features) bool: the inputs that each depends on, by column.

    >>> from sparsecomp.functions import Tree
    >>> nodes = Subtrees.of(Tree(depth=2))
    >>> nodes.names, nodes.levels.tolist(), nodes.leaves.int().tolist()
    (('h1_0', 'h1_1'), [1, 1], [[1, 1, 0, 0], [0, 0, 1, 1]])
    """

    names: tuple[str, ...]
    columns: Tensor
    levels: Tensor
    leaves: Tensor

    @classmethod
    def of(cls, function: TargetFunction) -> "Subtrees":
        """Read them from the graph.

        Raises:
            UndefinedError: If all internal nodes are outputs.
        """
        names = tuple(name for name in function.node_names if name not in function.output_names)
        if not names:
            raise UndefinedError(f"all internal nodes of {function!r} are outputs.")
        nodes = function.graph.nodes
        leaves = torch.zeros(len(names), function.in_features, dtype=torch.bool)
        for row, name in enumerate(names):
            leaves[row, [nodes[leaf]["index"] for leaf in nodes[name]["leaves"]]] = True
        columns = torch.tensor([function.node_names.index(name) for name in names])
        return cls(names, columns, torch.tensor([nodes[name]["level"] for name in names]), leaves)
