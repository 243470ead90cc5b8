r"""The tree of a function from its input derivatives, and the mask that follows it (SP-H), as pure functions.

If inputs a and b reach f only through one h(a, b), then f_a / f_b = h_a / h_b does not depend on any other input c: the
derivative of the ratio is 0, so that f_ac f_b = f_bc f_a. How nearly this holds is the similarity of a and b.

Reference:
    Similarity-based pruning is the idea of arXiv 2606.19941, whose recipe is not public. This recipe is ours.
    The separability criterion is that of W. Leontief (Econometrica 15, 1947).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsecomp.functional import _checked

Cluster = tuple[int, ...]
Level = tuple[Cluster, ...]


@dataclass(frozen=True, eq=False)
class SimilaritySums:
    """Sums over samples and outputs of products of derivatives; they add over batches and ranks.

    Attributes:
        cross: (d, d, d) over inputs a, b, c: sum of (f_ac f_b) (f_bc f_a).
        square: (d, d, d) over inputs a, b, c: sum of (f_ac f_b)^2.
    """

    cross: Tensor
    square: Tensor

    def __add__(self, other: "SimilaritySums") -> "SimilaritySums":
        return SimilaritySums(self.cross + other.cross, self.square + other.square)


@dataclass(frozen=True)
class InputTree:
    """Which inputs belong together, level by level.

    Attributes:
        levels: The clusters of each level above the single inputs, the last one with a single cluster; each cluster is
            the sorted tuple of its inputs.
        similarity: Per level the similarity of each pair that was merged, by the cluster it became; NaN where no input
            was left outside to tell by.
        apart: Per level the mean similarity of the pairs that were not merged; NaN if there were none.
        dropped: Inputs that are in no cluster.

    A tree of a single input has one level, and no similarity.
    """

    levels: tuple[Level, ...]
    similarity: tuple[dict[Cluster, float], ...]
    apart: tuple[float, ...]
    dropped: Cluster = ()

    @property
    def mean_similarity(self) -> tuple[float, ...]:
        """Per level the mean similarity of the pairs that were merged; NaN where one cannot be told."""
        return tuple(math.fsum(merged.values()) / len(merged) for merged in self.similarity)

    @property
    def contradicted(self) -> bool:
        """Whether at every level that can be told the merged pairs are no more similar than the others: no tree shows."""
        pairs = zip(self.mean_similarity, self.apart, strict=True)
        told = [merged > apart for merged, apart in pairs if not math.isnan(apart)]
        return bool(told) and not any(told)

    def to_record(self) -> dict[str, Any]:
        """Plain containers for JSON and checkpoints; NaN becomes None."""
        return {
            "levels": [[list(cluster) for cluster in level] for level in self.levels],
            "similarity": [
                [{"cluster": list(cluster), "similarity": _or_none(value)} for cluster, value in merged.items()]
                for merged in self.similarity
            ],
            "apart": [_or_none(value) for value in self.apart],
            "dropped": list(self.dropped),
            "contradicted": self.contradicted,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "InputTree":
        """The inverse of `to_record`."""
        return cls(
            levels=tuple(tuple(tuple(cluster) for cluster in level) for level in record["levels"]),
            similarity=tuple(
                {tuple(pair["cluster"]): _or_nan(pair["similarity"]) for pair in merged}
                for merged in record["similarity"]
            ),
            apart=tuple(_or_nan(value) for value in record["apart"]),
            dropped=tuple(record["dropped"]),
        )


def similarity_sums(first: Tensor, second: Tensor) -> SimilaritySums:
    """The sums that `input_similarity` and `infer_levels` read.

    Args:
        first: (n, d) or (n, outputs, d) derivatives f_a of each output by each input.
        second: (n, d, d) or (n, outputs, d, d) second derivatives f_ac.

    Raises:
        ValueError: If a shape does not fit, or a value is not finite.
    """
    d = first.shape[-1]
    f = first.reshape(-1, d)
    shape = (len(f), d, d)
    form = f"({len(f)}, {d}, {d}), or with outputs after the samples"
    f = _checked.floats("first", f, "the derivative by each input", (-1, d), "(n, d)")
    s = _checked.floats("second", second.reshape(-1, d, d), "the second derivatives by the inputs", shape, form)
    product = (s * f.unsqueeze(2)).permute(2, 0, 1)  # (c, n, a): f_ac f_a
    cross = torch.bmm(product.transpose(1, 2), product).permute(1, 2, 0)  # f_ac f_a f_bc f_b
    square = (s.square().reshape(len(f), d * d).T @ f.square()).reshape(d, d, d).transpose(1, 2)
    return SimilaritySums(cross, square)


def input_similarity(sums: SimilaritySums, clusters: Sequence[Cluster] | None = None) -> Tensor:
    r"""How nearly the ratio of two inputs' derivatives depends on no other input.

        S(a, b) = sum u v / sqrt(sum u^2 sum v^2),   u = f_ac f_b, v = f_bc f_a,

    over samples, outputs and the context inputs c other than a and b. 1 if a and b reach f through one h(a, b) only.
    Between clusters it is the mean over their pairs, with the context outside both. It does not change when f
    is scaled, or all inputs alike; where inputs are of different scales, multiply derivatives by their deviations first,
    or those of the smallest scale make up the context.

    Args:
        sums: From `similarity_sums`.
        clusters: Disjoint groups of inputs; the single inputs if None.

    Returns:
        (clusters, clusters) float64 in [-1, 1], with ones on the diagonal; NaN where no context is left; 0 where all
        mixed derivatives are 0.

    >>> x = torch.rand(200, 4, dtype=torch.float64) + 0.5
    >>> f = lambda x: torch.sin(x[0] * x[1]) * (x[2] + x[3] ** 2)
    >>> first = torch.func.vmap(torch.func.grad(f))(x)
    >>> second = torch.func.vmap(torch.func.jacrev(torch.func.grad(f)))(x)
    >>> similarity = input_similarity(similarity_sums(first, second))
    >>> [round(float(value), 6) for value in (similarity[0, 1], similarity[2, 3])]
    [1.0, 1.0]
    >>> bool(similarity[0, 2] < 0.9)
    True
    """
    d = len(sums.cross)
    clusters = [(a,) for a in range(d)] if clusters is None else clusters
    found = torch.eye(len(clusters), dtype=sums.cross.dtype, device=sums.cross.device)
    inside = sorted(a for cluster in clusters for a in cluster)
    for (i, one), (j, other) in itertools.combinations(enumerate(clusters), 2):
        context = [c for c in inside if c not in one and c not in other]
        if not context:
            found[i, j] = found[j, i] = math.nan
            continue
        of, to = list(one), list(other)
        cross = sums.cross[of][:, to][:, :, context].sum(2)
        u = sums.square[of][:, to][:, :, context].sum(2)
        v = sums.square[to][:, of][:, :, context].sum(2).T
        scale = (u * v).sqrt()
        found[i, j] = found[j, i] = torch.where(scale > 0, cross / scale, 0.0).mean()
    return found


def infer_levels(sums: SimilaritySums, inputs: Sequence[int] | None = None) -> InputTree:
    """Group inputs level by level: the most similar pairs of clusters merge, each cluster at most once a level.

    A low similarity does not say that a pair is wrong, so that there is no threshold. What is left over where the number
    of clusters is odd goes up alone. Ties go to the pair with the lower inputs.

    Args:
        sums: From `similarity_sums`.
        inputs: The inputs to group; all if None. The others are `dropped`.

    Raises:
        ValueError: If `inputs` is empty, or names an input twice or one that does not exist.

    >>> sums = SimilaritySums(torch.ones(4, 4, 4), torch.ones(4, 4, 4) * 2)
    >>> infer_levels(sums).levels
    (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    """
    d = len(sums.cross)
    kept = sorted(range(d) if inputs is None else inputs)
    if not kept or len(set(kept)) != len(kept) or not 0 <= kept[0] <= kept[-1] < d:
        raise ValueError(
            f"`inputs` is what is grouped and must be different numbers in [0, {d - 1}], at least one; got {inputs!r}."
        )
    clusters: Level = tuple((a,) for a in kept)
    levels: list[Level] = []
    merges: list[dict[Cluster, float]] = []
    apart: list[float] = []
    while len(clusters) > 1:
        similarity = input_similarity(sums, clusters).nan_to_num(nan=-math.inf).tolist()
        pairs = sorted(itertools.combinations(range(len(clusters)), 2), key=lambda pair: -similarity[pair[0]][pair[1]])
        taken: set[int] = set()
        merged: dict[Cluster, float] = {}
        others = []
        for i, j in pairs:
            value = similarity[i][j] if similarity[i][j] > -math.inf else math.nan
            if i in taken or j in taken:
                others.append(value)
                continue
            taken |= {i, j}
            merged[tuple(sorted(clusters[i] + clusters[j]))] = value
        alone = [cluster for index, cluster in enumerate(clusters) if index not in taken]
        clusters = tuple(sorted([*merged, *alone]))
        levels.append(clusters)
        merges.append(merged)
        apart.append(math.fsum(others) / len(others) if others else math.nan)
    return InputTree(tuple(levels) or (clusters,), tuple(merges), tuple(apart), tuple(sorted({*range(d)} - {*kept})))


def layout_mask(levels: Sequence[Level], inputs: int, layers: Sequence[Sequence[str]], outputs: int) -> list[Tensor]:
    """Masks of a chain of fully connected layers that follow a tree of inputs.

    The units of a hidden layer are dealt over the clusters of its level in turn, one kind of activation after the other,
    so that each cluster has units of each kind as far as there are enough. Connection i -> j stays iff
    cluster(i) is part of cluster(j); the outputs read all units of the last hidden layer. Hidden layer l of H has
    level l; beyond the last level the last one again; with fewer layers than levels, level ceil(l L / H) of L, so that
    the last hidden layer has all inputs.

    Args:
        levels: The clusters of each level, as `InputTree.levels`, or of a tree that is known.
        inputs: Number of inputs; those in no cluster are connected to nothing.
        layers: For each hidden layer the kind of activation of each unit.
        outputs: Number of outputs.

    Returns:
        A bool mask (out, in) for each layer, the hidden ones and the readout.

    Raises:
        ValueError: If there are no levels or no hidden layers, or a layer has fewer units than its level has clusters.

    >>> levels = [((0, 1), (2, 3)), ((0, 1, 2, 3),)]
    >>> [mask.int().tolist() for mask in layout_mask(levels, 4, [["tanh"] * 2, ["tanh"]], 1)]
    [[[1, 1, 0, 0], [0, 0, 1, 1]], [[1, 1]], [[1]]]
    """
    if not levels or not layers:
        raise ValueError(
            f"a layout needs at least one level of clusters and one hidden layer; got {len(levels)} and {len(layers)}."
        )
    below: list[frozenset[int]] = [frozenset({a}) for a in range(inputs)]
    used = frozenset(a for cluster in levels[-1] for a in cluster)
    masks = []
    for number, kinds in enumerate(layers, start=1):
        deep = len(layers) >= len(levels)
        level = levels[(min(number, len(levels)) if deep else -(-number * len(levels) // len(layers))) - 1]
        if len(kinds) < len(level):
            raise ValueError(
                f"hidden layer {number} must have a unit for each of the {len(level)} clusters of its level; it has "
                f"{len(kinds)}. Make it wider."
            )
        clusters = _dealt([frozenset(cluster) for cluster in level], kinds)
        masks.append(torch.tensor([[bool(i & used) and i <= j for i in below] for j in clusters]))
        below = clusters
    masks.append(torch.ones(outputs, len(below), dtype=torch.bool))
    return masks


def _dealt(clusters: Sequence[frozenset[int]], kinds: Sequence[str]) -> list[frozenset[int]]:
    """The cluster of each unit; one kind goes on where the one before ended, so that none is left without units."""
    turn = itertools.cycle(clusters)
    of = {unit: next(turn) for kind in dict.fromkeys(kinds) for unit, own in enumerate(kinds) if own == kind}
    return [of[unit] for unit in range(len(kinds))]


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
