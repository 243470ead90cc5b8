"""Tickets on disk: masks and weights in one safetensors file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import sparsecomp
from sparsecomp._checks import check_choice
from sparsecomp.averaging import averaged_prefixes
from sparsecomp.masks import MaskStore
from sparsecomp.selection import Selection

_FORMAT_VERSION = 1
_HEADER = "sparsecomp"


def save_ticket(
    path: str | Path,
    store: MaskStore,
    weights: Mapping[str, Tensor],
    kind: Literal["ticket", "trained"] = "trained",
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write masks and the weights under them to a safetensors file.

    The file holds `mask.<name>` (bool) and `weight.<name>` tensors, weights with masked places zero, and in its
    metadata, under `sparsecomp`, a JSON header: version, kind, shapes of the masked parameters, sparsity, provenance.

    Args:
        path: Where to; never overwritten.
        store: The masks.
        weights: Name to tensor: those of the network, or of a rewind point.
        kind: "ticket" for weights of a rewind point, "trained" for trained ones.
        provenance: What made it; anything JSON holds.

    Raises:
        FileExistsError: If there is a file at `path`.
        ValueError: If weights are missing, or do not have the masks' shapes.

    >>> import tempfile
    >>> layer = nn.Linear(4, 2)
    >>> store = MaskStore(layer)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_ticket(Path(folder) / "trained.safetensors", store, layer.state_dict())
    ...     load_ticket(path, nn.Linear(4, 2)).sparsity
    0.0
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"`path` is where the ticket is written and must not exist yet; {path} does.")
    check_choice("kind", kind, "what the weights are", ("ticket", "trained"))
    if missing := store.masks.keys() - weights.keys():
        raise ValueError(f"`weights` must hold every masked parameter; missing are {', '.join(sorted(missing))}.")
    # Cloned: tied entries share memory, which the format refuses, and masking must not touch the caller's.
    kept = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    store.apply_to_(kept)
    tensors = {f"weight.{name}": tensor for name, tensor in kept.items()}
    tensors |= {f"mask.{name}": mask.cpu().contiguous() for name, mask in store.masks.items()}
    header = {
        "version": _FORMAT_VERSION,
        "kind": kind,
        "shapes": {name: list(mask.shape) for name, mask in store.masks.items()},
        "sparsity": store.sparsity,
        "provenance": {"sparsecomp": sparsecomp.__version__, "torch": torch.__version__, **(provenance or {})},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={_HEADER: json.dumps(header, sort_keys=True)})
    return path


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the JSON header of a ticket file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is truncated or no ticket, or of a newer version.
    """
    return _read(path)[0]


def load_ticket(path: str | Path, model: nn.Module, selection: Selection | None = None) -> MaskStore:
    """Put a ticket's weights and masks on `model`, in place, and return the masks.

    The store is attached: the masks are applied again after each `load_state_dict` until its `detach()`.

    Args:
        path: A file that `save_ticket` or a run with rewinding wrote.
        model: A network of the same architecture and names.
        selection: What the masks were made for; the default of `Selection` if None.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is truncated, foreign or newer, or a name or shape differs. The model is as it was.
    """
    header, tensors = _read(path)
    masks = {name.removeprefix("mask."): tensor for name, tensor in tensors.items() if name.startswith("mask.")}
    weights = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
    live: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in weights.items():
        if name not in live or live[name].shape != tensor.shape:
            found = f"of shape {tuple(live[name].shape)}" if name in live else "missing"
            raise ValueError(
                f"{path} holds {name!r} of shape {tuple(tensor.shape)}, in {type(model).__name__} it is {found}; load the "
                f"ticket on the architecture it was made of, with parameters {', '.join(header['shapes'])}."
            )
    averages = averaged_prefixes(model)
    if absent := [n for n, _ in model.named_parameters() if n not in weights and not n.startswith(averages)]:
        raise ValueError(f"{path} has no weights for {', '.join(absent)} of {type(model).__name__}.")
    store = MaskStore(model, selection)
    if unselected := {entry.name for entry in store.selected} - masks.keys():
        raise ValueError(
            f"{path} has no mask for {', '.join(sorted(unselected))}; pass the `selection` that its masks were made with."
        )
    store.check(masks)
    with torch.no_grad():
        for name, tensor in weights.items():
            live[name].copy_(tensor)
    store.update_(masks)
    return store.attach()


def unused_path(folder: Path, stem: str, suffix: str = ".safetensors") -> Path:
    """The file `stem` + `suffix` in `folder`, or the first with -v1, -v2, ... that does not exist yet."""
    path, version = folder / f"{stem}{suffix}", 0
    while path.exists():
        version += 1
        path = folder / f"{stem}-v{version}{suffix}"
    return path


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"`path` is a ticket file, such as ticket.safetensors, and there is none at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as a safetensors file (truncated or foreign): {error}") from None
    try:
        header = json.loads(metadata[_HEADER])
        version = int(header["version"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is a safetensors file without a sparsecomp header, no ticket.") from None
    if version > _FORMAT_VERSION:
        raise ValueError(
            f"{path} has ticket format {version}, and this sparsecomp reads up to {_FORMAT_VERSION}; use a newer one."
        )
    return header, tensors
