"""Which normalisation reads a layer's output directly."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from sparsecomp.probe import Probe, like_module, untouched
from sparsecomp.selection import PrunableParameter


def following_norms(
    module: nn.Module, selected: Sequence[PrunableParameter], batch: Any, probe: Probe
) -> dict[str, tuple[str, _NormBase]]:
    """Weight name to the name and module of the BatchNorm with running statistics that reads its layer's output.

    Found by one forward pass in eval mode: the norm is given the very tensor that the layer returned.

    >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU())
    >>> from sparsecomp.selection import Selection
    >>> list(following_norms(net, Selection().resolve(net), torch.zeros(4, 2), Probe())["0.weight"])[0]
    '1'
    """
    # The outputs are kept until the pass is over: a freed tensor's id may be given to another.
    outputs: dict[int, tuple[str, Tensor]] = {}
    found: dict[str, tuple[str, _NormBase]] = {}
    handles: list[RemovableHandle] = []

    def remember(name: str) -> Any:
        return lambda layer, inputs, output: outputs.update({id(output): (name, output)})

    def look(name: str) -> Any:
        return lambda norm, inputs: (
            found.update({outputs[id(inputs[0])][0]: (name, norm)}) if id(inputs[0]) in outputs else None
        )

    handles += [entry.owner.register_forward_hook(remember(entry.name)) for entry in selected]
    for name, norm in module.named_modules():
        if isinstance(norm, _NormBase) and norm.running_mean is not None:
            handles.append(norm.register_forward_pre_hook(look(name)))
    try:
        with untouched(module), torch.no_grad():
            probe(module, like_module(batch, module))
    finally:
        for handle in handles:
            handle.remove()
    return found
