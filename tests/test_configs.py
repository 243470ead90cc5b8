"""Every config that is shipped goes through the command line; a new file is picked up by itself."""

import pytest
import yaml
from command_line import CONFIGS, configs, fit, pruner_of

from sparsecomp import cli
from sparsecomp._discovery import concrete_subclasses
from sparsecomp.criteria import Criterion
from sparsecomp.schedules import Schedule

TWO_BATCHES = ("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2")
# What an overlay is combined with: one file of each other kind.
PARTS = {"data": "data/digits.yaml", "schedule": "schedule/polynomial.yaml", "criterion": "criterion/magnitude.yaml"}


def files(folder):
    return sorted(str(path.relative_to(CONFIGS)) for path in (CONFIGS / folder).rglob("*.yaml"))


EXPERIMENTS = files("experiment")
DATA = files("data")
# Needs smooth activations, which the networks for digits do not have; experiment/tree_hierarchical.yaml builds on it.
OF_TREES = {"criterion/hierarchical_similarity.yaml"}
OVERLAYS = [path for path in files(".") if path not in {"base.yaml", *EXPERIMENTS, *DATA, *OF_TREES}]


def content(path):
    """The file with its bases, later ones over earlier ones; lists and class changes as jsonargparse takes them."""
    own = yaml.safe_load((CONFIGS / path).read_text())
    bases = own.pop("base", [])
    merged = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = merge(merged, content((CONFIGS / path).parent / base))
    return merge(merged, own)


def merge(below, above):
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "class_path" in above and above["class_path"] != below.get("class_path"):
        return above
    return {key: merge(below.get(key), above[key]) if key in above else below[key] for key in below | above}


def assert_is(instance, spec):
    """`instance` is of the class that `spec` names, and has its arguments where they are attributes of a config's kind."""
    assert type(instance).__name__ == spec["class_path"].rpartition(".")[2]
    for name, value in spec.get("init_args", {}).items():
        # A preset hands its criterion's arguments on.
        held = getattr(instance, name) if hasattr(instance, name) else getattr(instance.criterion, name)
        if isinstance(value, dict) and "class_path" in value:
            assert_is(held, value)
        else:
            assert (list(held) if isinstance(value, list) else held) == value, name


def assert_pruned(command, spec):
    pruner = pruner_of(command)
    assert_is(pruner, spec)
    _, total = (sum(column) for column in zip(*pruner.counts.values(), strict=True))
    wanted = round(pruner.schedule.final_sparsity * total) / total
    if pruner.target == "effective":  # the nearest reachable one that is not below
        assert wanted - 1 / total < pruner.sparsity == pruner.effective_sparsity < wanted + 10 / total
    else:
        assert pruner.sparsity == wanted > 0.5
    state = command.model.state_dict()
    assert sum(int((state[name] == 0).sum()) for name in pruner.masks) == round(pruner.sparsity * total)


def test_what_is_shipped():
    assert set(PARTS.values()) | {"base.yaml", "data/digits_conv.yaml"} <= set(files("."))
    assert {"experiment/digits_magnitude.yaml", "experiment/digits_dense.yaml"} <= set(EXPERIMENTS)
    assert len(OVERLAYS) >= 8


@pytest.mark.parametrize("path", EXPERIMENTS)
def test_experiment(tmp_path, path):
    command = fit(tmp_path, *configs(path), *TWO_BATCHES)
    assert command.trainer.global_step == 2
    spec = content(path)
    assert_is(command.datamodule, spec["data"])
    assert type(command.model.network).__name__ == spec["model"]["init_args"]["network"]["class_path"]
    # Each experiment writes to a folder of its own name.
    (logger,) = command.trainer.loggers
    assert logger.name == (CONFIGS / path).stem
    assert (tmp_path / "runs" / logger.name / "version_0" / "metrics.csv").is_file()
    pruners = [callback for callback in command.trainer.callbacks if isinstance(callback, cli.PruningBase)]
    specs = [spec["pruning"]] if "pruning" in spec else []  # an experiment without one is dense
    assert len(pruners) == len(specs)
    for pruning in specs:
        assert_pruned(command, pruning)


@pytest.mark.parametrize("path", DATA)
def test_data(tmp_path, path):
    command = fit(tmp_path, *configs("base.yaml", path), *TWO_BATCHES)
    spec = content(path)
    assert_is(command.datamodule, spec["data"])
    model = spec["model"]
    assert type(command.model).__name__ == model["class_path"]
    assert type(command.model.network).__name__ == model["init_args"]["network"]["class_path"]
    assert type(command.model.loss).__name__ == model["init_args"]["loss"]["class_path"].rpartition(".")[2]
    (optimizer,) = command.trainer.optimizers
    assert type(optimizer).__name__ == model["init_args"]["optimizer"]["class_path"].rpartition(".")[2]
    assert optimizer.param_groups[0]["lr"] == model["init_args"]["optimizer"]["init_args"]["lr"]
    assert command.trainer.global_step == 2
    metrics = model["init_args"]["metrics"]
    assert {f"test/{name}" for name in metrics} <= set(command.trainer.callback_metrics)


@pytest.mark.parametrize("path", OVERLAYS)
def test_overlay(tmp_path, path):
    kind = path.partition("/")[0]
    combined = ["base.yaml", *(PARTS | {kind: path}).values()]
    command = fit(tmp_path, *configs(*combined), *TWO_BATCHES)
    assert command.trainer.global_step == 2
    spec = {}
    for part in combined:
        spec = merge(spec, content(part))
    assert_pruned(command, spec["pruning"])


@pytest.mark.parametrize(("kind", "family"), [("criterion", Criterion), ("schedule", Schedule)])
def test_every_class_has_a_config(kind, family):
    configured = {
        content(path)["pruning"]["init_args"][kind]["class_path"] for path in files(kind) if path not in OF_TREES
    }
    ours = {c.__name__ for c in concrete_subclasses(family) if c.__module__.startswith("sparsecomp.")}
    assert configured == ours
