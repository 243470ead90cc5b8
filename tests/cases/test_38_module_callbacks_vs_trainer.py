"""A pruner from the module never replaces the configured one in silence.

https://github.com/Lightning-AI/pytorch-lightning/issues/18784
"""

import pytest
from helpers import Lit, assert_same, clone, loader, mlp, trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer

from sparsecomp import LotteryTicketPruning, Magnitude, MagnitudePruning, OneShot, Pruning


class WithCallbacks(Lit):
    """A module that brings callbacks."""

    def __init__(self, make):
        super().__init__(mlp())
        self.make = make

    def configure_callbacks(self):
        return self.make()


def configured():
    return Pruning(Magnitude(), OneShot(0.9, at=1))


def of_the_module():
    return Pruning(Magnitude(), OneShot(0.1, at=1))


class Custom(Pruning):
    """A user's own pruner."""


BROUGHT = {
    "one": of_the_module,
    "list": lambda: [of_the_module()],
    "tuple": lambda: (of_the_module(),),
    "among_others": lambda: [Timer(), of_the_module(), Callback()],
    "another_class": lambda: [MagnitudePruning()],
    "users_class": lambda: [Custom(Magnitude(), OneShot(0.1, at=1))],
}


@pytest.mark.parametrize("brought", BROUGHT)
@pytest.mark.parametrize("with_trainers", [True, False])
def test_the_module_brings_a_pruner(brought, with_trainers):
    module = WithCallbacks(BROUGHT[brought])
    before = clone(module.state_dict())
    t = trainer(*[configured()] * with_trainers)
    with pytest.raises(
        ValueError, match=r"WithCallbacks\.configure_callbacks returns a pruner.*give the pruner to the"
    ):
        t.fit(module, loader())
    assert t.global_step == 0
    assert_same(clone(module.state_dict()), before)


@pytest.mark.parametrize("run", ["validate", "test"])
def test_nor_in_evaluation(run):
    with pytest.raises(ValueError, match="configure_callbacks returns a pruner"):
        getattr(trainer(configured()), run)(WithCallbacks(of_the_module), loader(), verbose=False)


@pytest.mark.parametrize("brought", [list, lambda: [Timer()], Timer, lambda: [Callback(), Timer()]])
def test_other_callbacks_of_the_module_are_welcome(brought):
    pruner = configured()
    t = trainer(pruner)
    module = WithCallbacks(brought)
    t.fit(module, loader())
    assert pruner.sparsity == 0.9
    assert int((module.net[0].weight == 0).sum() + (module.net[2].weight == 0).sum()) == 576
    assert [c for c in t.callbacks if isinstance(c, Pruning)] == [pruner]


@pytest.mark.parametrize("second", [configured, MagnitudePruning, LotteryTicketPruning])
def test_two_pruners_of_one_trainer(second):
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        trainer(configured(), second())


def test_a_module_may_replace_a_callback_that_is_no_pruner(tmp_path):
    pruner = configured()
    module = WithCallbacks(lambda: [ModelCheckpoint(tmp_path, "mine")])
    t = trainer(pruner, ModelCheckpoint(tmp_path, "trainers"), enable_checkpointing=True)
    t.fit(module, loader())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.ckpt"]
    assert pruner.sparsity == 0.9
