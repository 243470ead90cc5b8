"""A callback added on the command line joins those of the config, and a config alone sets all there is of a pruner.

https://github.com/Lightning-AI/pytorch-lightning/issues/15256 and https://github.com/mauvilsa/jsonargparse/issues/256
"""

import dataclasses
import inspect

import pytest
import torch
import yaml
from command_line import CONFIGS, fit, pruner_of, resolved, run
from helpers import assert_same
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

from sparsecomp import ERK, Cosine, Geometric, Levels, Linear, OneShot, Polynomial, Pruning, Random, Rewind, Selection
from sparsecomp._discovery import concrete_subclasses
from sparsecomp.schedules import Schedule

CHECKPOINT = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss", "save_top_k": 2}}
MONITOR = {"class_path": "LearningRateMonitor", "init_args": {"logging_interval": "step"}}


def write(folder, name, base="experiment/digits_magnitude.yaml", **content):
    path = folder / name
    path.write_text(yaml.safe_dump({"base": str(CONFIGS / base), **content}))
    return path


def paths(text):
    return [callback["class_path"].rpartition(".")[2] for callback in yaml.safe_load(text)["trainer"]["callbacks"]]


@pytest.mark.parametrize("how", ["command line", "layer"])
def test_an_appended_callback_joins_those_of_the_config(tmp_path, how):
    config = write(tmp_path, "base.yaml", trainer={"callbacks": [CHECKPOINT]})
    layer = tmp_path / "layer.yaml"
    layer.write_text(yaml.safe_dump({"base": "base.yaml", "trainer": {"callbacks+": [MONITOR]}}))
    arguments = {
        "command line": [
            f"--config={config}",
            "--trainer.callbacks+=LearningRateMonitor",
            "--trainer.callbacks.logging_interval=step",
        ],
        "layer": [f"--config={layer}"],
    }[how]
    assert paths(resolved(tmp_path, "fit", *arguments)) == ["ModelCheckpoint", "LearningRateMonitor"]
    command = fit(tmp_path, *arguments)
    (checkpoint,) = [c for c in command.trainer.callbacks if isinstance(c, ModelCheckpoint)]
    (monitor,) = [c for c in command.trainer.callbacks if isinstance(c, LearningRateMonitor)]
    assert (checkpoint.monitor, checkpoint.save_top_k) == ("val/loss", 2)
    assert monitor.logging_interval == "step"
    # The pruner is one of them and acts, whichever way callbacks are given.
    assert pruner_of(command).sparsity == pytest.approx(0.9, abs=1e-4)


def test_two_of_one_class_may_be_appended(tmp_path):
    config = write(tmp_path, "base.yaml", trainer={"callbacks": [CHECKPOINT]})
    more = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=second"]
    text = resolved(tmp_path, "fit", f"--config={config}", *more)
    callbacks = yaml.safe_load(text)["trainer"]["callbacks"]
    assert [c["init_args"]["filename"] for c in callbacks] == [None, "second"]
    assert [c["init_args"]["monitor"] for c in callbacks] == ["val/loss", None]


def test_print_config_round_trips(tmp_path):
    config = write(tmp_path, "base.yaml", trainer={"callbacks": [CHECKPOINT]})
    text = resolved(tmp_path, "fit", f"--config={config}", "--trainer.callbacks+=LearningRateMonitor")
    printed = tmp_path / "printed.yaml"
    printed.write_text(text)
    assert yaml.safe_load(resolved(tmp_path, "fit", f"--config={printed}")) == yaml.safe_load(text)
    first = fit(tmp_path, f"--config={config}", "--trainer.callbacks+=LearningRateMonitor")
    second = fit(tmp_path, f"--config={printed}")
    assert [type(c) for c in second.trainer.callbacks] == [type(c) for c in first.trainer.callbacks]
    assert_same(dict(second.model.state_dict()), dict(first.model.state_dict()))


FULL = {
    "class_path": "Pruning",
    "init_args": {
        "criterion": {"class_path": "Random", "init_args": {"seed": 4}},
        "schedule": {
            "class_path": "Levels",
            "init_args": {"sparsities": [0.2, 0.5], "begin": 0.5, "every": 0.25, "unit": "fraction"},
        },
        "allocation": {"class_path": "ERK", "init_args": {"granularity": "unit", "min_keep": 3}},
        "selection": {"include": ["Linear", "network.1.bias"], "exclude": ["network.5.*"]},
        "rewind": {
            "at": 1,
            "unit": "step",
            "other_parameters": False,
            "norm_statistics": False,
            "optimizer_state": False,
            "lr_schedule": False,
        },
        "target": "nominal",
        "probe": {"class_path": "Probe", "init_args": {"batches": 3}},
        "l1": 0.001,
        "l1_until": 0.4,
    },
}


def test_every_argument_of_a_pruner_is_set_from_yaml(tmp_path):
    # A new argument, also of a part, must be added above.
    assert set(FULL["init_args"]) == set(inspect.signature(Pruning).parameters)
    assert set(FULL["init_args"]["rewind"]) == {field.name for field in dataclasses.fields(Rewind)}
    assert set(FULL["init_args"]["selection"]) == {field.name for field in dataclasses.fields(Selection)}
    assert set(FULL["init_args"]["allocation"]["init_args"]) == set(inspect.signature(ERK).parameters)
    config = write(tmp_path, "full.yaml", "experiment/digits_dense.yaml", pruning=FULL)
    pruner = pruner_of(fit(tmp_path, f"--config={config}", epochs=2))
    assert type(pruner.criterion) is Random
    assert pruner.criterion.seed == 4
    assert pruner.schedule == Levels((0.2, 0.5), begin=0.5, every=0.25, unit="fraction")
    assert (type(pruner.allocation), pruner.allocation.granularity, pruner.allocation.min_keep) == (ERK, "unit", 3)
    assert pruner.selection == Selection(include=["Linear", "network.1.bias"], exclude=["network.5.*"])
    assert (pruner.target, pruner.probe.batches) == ("nominal", 3)
    assert pruner.rewind == Rewind(1, "step", False, False, False, False)
    assert set(pruner.counts) == {"network.1.weight", "network.1.bias", "network.3.weight"}
    assert [(event.target, event.rewound) for event in pruner.events] == [(0.2, True), (0.5, True)]
    # What was saved says the same in plain YAML, and runs again.
    saved = tmp_path / "runs/digits_dense/version_0/config.yaml"
    text = yaml.safe_load(saved.read_text())["pruning"]["init_args"]
    assert text["selection"] == FULL["init_args"]["selection"]
    assert text["rewind"] == FULL["init_args"]["rewind"]
    run(tmp_path, "fit", f"--config={saved}")
    first, second = (
        torch.load(next(tmp_path.glob(f"runs/digits_dense/version_{v}/checkpoints/*.ckpt")), weights_only=True)
        for v in (0, 1)
    )
    assert_same(second["state_dict"], first["state_dict"])


def test_every_argument_of_a_pruner_is_set_on_the_command_line(tmp_path):
    command = fit(
        tmp_path,
        f"--config={CONFIGS / 'experiment/digits_dense.yaml'}",
        "--pruning=Pruning",
        "--pruning.criterion=Random",
        "--pruning.criterion.seed=4",
        "--pruning.schedule=OneShot",
        "--pruning.schedule.final_sparsity=0.5",
        "--pruning.schedule.at=0.5",
        "--pruning.schedule.unit=fraction",
        "--pruning.allocation=erk",
        "--pruning.selection.exclude=[network.5]",
        "--pruning.rewind.at=2",
    )
    pruner = pruner_of(command)
    assert pruner.schedule == OneShot(0.5, at=0.5, unit="fraction")
    assert (pruner.criterion.seed, type(pruner.allocation), pruner.rewind) == (4, ERK, Rewind(at=2))
    assert list(pruner.masks) == ["network.1.weight", "network.3.weight"]
    assert pruner.sparsity == 0.5


@pytest.mark.parametrize("name", ["global", "layerwise", "erk"])
def test_an_allocation_by_its_name(tmp_path, name):
    config = write(tmp_path, "named.yaml", pruning={"init_args": {"allocation": name}})
    command = fit(tmp_path, f"--config={config}", "--trainer.fast_dev_run=2")
    assert pruner_of(command).allocation.name == name


# Two positions of each schedule, as a YAML has them: whole numbers for steps and epochs.
SCHEDULES = {
    OneShot: {"final_sparsity": 0.5, "at": 1},
    Linear: {"final_sparsity": 0.5, "begin": 0, "end": 2, "every": 1},
    Polynomial: {"final_sparsity": 0.5, "begin": 0, "end": 2, "every": 1, "power": 2, "initial_sparsity": 0.1},
    Cosine: {"final_sparsity": 0.5, "begin": 0, "end": 2, "every": 1},
    Geometric: {"final_sparsity": 0.5, "rounds": 2, "begin": 1, "every": 1},
    Levels: {"sparsities": [0.25, 0.5], "begin": 1, "every": 1},
}


@pytest.mark.parametrize(("class_", "unit"), [(OneShot, "step"), *((class_, "epoch") for class_ in SCHEDULES)])
def test_a_schedule_in_steps_or_epochs_from_yaml(tmp_path, class_, unit):
    arguments = SCHEDULES[class_] | {"unit": unit}
    spec = {"class_path": class_.__name__, "init_args": arguments}
    config = write(tmp_path, "schedule.yaml", pruning={"init_args": {"schedule": spec}})
    command = fit(tmp_path, f"--config={config}", "--trainer.limit_train_batches=2", epochs=2)
    pruner = pruner_of(command)
    assert pruner.schedule == class_(**arguments)
    assert [getattr(event, unit) for event in pruner.events] == list(class_(**arguments).positions)
    assert pruner.sparsity == pytest.approx(0.5, abs=1e-4)


def test_no_schedule_is_forgotten():
    ours = {c for c in concrete_subclasses(Schedule) if c.__module__.startswith("sparsecomp.")}
    assert set(SCHEDULES) == ours
