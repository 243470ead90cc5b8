"""Pruners are compared on one's own network from config files, and what a run leaves says how it was made.

https://github.com/JJGO/shrinkbench/issues/6
"""

import csv
import sys
import textwrap

import pytest
import torch
import yaml
from command_line import fit, run
from helpers import assert_same

from sparsecomp.reporting import read_curves

CODE = """
    from torch import nn


    class Halves(nn.Module):
        '''A network of one's own: the upper and the lower half of the picture, each through a layer.'''

        def __init__(self, width: int) -> None:
            super().__init__()
            self.upper = nn.Linear(32, width)
            self.lower = nn.Linear(32, width)
            self.out = nn.Linear(2 * width, 10)

        def forward(self, x):
            upper, lower = x.flatten(1).chunk(2, 1)
            return self.out(nn.functional.relu(nn.functional.pad(self.upper(upper), (0, self.lower.out_features))
                                               + nn.functional.pad(self.lower(lower), (self.upper.out_features, 0))))
"""

SHARED = """
    seed_everything: 11
    trainer:
      max_epochs: 2
      accelerator: cpu
      enable_model_summary: false
      logger: {class_path: CSVLogger, init_args: {save_dir: results, name: unnamed}}
    data: {class_path: DigitsDataModule, init_args: {batch_size: 100}}
    model:
      class_path: MaskedModule
      init_args:
        network: {class_path: own_networks.Halves, init_args: {width: 12}}
        loss: {class_path: torch.nn.CrossEntropyLoss}
        optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5}}
        metrics:
          accuracy: {class_path: torchmetrics.classification.MulticlassAccuracy, init_args: {num_classes: 10}}
"""

PRUNERS = {
    "magnitude": {"class_path": "MagnitudePruning"},
    "layerwise": {"class_path": "MagnitudePruning", "init_args": {"allocation": "layerwise"}},
    "ticket": {"class_path": "LotteryTicketPruning"},
}
WEIGHTS = 2 * 32 * 12 + 24 * 10


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(textwrap.dedent(CODE))
    (tmp_path / "shared.yaml").write_text(textwrap.dedent(SHARED))
    for name, pruning in PRUNERS.items():
        overlay = {"base": "shared.yaml", "trainer": {"logger": {"init_args": {"name": name}}}, "pruning": pruning}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(overlay))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_networks", None)


def weights(version):
    (path,) = version.glob("checkpoints/*.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def test_pruners_compared_on_ones_own_network_from_files_alone(folder):
    for name in PRUNERS:
        fit(folder, f"--config={name}.yaml", epochs=2)
    # From here on nothing but what the runs left.
    accuracy = {}
    for name, pruning in PRUNERS.items():
        version = folder / "results" / name / "version_0"
        curves = read_curves(version / "metrics.csv")
        assert curves["pruning/sparsity"] == pytest.approx({0: curves["pruning/sparsity"][0], 1: 0.9}, abs=1e-3)
        assert set(curves["val/accuracy"]) == {0, 1}
        accuracy[name] = curves["test/accuracy"][2]
        with (version / "metrics.csv").open(newline="") as file:
            assert float(list(csv.DictReader(file))[-1]["test/accuracy"]) == accuracy[name]
        state = weights(version)
        removed = sum(int((state[f"network.{layer}.weight"] == 0).sum()) for layer in ("upper", "lower", "out"))
        assert removed == round(0.9 * WEIGHTS)
        config = yaml.safe_load((version / "config.yaml").read_text())  # plain YAML, no python objects
        assert config["seed_everything"] == 11
        assert config["model"]["init_args"]["network"] == {
            "class_path": "own_networks.Halves",
            "init_args": {"width": 12},
        }
        assert config["pruning"]["class_path"].rpartition(".")[2] == pruning["class_path"]
        assert config["data"]["init_args"]["batch_size"] == 100
    assert len(set(accuracy.values())) == 3


def test_the_saved_config_alone_repeats_the_run(folder):
    fit(folder, "--config=layerwise.yaml", epochs=2)
    version = folder / "results/layerwise/version_0"
    # The files it was made from are gone, and the copy lies somewhere else.
    for name in ("shared", *PRUNERS):
        (folder / f"{name}.yaml").unlink()
    copied = folder / "elsewhere.yaml"
    copied.write_text((version / "config.yaml").read_text())
    run(folder, "fit", "--config", copied)
    again = version.with_name("version_1")
    assert_same(weights(again), weights(version))
    assert (again / "metrics.csv").read_text() == (version / "metrics.csv").read_text()


@pytest.mark.filterwarnings("ignore:No seed found, seed set to 0:UserWarning")  # Lightning's way to say which it took
def test_the_seed_is_saved_where_none_was_given(folder):
    (folder / "shared.yaml").write_text(textwrap.dedent(SHARED).replace("seed_everything: 11\n", ""))
    fit(folder, "--config=magnitude.yaml", "--trainer.limit_train_batches=3", "--seed_everything=true")
    version = folder / "results/magnitude/version_0"
    seed = yaml.safe_load((version / "config.yaml").read_text())["seed_everything"]
    assert type(seed) is int
    run(folder, "fit", "--config", version / "config.yaml")
    assert_same(weights(version.with_name("version_1")), weights(version))
