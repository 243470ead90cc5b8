"""Pruning under Lightning's profilers. https://github.com/Lightning-AI/pytorch-lightning/issues/12393"""

import pytest
from helpers import Lit, assert_same, clone, loader, mlp, trainer

from sparsecomp import Levels, Magnitude, Pruning, Rewind


def run(folder, profiler):
    module = Lit(mlp())
    pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1), rewind=Rewind(at=2))
    t = trainer(pruner, max_epochs=3, profiler=profiler, default_root_dir=folder)
    # The profiler wants at least 5 steps in each loop.
    t.fit(module, loader(batch_size=4), loader(batch_size=4))
    t.test(module, loader(batch_size=4), verbose=False)
    return module, pruner


@pytest.mark.parametrize("profiler", ["pytorch", "simple", "advanced"])
def test_profiled_run_is_the_same_run(tmp_path, profiler):
    module, pruner = run(tmp_path, profiler)
    plain_module, plain_pruner = run(tmp_path, None)
    assert pruner.events == plain_pruner.events
    assert [e.after for e in pruner.events] == [0.5, 0.8]
    assert_same(dict(pruner.masks), dict(plain_pruner.masks))
    assert_same(clone(dict(module.named_parameters())), clone(dict(plain_module.named_parameters())))
