"""A schedule states TOTAL sparsity; asking twice changes nothing.

https://github.com/pytorch/pytorch/pull/65293 and https://github.com/VainF/Torch-Pruning/issues/224
"""

import itertools

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, mlp, trainer

from sparsecomp import (
    ERK,
    Geometric,
    Global,
    Layerwise,
    Levels,
    Linear,
    Magnitude,
    OneShot,
    Polynomial,
    Pruning,
    Random,
    prune,
)

EVENTS, TARGET = 4, 0.5


def run(criterion, schedule, allocation="global", epochs=6):
    """Masked weights after each epoch, counted in the masks and in the network."""
    module, counted = Lit(mlp()), []

    def look(trainer, module):
        live = dict(module.named_parameters())
        in_masks = sum(int((~mask).sum()) for mask in pruner.masks.values())
        assert sum(int((live[name] == 0).sum()) for name in pruner.masks) == in_masks
        if trainer.is_last_batch:
            counted.append((in_masks, clone(pruner.masks)))

    pruner = Pruning(criterion, schedule, allocation)
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=epochs).fit(module, loader())
    return pruner, [number for number, _ in counted], [masks for _, masks in counted]


@pytest.mark.parametrize("allocation", ["global", "layerwise", "erk"])
@pytest.mark.parametrize("criterion", [Magnitude(), Random()])
def test_the_same_level_again_is_a_no_op(criterion, allocation):
    pruner, counts, masks = run(criterion, Levels((TARGET,) * EVENTS, begin=1), allocation)
    assert counts == [320] * 6
    assert [(e.before, e.after) for e in pruner.events] == [(0.0, 0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5)]
    for later in masks:
        assert_same(later, masks[0])


@pytest.mark.parametrize("criterion", [Magnitude(), Random()])
@pytest.mark.parametrize(
    "schedule",
    [
        OneShot(TARGET, at=1),
        Linear(TARGET, begin=1, end=EVENTS),
        Polynomial(TARGET, begin=1, end=EVENTS),
        Levels((0.2, 0.3, 0.4, TARGET), begin=1),
        Geometric(TARGET, rounds=EVENTS, begin=1),
    ],
)
def test_after_the_last_event_it_is_the_target(criterion, schedule):
    pruner, counts, masks = run(criterion, schedule)
    expected = [round(640 * schedule.sparsity(epoch)) for epoch in range(1, 7)]
    assert counts == expected
    assert counts[-3:] == [320] * 3
    assert pruner.sparsity == TARGET
    for earlier, later in itertools.pairwise(masks):  # nested
        assert not any((later[name] & ~earlier[name]).any() for name in later)


def test_the_cubic_schedule_of_the_report():
    pruner, counts, _ = run(Magnitude(), Polynomial(0.8, begin=1, end=5), epochs=5)
    assert [round(e.target, 4) for e in pruner.events] == [0.0, 0.4625, 0.7, 0.7875, 0.8]
    assert counts == [0, 296, 448, 504, 512]


def test_a_share_of_what_remains_has_a_name_of_its_own():
    schedule = Geometric(1 - 0.5**EVENTS, rounds=EVENTS, begin=1)
    assert schedule.rate == 0.5
    _, counts, _ = run(Magnitude(), schedule, epochs=4)
    assert counts == [320, 480, 560, 600]


@pytest.mark.parametrize("allocation", [Global(), Layerwise(), ERK(), Global("unit"), Layerwise("unit")])
def test_an_allocation_keeps_to_the_total_whatever_the_scores_say(allocation):
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (32, 16), "b": (4, 32)}
    first = allocation({name: torch.rand(shape, generator=g) for name, shape in shapes.items()}, TARGET)
    for _ in range(3):
        # Pruned entries come with the highest scores, as regrown ones would.
        scores = {name: torch.rand(shape, generator=g) + 2.0 * ~first[name] for name, shape in shapes.items()}
        assert_same(allocation(scores, TARGET, first), first)
        lower = allocation(scores, 0.1, first)
        assert_same(lower, first)


def test_pruning_a_plain_network_twice():
    net = mlp()
    first = clone(prune(net, Magnitude(), TARGET).masks)
    weights = clone(dict(net.named_parameters()))
    again = prune(net, Magnitude(), TARGET)
    assert again.sparsity == TARGET
    assert_same(dict(again.masks), first)
    assert_same(clone(dict(net.named_parameters())), weights)


def test_masks_updated_twice():
    net = mlp()
    store = prune(net, Magnitude(), TARGET)
    masks = clone(store.masks)
    store.update_(masks)
    store.update_(masks)
    assert store.sparsity == TARGET
    assert_same(dict(store.masks), masks)
