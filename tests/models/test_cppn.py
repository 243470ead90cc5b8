"""A CPPN by hand: its activations, layers and initial weights."""

import math

import lightning as L
import pytest
import torch
from helpers import assert_same
from torch import nn

from sparsecomp import Magnitude, MaskStore, prune
from sparsecomp.models import CPPN, MixedActivation

SCALAR = {
    "cos": math.cos,
    "gauss": lambda z: 2 * math.exp(-z * z) - 1,
    "identity": lambda z: z,
    "sin": math.sin,
    "tanh": math.tanh,
}


def test_mixed_activation_by_hand():
    mixed = MixedActivation({"gauss": 1, "identity": 2, "cos": 1, "tanh": 1, "sin": 1})
    assert mixed.activations == ("gauss", "identity", "identity", "cos", "tanh", "sin")
    z = torch.tensor([[0.0, 5.0, -7.0, 0.0, 1.0, math.pi / 2], [1.0, 0.0, 2.0, math.pi, 0.0, 0.0]])
    expected = [[1, 5, -7, 1, math.tanh(1), 1], [2 / math.e - 1, 0, 2, -1, 0, 0]]
    assert mixed(z).tolist() == [pytest.approx(row, abs=1e-6) for row in expected]
    assert str(mixed) == "MixedActivation(gauss=1, identity=2, cos=1, tanh=1, sin=1)"
    assert mixed(z.view(2, 1, 6)).shape == (2, 1, 6)


def test_default_network():
    network = CPPN(8, 1)
    kinds = [type(module) for module in network]
    assert kinds == [nn.Linear, MixedActivation] * 3 + [nn.Linear]
    shapes = [tuple(network[index].weight.shape) for index in (0, 2, 4, 6)]
    assert shapes == [(24, 8), (24, 24), (24, 24), (1, 24)]
    for index in (1, 3, 5):
        names = network[index].activations
        assert names == ("tanh",) * 8 + ("sin",) * 6 + ("gauss",) * 6 + ("identity",) * 4


@pytest.mark.parametrize("bias", [True, False])
def test_output_is_that_of_a_unit_by_unit_evaluation(bias):
    torch.manual_seed(0)
    counts = {"identity": 2, "cos": 1, "gauss": 2, "tanh": 1, "sin": 1}
    network = CPPN(3, 2, counts, depth=2, bias=bias).double()
    if bias:
        for index in (0, 2, 4):
            nn.init.normal_(network[index].bias)
    x = torch.randn(6, 3, dtype=torch.float64)
    names = ["identity", "identity", "cos", "gauss", "gauss", "tanh", "sin"]
    for row, output in zip(x.tolist(), network(x).tolist(), strict=True):
        values = row
        for index in (0, 2, 4):
            weight = network[index].weight.tolist()
            offset = network[index].bias.tolist() if bias else [0.0] * len(weight)
            values = [
                sum(w * v for w, v in zip(ws, values, strict=True)) + b for ws, b in zip(weight, offset, strict=True)
            ]
            if index < 4:
                values = [SCALAR[name](z) for name, z in zip(names, values, strict=True)]
        assert output == pytest.approx(values, abs=1e-12)


def test_initial_weights():
    torch.manual_seed(0)
    network = CPPN(100, 400, {"tanh": 200, "cos": 200}, depth=2)
    for index, fan_in in {0: 100, 2: 400, 4: 400}.items():
        weight = network[index].weight.detach()
        assert float(weight.mean()) == pytest.approx(0, abs=0.02 * fan_in**-0.5)
        assert float(weight.var()) * fan_in == pytest.approx(1, abs=0.02)
        # Normal, not uniform: 31.7% beyond one standard deviation, and the fourth moment 3.
        assert float((weight.abs() > fan_in**-0.5).float().mean()) == pytest.approx(0.317, abs=0.01)
        assert float((weight**4).mean()) * fan_in**2 == pytest.approx(3, abs=0.2)
        assert not network[index].bias.any()


def test_the_global_seed_makes_the_weights():
    networks = []
    for seed in (3, 3, 4):
        L.seed_everything(seed, verbose=False)
        networks.append(CPPN(4, 1).state_dict())
    assert_same(dict(networks[0]), dict(networks[1]))
    assert not torch.equal(networks[0]["0.weight"], networks[2]["0.weight"])


def test_without_biases():
    assert [name for name, _ in CPPN(4, 3, depth=1, bias=False).named_parameters()] == ["0.weight", "2.weight"]


def test_arguments_are_not_kept():
    counts = {"tanh": 2}
    mixed = MixedActivation(counts)
    counts["sin"] = 3
    assert mixed(torch.zeros(1, 2)).shape == (1, 2)
    assert mixed.activations == ("tanh", "tanh")


def test_can_be_traced_and_pruned():
    torch.manual_seed(0)
    network = CPPN(8, 1)
    x = torch.randn(5, 8)
    assert_same(torch.fx.symbolic_trace(network)(x), network(x))
    store = prune(network, Magnitude(), 0.5)
    assert set(store.masks) == set(MaskStore(network).masks) == {"0.weight", "2.weight", "4.weight", "6.weight"}
    assert sum(int((~mask).sum()) for mask in store.masks.values()) == 684  # of 8 24 + 2 24 24 + 24


def test_errors():
    with pytest.raises(
        ValueError, match=r"`counts` is the number of units of each activation.* one of 'cos', .*; got 'relu'"
    ):
        MixedActivation({"relu": 3})
    with pytest.raises(ValueError, match=r"`counts\['sin'\]` is .* integer >= 1; got 0"):
        CPPN(2, 1, {"tanh": 1, "sin": 0})
    with pytest.raises(TypeError, match=r"`counts\['sin'\]` is .* integer >= 1; got 1\.5"):
        MixedActivation({"sin": 1.5})
    with pytest.raises(ValueError, match=r"`counts` is .* must not be empty"):
        CPPN(2, 1, {})
    with pytest.raises(TypeError, match=r"`counts` is .* must be a mapping; got \['sin'\]"):
        MixedActivation(["sin"])
    for name in ("in_features", "out_features", "depth"):
        arguments = {"in_features": 2, "out_features": 1, "depth": 1} | {name: 0}
        with pytest.raises(ValueError, match=f"`{name}` is the number of .* integer >= 1; got 0"):
            CPPN(**arguments)
    with pytest.raises(RuntimeError, match="split_with_sizes expects split_sizes to sum exactly to 3"):
        MixedActivation({"sin": 2})(torch.zeros(1, 3))
