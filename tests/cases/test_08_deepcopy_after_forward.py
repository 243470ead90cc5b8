"""A masked network is copied and pickled at any moment. https://github.com/pytorch/pytorch/issues/37322"""

import copy
import io
import pickle

import pytest
import torch
from helpers import Lit, Watch, assert_same, loader, mlp, trainer
from torch import nn

from sparsecomp import Levels, Magnitude, Pruning, Rewind, prune


def by_torch_save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPY = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)), "save": by_torch_save}


def after_prune(net, x):
    pass


def after_forward(net, x):
    net(x)


def after_backward(net, x):
    net(x).sum().backward()


def after_step(net, x):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(x).sum().backward()
    optimizer.step()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 4))), torch.randn(3, 8)


@pytest.mark.parametrize("moment", [after_prune, after_forward, after_backward, after_step])
@pytest.mark.parametrize("how", COPY)
def test_copy_of_the_network(moment, how):
    net, x = build()
    store = prune(net, Magnitude(), 0.5)
    moment(net, x)
    twin = COPY[how](net)
    assert_same(twin(x), net(x))
    assert_same(twin.state_dict(), net.state_dict())
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(twin.parameters(), net.parameters(), strict=True))
    # The copy is a plain network: a load into it is not masked, and does not reach the original.
    kept, dense = copy.deepcopy(net.state_dict()), build()[0].state_dict()
    twin.load_state_dict(dense)
    assert_same(twin.state_dict(), dense)
    assert_same(net.state_dict(), kept)
    # The original is still watched.
    net.load_state_dict(dense)
    assert_same(dict(net.named_parameters())["0.weight"].detach(), dense["0.weight"] * store.masks["0.weight"])


@pytest.mark.parametrize("moment", [after_prune, after_forward, after_backward, after_step])
@pytest.mark.parametrize("how", COPY)
def test_copy_of_network_and_masks_has_masks_of_its_own(moment, how):
    net, x = build()
    store = prune(net, Magnitude(), 0.5)
    moment(net, x)
    twin, twin_store = COPY[how]((net, store))
    assert_same(twin(x), net(x))
    assert_same(dict(twin_store.masks), dict(store.masks))
    before, masks = copy.deepcopy(net.state_dict()), {name: mask.clone() for name, mask in store.masks.items()}
    # More is pruned in the copy: it shows there and nowhere else.
    none = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    twin_store.update_(none)
    assert twin_store.sparsity == 1.0
    assert not twin[0].weight.any()
    assert not twin[2][0].weight.any()
    assert_same(net.state_dict(), before)
    assert_same(dict(store.masks), masks)
    # And the other way round.
    store.update_({name: torch.ones_like(mask) for name, mask in masks.items()})
    assert (store.sparsity, twin_store.sparsity) == (0.0, 1.0)
    twin_store.attach()
    twin.load_state_dict(build()[0].state_dict())
    assert not twin[0].weight.any()
    net.load_state_dict(build()[0].state_dict())
    assert_same(net.state_dict(), build()[0].state_dict())


@pytest.mark.parametrize("how", COPY)
@pytest.mark.parametrize("rewind", [None, Rewind(at=0)])
def test_copy_inside_a_callback(tmp_path, how, rewind):
    module, copies = Lit(mlp()), []
    x = torch.randn(5, 16)

    def look(trainer, module):
        twin = COPY[how](module.net)
        assert_same(twin(x), module.net(x))
        copies.append((twin, {name: mask.clone() for name, mask in pruner.masks.items()}))

    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1), rewind=rewind)
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3, default_root_dir=tmp_path).fit(
        module, loader(), loader()
    )
    assert [sum(int((~m).sum()) for m in masks.values()) for _, masks in copies] == [0] * 3 + [320] * 4 + [512] * 5
    for twin, masks in copies:  # later training of the original did not reach them
        live = dict(twin.named_parameters(prefix="net"))
        assert not any(live[name][~mask].any() for name, mask in masks.items())
    assert not torch.equal(copies[-2][0][0].weight, module.net[0].weight)


def test_deepcopy_of_the_whole_module_inside_a_callback(tmp_path):
    """As StochasticWeightAveraging does."""
    module, copies = Lit(mlp()), []
    x = torch.randn(5, 16)

    def look(trainer, module):
        twin = copy.deepcopy(module)
        assert_same(twin(x), module(x))
        copies.append(twin)

    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1))
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3).fit(module, loader(), loader())
    assert [int((twin.net[0].weight == 0).sum() + (twin.net[2].weight == 0).sum()) for twin in copies] == (
        [0] * 3 + [320] * 4 + [512] * 5
    )


@pytest.mark.parametrize("rewind", [None, Rewind(at=0)])
def test_copy_of_the_pruner_goes_on_by_itself(tmp_path, rewind):
    module = Lit(mlp())
    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1, every=2), rewind=rewind)
    trainer(pruner, max_epochs=2, default_root_dir=tmp_path).fit(module, loader(), loader())
    twin = copy.deepcopy(pruner)
    assert_same(dict(twin.masks), dict(pruner.masks))
    masks = {name: mask.clone() for name, mask in pruner.masks.items()}
    other = Lit(mlp(seed=1))
    trainer(twin, max_epochs=4, default_root_dir=tmp_path).fit(other, loader(), loader())
    assert [e.after for e in twin.events] == [0.5, 0.8]
    assert (twin.sparsity, pruner.sparsity) == (0.8, 0.5)
    assert_same(dict(pruner.masks), masks)
