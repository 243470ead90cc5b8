"""The picture from a graph of CPPN primitives: its layers, what it rejects, and its coordinates."""

import math

import networkx as nx
import pytest
import torch
from helpers import assert_same

from sparsecomp.functions import Pattern
from sparsecomp.functions.coordinates import coordinate_inputs, pixel_grid


def values(pattern, n=30000):
    x = pattern.sample_inputs(n, torch.Generator().manual_seed(11))
    return dict(zip(pattern.node_names, pattern.node_values(x).double().T, strict=True))


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("out_features", [1, 3])
def test_layers(depth, out_features):
    pattern = Pattern(depth=depth, out_features=out_features, seed=3)
    graph = pattern.graph
    assert pattern.input_names == ("x", "y", "d", "bias")
    assert pattern.output_names == tuple(f"h{depth}_{place}" for place in range(out_features))
    for name in pattern.node_names:
        node = graph.nodes[name]
        assert node["kind"] in {"sin", "gauss", "tanh", "cos", "identity"}
        assert name.startswith(f"h{node['level']}_")
        assert len(set(node["parents"])) == len(node["weights"]) == graph.in_degree(name) == 2
        assert {graph.nodes[parent]["level"] for parent in node["parents"]} == {node["level"] - 1}
        assert all(0.5 <= abs(weight) <= 2.5 for weight in node["weights"])
        assert (node["bias"], node["mean"]) == (0.0, 0.0)
    counts = [sum(graph.nodes[name]["level"] == level for name in pattern.node_names) for level in range(1, depth + 1)]
    assert counts[-1] == out_features
    assert all(2 <= count <= 4 for count in counts[:-1])
    assert nx.dag_longest_path_length(graph) == depth


def test_all_primitives_are_drawn():
    kinds = [Pattern(depth=1, seed=seed).graph.nodes["h1_0"]["kind"] for seed in range(60)]
    assert set(kinds) == {"sin", "gauss", "tanh", "cos", "identity"}
    assert max(kinds.count(kind) for kind in kinds) < 30


@pytest.mark.parametrize("seed", range(4))
def test_no_node_is_nearly_constant_or_nearly_its_sibling(seed):
    pattern = Pattern(depth=3, width=6, out_features=3, min_std=0.3, max_correlation=0.6, seed=seed)
    found = values(pattern)
    for name in pattern.node_names:
        # The scale is the standard deviation before scaling.
        assert pattern.graph.nodes[name]["scale"] >= 0.3
        for other in pattern.node_names:
            if name < other and name[:2] == other[:2]:
                assert abs(float(torch.corrcoef(torch.stack([found[name], found[other]]))[0, 1])) < 0.6 + 0.03


def test_the_limits_are_what_rejects():
    # Without limits the same draws give some node that the default limits would not have taken.
    def loose(seed):
        return Pattern(depth=2, width=6, out_features=6, min_std=0.0, max_correlation=1.0, seed=seed)

    patterns = [loose(seed) for seed in range(10)]
    assert min(p.graph.nodes[name]["scale"] for p in patterns for name in p.node_names) < 0.2
    strongest = 0.0
    for pattern in patterns:
        outputs = torch.stack([values(pattern)[name] for name in pattern.output_names])
        strongest = max(strongest, float((torch.corrcoef(outputs) - torch.eye(6)).abs().max()))
    assert strongest > 0.95


def test_gives_up_with_a_clear_error():
    with pytest.raises(
        ValueError,
        match=r"`max_tries` is .*, and 5 gave no 'h1_1' .* `min_std`=0\.2 .* `max_correlation`=1e-06 to the 1 nodes beside it\. "
        r"Lower `width` .* another `seed` than 0\.",
    ):
        Pattern(max_correlation=1e-6, max_tries=5)
    # Only an identity of large weights has such a standard deviation.
    with pytest.raises(ValueError, match=r"1 gave no 'h1_0' .* `min_std`=0\.99 .* the 0 nodes beside it"):
        Pattern(depth=1, min_std=0.99, max_tries=1, seed=0)


def test_wrong_limits():
    for value in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=rf"`min_std` is .* in \[0, 1\); got {value}"):
            Pattern(min_std=value)
    for value in (0.0, 1.1, math.inf):
        with pytest.raises(ValueError, match=rf"`max_correlation` is .* in \(0, 1\]; got {value}"):
            Pattern(max_correlation=value)
    with pytest.raises(ValueError, match=r"`width` is .* integer >= 2; got 1"):
        Pattern(width=1)


def test_inputs_are_places_in_the_square():
    x, y, d, bias = Pattern().sample_inputs(20000, torch.Generator().manual_seed(0)).T
    for coordinate in (x, y):
        assert -1 <= float(coordinate.min()) < -0.99 < 0.99 < float(coordinate.max()) <= 1
        assert float(coordinate.var()) == pytest.approx(1 / 3, abs=0.01)
    assert d.tolist() == pytest.approx([1.4 * math.hypot(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)])
    assert set(bias.tolist()) == {1.0}


def test_image_is_the_function_on_the_pixels():
    pattern = Pattern(seed=1, out_features=2)
    image = pattern.image(5)
    assert image.shape == (5, 5, 2)
    # Second row, last column: y = -0.5, x = 1.
    place = torch.tensor([[1.0, -0.5, 1.4 * math.sqrt(1.25), 1.0]])
    assert image[1, 4].tolist() == pytest.approx(pattern(place)[0].tolist(), abs=1e-6)


def test_coordinates_by_hand():
    grid = pixel_grid(3, 2)
    assert grid.tolist() == [
        pytest.approx([-1, -1, 1.4 * math.sqrt(2), 1]),
        pytest.approx([1, -1, 1.4 * math.sqrt(2), 1]),
        pytest.approx([-1, 0, 1.4, 1]),
        pytest.approx([1, 0, 1.4, 1]),
        pytest.approx([-1, 1, 1.4 * math.sqrt(2), 1]),
        pytest.approx([1, 1, 1.4 * math.sqrt(2), 1]),
    ]
    assert_same(pixel_grid(3, 2, bias=False), grid[:, :3].contiguous())
    assert_same(coordinate_inputs(grid[:, 0], grid[:, 1]), grid)
    with pytest.raises(ValueError, match=r"`height` is the number of rows of pixels .* >= 1; got 0"):
        pixel_grid(0, 2)
