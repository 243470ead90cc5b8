"""A tree of inputs as text and as a picture."""

import math
from pathlib import Path

from sparsecomp.functional.hierarchy import Cluster, InputTree


def tree_text(tree: InputTree) -> str:
    """The tree as nested brackets, and for each level how similar what merged was, beside the rest.

    >>> print(tree_text(InputTree((((0, 1), (2,)), ((0, 1, 2),)), ({(0, 1): 0.9}, {(0, 1, 2): math.nan}), (0.25, math.nan))))
    ((x0 x1) x2)
    level 1: (x0 x1) .90; pairs that were not merged .25 on average
    level 2: (x0 x1 x2) cannot be told
    """
    lines = [" ".join(_nested(tree, cluster, len(tree.levels)) for cluster in tree.levels[-1])]
    for level, (merged, apart) in enumerate(zip(tree.similarity, tree.apart, strict=True), start=1):
        pairs = ", ".join(
            f"({' '.join(f'x{a}' for a in cluster)}) {_number(value)}" for cluster, value in merged.items()
        )
        rest = "" if math.isnan(apart) else f"; pairs that were not merged {_number(apart)} on average"
        lines.append(f"level {level}: {pairs}{rest}")
    if tree.dropped:
        lines.append(f"without effect and dropped: {' '.join(f'x{a}' for a in tree.dropped)}")
    return "\n".join(lines)


def draw_tree(tree: InputTree, picture: Path) -> None:
    """Inputs at the bottom, a bracket for each merge at its level, labelled with its similarity."""
    from matplotlib.figure import Figure

    order = [a for cluster in tree.levels[-1] for a in _order(tree, cluster, len(tree.levels))]
    place: dict[Cluster, tuple[float, float]] = {(a,): (float(index), 0.0) for index, a in enumerate(order)}
    figure = Figure(figsize=(max(4.0, 0.6 * len(order)), 1.5 + len(tree.levels)), layout="constrained")
    axes = figure.subplots()
    for level, merged in enumerate(tree.similarity, start=1):
        for cluster, value in merged.items():
            (left, low), (right, other) = (place[part] for part in _parts(tree, cluster, level))
            axes.plot([left, left, right, right], [low, level, level, other], color="black")
            place[cluster] = ((left + right) / 2, float(level))
            label = "" if math.isnan(value) else _number(value)
            axes.annotate(label, ((left + right) / 2, level), ha="center", va="bottom")
    axes.set_xticks(range(len(order)), [f"x{a}" for a in order])
    axes.set_yticks(range(1, len(tree.similarity) + 1))
    axes.set_ylabel("level")
    axes.set_ylim(0, len(tree.levels) + 0.5)
    axes.set_title("Inputs that belong together, with their similarity")
    figure.savefig(picture, dpi=150, metadata={"Software": None})


def _parts(tree: InputTree, cluster: Cluster, level: int) -> list[Cluster]:
    """What became `cluster` at `level`; itself alone where nothing did."""
    below = tree.levels[level - 2] if level > 1 else tuple((a,) for a in cluster)
    return [part for part in below if {*part} <= {*cluster}]


def _nested(tree: InputTree, cluster: Cluster, level: int) -> str:
    if len(cluster) == 1:
        return f"x{cluster[0]}"
    parts = _parts(tree, cluster, level)
    inner = " ".join(_nested(tree, part, level - 1) for part in parts)
    return inner if len(parts) == 1 else f"({inner})"


def _order(tree: InputTree, cluster: Cluster, level: int) -> list[int]:
    if len(cluster) == 1:
        return list(cluster)
    return [a for part in _parts(tree, cluster, level) for a in _order(tree, part, level - 1)]


def _number(value: float) -> str:
    return "cannot be told" if math.isnan(value) else f"{value:.2f}".replace("0.", ".", 1)
