"""The command line: `sparsecomp fit`, `validate` and `test` on LightningCLI."""

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning
import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console

import sparsecomp
from sparsecomp import data, models
from sparsecomp._config_files import LayeredConfigFile
from sparsecomp._parser import SuggestingParser, debugging
from sparsecomp.callbacks.base import PruningBase
from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.reporting import closing_table, plot_curves

__all__ = ["SparsecompCLI", "data", "main", "models"]  # imported, so that configs may use their classes' short names

_HINT = " (JSONARGPARSE_DEBUG=true shows the traceback)"
_DEFAULT_LOGGER = {
    "class_path": "lightning.pytorch.loggers.CSVLogger",
    "init_args": {"save_dir": "runs", "name": "fit"},
}


class SparsecompCLI(LightningCLI):
    """LightningCLI with a `pruning` argument, layered configs, errors without tracebacks, and a closing table."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The Trainer methods offered, and their arguments that the config does not take."""
        offered = {"fit", "validate", "test"}
        return {name: skip for name, skip in LightningCLI.subcommands().items() if name in offered}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that names the version it wrote a config with."""
        parser: LightningArgumentParser = self.parser_class(
            dump_header=[f"sparsecomp=={sparsecomp.__version__}", f"lightning=={L.__version__}"], **kwargs
        )
        parser.add_argument(
            "-c",
            "--config",
            action=LayeredConfigFile,
            help="A YAML file; several are merged in order, and `base: [other.yaml]` in a file names those it builds on.",
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the pruner; none means no pruning."""
        parser.add_lightning_class_args(PruningBase, "pruning", subclass_mode=True, required=False)
        parser.set_defaults({"trainer.logger": _DEFAULT_LOGGER})

    def instantiate_classes(self) -> None:
        """Instantiate, and say what a constructor refused as a parser error."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            # A constructor's refusal of its arguments is one message; what looks like a bug keeps its traceback.
            if debugging() or not isinstance(_root_cause(error), ValueError | TypeError | MisconfigurationException):
                raise
            self._parser(self.subcommand).error(f"{_root_cause(error)}{_HINT}")

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> L.Trainer:
        return super()._instantiate_trainer(config, [callback for callback in callbacks if callback is not None])

    def after_fit(self) -> None:
        """Test the network as training left it, and print what came out."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        compositionality = {name: value for name, value in logged.items() if name.startswith("compositionality/")}
        tested = self._test()
        folder = run_folder(self.trainer)
        if not self.trainer.is_global_zero:
            return
        pruner = next((c for c in self.trainer.callbacks if isinstance(c, PruningBase)), None)  # type: ignore[attr-defined]
        Console().print(closing_table(tested, pruner, folder, self._files(folder, pruner), compositionality))

    def _test(self) -> dict[str, float]:
        module = self.model
        has_data = self.datamodule is not None and is_overridden("test_dataloader", self.datamodule)
        if not is_overridden("test_step", module) or not (has_data or is_overridden("test_dataloader", module)):
            return {}
        results = self.trainer.test(module, datamodule=self.datamodule, verbose=False)
        return {name: value for result in results for name, value in result.items()}

    def _files(self, folder: Path, pruner: PruningBase | None) -> dict[str, Path]:
        files: dict[str, Path] = {}
        metrics = folder / "metrics.csv"
        if metrics.is_file():
            files["metrics"] = metrics
            if plot_curves(metrics, folder / "curves.png"):
                files["picture"] = folder / "curves.png"
        if (folder / "config.yaml").is_file():
            files["config"] = folder / "config.yaml"
        checkpoint = self.trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
            files["checkpoint"] = Path(checkpoint.best_model_path)
        if isinstance(pruner, Pruning):
            files |= {kind: Path(path) for kind, path in pruner.ticket_files.items()}
        return files


def run_folder(trainer: L.Trainer) -> Path:
    """The folder of this run alone; every rank must ask.

    That of a CSVLogger where there is one: with a WandbLogger first, Lightning's `log_dir` is the same for all runs.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            return Path(str(trainer.strategy.broadcast(logger.log_dir)))
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            version = trainer.strategy.broadcast(logger.experiment.id if trainer.is_global_zero else None)
            return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / str(version)
    return Path(trainer.log_dir or trainer.default_root_dir)


class SaveRunConfig(SaveConfigCallback):
    """Writes the whole configuration to the run's folder, and never over another's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"save_to_log_dir": False})

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write config.yaml, or config-v1.yaml, ... where there is one already."""
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        path, version = folder / "config.yaml", 0
        while path.exists():
            version += 1
            path = folder / f"config-v{version}.yaml"
        self.parser.save(self.config, str(path), skip_none=False, multifile=False)


def main(args: list[str] | None = None) -> None:
    """Run the command line; `args` are those after the program's name."""
    # Lightning's use of a torch interface that will go; nothing a user can do about it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    try:
        SparsecompCLI(
            save_config_callback=SaveRunConfig,
            parser_class=SuggestingParser,
            parser_kwargs={"prog": "sparsecomp", "description": sparsecomp.__doc__},
            args=args,
        )
    except (ValueError, TypeError, OSError, MisconfigurationException) as error:
        if debugging() or not _says_it_all(error):
            raise
        sys.exit(f"error: {error}{_HINT}")


def _says_it_all(error: BaseException) -> bool:
    """Whether a check of this package or of Lightning raised it, and not a bug in somebody's code."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = raised_in.is_relative_to(Path(sparsecomp.__file__).parent)
    lightnings = raised_in.is_relative_to(Path(lightning.__file__).parent)
    return ours or (lightnings and isinstance(error, FileNotFoundError | MisconfigurationException))


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
