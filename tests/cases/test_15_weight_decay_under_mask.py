"""Under a mask a weight is exactly zero: there is no hidden value for weight decay to shrink.

https://github.com/OPTML-Group/Unlearn-Saliency/issues/32 and
https://community.deeplearning.ai/t/how-training-after-pruning-works/887581
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from torch import optim

from sparsecomp import Levels, Magnitude, Pruning, Rewind

DECAYING = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, weight_decay=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: optim.Adam(params, lr=0.05, weight_decay=0.1),
    "adamw": lambda params: optim.AdamW(params, lr=0.05, weight_decay=0.5),
    "nadam": lambda params: optim.NAdam(params, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda params: optim.RAdam(params, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05, weight_decay=0.1),
    "adamax": lambda params: optim.Adamax(params, lr=0.05, weight_decay=0.1),
    "adadelta": lambda params: optim.Adadelta(params, weight_decay=0.1),
    "adafactor": lambda params: optim.Adafactor(params, lr=0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", DECAYING)
def test_the_value_under_a_mask_is_zero_and_nothing_hides_another(optimizer):
    module, seen = Lit(mlp(), DECAYING[optimizer]), []

    def look(trainer, module):
        assert not masked_values(module, pruner.masks).any()
        live, state, moments = dict(module.named_parameters()), trainer.optimizers[0].state, []
        for name, mask in pruner.masks.items():
            # A moment of a pruned weight would be a hidden value too; Adamax adds its eps to a maximum of zeros.
            of_weights = (v for v in state[live[name]].values() if torch.is_tensor(v) and v.shape == mask.shape)
            moments.extend(bool((value[~mask].abs() <= 1e-8).all()) for value in of_weights)
        assert all(moments)
        seen.append(pruner.sparsity)

    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1))
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=4).fit(module, loader())
    assert seen == [0.0] * 3 + [0.5] * 4 + [0.8] * 9
    # No second tensor of a weight's shape is anywhere in the module.
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [value for child in module.modules() for value in vars(child).values() if torch.is_tensor(value)]
    assert [tuple(tensor.shape) for tensor in tensors] == [(32, 16), (32,), (4, 32), (4,)]


@pytest.mark.parametrize("optimizer", DECAYING)
def test_rewind_values_are_not_shrunk(tmp_path, optimizer):
    """The one place where values from before the mask are kept; they are frozen bit for bit."""
    module, seen = Lit(mlp(), DECAYING[optimizer]), []
    initial = clone(dict(module.named_parameters()))

    def look(trainer, module):
        assert_same(pruner.state_dict()["snapshot"]["tensors"], initial)
        seen.append(clone(dict(module.named_parameters())))

    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1), rewind=Rewind(at=0))
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3, default_root_dir=tmp_path).fit(module, loader())
    for at in (3, 7):
        rewound = {name: torch.where(seen[at][name] == 0, 0, value) for name, value in initial.items()}
        assert_same(seen[at], rewound)
    assert sum(int((seen[7][name] == 0).sum()) for name in pruner.masks) == 512


def test_decay_goes_on_for_kept_weights():
    """It is the mask that stops it, not a switched-off optimizer: with a zero gradient a kept weight shrinks by 1 - lr wd."""
    module, before = Lit(mlp(), lambda params: optim.SGD(params, lr=0.1, weight_decay=0.5)), {}

    def zero(trainer, module):
        if trainer.global_step == 6:
            before.update(clone(dict(module.named_parameters())))
        if trainer.global_step >= 6:
            for parameter in module.parameters():
                parameter.grad.zero_()

    pruner = Pruning(Magnitude(), Levels((0.5,), begin=1))
    trainer(pruner, Watch(on_before_optimizer_step=zero), max_steps=7, max_epochs=2).fit(module, loader())
    for name, parameter in module.named_parameters():
        expected = before[name].add(before[name] * 0.5, alpha=-0.1)
        assert_same(parameter.detach(), expected)
    assert not masked_values(module, pruner.masks).any()
