"""Find the members of a family: a criterion, schedule or allocation is one file, and nothing else to register."""

import importlib
import inspect
import pkgutil
import sys
from typing import Any, TypeVar

T = TypeVar("T")


def concrete_subclasses(base: type[T]) -> list[type[T]]:
    """Return every non-abstract class below `base`, sorted by name."""
    found: set[type[T]] = set()
    queue: list[type[T]] = [base]
    while queue:
        class_ = queue.pop()
        queue.extend(class_.__subclasses__())
        if not inspect.isabstract(class_):
            found.add(class_)
    return sorted(found, key=lambda class_: class_.__name__)


def export_family(package: str, base: type[Any]) -> list[str]:
    """Import each file of `package` and put the concrete subclasses of `base` it defines into the package.

    Returns the names put there.
    """
    module = sys.modules[package]
    for info in pkgutil.iter_modules(module.__path__):
        importlib.import_module(f"{package}.{info.name}")
    members = [class_ for class_ in concrete_subclasses(base) if class_.__module__.startswith(f"{package}.")]
    for class_ in members:
        setattr(module, class_.__name__, class_)
    return [class_.__name__ for class_ in members]
