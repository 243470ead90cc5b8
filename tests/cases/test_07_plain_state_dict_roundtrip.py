"""State dicts keep the user's own keys. https://github.com/ahendriksen/msd_pytorch/pull/3"""

import copy

import pytest
import torch
from helpers import Lit, Watch, assert_same, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from sparsecomp import Levels, Magnitude, Pruning, prune

DENSE_KEYS = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
DENSE_KEYS += ["3.weight", "3.bias"]


def fit(tmp_path, *after):
    module = Lit(mlp(norm=True))
    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1))
    save = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    t = trainer(pruner, *after, save, max_epochs=3, enable_checkpointing=True, default_root_dir=tmp_path)
    t.fit(module, loader(), loader())
    return module, pruner


def test_keys_and_order_are_the_users_at_every_moment(tmp_path):
    keys, names, in_optimizer = [], [], []

    def look(trainer, module):
        keys.append(list(module.net.state_dict()))
        names.append([name for name, _ in module.net.named_parameters()])
        by_id = {id(p): name for name, p in module.net.named_parameters()}
        in_optimizer.append([by_id[id(p)] for group in trainer.optimizers[0].param_groups for p in group["params"]])

    module, _ = fit(tmp_path, Watch(on_train_batch_end=look))
    assert list(module.net.state_dict()) == DENSE_KEYS
    assert keys == [DENSE_KEYS] * 12
    assert names == in_optimizer == [[key for key in DENSE_KEYS if "weight" in key or "bias" in key]] * 12
    assert not list(module.net[0].buffers())


def test_sparse_weights_load_strictly_into_the_untouched_class(tmp_path):
    module, pruner = fit(tmp_path)
    fresh = mlp(seed=5, norm=True)
    fresh.load_state_dict(module.net.state_dict(), strict=True)
    x = torch.randn(7, 16)
    assert_same(fresh.eval()(x), module.net.eval()(x))
    checkpoint = torch.load(tmp_path / "epoch=2.ckpt", weights_only=True)
    plain = Lit(mlp(seed=6, norm=True))
    plain.load_state_dict(checkpoint["state_dict"], strict=True)
    assert_same(plain.state_dict(), module.state_dict())
    by_lightning = Lit.load_from_checkpoint(tmp_path / "epoch=2.ckpt", net=mlp(seed=8, norm=True))
    assert_same(by_lightning.state_dict(), module.state_dict())
    assert masked_values(by_lightning, pruner.masks).numel() == 512
    assert not masked_values(by_lightning, pruner.masks).any()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("part", ["whole", "layers"])
def test_a_dense_checkpoint_loads_into_a_masked_network(assign, part):
    net, dense = mlp(norm=True), copy.deepcopy(mlp(seed=1, norm=True).state_dict())
    store = prune(net, Magnitude(), 0.5)
    if part == "whole":
        net.load_state_dict(dense, strict=True, assign=assign)
    else:
        for place, layer in net.named_children():
            own = {key.partition(".")[2]: value for key, value in dense.items() if key.startswith(f"{place}.")}
            layer.load_state_dict(own, strict=True, assign=assign)
    assert store.sparsity == 0.5
    expected = mlp(seed=1, norm=True).state_dict()
    assert_same(
        net.state_dict(), {key: v * store.masks[key] if key in store.masks else v for key, v in expected.items()}
    )


@pytest.mark.parametrize("when", [2, 5, 9])
def test_a_dense_checkpoint_loads_in_the_middle_of_training(tmp_path, when):
    """Step 9 is after the last event: masks hold also when the schedule is over."""
    loaded = []

    def look(trainer, module):
        if trainer.global_step == when:
            module.load_state_dict(Lit(mlp(seed=1, norm=True)).state_dict(), strict=True)
            loaded.append((copy.deepcopy(module.state_dict()), {n: m.clone() for n, m in pruner.masks.items()}))

    module = Lit(mlp(norm=True))
    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1))
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3).fit(module, loader(), loader())
    ((state, masks),) = loaded
    expected = Lit(mlp(seed=1, norm=True)).state_dict()
    assert_same(state, {key: v * masks[key] if key in masks else v for key, v in expected.items()})
    assert sum(int((~mask).sum()) for mask in masks.values()) == {2: 0, 5: 320, 9: 512}[when]
    assert not masked_values(module, pruner.masks).any()
