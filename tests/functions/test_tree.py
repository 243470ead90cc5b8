"""The tree: its shape, its constituents, and its ground truth under permutation and distractors."""

import itertools
import math

import pytest
import torch
from helpers import assert_same

from sparsecomp.functions import Tree


def sample(tree, n=500, seed=7):
    return tree.sample_inputs(n, torch.Generator().manual_seed(seed))


def leaves(tree):
    return {name: tree.graph.nodes[name]["leaves"] for name in tree.node_names}


def test_shape_of_the_default_tree():
    tree = Tree()
    assert (tree.in_features, tree.out_features, tree.output_names) == (8, 1, ("h3_0",))
    assert tree.node_names == ("h1_0", "h1_1", "h1_2", "h1_3", "h2_0", "h2_1", "h3_0")
    assert leaves(tree) == {
        "h1_0": {"x0", "x1"},
        "h1_1": {"x2", "x3"},
        "h1_2": {"x4", "x5"},
        "h1_3": {"x6", "x7"},
        "h2_0": {"x0", "x1", "x2", "x3"},
        "h2_1": {"x4", "x5", "x6", "x7"},
        "h3_0": {f"x{i}" for i in range(8)},
    }
    assert sorted(tree.graph.edges) == sorted(
        [(f"x{i}", f"h1_{i // 2}") for i in range(8)] + [(f"h1_{i}", f"h2_{i // 2}") for i in range(4)]
        + [("h2_0", "h3_0"), ("h2_1", "h3_0")]
    )  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 4, 5])
def test_depth(depth):
    tree = Tree(depth=depth)
    assert tree.in_features == 2**depth
    assert len(tree.node_names) == 2**depth - 1
    for name in tree.node_names:
        node = tree.graph.nodes[name]
        level, place = (int(number) for number in name[1:].split("_"))
        assert node["level"] == level
        assert node["leaves"] == {f"x{i}" for i in range(place * 2**level, (place + 1) * 2**level)}


def test_constituents_and_their_constants():
    trees = [Tree(seed=seed) for seed in range(26)]
    nodes = [tree.graph.nodes[name] for tree in trees for name in tree.node_names]
    kinds = [node["kind"] for node in nodes]
    assert {kind: 35 < kinds.count(kind) < 85 for kind in set(kinds)} == {"sin": True, "gauss": True, "product": True}
    weights = [weight for node in nodes for weight in node["weights"]]
    biases = [node["bias"] for node in nodes if node["kind"] != "product"]
    assert {len(node["weights"]) for node in nodes if node["kind"] != "product"} == {2}
    assert all(0.5 <= abs(weight) <= 0.9 for weight in weights)
    assert min(map(abs, weights)) < 0.52 < 0.88 < max(map(abs, weights))
    assert 0.4 < sum(weight > 0 for weight in weights) / len(weights) < 0.6
    assert all(-1 <= bias <= 1 for bias in biases)
    assert min(biases) < -0.9 < 0.9 < max(biases)
    assert all((node["weights"], node["bias"]) == ((), 0.0) for node in nodes if node["kind"] == "product")


def test_one_node_by_hand():
    seen = {}
    for seed in range(20):
        tree = Tree(depth=1, seed=seed)
        node = tree.graph.nodes["h1_0"]
        a, b = 0.4, -1.1
        if node["kind"] == "product":
            expected = (a * b - node["mean"]) / node["scale"]
            # Mean 0 and variance 1 already.
            assert (node["mean"], node["scale"]) == (pytest.approx(0, abs=0.01), pytest.approx(1, abs=0.01))
        else:
            (v, w), c = node["weights"], node["bias"]
            z = v * a + w * b + c
            raw = math.sin(z) if node["kind"] == "sin" else 2 * math.exp(-z * z) - 1
            expected = (raw - node["mean"]) / node["scale"]
        seen[node["kind"]] = expected
        assert float(tree(torch.tensor([[a, b]], dtype=torch.float64))) == pytest.approx(expected, abs=1e-12)
    assert len(seen) == 3


def test_inputs_are_uniform_with_unit_variance():
    x = sample(Tree(distractors=2), 40000)
    assert x.shape == (40000, 10)
    assert x.mean(dim=0).tolist() == pytest.approx([0.0] * 10, abs=0.03)
    assert x.var(dim=0).tolist() == pytest.approx([1.0] * 10, abs=0.03)
    assert math.sqrt(3) - 0.01 < float(x.abs().max()) <= math.sqrt(3) + 1e-6
    assert (x.abs() < math.sqrt(3) / 2).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert float((torch.corrcoef(x.T) - torch.eye(10)).abs().max()) < 0.03


@pytest.mark.parametrize("seed", range(5))
def test_standardised(seed):
    tree = Tree(seed=seed)
    values = tree.node_values(sample(tree, 50000))
    assert values.mean(dim=0).tolist() == pytest.approx([0.0] * 7, abs=0.03)
    assert values.std(dim=0).tolist() == pytest.approx([1.0] * 7, abs=0.03)


@pytest.mark.parametrize(("distractors", "permuted"), list(itertools.product([0, 3], [False, True])))
def test_ground_truth_under_permutation_and_distractors(distractors, permuted):
    plain = Tree(seed=2)
    tree = Tree(seed=2, permuted=permuted, distractors=distractors)
    columns = list(tree.leaf_columns)
    assert tree.in_features == 8 + distractors
    assert len(set(columns)) == 8
    assert set(columns) <= set(range(8 + distractors))
    assert (columns == list(range(8))) == (not permuted)
    # The same nodes over other columns ...
    assert leaves(tree) == {
        name: {f"x{columns[int(leaf[1:])]}" for leaf in below} for name, below in leaves(plain).items()
    }
    for name in plain.node_names:
        constants = [
            {k: t.graph.nodes[name][k] for k in ("kind", "weights", "bias", "mean", "scale")} for t in (plain, tree)
        ]
        assert constants[0] == constants[1]
    # ... have the same values there, and no other column matters, to any node.
    x = sample(tree)
    assert_same(tree.node_values(x), plain.node_values(x[:, columns]))
    unread = set(range(8 + distractors)) - set(columns)
    assert len(unread) == distractors
    for column, name in enumerate(tree.input_names):
        changed = x.clone()
        changed[:, column] += 1
        moved = (tree.node_values(changed) != tree.node_values(x)).any(dim=0).tolist()
        assert {node for node, is_moved in zip(tree.node_names, moved, strict=True) if is_moved} == {
            node for node, below in leaves(tree).items() if name in below
        }
        assert (tree.graph.out_degree(name) == 0) == (column in unread)


def test_permutations_differ_and_reach_distractors():
    trees = [Tree(depth=2, permuted=True, distractors=2, seed=seed) for seed in range(20)]
    assert len({tree.leaf_columns for tree in trees}) > 15
    assert {column for tree in trees for column in tree.leaf_columns} == set(range(6))


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"`depth` is the number of levels .* integer >= 1; got 0"):
        Tree(depth=0)
    with pytest.raises(ValueError, match=r"`depth` is the number of levels and must be in \[1, 8\]; got 9"):
        Tree(depth=9)
    with pytest.raises(TypeError, match=r"`permuted` is .* must be True or False; got 1"):
        Tree(permuted=1)
    with pytest.raises(ValueError, match=r"`distractors` is the number of columns without effect .* >= 0; got -1"):
        Tree(distractors=-1)
