"""MaskStore without Lightning. The rules that live in the callback are in callbacks/test_rules.py."""

import copy
import gc
import pickle
import re

import pytest
import torch
from helpers import assert_same, clone, mlp
from torch import nn

from sparsecomp import MaskStore, Selection
from sparsecomp import prune as prune_once
from sparsecomp.criteria import Magnitude

KEEP = torch.tensor([[True, False, True], [False, False, True]])


def layer(dtype=torch.float32):
    linear = nn.Linear(3, 2, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    return linear


def store_of(module, keep=KEEP):
    store = MaskStore(module)
    store.update_({store.selected[0].name: keep})
    return store


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def test_update_zeroes_what_is_removed_and_counts_it():
    linear = layer()
    bias = linear.bias.detach().clone()
    store = MaskStore(linear)
    assert (store.sparsity, store.layer_sparsity()) == (0.0, {"weight": 0.0})
    store.update_({"weight": KEEP})
    assert linear.weight.tolist() == [[1.0, 0.0, 3.0], [0.0, 0.0, 6.0]]
    assert torch.equal(linear.bias, bias)
    assert (store.sparsity, store.counts(), store.layer_sparsity()) == (0.5, {"weight": (3, 6)}, {"weight": 0.5})


def test_sparsity_weighs_layers_by_their_size():
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    store = MaskStore(module)
    store.update_({"1.weight": torch.tensor([[True, False]])})
    assert store.sparsity == 0.1
    assert store.layer_sparsity() == {"0.weight": 0.0, "1.weight": 0.5}


def test_parameters_not_named_keep_their_masks():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    store = store_of(module)
    store.update_({"1.weight": torch.tensor([[True, False]])})
    assert_same(dict(store.masks), {"0.weight": KEEP, "1.weight": torch.tensor([[True, False]])})
    store.update_({"1.weight": torch.tensor([[True, True]])})
    assert store.layer_sparsity() == {"0.weight": 0.5, "1.weight": 0.0}


def test_masks_are_copied_in_and_read_only_out():
    linear, keep = layer(), KEEP.clone()
    store = store_of(linear, keep)
    keep.zero_()
    assert_same(store.masks["weight"], KEEP)
    with pytest.raises(TypeError, match="does not support item assignment"):
        store.masks["weight"] = keep


def test_the_weights_stay_plain_parameters():
    """Names, order, types and identity are as without masks, and a dense state loads."""
    module = mlp()
    keys, parameters = list(module.state_dict()), list(module.parameters())
    dense = clone(module.state_dict())
    store = prune_once(module, Magnitude(), 0.5)
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    module.load_state_dict(dense, strict=True)
    assert store.revived() == []


# NaN and infinity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, 1e-7, 7.0])
def test_gradients_of_removed_weights_become_exactly_zero(dtype, value):
    linear = layer(dtype)
    store = store_of(linear)
    grad = torch.tensor([[1.5, -2.5, float("nan")], [0.25, 8.0, -float("inf")]], dtype=dtype)
    kept = grad[KEEP].clone()
    grad[~KEEP] = value
    linear.weight.grad = grad
    store.mask_grads_()
    assert linear.weight.grad is grad
    assert bits(grad[~KEEP]).tolist() == [0, 0, 0]  # +0, whatever was there
    assert torch.equal(bits(grad[KEEP]), bits(kept))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7.0])
def test_weights_that_were_written_to_become_exactly_zero(value):
    linear = layer()
    store = store_of(linear)
    with torch.no_grad():
        linear.weight.fill_(value)
    assert store.revived() == ["weight"]
    store.apply_()
    assert store.revived() == []
    assert bits(linear.weight.detach()[~KEEP]).tolist() == [0, 0, 0]
    assert_same(linear.weight.detach()[KEEP], torch.full((3,), value))


def test_channels_last_gradients():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    store = MaskStore(conv)
    keep = torch.rand(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    store.update_({"weight": keep})
    expected = (conv.weight.detach() * keep).contiguous()
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(conv.weight.detach(), expected)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    (conv(x) * float("inf")).sum().backward()
    assert not bool(conv.weight.grad[~keep].isfinite().all())
    store.mask_grads_()
    assert conv.weight.grad[~keep].count_nonzero() == 0
    assert not bool(conv.weight.grad[keep].isfinite().any())


@pytest.mark.parametrize("make", [lambda g: g.t().contiguous().t(), lambda g: torch.stack([g, g], dim=-1)[..., 0]])
def test_gradients_that_are_not_contiguous(make):
    linear = layer()
    store = store_of(linear)
    linear.weight.grad = make(torch.tensor([[1.0, float("nan"), 3.0], [4.0, 5.0, 6.0]]))
    assert not linear.weight.grad.is_contiguous()
    store.mask_grads_()
    assert linear.weight.grad.tolist() == [[1.0, 0.0, 3.0], [0.0, 0.0, 6.0]]


def test_no_gradient_is_no_error():
    linear = layer()
    store_of(linear).mask_grads_()
    assert linear.weight.grad is None


def test_a_change_of_dtype_is_followed():
    linear = layer()
    store = store_of(linear)
    linear.double()
    linear.weight.grad = torch.full((2, 3), float("nan"), dtype=torch.float64)
    store.mask_grads_()
    assert linear.weight.grad[~KEEP].tolist() == [0.0] * 3


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(2, 3)
    store = MaskStore(embedding, Selection(include=["weight"]))
    embedding.weight.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(TypeError, match="masks cannot hold on sparse gradients; build the embedding with sparse=False"):
        store.mask_grads_()


# What optimizers remember, and other tensors


def test_optimizer_state_of_removed_weights_is_zeroed():
    module = mlp()
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    module(torch.randn(8, 16)).square().sum().backward()
    optimizer.step()
    store = prune_once(module, Magnitude(), 0.5)
    before = clone(optimizer.state_dict()["state"])
    store.zero_optimizer_state_([optimizer])
    after = optimizer.state_dict()["state"]
    for index, name in ((0, "0.weight"), (2, "2.weight")):
        keep = store.masks[name]
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert before[index][key][~keep].count_nonzero() > 0
            assert after[index][key][~keep].count_nonzero() == 0
            assert_same(after[index][key][keep], before[index][key][keep])
    assert_same(after[1], before[1])
    assert after[0]["step"] == 1


def test_tensors_of_the_same_names_are_masked():
    store = store_of(layer())
    average = {"weight": torch.full((2, 3), float("nan")), "other": torch.ones(2)}
    store.apply_to_(average)
    assert average["weight"][~KEEP].tolist() == [0.0] * 3
    assert average["other"].tolist() == [1.0, 1.0]


def test_a_bias_is_held_with_its_layer_and_not_counted():
    linear = layer()
    store = store_of(linear)
    store.update_({"bias": torch.tensor([True, False])})
    assert linear.bias.tolist()[1] == 0.0
    linear.bias.grad = torch.tensor([1.0, float("nan")])
    store.mask_grads_()
    assert linear.bias.grad.tolist() == [1.0, 0.0]
    assert store.sparsity == 0.5
    assert list(store.state_dict()) == ["weight", "bias"]


# Loads


def dense_state(module):
    return {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
def test_attached_masks_are_applied_after_each_load(assign):
    module = nn.Sequential(layer(), nn.Linear(2, 1))
    store = store_of(module).attach()
    for _ in range(2):
        module.load_state_dict(dense_state(module), assign=assign)
        assert module[0].weight.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    module[0].load_state_dict(dense_state(module[0]), assign=assign)
    assert store.revived() == []
    module[0].weight.grad = torch.full((2, 3), float("nan"))
    store.mask_grads_()
    assert module[0].weight.grad[~KEEP].tolist() == [0.0] * 3


def test_attached_masks_follow_a_load_of_a_submodule_that_shares_the_weight():
    module = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "second": nn.Linear(3, 3, bias=False)})
    module["second"].weight = module["first"].weight
    store = MaskStore(module)
    store.update_({"first.weight": torch.eye(3) > 0})
    store.attach()
    module["second"].load_state_dict({"weight": torch.ones(3, 3)})
    assert torch.equal(module["first"].weight.detach(), torch.eye(3))


def test_detached_masks_are_not_applied():
    module = layer()
    store = store_of(module).attach()
    assert store.detach() is store
    module.load_state_dict(dense_state(module))
    assert store.revived() == ["weight"]
    assert store.sparsity == 0.5


def test_attaching_twice_is_attaching_once():
    module = layer()
    store = store_of(module).attach().attach()
    store.detach()
    module.load_state_dict(dense_state(module))
    assert store.revived() == ["weight"]


def test_the_hook_ends_with_its_store():
    module = layer()
    store_of(module).attach()
    gc.collect()
    module.load_state_dict(dense_state(module))
    assert bool((module.weight == 1).all())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_network_carries_no_masks(copied):
    module = layer()
    store = store_of(module).attach()
    twin = copied(module)
    twin.load_state_dict(dense_state(twin))
    assert bool((twin.weight == 1).all())
    module.load_state_dict(dense_state(module))
    assert store.revived() == []


def test_a_pickled_network_holds_no_mask_tensor():
    big = nn.Linear(300, 300, bias=False)
    plain = len(pickle.dumps(big))
    store = MaskStore(big).attach()
    store.mask_grads_()
    assert len(pickle.dumps(big)) < plain + 1000


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copied_store_masks_its_own_copy_of_the_network(copied):
    module = layer()
    store = store_of(module).attach()
    twin = copied(store)
    assert_same(dict(twin.masks), dict(store.masks))
    own = twin.selected[0].parameter
    with torch.no_grad():
        own.fill_(1.0)
    twin.apply_()
    assert own.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    assert module.weight.tolist() == [[1.0, 0.0, 3.0], [0.0, 0.0, 6.0]]
    with torch.no_grad():
        own.fill_(1.0)
    twin.selected[0].owner.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert twin.revived() == ["weight"]  # it watches only once it is attached
    twin.attach()
    twin.selected[0].owner.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert twin.revived() == []


# State


def test_state_round_trip():
    module = mlp()
    store = prune_once(module, Magnitude(), 0.7)
    other = mlp(seed=1)
    into = MaskStore(other)
    into.load_state_dict(store.state_dict())
    assert_same(into.state_dict(), store.state_dict())
    assert into.sparsity == store.sparsity == 0.7
    assert into.revived() == []


def test_a_saved_state_does_not_change_with_later_updates():
    store = store_of(layer())
    saved = store.state_dict()
    store.update_({"weight": torch.zeros(2, 3, dtype=torch.bool)})
    assert_same(saved, {"weight": KEEP})


def test_state_with_bias_masks_round_trips():
    store = store_of(layer())
    store.update_({"bias": torch.tensor([True, False])})
    into = MaskStore(layer())
    into.load_state_dict(store.state_dict())
    assert_same(into.state_dict(), store.state_dict())


def test_state_that_lacks_a_mask():
    store = MaskStore(mlp())
    with pytest.raises(ValueError, match=r"the saved masks have none for 2\.weight; saved are 0\.weight\."):
        store.load_state_dict({"0.weight": torch.zeros(32, 16, dtype=torch.bool)})
    assert store.sparsity == 0.0


# Errors


def unchanged_by(module, store, action, error, message):
    before = clone([module.state_dict(), store.masks])
    with pytest.raises(error, match=message):
        action()
    assert_same(clone([module.state_dict(), store.masks]), before)


DROP = torch.zeros(32, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "mask", "error", "message"),
    [
        (
            "2.weight",
            torch.ones(32, 4) > 0,
            ValueError,
            "mask of '2.weight' has shape (32, 4) and the parameter (4, 32)",
        ),
        (
            "2.weight",
            torch.ones(4, 32),
            TypeError,
            "the mask of '2.weight' .* must be a bool tensor; got torch.float32",
        ),
        ("2.weight", [[True]], TypeError, "the mask of '2.weight' .* must be a bool tensor; got list"),
        (
            "3.weight",
            torch.ones(4, 32) > 0,
            ValueError,
            "no mask can be set for '3.weight': .* Selected are 0.weight, 2",
        ),
        ("0.bias2", torch.ones(32) > 0, ValueError, "no mask can be set for '0.bias2'"),
    ],
)
def test_a_failing_update_changes_nothing(name, mask, error, message):
    """The first mask of the two is fine, and is not set either."""
    module = mlp()
    store = MaskStore(module)
    pattern = re.escape(message).replace(r"\.\*", ".*")
    unchanged_by(module, store, lambda: store.update_({"0.weight": DROP, name: mask}), error, pattern)
    state = {"0.weight": DROP, "2.weight": torch.ones(4, 32) > 0, name: mask}
    unchanged_by(module, store, lambda: store.load_state_dict(state), error, pattern)


@pytest.mark.parametrize("method", ["apply_", "mask_grads_"])
def test_after_a_physical_cut_the_error_names_the_parameter_and_both_shapes(method):
    module = mlp()
    store = prune_once(module, Magnitude(), 0.5)
    store.mask_grads_()
    module[2].weight = nn.Parameter(module[2].weight[:, :20].clone())
    module[2].weight.grad = torch.ones(4, 20)
    with pytest.raises(ValueError, match=r"mask of '2\.weight' has shape \(4, 32\) and the parameter \(4, 20\)"):
        getattr(store, method)()


def test_a_parameter_that_is_gone_is_named():
    module = layer()
    store = store_of(module)
    module.weight = None
    with pytest.raises(RuntimeError, match="parameter 'weight' is gone from its layer; build the masks anew"):
        store.apply_()


def test_sync_applies_without_a_process_group():
    module = layer()
    store = store_of(module)
    with torch.no_grad():
        module.weight.fill_(1.0)
    store.sync_()
    assert store.revived() == []
    assert_same(store.masks["weight"], KEEP)


def test_tied_weights_stay_tied():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    store = prune_once(module, Magnitude(), 4 / 9)
    assert list(store.masks) == ["0.weight"]
    assert module[1].weight is module[0].weight
    assert module[1].weight.count_nonzero() == 5
    assert store.sparsity == 4 / 9


def test_a_hand_written_loop_keeps_zeros():
    """The loop that the docstring describes, with momentum and weight decay."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    store = prune_once(module, Magnitude(), 0.8)
    kept = clone(module[0].weight[store.masks["0.weight"]])
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        store.mask_grads_()
        optimizer.step()
        store.apply_()
        assert store.revived() == []
    assert not torch.equal(module[0].weight[store.masks["0.weight"]], kept)
