"""The logged sparsity counts all parameters in scope. https://github.com/Lightning-AI/pytorch-lightning/issues/13595"""

import csv

import pytest
import torch
from helpers import Lit, Watch, loader, mlp, trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from sparsecomp import Layerwise, Levels, Magnitude, OneShot, Pruning, Selection


def test_13_of_66_from_the_first_event_on(tmp_path):
    torch.manual_seed(0)
    module = Lit(nn.Linear(32, 2))
    pruner = Pruning(Magnitude(), OneShot(0.2, at=1), selection=Selection(include=["net.weight", "net.bias"]))
    t = trainer(pruner, max_epochs=1)
    t.fit(module, loader(d=32, c=2), loader(d=32, c=2))
    assert pruner.sparsity == 13 / 66
    assert pruner.events[0].after == 13 / 66
    assert t.callback_metrics["pruning/sparsity"] == torch.tensor(13 / 66)
    assert int((module.net.weight == 0).sum()) + int((module.net.bias == 0).sum()) == 13


@pytest.mark.parametrize("allocation", ["global", Layerwise()])
def test_every_number_is_zeros_in_masks_over_parameters_in_scope(tmp_path, allocation):
    module, seen = Lit(mlp()), []
    scope = {"net.0.weight": 512, "net.0.bias": 32, "net.2.weight": 128, "net.2.bias": 4}
    pruner = Pruning(Magnitude(), Levels((0.2, 0.5, 0.9), begin=1), allocation, Selection(include=list(scope)))

    def look(trainer, module):
        zeros = {name: int((mask == 0).sum()) for name, mask in pruner.masks.items()}
        live = dict(module.named_parameters())
        assert {name: int((live[name] == 0).sum()) for name in scope} == zeros
        assert pruner.sparsity == sum(zeros.values()) / 676
        assert pruner.layer_sparsity == {name: zeros[name] / size for name, size in scope.items()}
        seen.append((sum(zeros.values()) / 676, {name: zeros[name] / size for name, size in scope.items()}))

    logger = CSVLogger(tmp_path)
    trainer(pruner, Watch(on_train_batch_end=look), logger=logger).fit(module, loader(), loader())
    assert [overall for overall, _ in seen[3::4]] == [135 / 676, 338 / 676, 608 / 676, 608 / 676]
    assert [e.after for e in pruner.events] == [135 / 676, 338 / 676, 608 / 676]
    for event, (_, layers) in zip(pruner.events, seen[3::4], strict=False):
        assert {name: after for name, (_, after) in event.layers.items()} == layers
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        logged = [float(row["pruning/sparsity"]) for row in csv.DictReader(file) if row["pruning/sparsity"]]
    assert logged == [float(torch.tensor(overall)) for overall, _ in seen[3::4]]
