"""A parser whose errors name the wrong key and what was near it."""

import difflib
import importlib
import inspect
import os
import re
import sys
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

import sparsecomp
from sparsecomp._discovery import concrete_subclasses

_WRONG_INIT_ARG = re.compile(r"Problem with given class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted")
_MISSING = re.compile(r"Problem with given class_path '([\w.]+)':\s+the following arguments are required: (.*)")
_WRONG_KEY = re.compile(r"(?:does not accept option|Option) '([\w.]+)'")
_WRONG_FLAG = re.compile(r"unrecognized arguments: --([\w.]+)")
_WRONG_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_CONSTRUCTOR = re.compile(r"^\s*- (`[^`]+`.*?)(?=^\s*- Expected a <class 'NoneType'>|^\s*Given value|\Z)", re.M | re.S)
_PATH = re.compile(r'Parser key "([\w.]+)"')
_TYPE = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*)\])")
_GIVEN = re.compile(r"(?:Got value|Given value): (.*)")
# What jsonargparse says of its own workings.
_NOISE = re.compile(
    r"^\s*(?:-\s*)?(?:Does not validate against any of the Union subtypes|Subtypes:.*|Errors:|Given value.*"
    r"|Expected a <class 'NoneType'>|Expected a path but .*|Parser key .*:)\s*$",
    re.M,
)


class SuggestingParser(LightningArgumentParser):
    """Takes no abbreviations: `--trainer.max_epoch` is an error that suggests `trainer.max_epochs`.

    With JSONARGPARSE_DEBUG=true, errors are raised as they are, with their traceback.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2 and one message."""
        parser = getattr(ex, "subcommand_parser", None) or self
        if not self.exit_on_error or debugging():
            super().error(message, ex)
        sys.stderr.write(f"error: {concise(message, _keys_of(parser))}\n")
        sys.stderr.write(f"tip: {parser.prog.replace(' [options]', '')} --help lists the options.\n")
        sys.exit(2)


def debugging() -> bool:
    """Whether the user asked for tracebacks, in the way of jsonargparse."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true"


def concise(message: str, known: list[str]) -> str:
    """What is wrong in a jsonargparse message, and what was near it among the keys `known`."""
    where = ".".join(_PATH.findall(message))
    at = f" (at {where})" if where else ""
    if found := _WRONG_INIT_ARG.findall(message):
        class_path, option = found[-1]
        options = _init_args_of(class_path)
        name = class_path.rpartition(".")[2]
        near = _near(option, [*options, "class_path", "init_args"])
        return f"{name} has no option {option!r}{at}{near} It takes {', '.join(options) or 'none'}."
    if found := _MISSING.findall(message):
        class_path, missing = found[-1]
        return f"{class_path.rpartition('.')[2]} needs {', '.join(map(repr, missing.split(', ')))}{at}."
    if found := _WRONG_FLAG.findall(message) or _WRONG_KEY.findall(message):
        return f"there is no option {found[-1]!r}{at}{_near(found[-1], [*known, *_optimizer_settings()])}"
    if found := _WRONG_CLASS.findall(message):
        return f"no class {found[-1]!r} is known{at}{_near(found[-1], _class_names())} Others by their import path."
    if found := _CONSTRUCTOR.findall(message):
        return " ".join(found[-1].split()) + at
    types = [name or f"one of {choices}" for name, choices in _TYPE.findall(message) if name != "NoneType"]
    if types and (given := _GIVEN.findall(message)):
        return f"the value must be {' or '.join(types)}{at}; got {given[0]}."
    rest = [line.strip().removeprefix("- ") for line in _NOISE.sub("", message).splitlines() if line.strip()]
    given = [value for value in _GIVEN.findall(message) if not value.startswith(("Namespace(", "NestedArg("))]
    return " ".join(rest) + at + (f"; got {given[-1]}" if given else "")


def _optimizer_settings() -> list[str]:
    """Arguments of optimizers are passed on as they are, so that no parser lists them."""
    from torch.optim import Optimizer

    return sorted({arg for class_ in concrete_subclasses(Optimizer) for arg in inspect.signature(class_).parameters})


def _near(wrong: str, known: list[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=3, cutoff=0.6)
    if not near:  # the path may be right up to its last or its first part
        near = [key for key in known if key.rpartition(".")[2] == wrong.rpartition(".")[2]][:3]
    if not near and "." in wrong:
        near = difflib.get_close_matches(wrong.partition(".")[0], known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(key) for key in near)}?" if near else "."


def _keys_of(parser: Any) -> list[str]:
    keys = {action.dest for action in parser._actions if action.dest != "==SUPPRESS=="}
    keys = {key for key in keys if key.rpartition(".")[2] != "help"}
    return sorted(keys | {key.partition(".")[0] for key in keys})


def _init_args_of(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        class_ = getattr(importlib.import_module(module), name)
        return [parameter for parameter in inspect.signature(class_).parameters if parameter not in {"args", "kwargs"}]
    except (ImportError, AttributeError, TypeError, ValueError):
        return []


def _class_names() -> list[str]:
    from torch import nn

    names = {name for name in sparsecomp.__all__ if name[0].isupper()}
    for base in (LightningModule, LightningDataModule, Callback, Logger, nn.Module):
        names |= {class_.__name__ for class_ in concrete_subclasses(base)}
    return sorted(names)
