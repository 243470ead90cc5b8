"""Live connections against paths over single units, by hand, and by what the network computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS, DenseBlock, Residual, mlp, naive_live, selected
from torch import nn

from sparsecomp import MaskStore
from sparsecomp.connectivity import ConnectivityGraph, effective_sparsity, live_connections


def random_masks(module, seed, density):
    generator = torch.Generator().manual_seed(seed)
    names = dict.fromkeys(selected(module).values())
    return {n: torch.rand(module.get_parameter(n).shape, generator=generator) < density for n in names}


@pytest.mark.parametrize("name", NETWORKS)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31), density=st.sampled_from([0.1, 0.25, 0.4, 0.6, 0.9]))
def test_as_paths_over_single_units(name, seed, density):
    torch.manual_seed(0)
    module = NETWORKS[name][0]()
    graph = ConnectivityGraph.trace(module)
    masks = random_masks(module, seed, density)
    expected = naive_live(name, module, masks)
    found = live_connections(graph, masks)
    assert {n: m.tolist() for n, m in found.items()} == {n: m.tolist() for n, m in expected.items()}
    total = sum(mask.numel() for mask in masks.values())
    live = sum(int(mask.sum()) for mask in expected.values())
    assert effective_sparsity(graph, masks) == (total - live) / total


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("density", [0.5, 0.7])
def test_only_live_connections_matter_and_all_do(name, density):
    """Without the others the output is the same, without any live one it is not.

    Biases are zero: a unit that no input reaches is then 0 and not another constant, which its readers would miss.
    """
    build, shape, _ = NETWORKS[name]
    torch.manual_seed(1)
    module = build().double().eval()
    for parameter in module.parameters():
        if parameter.dim() == 1 and not bool((parameter == 1).all()):
            parameter.data.zero_()
    graph = ConnectivityGraph.trace(module)
    store = MaskStore(module)
    masks = random_masks(module, 3, density)
    store.update_(masks)
    live = live_connections(graph, masks)
    assert any(bool(mask.any()) for mask in live.values())
    x = torch.randn(16, *shape, dtype=torch.double)

    def run():
        with torch.no_grad():
            return module(x)

    before = run()
    store.update_(live)
    torch.testing.assert_close(run(), before, rtol=0, atol=1e-12)
    if name == "upsampling":  # units are channels: a live one may be 0 at a position that a kept tap does not reach
        return
    for weight_name, mask in live.items():
        for index in mask.nonzero().tolist():
            weight = module.get_parameter(weight_name).data
            kept = weight[tuple(index)].item()
            weight[tuple(index)] = 0
            assert (run() - before).abs().max() > 1e-9, (weight_name, index)
            weight[tuple(index)] = kept


def test_by_hand():
    """Unit 0 is a constant, unit 2 leads nowhere, unit 1 is live, unit 3 is cut on both sides."""
    module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    masks = {
        "0.weight": torch.tensor([[0, 0], [1, 0], [1, 1], [0, 0]]).bool(),
        "2.weight": torch.tensor([[1, 1, 0, 0]]).bool(),
    }
    graph = ConnectivityGraph.trace(module)
    live = live_connections(graph, masks)
    assert live["0.weight"].int().tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert live["2.weight"].int().tolist() == [[0, 1, 0, 0]]
    assert effective_sparsity(graph, masks) == 10 / 12


def test_a_residual_carries_on_where_its_branch_is_cut():
    module = Residual()
    masks = {n: torch.ones_like(module.get_parameter(n), dtype=torch.bool) for n in selected(module).values()}
    masks["same.weight"][:] = False
    assert effective_sparsity(ConnectivityGraph.trace(module), masks) == 81 / sum(m.numel() for m in masks.values())


def test_concatenated_units_keep_their_place():
    module = DenseBlock()
    masks = {n: torch.ones_like(module.get_parameter(n), dtype=torch.bool) for n in selected(module).values()}
    masks["head.weight"][:, 3:] = False  # all that reads `two`
    live = live_connections(ConnectivityGraph.trace(module), masks)
    assert {name: int(mask.sum()) for name, mask in live.items()} == {
        "one.weight": 6,
        "two.weight": 0,
        "head.weight": 6,
    }


def test_layer_norm_makes_every_unit_reach_every_other():
    masks = {"0.weight": torch.tensor([[1, 0], [0, 0]]).bool(), "2.weight": torch.tensor([[0, 1]]).bool()}
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    normed = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    assert effective_sparsity(ConnectivityGraph.trace(plain), masks) == 1.0
    assert effective_sparsity(ConnectivityGraph.trace(normed), masks) == 4 / 6


def test_rows_longer_than_a_byte_can_count():
    """2,040 inputs is what eight counters of one byte hold; one more word is counted apart."""
    module = nn.Sequential(nn.Linear(3, 4104), nn.Linear(4104, 2))
    masks = {"0.weight": torch.ones(4104, 3) > 0, "1.weight": torch.ones(2, 4104) > 0}
    masks["0.weight"][4100:] = False
    assert effective_sparsity(ConnectivityGraph.trace(module), masks) == (4 * 3 + 4 * 2) / (4104 * 5)


def test_weights_without_a_mask_count_as_kept_and_biases_are_passed_over():
    graph = ConnectivityGraph.trace(mlp())
    masks = {"2.weight": torch.ones(3, 4) > 0, "2.bias": torch.zeros(3) > 0}
    assert effective_sparsity(graph, masks) == 0.0
    assert list(live_connections(graph, masks)) == ["2.weight"]


def test_masks_that_do_not_fit_are_refused():
    graph = ConnectivityGraph.trace(mlp())
    with pytest.raises(ValueError, match=r"'5.weight' is none; the\s+weights are 0.weight, 2.weight, 4.weight"):
        effective_sparsity(graph, {"5.weight": torch.ones(1, 1) > 0})
    with pytest.raises(ValueError, match=r"shape of the weight, \(4, 3\); got \(3, 4\)"):
        live_connections(graph, {"0.weight": torch.ones(3, 4) > 0})
    with pytest.raises(TypeError, match=r"bool tensor, True = kept; got dtype torch.float32"):
        live_connections(graph, {"0.weight": torch.ones(4, 3)})
    with pytest.raises(ValueError, match="must hold a weight of the network"):
        effective_sparsity(graph, {})
