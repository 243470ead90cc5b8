"""Trees from derivatives: the reference network, functions with a known tree, masks by hand."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsecomp.functional.hierarchy import (
    InputTree,
    SimilaritySums,
    infer_levels,
    input_similarity,
    layout_mask,
    similarity_sums,
)

ACTIVATIONS = {"tanh": torch.tanh, "sin": torch.sin, "gauss": lambda z: 2 * torch.exp(-(z**2)) - 1, "id": lambda z: z}


def derivatives(function, x):
    return torch.func.vmap(torch.func.jacrev(function))(x), torch.func.vmap(
        torch.func.jacrev(torch.func.jacrev(function))
    )(x)


def sums_of(function, d, n=100, seed=0):
    x = torch.rand(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 - 0.9
    return similarity_sums(*derivatives(function, x))


def balanced(x):
    """Pairs (0, 1), (2, 3), (4, 5), (6, 7); then the first two and the last two of them."""
    pair = [torch.sin(x[i] + 0.5 * x[i + 1] ** 2) * (1 + x[i + 1]) for i in range(0, 8, 2)]
    return torch.tanh(pair[0] * pair[1] + pair[0]) * torch.exp(0.5 * pair[2] * pair[3] - pair[3])


def test_the_reference_network():
    file = np.load(Path(__file__).parents[1] / "data" / "sp_reference.npz", allow_pickle=False)
    names = json.loads(str(file["activations"]))
    layers = [
        (torch.from_numpy(file[f"weight_{layer}"]), torch.from_numpy(file[f"bias_{layer}"])) for layer in range(4)
    ]

    def network(x):
        for number, (weight, bias) in enumerate(layers):
            x = weight @ x + bias
            if number < 3:
                x = torch.stack([ACTIVATIONS[name](z) for name, z in zip(names, x.unbind(), strict=True)])
        return x.squeeze()

    x = torch.from_numpy(file["X"])[: int(file["n_similarity_samples"])]
    sums = similarity_sums(*derivatives(network, x))
    torch.testing.assert_close(input_similarity(sums), torch.from_numpy(file["input_similarity"]), rtol=1e-6, atol=1e-9)
    for form in (json.loads(str(file["levels"])), infer_levels(sums).levels):
        assert [len(level) for level in form] == [4, 2, 1]


def test_similarity_is_the_naive_sum():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(7, 2, 5, dtype=torch.float64, generator=generator)
    second = torch.randn(7, 2, 5, 5, dtype=torch.float64, generator=generator)
    second = second + second.transpose(2, 3)
    found = input_similarity(similarity_sums(first, second))
    clusters = [(0, 3), (1,), (2,), (4,)]
    grouped = input_similarity(similarity_sums(first, second), clusters)

    def naive(a, b, context):
        u = [float(second[n, o, a, c] * first[n, o, b]) for n in range(7) for o in range(2) for c in context]
        v = [float(second[n, o, b, c] * first[n, o, a]) for n in range(7) for o in range(2) for c in context]
        return np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v)

    for a, b in itertools.permutations(range(5), 2):
        assert float(found[a, b]) == pytest.approx(naive(a, b, [c for c in range(5) if c not in (a, b)]))
    assert float(grouped[0, 2]) == pytest.approx((naive(0, 2, [1, 4]) + naive(3, 2, [1, 4])) / 2)
    assert found.diagonal().tolist() == [1.0] * 5


def test_sums_add_over_batches():
    x = torch.rand(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = similarity_sums(*derivatives(balanced, x))
    parts = [similarity_sums(*derivatives(balanced, part)) for part in x.split(15)]
    total = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close((total.cross, total.square), (whole.cross, whole.square))


def test_a_balanced_tree_is_found():
    tree = infer_levels(sums_of(balanced, 8))
    assert tree.levels == (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)), (tuple(range(8)),))
    assert all(value == pytest.approx(1.0) for level in tree.similarity[:2] for value in level.values())
    assert math.isnan(tree.similarity[2][tuple(range(8))])
    assert not tree.contradicted
    assert tree.dropped == ()


def test_a_permutation_of_inputs_permutes_the_tree():
    order = [3, 6, 0, 5, 1, 7, 2, 4]  # input i of the new function is input order[i] of the old one
    tree = infer_levels(sums_of(lambda x: balanced(torch.stack([x[order.index(i)] for i in range(8)])), 8))
    named = {frozenset(order[i] for i in cluster) for cluster in tree.levels[0]}
    assert named == {frozenset(pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))}


def test_a_scaled_function_and_inputs_scaled_alike():
    x = torch.rand(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = input_similarity(similarity_sums(*derivatives(balanced, x)))
    scaled = input_similarity(similarity_sums(*derivatives(lambda x: -5 * balanced(x / 3), x * 3)))
    torch.testing.assert_close(scaled, plain)


def test_inputs_of_other_scales_with_derivatives_by_their_deviations():
    scale = torch.tensor([3.0, 0.1, 1.0, 1.0, 7.0, 1.0, 0.5, 1.0]).double()
    x = torch.rand(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = input_similarity(similarity_sums(*derivatives(balanced, x)))
    first, second = derivatives(lambda x: balanced(x / scale), x * scale)
    scaled = input_similarity(similarity_sums(first * scale, second * scale * scale[:, None]))
    torch.testing.assert_close(scaled, plain)


def test_several_outputs_of_one_tree():
    tree = infer_levels(sums_of(lambda x: torch.stack([balanced(x), torch.tanh(balanced(x))]), 8))
    assert tree.levels[0] == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_inputs_left_out_and_odd_numbers():
    tree = infer_levels(sums_of(balanced, 8), inputs=[0, 1, 2, 3, 4, 5, 6])
    assert tree.dropped == (7,)
    assert tree.levels[0] == ((0, 1), (2, 3), (4, 5), (6,))
    assert [len(level) for level in tree.levels] == [4, 2, 1]
    assert infer_levels(sums_of(balanced, 8), inputs=[5]).levels == (((5,),),)


def test_greedy_by_hand():
    """The pair (1, 2) is the most similar one, so that 0 must go with 3."""
    similarity = torch.eye(4).double()
    for (a, b), value in {(0, 1): 0.8, (1, 2): 0.9, (2, 3): 0.7, (0, 3): 0.1, (0, 2): 0.3, (1, 3): 0.2}.items():
        similarity[a, b] = similarity[b, a] = value
    sums = SimilaritySums(similarity.unsqueeze(2).expand(4, 4, 4), torch.ones(4, 4, 4).double())
    tree = infer_levels(sums)
    assert tree.levels == (((0, 3), (1, 2)), ((0, 1, 2, 3),))
    assert tree.similarity[0] == pytest.approx({(1, 2): 0.9, (0, 3): 0.1})
    assert tree.apart[0] == pytest.approx((0.8 + 0.7 + 0.3 + 0.2) / 4)


def test_when_no_tree_shows():
    """Merged 0.9 and 0.1, apart 0.5 or 0.6: no better than the others."""
    merged = ({(0, 1): 0.9, (2, 3): 0.1}, {(0, 1, 2, 3): math.nan})
    levels = (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    assert InputTree(levels, merged, (0.6, math.nan)).contradicted
    assert not InputTree(levels, merged, (0.4, math.nan)).contradicted
    assert not InputTree(levels, merged, (math.nan, math.nan)).contradicted


def naive_layout(clusters):
    """Of layers given as the list of their units' inputs."""
    return [
        torch.tensor([[set(i) <= set(j) for i in before] for j in after])
        for before, after in itertools.pairwise(clusters)
    ]


def test_layout_by_hand():
    levels = [((0, 1), (2, 3)), ((0, 1, 2, 3),)]
    first, second, readout = layout_mask(levels, 5, [["tanh", "sin", "tanh", "sin", "tanh"], ["tanh"] * 2], 2)
    # tanh units 0, 2, 4 take the clusters in turn, sin units go on: 1 has the second one, 3 the first.
    left, right = [1, 1, 0, 0, 0], [0, 0, 1, 1, 0]
    assert first.int().tolist() == [left, right, right, left, left]
    assert second.all()
    assert second.shape == (2, 5)
    assert readout.shape == (2, 2)


def test_layout_is_the_naive_one():
    levels = [((0, 1), (2, 3), (4,)), ((0, 1, 2, 3), (4,)), ((0, 1, 2, 3, 4),)]
    masks = layout_mask(levels, 5, [["id"] * 6, ["id"] * 4, ["id"] * 3], 1)
    units = [[(a,) for a in range(5)], [*levels[0]] * 2, [*levels[1]] * 2, [levels[2][0]] * 3]
    for mask, expected in zip(masks, naive_layout(units), strict=False):
        assert torch.equal(mask, expected)


@pytest.mark.parametrize(("layers", "expected"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (5, [1, 2, 3, 3, 3])])
def test_more_and_fewer_layers_than_levels(layers, expected):
    levels = [((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)), (tuple(range(8)),)]
    masks = layout_mask(levels, 8, [["id"] * 4] * layers, 1)
    units = [[(a,) for a in range(8)], *([*levels[level - 1]] * (4 // len(levels[level - 1])) for level in expected)]
    for mask, right in zip(masks, naive_layout(units), strict=False):
        assert torch.equal(mask, right)


def test_dropped_inputs_are_connected_to_nothing():
    first, *_ = layout_mask([((0, 2),)], 4, [["id"] * 2], 1)
    assert first.int().tolist() == [[1, 0, 1, 0]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layout_mask([], 2, [["id"]], 1), "at least one level"),
        (lambda: layout_mask([((0, 1),)], 2, [], 1), "one hidden layer; got 1 and 0"),
        (lambda: layout_mask([((0,), (1,))], 2, [["id"]], 1), "a unit for each of the 2 clusters .* it has 1"),
        (lambda: infer_levels(SimilaritySums(torch.ones(2, 2, 2), torch.ones(2, 2, 2)), [0, 2]), "`inputs` .* got"),
        (lambda: infer_levels(SimilaritySums(torch.ones(2, 2, 2), torch.ones(2, 2, 2)), []), "`inputs` .* got"),
        (lambda: similarity_sums(torch.ones(3, 2), torch.ones(3, 2, 3)), "`second` .* must have the shape|invalid"),
        (lambda: similarity_sums(torch.ones(3, 2) * torch.nan, torch.ones(3, 2, 2)), "`first` .* must be finite"),
    ],
)
def test_errors_say_what_came(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()
