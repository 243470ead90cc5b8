"""First and second derivatives of a network by its inputs, summed over batches and ranks."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsecomp._checks import check_int
from sparsecomp._layer_passes import added, failing_together
from sparsecomp.functional.hierarchy import SimilaritySums, similarity_sums
from sparsecomp.probe import Probe, like_module, untouched
from sparsecomp.statistics import same_place

MAX_INPUTS = 64
# Elements of second derivatives that are held at a time, in front of the units of the network.
_HELD = 2**18


@dataclass(frozen=True, eq=False)
class InputDerivatives:
    """How a network depends on its inputs.

    Attributes:
        effects: (d,) sum over outputs of E[f_a^2] var(x_a): what the outputs would lose of their variance if they were
            linear in the input a.
        sums: Of products of derivatives by inputs scaled to unit variance, for `input_similarity` and `infer_levels`;
            those of constant inputs are 0.
        samples: How many samples they were taken of.
    """

    effects: Tensor
    sums: SimilaritySums
    samples: int

    def relevant(self, share: float = 0.01) -> list[int]:
        """Inputs whose effect is at least `share` of the largest; none if nothing has an effect."""
        largest = float(self.effects.max())
        return [a for a, effect in enumerate(self.effects.tolist()) if effect > 0 and effect >= share * largest]


def input_derivatives(module: nn.Module, batches: Iterable[Any], probe: Probe, samples: int = 400) -> InputDerivatives:
    """Derivatives f_a and f_ac of all outputs by the inputs, with torch.func, in eval mode, in chunks.

    Every row of the batch must be a sample by itself: the network is called on single rows. Mode, buffers, gradients,
    random states and the place in the data are left as they were. Under DDP each rank takes its share of the samples and
    sums are added.

    Args:
        module: The network.
        batches: Batches that `probe` understands.
        probe: What the input and the output of the module are.
        samples: How many samples to take in all, >= 1; fewer where there are fewer.

    Raises:
        TypeError: If inputs are not floating point, or torch.func cannot map the network.
        ValueError: If there are more than 64 inputs, no samples, or a derivative is not finite.
        RuntimeError: If another rank failed.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> found = input_derivatives(net, [torch.randn(50, 3)], Probe())
    >>> found.effects.shape, found.sums.cross.shape, found.samples
    (torch.Size([3]), torch.Size([3, 3, 3]), 50)
    """
    check_int("samples", samples, "the number of samples that derivatives are taken of", minimum=1)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    totals: list[Tensor] | None = None
    with failing_together(device), untouched(module), same_place(batches) as copied:
        for parameter in module.parameters():
            parameter.requires_grad_(False)  # derivatives are by inputs alone
        for x, first, second in _chunks(module, copied, probe, math.ceil(samples / ranks)):
            sums = similarity_sums(first.double(), second.double())
            rows = x.reshape(len(x), -1).double()
            squares = first.double().square().sum((0, 1))
            parts = [rows.new_tensor(len(rows)), rows.sum(0), rows.square().sum(0), squares, sums.cross, sums.square]
            totals = parts if totals is None else [total + part for total, part in zip(totals, parts, strict=True)]
        if totals is None:
            raise ValueError("`batches` yields what derivatives are taken of and was empty; pass at least one batch.")
    n, total, square, derivative, cross, squared = (added(part) for part in totals)
    mean = total / n
    variance = square / n - mean.square()
    # Of a constant input rounding may leave a trace of variance.
    variance = torch.where(variance > 1e-12 * (square / n), variance, 0.0)
    scale = variance[:, None, None] * variance[:, None] * variance
    return InputDerivatives(derivative / n * variance, SimilaritySums(cross * scale, squared * scale), int(n))


def _chunks(
    module: nn.Module, batches: Iterable[Any], probe: Probe, samples: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(n, ...) inputs, (n, outputs, d) first and (n, outputs, d, d) second derivatives, of so many samples in all."""
    size = 1  # until the number of outputs is known
    for batch in batches:
        moved = like_module(batch, module)
        inputs = _check_inputs(probe.inputs(moved).detach())[:samples]
        derivatives = torch.func.vmap(_derivatives(module, probe, moved, inputs[:1]))
        start = 0
        while start < len(inputs):
            x = inputs[start : start + size]
            try:
                second, first = derivatives(x.reshape(len(x), -1))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                raise TypeError(
                    f"torch.func must be able to map {type(module).__name__} over single samples, and could not: "
                    f"{str(error).partition(chr(10))[0]} Use a network of Linear layers and smooth activations."
                ) from error
            yield x, first, second
            start += len(x)
            size = max(_HELD // second[0].numel(), 1)
        samples -= len(inputs)
        if samples <= 0:
            return


def _derivatives(
    module: nn.Module, probe: Probe, batch: Any, like: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Of a flat row x (d,), the second derivatives (outputs, d, d) and the first (outputs, d)."""

    def function(x: Tensor) -> Tensor:
        return probe.outputs(module, x.reshape(like.shape), batch).flatten()

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.func.jacrev(function)(x)
        return found, found

    return torch.func.jacrev(first, has_aux=True)


def _check_inputs(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(
            f"derivatives are taken by the network's inputs, which must be continuous (floating point); got {x.dtype}. "
            "Pass a Probe whose `inputs` picks the continuous input of your module."
        )
    if len(x) and x[0].numel() > MAX_INPUTS:
        raise ValueError(
            f"derivatives by the network's inputs are taken of at most {MAX_INPUTS} inputs; got {x[0].numel()}."
        )
    return x
