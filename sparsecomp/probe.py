"""What the input, the output and the loss of a user's module are."""

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from sparsecomp._checks import check_int


@dataclass(frozen=True)
class ProbeOutput:
    """One batch, seen by a network.

    Attributes:
        inputs: (n, ...) what the network was given; a leaf that requires gradients where it is floating point.
        outputs: (n, ...) what it returned, connected to `inputs` and the parameters.
    """

    inputs: Tensor
    outputs: Tensor


class Probe:
    """Says how statistics look at a module: override what does not fit, `inputs`, `outputs` or `loss`.

    Args:
        batches: How many training batches statistics use, >= 1.

    Raises:
        ValueError: If `batches` is not positive.
        TypeError: If `batches` is no integer.

    >>> output = Probe()(nn.Linear(4, 2), (torch.zeros(3, 4), torch.zeros(3)))
    >>> output.inputs.shape, output.outputs.shape
    (torch.Size([3, 4]), torch.Size([3, 2]))
    """

    def __init__(self, batches: int = 16) -> None:
        self.batches = check_int("batches", batches, "the number of training batches that statistics use", minimum=1)

    def __call__(self, module: nn.Module, batch: Any) -> ProbeOutput:
        """Run the network on a batch.

        Raises:
            TypeError: As `inputs` and `outputs`.
        """
        x = self.inputs(batch)
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        return ProbeOutput(x, self.outputs(module, x, batch))

    def inputs(self, batch: Any) -> Tensor:
        """What the network is given, (n, ...): the first element of the batch, or the batch itself if it is a tensor.

        Raises:
            TypeError: If that is no tensor.
        """
        x = batch if isinstance(batch, Tensor) else batch[0] if isinstance(batch, list | tuple) and batch else None
        if not isinstance(x, Tensor):
            raise TypeError(
                f"a batch must be a tensor x or begin with one, as in (x, y); got {type(batch).__name__}. Pass a Probe whose "
                "`inputs` picks the input of your module."
            )
        return x

    def outputs(self, module: nn.Module, inputs: Tensor, batch: Any) -> Tensor:
        """What the network makes of `inputs`, (n, ...). An override may take more from the batch, as a padding mask.

        Raises:
            TypeError: If the network returns no tensor.
        """
        outputs = module(inputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"{type(module).__name__} must return a tensor; got {type(outputs).__name__}. Pass a Probe whose `outputs` "
                "picks the output of your module."
            )
        return outputs

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The scalar loss that `training_step` returns for the batch; what the step logs is dropped.

        Raises:
            TypeError: If the module has no `training_step` that returns a loss.
            ValueError: If the module optimizes by hand: its `training_step` would train it.
        """
        step = getattr(module, "training_step", None)
        if step is None:
            raise TypeError(
                f"{type(module).__name__} has no training_step to take the loss from. Pass a Probe whose `loss` computes it."
            )
        if not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"{type(module).__name__} optimizes by hand, so that its training_step trains when the loss is looked at. "
                "Pass a Probe whose `loss` computes it."
            )
        with _without_logging(module):
            result = step(batch, 0)
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step of {type(module).__name__} must return a loss here; got {type(loss).__name__}. Pass a Probe "
                "whose `loss` computes it."
            )
        return loss


@contextlib.contextmanager
def untouched(module: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Look at a module in eval (or training) mode and leave no trace.

    Restored afterwards, also after an error: the mode of every submodule, all buffers (BatchNorm statistics; also where
    a forward put another tensor in their place), what torchmetrics have counted, the gradients and `requires_grad` flags
    of all parameters, and the random states of torch, NumPy and Python.

    >>> layer = nn.BatchNorm1d(2)
    >>> with untouched(layer, training=True):
    ...     _ = layer(torch.ones(4, 2)).sum().backward()
    >>> int(layer.num_batches_tracked), layer.weight.grad
    (0, None)
    """
    children = list(module.modules())
    modes = [child.training for child in children]
    buffers = [dict(child._buffers) for child in children]
    values = [{name: None if b is None else b.clone() for name, b in held.items()} for held in buffers]
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for parameter in module.parameters()]
    metrics = [(metric, _counted(metric)) for metric in children if isinstance(metric, Metric)]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global one is meant)
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
            for parameter, _, _ in parameters:
                parameter.grad = None
            module.train(training)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for child, mode, held, saved in zip(children, modes, buffers, values, strict=True):
            child.training = mode
            child._buffers.clear()
            child._buffers.update(held)
            for name, buffer in held.items():
                value = saved[name]
                if buffer is not None and value is not None:
                    buffer.data.copy_(value)
        for metric, counted in metrics:
            vars(metric).update(counted)
        for parameter, gradient, trainable in parameters:
            if parameter.requires_grad != trainable:
                parameter.requires_grad_(trainable)
            parameter.grad = gradient


def _counted(metric: Metric) -> dict[str, Any]:
    """The state of a metric, which it holds beside its buffers; copied, as an update writes into it."""
    names = [*metric._defaults, "_update_count", "_update_called", "_computed", "_forward_cache"]
    return copy.deepcopy({name: vars(metric)[name] for name in names if name in vars(metric)})


def like_module(batch: Any, module: nn.Module) -> Any:
    """The batch on the device of the module, its floating point tensors in the precision of the parameters.

    As Lightning hands batches to a module: without this a network in bfloat16 refuses data in float32. Where parameters
    are of several precisions, that of the data stays.

    >>> x, y = like_module((torch.zeros(2), torch.tensor([1, 0])), nn.Linear(2, 1).to(torch.bfloat16))
    >>> x.dtype, y.dtype
    (torch.bfloat16, torch.int64)
    """
    parameters = list(module.parameters())
    if not parameters:
        return batch
    precisions = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    batch = move_data_to_device(batch, parameters[0].device)
    if len(precisions) != 1:
        return batch
    (precision,) = precisions
    return apply_to_collection(batch, Tensor, lambda x: x.to(precision) if x.is_floating_point() else x)


@contextlib.contextmanager
def _without_logging(module: nn.Module) -> Iterator[None]:
    names = [name for name in ("log", "log_dict") if callable(getattr(module, name, None))]
    own = {name: vars(module)[name] for name in names if name in vars(module)}
    for name in names:
        object.__setattr__(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
        vars(module).update(own)
