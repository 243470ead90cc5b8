"""Weight averages (EMA, SWA) obey the masks too."""

from collections.abc import Iterator, Mapping

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def averaged_tensors(module: nn.Module, trainer: L.Trainer | None = None) -> Iterator[dict[str, Tensor]]:
    """For each average of `module`'s weights, its tensors under the names they have in `module`.

    Found are the averages of Lightning's WeightAveraging and StochasticWeightAveraging callbacks, and every
    torch.optim.swa_utils.AveragedModel within `module`. Once zero they stay zero, because the weights they follow do.
    """
    for callback in trainer.callbacks if trainer is not None else ():  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            yield _tensors(callback._average_model.module, "")
        if isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            yield _tensors(callback._average_model, "")
    for name, child in module.named_modules():
        if isinstance(child, AveragedModel):
            yield _tensors(child.module, _prefix_of_original(module, name, child.module))


def averaged_prefixes(module: nn.Module) -> tuple[str, ...]:
    """What the names of all tensors within averages begin with; they are copies, not parts of the network."""
    return tuple(f"{name}." for name, child in module.named_modules() if isinstance(child, AveragedModel))


def _tensors(average: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": parameter.data for name, parameter in average.named_parameters()}


def _prefix_of_original(module: nn.Module, average_name: str, average: nn.Module) -> str:
    """Where in `module` the network is that `average` is a copy of."""
    shapes = _shapes(average)
    found = [
        name
        for name, child in module.named_modules()
        if type(child) is type(average) and not f"{name}.".startswith(f"{average_name}.") and _shapes(child) == shapes
    ]
    if len(found) != 1:
        raise ValueError(
            f"{average_name!r} averages the weights of a network, and {len(found)} submodules look like it "
            f"({', '.join(found) or 'none'}), so that its masks are not known. Keep the average in Lightning's "
            "WeightAveraging callback instead."
        )
    return f"{found[0]}." if found[0] else ""


def _shapes(module: nn.Module) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
