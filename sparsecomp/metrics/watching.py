"""Metrics are fed with what a module does on some batches."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsecomp.averaging import averaged_prefixes
from sparsecomp.metrics.base import NetworkMetric
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.network import NetworkStructure
from sparsecomp.probe import Probe, like_module, untouched
from sparsecomp.statistics import same_place


def watched_layers(module: nn.Module) -> dict[str, nn.Linear | _ConvNd]:
    """Parameter name of the weight of each Linear and Conv1d-3d of a module to its layer; copies for averaging left out.

    >>> list(watched_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))))
    ['0.weight', '2.weight']
    """
    copies = averaged_prefixes(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    layers: dict[str, nn.Linear | _ConvNd] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear | _ConvNd) or isinstance(layer, _ConvTransposeNd):
            continue
        weight = layer._parameters.get("weight")  # None under a parametrization
        if weight is not None and not f"{name}.".startswith(copies):
            layers.setdefault(names[id(weight)], layer)
    return layers


def watch(
    module: nn.Module,
    metrics: Sequence[NetworkMetric],
    batches: Iterable[Any],
    network: NetworkStructure,
    probe: Probe,
) -> None:
    """Update metrics with the first `probe.batches` batches, in eval mode; module and loader are left as they were.

    Args:
        module: The network.
        metrics: What is updated.
        batches: A loader, or any batches; a copy of it is iterated over.
        network: The structure of `module`; `weights` says whose inputs are recorded.
        probe: What the input and the output of the module are.

    >>> from sparsecomp.metrics import FVU
    >>> layer, metric = nn.Linear(2, 1), FVU()
    >>> watch(layer, [metric], [(torch.eye(2), torch.eye(2)[:, :1])], NetworkStructure({}, {}), Probe())
    >>> bool(metric.compute() >= 0)
    True
    """
    layers = watched_layers(module)
    with untouched(module), torch.no_grad(), same_place(batches) as copied:
        for batch in itertools.islice(copied, probe.batches):
            moved = like_module(batch, module)
            seen = _pass(module, {name: layers[name] for name in network.weights}, moved, network, probe)
            for metric in metrics:
                metric.update(seen)


def _pass(
    module: nn.Module, layers: Mapping[str, nn.Linear | _ConvNd], batch: Any, network: NetworkStructure, probe: Probe
) -> NetworkBatch:
    activations: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(_Recorder(name, activations), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        inputs = probe.inputs(batch)
        outputs = probe.outputs(module, inputs, batch)
    finally:
        for hook in hooks:
            hook.remove()
    second = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    return NetworkBatch(network, inputs, outputs, second if isinstance(second, Tensor) else None, activations)


class _Recorder:
    """Keeps what a layer is given in its first call, as rows of units; a copy, as it may be changed in place later."""

    def __init__(self, name: str, activations: dict[str, Tensor]) -> None:
        self.name, self.activations = name, activations

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.name not in self.activations:
            x = (args[0] if args else kwargs["input"]).detach()
            axes = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
            x = x.movedim(x.dim() - 1 - axes, -1)
            self.activations[self.name] = x.reshape(-1, x.shape[-1]).clone()
