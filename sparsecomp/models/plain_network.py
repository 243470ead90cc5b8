"""Networks from plain files of arrays: weight matrices and a description, never pickled objects."""

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor, nn

from sparsecomp._checks import check_choice, check_int
from sparsecomp.functions.primitives import gauss, identity

_ACTIVATIONS = {"cache": identity, "identity": identity, "gaussian": gauss, "sin": torch.sin, "sigmoid": None}
_NAMES = tuple(_ACTIVATIONS)
_MAX_ARRAYS = 1024


class UnitActivations(nn.Module):
    """Another activation for each unit.

    cache and identity are z, gaussian is 2 exp(-z^2) - 1, sin is sin z, and sigmoid is 2 / (1 + exp(-z)) - 1.

    Args:
        names: The activation of each unit, in order.

    Raises:
        ValueError: If one is unknown.

    >>> UnitActivations(["cache", "gaussian"])(torch.tensor([[3.0, 0.0]]))
    tensor([[3., 1.]])
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            check_choice("names", name, "the activation of each unit", _NAMES)
        self.names = tuple(names)
        self._kinds = tuple(dict.fromkeys(names))
        for kind in self._kinds:
            of_kind = torch.tensor([name == kind for name in names])
            self.register_buffer(f"is_{kind}", of_kind, persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        """(..., units) -> (..., units)."""
        out = z
        for kind in self._kinds:  # no assignment to places, which torch.fx cannot trace
            out = torch.where(getattr(self, f"is_{kind}"), _activate(kind, z), out)
        return out


@dataclass(frozen=True, eq=False)
class PlainNetwork:
    """What a plain file holds.

    Attributes:
        network: Linear layers without biases and `UnitActivations` between them.
        meta: The description in the file.
        pictures: Name to (height, width, 3) in [0, 1] of the other arrays in the file, such as "target".
    """

    network: nn.Sequential
    meta: Mapping[str, Any]
    pictures: Mapping[str, Tensor]


def load_plain_network(path: str | Path, max_bytes: int = 2**28) -> PlainNetwork:
    """Read a network from an `.npz` file: h_(l+1) = act(h_l W_l), the last layer linear.

    The file has the float matrices w00, w01, ... of shape (in, out), in order, and `meta`, a string with JSON whose list
    `activations` names the activation of each hidden unit, the same for every hidden layer. Objects are never unpickled.

    Args:
        path: The file.
        max_bytes: The largest size of its arrays, unpacked, >= 1.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no such file, is truncated, unpacks to more, or its matrices and activations do not fit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     meta = json.dumps({"activations": ["sin", "cache"]})
    ...     np.savez(f"{folder}/a.npz", w00=np.ones((4, 2), "f4"), w01=np.ones((2, 1), "f4"), meta=np.array(meta))
    ...     loaded = load_plain_network(f"{folder}/a.npz")
    >>> loaded.network(torch.zeros(5, 4)).shape
    torch.Size([5, 1])
    """
    check_int("max_bytes", max_bytes, "the largest size of the arrays", minimum=1)
    meaning = "`path` is the .npz file of a network"
    if not Path(path).is_file():
        raise FileNotFoundError(f"{meaning} and must exist; got {str(path)!r}, where there is no file.")
    try:
        arrays = _arrays(Path(path), max_bytes)
        meta = json.loads(str(arrays.pop("meta")[()]))
        activations = list(meta["activations"])
        names = sorted(name for name in arrays if name[:1] == "w" and name[1:].isdecimal())
        weights = [_matrix(name, arrays.pop(name)) for name in names]
        if len(weights) < 2 or [int(name[1:]) for name in names] != list(range(len(names))):
            raise ValueError(
                f"it must have the matrices w00, w01, ..., at least two; it has {', '.join(names) or 'none'}."
            )
        for name, (before, after) in zip(names[1:], pairwise(weights), strict=True):
            if not before.shape[0] == after.shape[1] == len(activations):  # (out, in) as torch has them
                raise ValueError(
                    f"{name} reads {after.shape[1]} units, the matrix before it makes {before.shape[0]}, and there are "
                    f"{len(activations)} activations; all must be the same."
                )
        network = _network(weights, activations)
    except (KeyError, TypeError, ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{meaning}, and {path} is none, or is broken: {said}") from error
    pictures = {name: torch.from_numpy(a) for name, a in arrays.items() if a.ndim == 3 and a.dtype.kind == "f"}
    return PlainNetwork(network, meta, pictures)


def _arrays(path: Path, max_bytes: int) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays; what they declare is checked before any is read."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        declared = sum(_declared(archive, member) for member in members[:_MAX_ARRAYS])
        if len(members) > _MAX_ARRAYS or max(unpacked, declared) > max_bytes:
            raise ValueError(
                f"its {len(members)} arrays unpack to {max(unpacked, declared)} bytes, more than `max_bytes`={max_bytes} "
                f"or {_MAX_ARRAYS} arrays."
            )
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _declared(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """The bytes that an array's header says it has: memory is taken for those, however short the file."""
    with archive.open(member) as file:
        version = npy.read_magic(file)
        shape, _, dtype = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
    return math.prod(shape) * dtype.itemsize


def _matrix(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if array.ndim != 2 or array.dtype.kind != "f" or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a finite float matrix; it is {array.dtype} of shape {array.shape}.")
    return torch.from_numpy(np.ascontiguousarray(array.T))


def _network(weights: list[Tensor], activations: list[str]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight in weights:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight)
        layers += [linear, UnitActivations(activations)]
    return nn.Sequential(*layers[:-1])


def _activate(name: str, z: Tensor) -> Tensor:
    function = _ACTIVATIONS[name]
    return 2 * torch.sigmoid(z) - 1 if function is None else function(z)
