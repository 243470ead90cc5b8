"""Whole runs through the command line: what they leave, repeat, resume, validate and accept of a user."""

import csv
import hashlib
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import wandb
import yaml
from command_line import EXPERIMENT, configs, fit, printed, pruner_of, resolved, rows, run
from helpers import assert_same
from torch.nn import functional as F

from sparsecomp import load_ticket
from sparsecomp.data import DigitsDataModule
from sparsecomp.models import MLP

# Said by Lightning's ModelCheckpoint of every checkpoint that is read by a run with another folder.
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")

EPOCHS = 3
WEIGHTS = ("network.1.weight", "network.3.weight", "network.5.weight")
TOTAL = 64 * 128 + 128 * 128 + 128 * 10
WIDE = {"COLUMNS": "250"}  # nothing in the table folds


def load(path):
    return torch.load(path, weights_only=True)


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def split(stage, name):
    data = DigitsDataModule()
    data.setup(stage)
    ((x, y),) = getattr(data, name)()
    return x, y


def accuracy_and_loss(state, x, y):
    """Of the weights in a checkpoint, without Lightning and torchmetrics."""
    network = MLP(64, 10)
    network.load_state_dict({name.removeprefix("network."): tensor for name, tensor in state.items()})
    with torch.no_grad():
        predictions = network(x)
    return float((predictions.argmax(1) == y).float().mean()), float(F.cross_entropy(predictions, y))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of an experiment, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    command, text = printed(fit, folder, *configs(EXPERIMENT), epochs=EPOCHS, **WIDE)
    version = folder / "runs" / "digits_magnitude" / "version_0"
    return SimpleNamespace(
        command=command, text=text, cwd=folder, folder=version, checkpoint=only(version, "checkpoints/*.ckpt")
    )


# What a run leaves


def test_closing_table_says_what_the_checkpoint_holds(finished):
    table, state = rows(finished.text), load(finished.checkpoint)["state_dict"]
    zeros = {name: int((state[name] == 0).sum()) for name in WEIGHTS}
    for name in WEIGHTS:
        total = state[name].numel()
        kept = total - zeros[name]
        assert table[f"sparsity of {name}"] == f"{zeros[name] / total:.4f}  ({kept:,} of {total:,} kept)"
    assert sum(zeros.values()) == round(0.9 * TOTAL)
    assert table["sparsity in all"] == "0.9000"
    accuracy, loss = accuracy_and_loss(state, *split("test", "test_dataloader"))
    assert table["test/accuracy"] == f"{accuracy:.4f}"
    assert float(table["test/loss"]) == pytest.approx(loss, abs=1e-4)
    assert accuracy > 0.4  # it has learnt


def test_closing_table_names_the_files(finished):
    table = rows(finished.text)
    folder = finished.cwd / table["files in"]
    assert folder == finished.folder
    for label in ("metrics", "picture", "config", "checkpoint"):
        assert (folder / table[label]).is_file(), label
    assert {path.name for path in folder.iterdir()} == {"metrics.csv", "curves.png", "config.yaml", "checkpoints"}


def test_metrics_have_the_sparsity_of_each_epoch(finished):
    with (finished.folder / "metrics.csv").open(newline="") as file:
        table = [row for row in csv.DictReader(file) if row["pruning/sparsity"]]

    def cubic(at):  # Zhu and Gupta from .05 to .6 of the training
        return 0.9 - 0.9 * (1 - (at - 0.05) / 0.55) ** 3

    # Epoch 1 of 3 ends at 1/3 of the training, where the event at .3 is the latest; epoch 2 after the last at .6.
    wanted = [round(sparsity * TOTAL) / TOTAL for sparsity in (cubic(0.3), 0.9, 0.9)]
    assert [int(row["epoch"]) for row in table] == [0, 1, 2]
    assert [float(row["pruning/sparsity"]) for row in table] == pytest.approx(wanted, abs=1e-6)
    # The metrics beside it are those of the pruned network: the last row describes the checkpoint.
    accuracy, loss = accuracy_and_loss(load(finished.checkpoint)["state_dict"], *split("fit", "val_dataloader"))
    assert float(table[-1]["val/accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    assert float(table[-1]["val/loss"]) == pytest.approx(loss, rel=1e-5)


def test_picture_is_a_png_with_something_in_it(finished):
    from matplotlib import image

    assert (finished.folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(finished.folder / "curves.png")
    assert pixels.std() > 0.01


def test_config_says_all_and_which_versions_wrote_it(finished):
    import lightning

    import sparsecomp

    text = (finished.folder / "config.yaml").read_text()
    assert f"sparsecomp=={sparsecomp.__version__}" in text
    assert f"lightning=={lightning.__version__}" in text
    config = yaml.safe_load(text)  # a python object would be refused
    assert config["seed_everything"] == 0
    assert config["trainer"]["max_epochs"] == EPOCHS
    assert config["pruning"]["class_path"].endswith("Pruning")
    schedule = config["pruning"]["init_args"]["schedule"]
    assert schedule["class_path"].endswith("Polynomial")
    # Defaults too: the run must stay the same when a default changes.
    assert schedule["init_args"]["power"] == 3
    assert config["data"]["init_args"]["validation"] == 200


def test_fast_dev_run_leaves_no_file(tmp_path):
    command, text = printed(fit, tmp_path, *configs(EXPERIMENT), "--trainer.fast_dev_run=2")
    assert command.trainer.global_step == 2
    assert list(tmp_path.iterdir()) == []
    assert "Result" not in text


# Repeat


def test_rerun_from_the_saved_config_is_equal_and_keeps_the_first_run(finished):
    before = digests(finished.folder)
    run(finished.cwd, "fit", "--config", finished.folder / "config.yaml")
    again = finished.folder.with_name("version_1")
    assert digests(finished.folder) == before
    first, second = load(finished.checkpoint), load(only(again, "checkpoints/*.ckpt"))
    for part in ("state_dict", "optimizer_states"):
        assert_same(second[part], first[part])
    assert_same(second["callbacks"]["sparsecomp.pruning"], first["callbacks"]["sparsecomp.pruning"])
    assert (again / "metrics.csv").read_text() == (finished.folder / "metrics.csv").read_text()
    assert (again / "config.yaml").read_text() == (finished.folder / "config.yaml").read_text()


def test_another_seed_is_another_run(finished, tmp_path):
    fit(tmp_path, "--config", finished.folder / "config.yaml", "--seed_everything=1", epochs=EPOCHS)
    other = load(only(tmp_path, "runs/*/version_0/checkpoints/*.ckpt"))["state_dict"]
    assert not torch.equal(other["network.1.weight"], load(finished.checkpoint)["state_dict"]["network.1.weight"])


WANDB = {"class_path": "WandbLogger", "init_args": {"save_dir": "runs", "project": "digits"}}
CSV = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "fit"}}


@pytest.fixture
def offline():
    """W&B without a network; each run must be closed, or the next one would go on in it."""
    yield {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    wandb.finish()


@pytest.mark.parametrize("loggers", [[WANDB, CSV], WANDB], ids=["before CSVLogger", "alone"])
def test_wandb_runs_keep_apart(tmp_path, offline, loggers):
    config = tmp_path / "offline.yaml"
    config.write_text(yaml.safe_dump({"base": str(EXPERIMENT), "trainer": {"logger": loggers}}))

    def once(path):
        _, text = printed(fit, tmp_path, "--config", path, "--trainer.limit_train_batches=4", **offline, **WIDE)
        wandb.finish()
        folder = tmp_path / rows(text)["files in"]
        assert rows(text)["config"] == "config.yaml"
        return folder, tmp_path / folder / rows(text)["checkpoint"]

    first, first_checkpoint = once(config)
    before = digests(first)
    assert first.name == ("version_0" if isinstance(loggers, list) else first_checkpoint.parent.parent.name)
    # Not in the folder that all runs share.
    assert not (tmp_path / "runs" / "config.yaml").exists()
    second, _ = once(first / "config.yaml")
    assert second != first
    assert digests(first) == before
    checkpoints = sorted(tmp_path.glob("runs/digits/*/checkpoints/*.ckpt"))
    assert len(checkpoints) == 2
    a, b = (load(path) for path in checkpoints)
    assert_same(a["state_dict"], b["state_dict"])
    assert_same(a["callbacks"]["sparsecomp.pruning"], b["callbacks"]["sparsecomp.pruning"])


# Resume

EVERY_4_STEPS = (
    "--trainer.callbacks+=ModelCheckpoint",
    "--trainer.callbacks.every_n_train_steps=4",
    "--trainer.callbacks.save_top_k=-1",
    "--trainer.callbacks.filename={step}",
)


@pytest.mark.parametrize("experiment", ["digits_magnitude", "digits_lottery_ticket"])
def test_resume_in_the_middle_of_an_epoch_equals_the_uninterrupted_run(tmp_path, experiment):
    # Saved every 4 of 16 steps of an epoch; 20 is in the middle of the second, 16 at the end of the first. In neither
    # place has the schedule come to its end, so that a resume has something left to do.
    arguments = (*configs(f"experiment/{experiment}.yaml"), *EVERY_4_STEPS)
    fit(tmp_path, *arguments, epochs=EPOCHS)
    whole = tmp_path / "runs" / experiment / "version_0"
    wanted = load(whole / "checkpoints/step=48.ckpt")
    for version, step in enumerate((16, 20), start=1):
        start = whole / "checkpoints" / f"step={step}.ckpt"
        masks = load(start)["callbacks"]["sparsecomp.pruning"]["masks"]
        assert 0.5 < sum(int((~mask).sum()) for mask in masks.values()) / TOTAL < 0.8995
        # Another seed: nothing may come from it, neither weights nor the order of the data.
        command = fit(tmp_path, *arguments, f"--ckpt_path={start}", "--seed_everything=5", epochs=EPOCHS)
        resumed = whole.with_name(f"version_{version}")
        assert sorted(path.name for path in resumed.glob("checkpoints/*")) == sorted(
            f"step={later}.ckpt" for later in range(step + 4, 49, 4)
        )
        found = load(resumed / "checkpoints/step=48.ckpt")
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_same(found[part], wanted[part], f"{part} after a resume at {step}")
        assert_same(found["callbacks"]["sparsecomp.pruning"], wanted["callbacks"]["sparsecomp.pruning"])
        assert pruner_of(command).sparsity == round(0.9 * TOTAL) / TOTAL


# Validate and test


@pytest.mark.parametrize(
    ("subcommand", "stage", "name"), [("validate", "fit", "val_dataloader"), ("test", "test", "test_dataloader")]
)
def test_validate_and_test_do_not_prune(finished, tmp_path, subcommand, stage, name):
    config, path = finished.folder / "config.yaml", finished.checkpoint
    before = digests(finished.folder)
    command = run(tmp_path, subcommand, "--config", config, "--ckpt_path", path)
    saved = load(path)
    assert_same(dict(command.model.state_dict()), dict(saved["state_dict"]))
    accuracy, _ = accuracy_and_loss(saved["state_dict"], *split(stage, name))
    key = {"validate": "val/accuracy", "test": "test/accuracy"}[subcommand]
    assert float(command.trainer.callback_metrics[key]) == pytest.approx(accuracy, abs=1e-6)
    # What the checkpoint says of its masks is there to read.
    assert pruner_of(command).sparsity == round(0.9 * TOTAL) / TOTAL
    assert digests(finished.folder) == before


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_a_dense_checkpoint_stays_dense(tmp_path, subcommand):
    fit(tmp_path, *configs("experiment/digits_dense.yaml"))
    path = only(tmp_path, "runs/*/version_0/checkpoints/*.ckpt")
    # The config asks for 90%, at once, and yet this is no training.
    arguments = (*configs(EXPERIMENT), "--pruning.schedule=OneShot", "--pruning.schedule.final_sparsity=0.9")
    command = run(tmp_path, subcommand, *arguments, "--pruning.schedule.at=0", "--ckpt_path", path)
    assert_same(dict(command.model.state_dict()), dict(load(path)["state_dict"]))
    assert all(bool(command.model.state_dict()[name].all()) for name in WEIGHTS)
    assert pruner_of(command).sparsity == 0.0


# Without a pruner


@pytest.mark.parametrize("how", ["absent", "null in YAML", "null on the command line"])
def test_no_pruner_means_dense(tmp_path, how):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("pruning: null\n")
    arguments = {
        "absent": configs("experiment/digits_dense.yaml"),
        "null in YAML": [*configs(EXPERIMENT), f"--config={overlay}"],
        "null on the command line": [*configs(EXPERIMENT), "--pruning=null"],
    }[how]
    command, text = printed(fit, tmp_path, *arguments, **WIDE)
    assert rows(text)["sparsity"] == "dense: no pruning"
    assert "pruning/sparsity" not in command.trainer.logged_metrics
    state = load(only(tmp_path, "runs/*/version_0/checkpoints/*.ckpt"))
    assert all(bool(state["state_dict"][name].all()) for name in WEIGHTS)
    assert "sparsecomp.pruning" not in state["callbacks"]
    assert yaml.safe_load(only(tmp_path, "runs/*/version_0/config.yaml").read_text()).get("pruning") is None


# A user's own module and data

OWN = """
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset


    class OwnModule(L.LightningModule):
        def __init__(self, width: int = 8, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Linear(6, width)
            self.head = nn.Linear(width, 3)

        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


    class OwnData(L.LightningDataModule):
        def __init__(self, samples: int = 24) -> None:
            super().__init__()
            self.samples = samples

        def train_dataloader(self):
            x = torch.linspace(-1, 1, self.samples * 6).reshape(self.samples, 6)
            return DataLoader(TensorDataset(x, torch.arange(self.samples) % 3), batch_size=4, shuffle=True)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module file on the path, which no other test sees."""
    (tmp_path / "own_code.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize("pruning", ["MagnitudePruning", "LotteryTicketPruning", "SimilarityPruning"])
def test_own_module_and_data_by_class_path(own, pruning):
    config = {
        "seed_everything": 3,
        "trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "own"}}},
        "model": {"class_path": "own_code.OwnModule", "init_args": {"width": 10}},
        "data": {"class_path": "own_code.OwnData"},
        "pruning": {"class_path": pruning},
    }
    (own / "own.yaml").write_text(yaml.safe_dump(config))
    command, text = printed(fit, own, "--config=own.yaml", epochs=5, **WIDE)
    assert type(command.model).__name__ == "OwnModule"
    assert type(pruner_of(command)).__name__ == pruning
    table, folder = rows(text), own / "runs/own/version_0"
    state = load(only(folder, "checkpoints/*.ckpt"))["state_dict"]
    zeros = {name: int((state[name] == 0).sum()) for name in ("body.weight", "head.weight")}
    assert (
        table["sparsity of body.weight"] == f"{zeros['body.weight'] / 60:.4f}  ({60 - zeros['body.weight']} of 60 kept)"
    )
    assert sum(zeros.values()) == 81  # 90% of 60 + 30
    assert table["test metrics"].startswith("none")
    # It logs no metric, so there is nothing to draw; the sparsity is there all the same.
    assert not (folder / "curves.png").exists()
    with (folder / "metrics.csv").open(newline="") as file:
        assert [float(row["pruning/sparsity"]) for row in csv.DictReader(file)][-1] == pytest.approx(0.9)


def test_lottery_ticket_files_are_in_the_run_folder_and_hold_the_ticket(tmp_path):
    command, text = printed(fit, tmp_path, *configs("experiment/digits_lottery_ticket.yaml"), epochs=EPOCHS, **WIDE)
    table, folder = rows(text), tmp_path / "runs/digits_lottery_ticket/version_0"
    saved = load(folder / table["checkpoint"])
    pruning = saved["callbacks"]["sparsecomp.pruning"]
    initial = pruning["snapshot"]["tensors"]
    for kind, weights in (("ticket", initial), ("trained", saved["state_dict"])):
        model = type(command.model)(MLP(64, 10), torch.nn.CrossEntropyLoss())
        store = load_ticket(folder / table[kind], model)
        assert_same(dict(store.masks), dict(pruning["masks"]))
        for name, mask in store.masks.items():
            assert torch.equal(model.state_dict()[name], weights[name] * mask), (kind, name)


# Printing


def test_print_config_has_the_bases_and_what_the_command_line_changed(tmp_path):
    printed_config = yaml.safe_load(resolved(tmp_path, "fit", *configs(EXPERIMENT), "--trainer.max_epochs=7"))
    assert printed_config["trainer"]["max_epochs"] == 7
    assert printed_config["trainer"]["logger"]["init_args"]["name"] == "digits_magnitude"
    assert printed_config["data"]["init_args"]["batch_size"] == 64
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--help"], ["fit", "validate", "test"]),
        (["fit", "--help"], ["--pruning", "--config", "--ckpt_path", "--trainer.max_epochs"]),
        (["fit", "--pruning.help", "MagnitudePruning"], ["--pruning.schedule", "--pruning.rewind"]),
    ],
)
def test_help(tmp_path, capsys, arguments, wanted):
    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path, *arguments)
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert [text for text in wanted if text not in shown] == []
