"""Weights and masks from a file, a fresh Trainer and optimizer: the sparsity does not change.

https://github.com/jsboige/CoursIA/pull/16192, https://github.com/jacobgil/pytorch-pruning/issues/41 and
https://github.com/huggingface/transformers/issues/29227
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from torch import nn, optim

from sparsecomp import FixedMasks, LotteryTicketPruning, Magnitude, MagnitudePruning, load_ticket, prune, save_ticket

ZEROS = 576  # 90 % of 640
OPTIMIZERS = {
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def one_shot(folder):
    module = Lit(mlp())
    store = prune(module, Magnitude(), 0.9)
    return save_ticket(folder / "one_shot.safetensors", store, module.state_dict())


def trained(folder, kind="trained"):
    pruner = LotteryTicketPruning()
    trainer(pruner, max_epochs=6, default_root_dir=folder).fit(Lit(mlp()), loader())
    return pruner.ticket_files[kind]


FILES = {"one_shot": one_shot, "trained": trained, "ticket": lambda folder: trained(folder, "ticket")}


def zeros(module):
    return [int((module.net[place].weight == 0).sum()) for place in (0, 2)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("file", FILES)
def test_finetuning_from_a_file(tmp_path, file, optimizer):
    path = FILES[file](tmp_path)
    reference = Lit(mlp(seed=3))
    store = load_ticket(path, reference)
    masks, start, seen = clone(store.masks), zeros(reference), []
    assert sum(start) == ZEROS
    pruner, module = FixedMasks(path), Lit(mlp(seed=4), OPTIMIZERS[optimizer])

    def begin(trainer, module):
        assert_same(clone(dict(module.named_parameters())), clone(dict(reference.named_parameters())))

    def look(trainer, module):
        assert not masked_values(module, masks).any()
        seen.append(zeros(module))

    t = trainer(pruner, Watch(on_train_start=begin, on_train_batch_end=look), max_epochs=4, default_root_dir=tmp_path)
    t.fit(module, loader(), loader())
    assert seen == [start] * 16
    assert pruner.sparsity == 0.9
    assert_same(dict(sorted(pruner.masks.items())), dict(sorted(masks.items())))
    assert pruner.events == []
    kept = masks["net.2.weight"]
    changed = (module.net[2].weight != reference.net[2].weight)[kept]
    assert changed.sum() > kept.sum() / 2  # it did train; a unit that no sample turns on has no gradient


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_finetuning_on_in_a_second_trainer(tmp_path, optimizer):
    """The network stays; the trainer, the optimizer and even the file's pruner are new ones."""
    path = one_shot(tmp_path)
    module, pruner = Lit(mlp(), OPTIMIZERS[optimizer]), FixedMasks(path)
    for _ in range(3):
        trainer(pruner, max_epochs=1).fit(module, loader())
        assert sum(zeros(module)) == ZEROS
    assert_same(dict(pruner.masks), clone(load_ticket(path, Lit(mlp())).masks))


def test_a_pruner_that_is_done_holds_its_masks_in_a_new_trainer():
    module, pruner = Lit(mlp(), OPTIMIZERS["adam"]), MagnitudePruning()
    trainer(pruner, max_epochs=6).fit(module, loader())
    masks = clone(pruner.masks)
    assert sum(zeros(module)) == ZEROS
    trainer(pruner, max_epochs=6).fit(module, loader())
    assert sum(zeros(module)) == ZEROS
    assert_same(dict(pruner.masks), masks)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_finetuning_from_a_checkpoint_without_further_pruning(tmp_path, optimizer):
    """A checkpoint of any pruner resumes under any other: masks are in it."""
    path = one_shot(tmp_path)
    module, first = Lit(mlp(), OPTIMIZERS[optimizer]), MagnitudePruning()
    t = trainer(first, max_epochs=6)
    t.fit(module, loader())
    t.save_checkpoint(tmp_path / "run.ckpt")
    other, pruner = Lit(mlp(seed=2), OPTIMIZERS[optimizer]), FixedMasks(path)
    trainer(pruner, max_epochs=9).fit(other, loader(), ckpt_path=tmp_path / "run.ckpt")
    assert sum(zeros(other)) == ZEROS
    assert_same(dict(pruner.masks), dict(first.masks))
    assert not masked_values(other, first.masks).any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_hand_written_loop(tmp_path, optimizer):
    module = Lit(mlp(seed=4))
    store = load_ticket(one_shot(tmp_path), module)
    step, start = OPTIMIZERS[optimizer](module.parameters()), zeros(module)
    for x, y in list(loader()) * 3:
        step.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        store.mask_grads_()
        step.step()
        store.apply_()
        assert zeros(module) == start
    assert store.sparsity == 0.9


def test_without_a_pruner_it_becomes_dense(tmp_path):
    """The danger is real."""
    module = Lit(mlp(), OPTIMIZERS["adam"])
    load_ticket(one_shot(tmp_path), module)
    trainer(max_epochs=1).fit(module, loader())
    assert sum(zeros(module)) < 64


def test_a_file_of_another_network_is_refused(tmp_path):
    torch.manual_seed(0)
    wide = Lit(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    before = clone(wide.state_dict())
    with pytest.raises(ValueError, match=r"'net\.0\.bias' of shape \(32,\), in Lit it is of shape \(64,\)"):
        trainer(FixedMasks(one_shot(tmp_path))).fit(wide, loader())
    assert_same(clone(wide.state_dict()), before)
