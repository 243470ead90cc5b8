"""The command line in this process, in a folder of its own."""

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest

from sparsecomp import cli

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
EXPERIMENT = CONFIGS / "experiment" / "digits_magnitude.yaml"


def run(folder, *args, **environment):
    """Run `sparsecomp *args` in `folder`; the LightningCLI object, which has trainer, model, datamodule and config."""
    made = []

    class Remembered(cli.SparsecompCLI):
        def before_instantiate_classes(self):
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["sparsecomp"])  # Lightning warns of arguments there that it does not read
        patch.setattr(cli, "SparsecompCLI", Remembered)
        # Lightning keeps the seed here, and JSONARGPARSE_DEBUG may come from outside: neither may reach a test.
        for name in ("PL_GLOBAL_SEED", "JSONARGPARSE_DEBUG"):
            patch.setenv(name, "")
            del os.environ[name]
        for name, value in environment.items():
            patch.setenv(name, value)
        cli.main([str(arg) for arg in args])
    return made[0]


def fit(folder, *args, epochs=1, **environment):
    """Run `sparsecomp fit` for `epochs` on the CPU."""
    return run(folder, "fit", *args, "--trainer.accelerator=cpu", f"--trainer.max_epochs={epochs}", **environment)


def configs(*paths):
    """The arguments that name config files; relative ones are under configs/."""
    return [f"--config={CONFIGS / path}" for path in paths]


def printed(function, *args, **kwargs):
    """What `function` returns, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args, **kwargs)
    return result, out.getvalue()


def refused(folder, *args, **environment):
    """Exit status and message of a command line that must end in an error."""
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as exit_info:
        run(folder, *args, **environment)
    code = exit_info.value.code
    # Python itself prints the text that sys.exit was given, and ends with status 1.
    return (1, err.getvalue() + code) if isinstance(code, str) else (code, err.getvalue())


def resolved(folder, *args):
    """The YAML text of --print_config."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as exit_info:
        run(folder, *args, "--print_config")
    assert exit_info.value.code == 0
    return out.getvalue()


def rows(text):
    """Label to value of the last table in `text`."""
    lines = text[text.rindex("Result") :].splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return dict(cells)


def pruner_of(command):
    """The pruner among the callbacks; there must be exactly one."""
    (pruner,) = [c for c in command.trainer.callbacks if isinstance(c, cli.PruningBase)]
    return pruner
