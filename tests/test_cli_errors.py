"""A mistake on the command line or in a YAML is one message that names it; a bug in a user's code keeps its traceback."""

import re
import subprocess
import sys
import textwrap

import pytest
import yaml
from command_line import EXPERIMENT, configs, fit, refused

# Words of parsers and of python objects, which say nothing to a reader.
JARGON = ("Traceback", "Union subtypes", "<class", "Namespace(", "Expected a", "NoneType", "object at 0x")
BATCHES = ("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2")


def check(status, message, wanted, expected_status):
    assert status == expected_status, message
    assert message.count("error:") == 1, message
    assert [word for word in JARGON if word in message] == [], message
    assert [word for word in wanted if word not in message] == [], message
    assert len(message) < 900, message  # not a page of python


# Option, and what the message must have: the wrong key or value, and what was near or allowed.
OPTIONS = {
    "trainer.max_epoch=3": ["'trainer.max_epoch'", "'trainer.max_epochs'"],  # an abbreviation
    "trainr.max_epochs=3": ["'trainr.max_epochs'", "'trainer.max_epochs'"],
    "seed=3": ["'seed'"],
    "prunning=Pruning": ["'prunning'", "'pruning'"],
    "pruning.schedul=3": ["'schedul'", "'schedule'"],
    "pruning.init_args.schedul=3": ["'schedul'", "'schedule'", "criterion"],
    "pruning.schedule.final_sparsty=0.3": ["'final_sparsty'", "'final_sparsity'"],
    "pruning.rewind.att=1": ["'att'", "'at'"],
    "pruning.selection.exclud=[a]": ["'exclud'", "'exclude'"],
    "model.network.hiden=[3]": ["MLP", "'hiden'", "'hidden'"],
    "model.optimizer.lrr=0.1": ["'lrr'", "'lr'"],
    "data.batchsize=3": ["'batchsize'", "'batch_size'"],
    "pruning=Pruner": ["'Pruner'", "'Pruning'"],
    "pruning.criterion=Magnitud": ["'Magnitud'", "'Magnitude'", "pruning.criterion"],
    "pruning.schedule=Polynomal": ["'Polynomal'", "'Polynomial'", "pruning.schedule"],
    "model=MaskedModul": ["'MaskedModul'", "'MaskedModule'"],
    "data=DigitDataModule": ["'DigitDataModule'", "'DigitsDataModule'"],
    "trainer.callbacks=ModelCheckpont": ["'ModelCheckpont'", "'ModelCheckpoint'", "trainer.callbacks"],
    "trainer.logger=CSVLoger": ["'CSVLoger'", "'CSVLogger'", "trainer.logger"],
    "model=own.nowhere.Module": ["own.nowhere.Module"],
    "trainer.max_epochs=abc": ["trainer.max_epochs", "int", "abc"],
    "trainer.max_epochs=1.5": ["trainer.max_epochs", "int", "1.5"],
    "seed_everything=abc": ["seed_everything", "abc"],
    "model.network.hidden=[3,x]": ["model.network.hidden", "int", "x"],
    "data.batch_size=x": ["data.batch_size", "int", "x"],
    "pruning.schedule.final_sparsity=abc": ["pruning.schedule.final_sparsity", "float", "abc"],
    "pruning.schedule.unit=week": ["pruning.schedule.unit", "week", "step", "epoch", "fraction"],
    "pruning.rewind.at=x": ["pruning.rewind.at", "int", "x"],
    "pruning.schedule.final_sparsity=90": ["`final_sparsity`", "[0, 1)", "90", "0.9"],
    "pruning.schedule.final_sparsity=1.5": ["`final_sparsity`", "[0, 1)", "1.5"],
    "pruning.schedule.end=1.5": ["`end`", "[0, 1]", "1.5"],
    "pruning.allocation=globl": ["`allocation`", "'global'", "'globl'"],
    "pruning.rewind.at=-1": ["`at`", ">= 0", "-1"],
    "pruning.criterion=Random --pruning.criterion.seed=-1": ["`seed`", ">= 0", "-1"],
    "pruning.selection.include=[]": ["`include`", "empty"],
    "model.network.hidden=[0]": ["`hidden`", ">= 1", "0"],
    "model.lr_interval=week": ["`lr_interval`", "'epoch'", "'week'"],
    "data.validation=1200": ["`validation`", "[0, 1199]", "1200"],
    "trainer.accelerator=abacus": ["abacus", "accelerator"],
    "trainer.precision=7": ["precision", "7"],
    "trainer.gradient_clip_algorithm=cut --trainer.gradient_clip_val=1": ["gradient_clip_algorithm", "cut"],
    "config=nofile.yaml": ["nofile.yaml", "config"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_wrong_option(tmp_path, option):
    status, message = refused(tmp_path, "fit", *configs(EXPERIMENT), *BATCHES, *f"--{option}".split())
    check(status, message, OPTIONS[option], 2)


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


# The same in a file; there, arguments of a class are under init_args.
FILES = {
    "trainer.max_epoch": (3, ["'trainer.max_epoch'", "'trainer.max_epochs'"]),
    "trainr.max_epochs": (3, ["'trainr.max_epochs'", "'trainer.max_epochs'"]),
    "prunning.class_path": ("Pruning", ["'prunning", "'pruning'"]),
    "pruning.init_args.allocatoin": ("erk", ["'allocatoin'", "'allocation'"]),
    "pruning.init_args.schedule.init_args.final_sparsty": (0.3, ["'final_sparsty'", "'final_sparsity'"]),
    "pruning.init_args.rewind.att": (1, ["'att'", "'at'"]),
    "pruning.init_args.selection.exclud": (["a"], ["'exclud'", "'exclude'"]),
    "pruning.clas_path": ("Pruning", ["'clas_path'"]),
    "pruning.init_args.schedule": ({"class_path": "OneShot"}, ["OneShot", "'at'"]),  # what has no default is left out
    "pruning.class_path": ("Pruner", ["'Pruner'", "'Pruning'"]),
    "pruning.init_args.criterion.class_path": ("Magnitud", ["'Magnitud'", "'Magnitude'"]),
    "model.class_path": ("MaskedModul", ["'MaskedModul'", "'MaskedModule'"]),
    "model.init_args.network.init_args.hiden": ([3], ["MLP", "'hiden'", "'hidden'"]),
    "model.init_args.network.init_args.hidden": ([3, "x"], ["hidden", "int", "x"]),
    "trainer.callbacks": ([{"class_path": "ModelCheckpont"}], ["'ModelCheckpont'", "'ModelCheckpoint'"]),
    "trainer.max_epochs": ("abc", ["trainer.max_epochs", "int", "abc"]),
    "trainer": (3, ["trainer", "3"]),
    "pruning": (3, ["pruning", "3"]),
    "pruning.init_args.schedule.init_args.final_sparsity": (90, ["`final_sparsity`", "[0, 1)", "90", "0.9"]),
    "pruning.init_args.schedule.init_args.unit": ("week", ["week", "step", "epoch", "fraction"]),
    "data.init_args.batch_size": (0, ["`batch_size`", ">= 1", "0"]),
}


@pytest.mark.parametrize("key", FILES)
def test_wrong_file(tmp_path, key):
    value, wanted = FILES[key]
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({"base": str(EXPERIMENT), **nested(key, value)}))
    status, message = refused(tmp_path, "fit", f"--config={path}", *BATCHES)
    check(status, message, wanted, 2)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["ft"], ["'ft'", "'fit'", "'validate'", "'test'"]),
        (["predict"], ["'predict'", "'fit'"]),
        ([], ["fit", "validate", "test"]),
        (["fit"], ["model"]),
        (["fit", "--config"], ["config"]),
        (["fit", "stray"], ["stray"]),
    ],
)
def test_wrong_command(tmp_path, arguments, wanted):
    check(*refused(tmp_path, *arguments), wanted, 2)


FITS = {
    "pruning.selection.include=[netwrk.1.weight]": ["`include`", "'netwrk.1.weight'", "network.1.weight"],
    "pruning.selection.exclude=[netwrk.1.weight]": ["`exclude`", "'netwrk.1.weight'", "network.1.weight"],
    "pruning.selection.exclude=[Linear]": ["nothing to prune", "network.1.weight"],
    "ckpt_path=gone.ckpt": ["gone.ckpt"],
    "pruning=FixedMasks --pruning.ticket=gone.safetensors": ["gone.safetensors"],
    "pruning=FixedMasks --pruning.ticket=text.safetensors": ["text.safetensors", "safetensors file"],
    "pruning.rewind.at=1000": ["`rewind.at`", "1000"],
}


@pytest.mark.parametrize("option", FITS)
def test_what_only_the_run_can_refuse(tmp_path, option):
    (tmp_path / "text.safetensors").write_text("no ticket")
    status, message = refused(tmp_path, "fit", *configs(EXPERIMENT), *BATCHES, *f"--{option}".split())
    check(status, message, FITS[option], 1)


def test_a_missing_checkpoint_is_named_by_test_and_validate(tmp_path):
    for subcommand in ("test", "validate"):
        status, message = refused(tmp_path, subcommand, *configs(EXPERIMENT), "--ckpt_path=gone.ckpt")
        check(status, message, ["gone.ckpt"], 1)


def test_model_without_data_says_so(tmp_path):
    overlay = tmp_path / "no_data.yaml"
    overlay.write_text(yaml.safe_dump({"base": str(EXPERIMENT), "data": None}))
    status, message = refused(tmp_path, "fit", f"--config={overlay}", *BATCHES)
    assert status in (1, 2)
    check(status, message, ["data"], status)


def test_the_process_ends_with_the_status_and_no_traceback(tmp_path):
    code = "from sparsecomp.cli import main; main()"
    arguments = [*configs(EXPERIMENT), *BATCHES, "--pruning.selection.include=[netwrk]"]
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith("error: `include` names what to prune, and 'netwrk' matches")


# A user's own bug

BUGS = """
    import lightning as L
    import torch
    from torch import nn


    class InStep(L.LightningModule):
        def __init__(self, error: str) -> None:
            super().__init__()
            self.net = nn.Linear(64, 10)
            self.error = error

        def training_step(self, batch, batch_idx):
            raise {"ValueError": ValueError, "TypeError": TypeError, "OSError": OSError, "KeyError": KeyError}[self.error]("mine")

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)


    class InConstructor(L.LightningModule):
        def __init__(self, error: str) -> None:
            super().__init__()
            raise {"ValueError": ValueError, "AttributeError": AttributeError}[error]("mine")
"""


@pytest.fixture
def bugs(tmp_path, monkeypatch):
    (tmp_path / "buggy_code.py").write_text(textwrap.dedent(BUGS))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("buggy_code", None)


def buggy(class_, error):
    return [*configs(EXPERIMENT), f"--model=buggy_code.{class_}", f"--model.error={error}", *BATCHES]


@pytest.mark.parametrize("error", [ValueError, TypeError, OSError, KeyError])
def test_a_bug_in_a_training_step_keeps_its_traceback(bugs, error):
    with pytest.raises(error, match="mine") as info:
        fit(bugs, *buggy("InStep", error.__name__))
    assert info.traceback[-1].name == "training_step"


def test_what_a_users_constructor_refuses_is_one_message(bugs):
    status, message = refused(bugs, "fit", *buggy("InConstructor", "ValueError"))
    check(status, message, ["mine", "JSONARGPARSE_DEBUG=true"], 2)


def test_a_bug_in_a_users_constructor_keeps_its_traceback(bugs):
    with pytest.raises(Exception, match="mine") as info:
        fit(bugs, *buggy("InConstructor", "AttributeError"))
    error = info.value
    while error.__cause__ is not None:  # jsonargparse wraps what a constructor raises
        error = error.__cause__
    assert isinstance(error, AttributeError)


# With JSONARGPARSE_DEBUG


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch"),
        ("pruning.criterion=Magnitud", "Magnitud"),
        ("pruning.schedule.final_sparsity=90", "final_sparsity"),
        ("pruning.selection.include=[netwrk]", "netwrk"),
    ],
)
@pytest.mark.parametrize("value", ["true"])
def test_debug_raises(tmp_path, option, match, value):
    # SystemExit is no Exception.
    with pytest.raises(Exception, match=match):
        fit(tmp_path, *configs(EXPERIMENT), *BATCHES, f"--{option}", JSONARGPARSE_DEBUG=value)


def test_the_debug_setting_that_a_message_names_works(tmp_path):
    arguments = [*configs(EXPERIMENT), *BATCHES, "--pruning.selection.include=[netwrk]"]
    _, message = refused(tmp_path, "fit", *arguments)
    (name, value) = re.search(r"(JSONARGPARSE_DEBUG)=(\w+) shows the traceback", message).groups()
    with pytest.raises(ValueError, match="netwrk"):
        fit(tmp_path, *arguments, **{name: value})
    fit(tmp_path, *configs(EXPERIMENT), *BATCHES, **{name: value})  # and a right command is right
