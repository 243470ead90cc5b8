"""Config files that build on others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]

BASE_KEY = "base"


class LayeredConfigFile(ActionConfigFile):
    """A config file whose `base: [other.yaml, ...]` are read before it, relative to its folder, each in its turn."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Apply the bases, then the file."""
        for layer in _layers(values, ()):
            try:
                self.apply_config(parser, cfg, self.dest, layer)
            except TypeError as error:
                raise TypeError(f"{error} (in {values})") from error


def _layers(value: str, above: tuple[Path, ...]) -> Iterator[str]:
    """The files to read, in order; one with bases comes as YAML text without that key."""
    path = Path(value)
    if not path.is_file():
        yield value  # a string of YAML, or an error that the parser words
        return
    if path.resolve() in above:
        raise TypeError(f"`{BASE_KEY}` of {above[-1]} leads back to {path}.")
    content = _read(path)
    if BASE_KEY not in content:
        yield str(path)
        return
    bases = content.pop(BASE_KEY)
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise TypeError(
            f"`{BASE_KEY}` of {path} names config files to build on, as a path or a list of paths; got {bases!r}."
        )
    for base in bases:
        base_path = path.parent / base
        if not base_path.is_file():
            raise TypeError(f"`{BASE_KEY}` of {path} names config files to build on, and there is none at {base_path}.")
        yield from _layers(str(base_path), (*above, path.resolve()))
    if content:
        yield yaml.safe_dump(content, sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TypeError(f"{path} is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise TypeError(f"{path} must map keys such as `trainer` and `model` to values; got {content!r}.")
    if not isinstance(content.get("trainer", {}), dict):  # which the parser would pass over
        raise TypeError(f"`trainer` in {path} must map names to values; got {content['trainer']!r}.")
    return content
