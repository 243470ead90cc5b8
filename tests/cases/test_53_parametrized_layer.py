"""A layer under a parametrization is refused by name, with what to do.

https://github.com/pytorch/pytorch/issues/37138 and https://github.com/pytorch/pytorch/issues/20402
"""

import re

import pytest
import torch
from helpers import Lit, assert_same, clone, loader, trainer
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import prune as torch_prune

from sparsecomp import Magnitude, MaskStore, OneShot, Pruning, Selection, prune


class Symmetric(nn.Module):
    """A user's own parametrization."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def own(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def old_weight_norm(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


WRAP = {
    "weight_norm": (parametrizations.weight_norm, "the parametrization WeightNorm"),
    "spectral_norm": (parametrizations.spectral_norm, "the parametrization SpectralNorm"),
    "orthogonal": (parametrizations.orthogonal, "the parametrization Orthogonal"),
    "own": (own, "the parametrization Symmetric"),
    "old_weight_norm": (old_weight_norm, "a weight_norm hook"),
    "old_spectral_norm": (nn.utils.spectral_norm, "a torch.nn.utils.prune or spectral_norm hook"),
    "torch_prune": (
        lambda layer: torch_prune.l1_unstructured(layer, "weight", 0.5),
        "a torch.nn.utils.prune or spectral_norm hook",
    ),
}
UNWRAP = {
    "old_weight_norm": nn.utils.remove_weight_norm,
    "old_spectral_norm": nn.utils.remove_spectral_norm,
    "torch_prune": lambda layer: torch_prune.remove(layer, "weight"),
}


def build(wrap, place="0"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    WRAP[wrap][0](net[int(place)])
    return net, torch.randn(3, 8)


@pytest.mark.parametrize("place", ["0", "2"])
@pytest.mark.parametrize("wrap", WRAP)
def test_refused_by_name_and_nothing_changes(wrap, place):
    net, x = build(wrap, place)
    net.eval()
    before, out = clone(net.state_dict()), net(x)
    message = f"layer '{place}' (Linear) is under {WRAP[wrap][1]}"
    for selection in (
        None,
        Selection(include=[place]),
        Selection(include=["Linear"]),
        Selection(include=[f"{place}.weight"]),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            prune(net, Magnitude(), 0.5, selection=selection)
        assert f"Selection(exclude=['{place}'])" in str(raised.value)
        assert "Call torch.nn.utils." in str(raised.value)
    assert_same(clone(net.state_dict()), before)
    assert_same(net(x), out)


@pytest.mark.parametrize("wrap", WRAP)
def test_refused_when_a_training_starts(wrap):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    WRAP[wrap][0](net[0])
    t = trainer(Pruning(Magnitude(), OneShot(0.5, at=1)))
    with pytest.raises(ValueError, match=re.escape(f"layer 'net.0' (Linear) is under {WRAP[wrap][1]}")):
        t.fit(Lit(net), loader())
    assert t.global_step == 0


@pytest.mark.parametrize("wrap", WRAP)
def test_the_rest_is_pruned_when_it_is_left_out(wrap):
    net, x = build(wrap)
    store = prune(net, Magnitude(), 0.5, selection=Selection(exclude=["0"]))
    assert list(store.masks) == ["2.weight", "4.weight"]
    net(x).sum().backward()
    keys = list(build(wrap)[0].state_dict())
    assert list(net.state_dict()) == keys  # the parametrization is still there
    assert store.sparsity == 0.5
    # Named alone, other layers need no exclusion.
    assert [e.name for e in Selection(include=["2", "4"]).resolve(net)] == ["2.weight", "4.weight"]


@pytest.mark.parametrize("wrap", WRAP)
def test_as_the_message_says_it_can_be_removed_first(wrap):
    net, x = build(wrap)
    net.eval()(x)
    UNWRAP.get(wrap, lambda layer: parametrize.remove_parametrizations(layer, "weight"))(net[0])
    store = prune(net, Magnitude(), 0.5)
    assert list(store.masks) == ["0.weight", "2.weight", "4.weight"]
    assert store.sparsity == 0.5
    effective = nn.functional.linear(x, net[0].weight, net[0].bias)
    assert_same(net[0](x), effective)
    assert not net[0].weight[~store.masks["0.weight"]].any()


@pytest.mark.parametrize("name", ["torch.nn.utils.prune", "parametrization"])
def test_masks_never_show_parts_of_a_parametrization(name):
    net, _ = build({"torch.nn.utils.prune": "torch_prune", "parametrization": "weight_norm"}[name])
    selection = Selection(exclude=["0"])
    names = [e.name for e in selection.resolve(net)]
    assert not any("original" in n or "_orig" in n or "_g" in n for n in names)


def test_attention_and_recurrent_layers():
    attention = nn.MultiheadAttention(8, 2)
    parametrizations.weight_norm(attention.out_proj)
    with pytest.raises(ValueError, match=r"layer 'out_proj' .* is under the parametrization WeightNorm"):
        MaskStore(attention)
    lstm = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "fc": nn.Linear(4, 2)})
    parametrizations.weight_norm(lstm["rnn"], "weight_hh_l0")
    with pytest.raises(
        ValueError, match=r"layer 'rnn' \(LSTM\) is under the parametrization WeightNorm.*'weight_hh_l0'"
    ):
        MaskStore(lstm)
    assert list(MaskStore(lstm, Selection(exclude=["rnn"])).masks) == ["fc.weight"]
