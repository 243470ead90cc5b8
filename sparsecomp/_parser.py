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
_WRONG_KEY = re.compile(r"(?:does not accept option|Option) '([\w.]+)'")
_WRONG_FLAG = re.compile(r"unrecognized arguments: --([\w.]+)")
_WRONG_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_CONSTRUCTOR = re.compile(r"^\s*- (`[^`]+`.*?)(?=^\s*- Expected a <class 'NoneType'>|^\s*Given value|\Z)", re.M | re.S)
_WRONG_VALUE = re.compile(r"Expected a <class '([\w.]+)'>\. Got value: (.*)")
_PATH = re.compile(r'Parser key "([\w.]+)"')


class SuggestingParser(LightningArgumentParser):
    """Takes no abbreviations: `--trainer.max_epoch` is an error that suggests `trainer.max_epochs`.

    With JSONARGPARSE_DEBUG set, errors are raised as they are, with their traceback.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2 and one message."""
        parser = getattr(ex, "subcommand_parser", None) or self
        if not self.exit_on_error or os.environ.get("JSONARGPARSE_DEBUG"):
            super().error(message, ex)
        sys.stderr.write(f"error: {concise(message, _keys_of(parser))}\n")
        sys.stderr.write(f"tip: {parser.prog.replace(' [options]', '')} --help lists the options.\n")
        sys.exit(2)


def concise(message: str, known: list[str]) -> str:
    """What is wrong in a jsonargparse message, and what was near it among the keys `known`."""
    where = ".".join(_PATH.findall(message))
    at = f" (at {where})" if where else ""
    if found := _WRONG_INIT_ARG.findall(message):
        class_path, option = found[-1]
        options = _init_args_of(class_path)
        name = class_path.rpartition(".")[2]
        return f"{name} has no option {option!r}{at}{_near(option, options)} It takes {', '.join(options) or 'none'}."
    if found := _WRONG_FLAG.findall(message) or _WRONG_KEY.findall(message):
        return f"there is no option {found[-1]!r}{at}{_near(found[-1], known)}"
    if found := _WRONG_CLASS.findall(message):
        return f"no class {found[-1]!r} is known{at}{_near(found[-1], _class_names())} Others by their import path."
    if found := _CONSTRUCTOR.findall(message):
        return " ".join(found[-1].split()) + at
    if found := _WRONG_VALUE.findall(message):
        return f"the value must be of type {found[-1][0]}{at}; got {found[-1][1]}."
    noise = re.compile(r"^\s*- Expected a <class 'NoneType'>\n?|^\s*(Subtypes|Given value type):.*\n?", re.M)
    return noise.sub("", message).strip()


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
