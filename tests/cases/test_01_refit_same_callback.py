"""The same pruner with rewinding in several fits. https://github.com/Lightning-AI/pytorch-lightning/issues/8542"""

import gc
import weakref

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer

from sparsecomp import Levels, Magnitude, Pruning, Rewind


def pruner_of_two_rounds():
    """Events after epochs 1 and 3: a fit of 2 epochs has one of them, a fit of 4 has both."""
    return Pruning(Magnitude(), Levels((0.5, 0.8), begin=1, every=2), rewind=Rewind(at=0))


def fit(pruner, module, epochs, folder, look=lambda *_: None):
    t = trainer(pruner, Watch(on_train_batch_end=look), max_epochs=epochs, default_root_dir=folder)
    t.fit(module, loader(), loader())
    return t


def test_second_fit_rewinds_to_the_first_rewind_point(tmp_path):
    module, pruner, after_event = Lit(mlp()), pruner_of_two_rounds(), {}
    initial = clone(dict(module.named_parameters()))

    def look(trainer, module):
        if pruner.events and pruner.events[-1].rewound:
            after_event.setdefault(len(pruner.events), (clone(dict(module.named_parameters())), dict(pruner.masks)))

    fit(pruner, module, 2, tmp_path, look)
    assert list(after_event) == [1]
    fit(pruner, module, 4, tmp_path, look)
    assert [(e.after, e.rewound) for e in pruner.events] == [(0.5, True), (0.5, False), (0.8, True)]
    assert list(after_event) == [1, 3]
    for rewound, masks in after_event.values():
        assert_same(rewound, {name: w * masks[name] if name in masks else w for name, w in initial.items()})


@pytest.mark.parametrize("rewind", [None, Rewind(at=0)])
def test_sparsity_never_falls_over_three_fits(tmp_path, rewind):
    module, seen = Lit(mlp()), []
    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1, every=2), rewind=rewind)

    def look(trainer, module):
        assert not masked_values(module, pruner.masks).any()
        seen.append(pruner.sparsity)

    for epochs in (2, 4, 4):
        fit(pruner, module, epochs, tmp_path, look)
    # 4 steps an epoch; events fall on the last step of epoch 1 of the first fit and of epoch 3 of the second.
    assert seen == [0.0] * 3 + [0.5] * (5 + 11) + [0.8] * (1 + 4 + 16)


def test_nothing_of_an_old_fit_stays_alive(tmp_path):
    module, pruner, tensors, old = Lit(mlp()), pruner_of_two_rounds(), [], []
    for _ in range(4):
        t = fit(pruner, module, 4, tmp_path)
        old += [weakref.ref(t), weakref.ref(t.optimizers[0])]
        del t
        gc.collect()
        tensors.append(sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in gc.get_objects()))
    assert tensors[1] == tensors[2] == tensors[3]
    # The module itself remembers the last trainer; those before must be gone.
    assert [ref() is None for ref in old[:-2]] == [True] * 6
    state = pruner.state_dict()
    held = [*state["masks"].values(), *state["snapshot"]["tensors"].values()]
    assert len(held) == 2 + 4
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in held)


def test_another_network_starts_anew(tmp_path):
    pruner, first, second = pruner_of_two_rounds(), Lit(mlp(0)), Lit(mlp(1))
    fit(pruner, first, 4, tmp_path)
    left = clone(dict(first.named_parameters()))
    initial = clone(dict(second.named_parameters()))
    fit(pruner, second, 2, tmp_path)
    assert [e.after for e in pruner.events] == [0.5]
    assert_same(pruner.state_dict()["snapshot"]["tensors"], initial)
    assert_same(clone(dict(first.named_parameters())), left)
