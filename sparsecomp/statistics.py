"""Statistics of layers, streamed over batches: second moments of inputs, credits, signatures. Never all activations."""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsecomp._checks import check_int
from sparsecomp._layer_passes import LayerPasses, LayerSums, added, failing_together
from sparsecomp.probe import Probe, like_module, untouched
from sparsecomp.selection import PrunableParameter


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What a layer with weight (out, ...) saw: each output is z = w . a + b, with d inputs a.

    The columns of a are those of `weight.reshape(out, -1)`. A Linear layer has a row a per sample (per token), a
    convolution one per sample and position. Of a grouped convolution each tensor over d has a leading dimension of
    groups. All tensors are float64, on the device of the layer.

    Attributes:
        count: Number n of rows a, of all uses of the layer and all ranks.
        mean: (d,) E[a].
        second_moment: (d, d) E[a a^T], not centred.
        output_gradient: (out,) E[sum over positions and uses of (do / dz_j)^2] over samples, summed over the outputs o
            of the network; None where gradients were not asked for.
        input_signature: (d, inputs) E[(da_i / dx_k)^2] * var(x_k) over rows, for each input x_k of the network; None
            where signatures were not asked for.
        output_signature: (out, inputs) the same of z.

    >>> from sparsecomp.selection import Selection
    >>> layer = nn.Linear(2, 1)
    >>> statistics = collect(layer, Selection().resolve(layer), [torch.eye(2)], Probe(), gradients=False,
    ...                      signatures=False, generator=torch.Generator())["weight"]
    >>> statistics.mean.tolist(), statistics.covariance.tolist()
    ([0.5, 0.5], [[0.25, -0.25], [-0.25, 0.25]])
    >>> statistics.output_variance(torch.tensor([[1.0, -1.0]])).tolist()
    [1.0]
    """

    count: int
    mean: Tensor
    second_moment: Tensor
    output_gradient: Tensor | None = None
    input_signature: Tensor | None = None
    output_signature: Tensor | None = None

    @property
    def covariance(self) -> Tensor:
        """(d, d) E[a a^T] - E[a] E[a]^T, divided by n; no variance is below 0."""
        covariance = self.second_moment - self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)
        covariance.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
        return covariance

    def output_variance(self, weight: Tensor) -> Tensor:
        """(out,) var(z_j) = w_j^T covariance w_j over rows, of a weight (out, ...) of the layer's shape."""
        d = self.mean.shape[-1]
        grouped = weight.detach().double().reshape(self.mean[..., 0].numel(), -1, d)
        return ((grouped @ self.covariance.reshape(-1, d, d)) * grouped).sum(-1).clamp(min=0).flatten()


def collect(
    module: nn.Module,
    selected: Sequence[PrunableParameter],
    batches: Iterable[Any],
    probe: Probe,
    *,
    gradients: bool,
    signatures: bool,
    generator: torch.Generator,
    max_inputs: int = 64,
) -> dict[str, LayerStatistics]:
    r"""Take the statistics of the selected weights over the first `probe.batches` batches, in eval mode.

    Credits (`gradients`) come from random signs s, one per sample and output: as E[s s^T] is the identity,

        E_s[(d(sum_k s_k o_k) / dz_j)^2] = sum_k (do_k / dz_j)^2,

    in 4 draws a batch; they are exact where a sample has one output. At each position the derivative is squared, then
    positions are summed. Signatures come from forward-mode derivatives, one pass per network input.

    Of a weight that is used several times (shared by layers, or called more than once) all uses are added. Under a
    process group the sums of all ranks are added. Nothing is left behind: see `untouched`; of `batches` a copy is read,
    so that a loader is at the same place as before, and its random generators too. An iterator is consumed.

    Args:
        module: The network.
        selected: Which weights, from `Selection.resolve`; of Linear and Conv1d-3d layers only.
        batches: Yields batches; they are moved to the device and precision of the module.
        probe: What is the input and the output of the module, and how many batches are read.
        gradients: Whether to take `output_gradient`.
        signatures: Whether to take `input_signature` and `output_signature`.
        generator: Draws the signs; unused without `gradients`.
        max_inputs: Above so many inputs of the network signatures are refused, >= 1: they take a pass each.

    Returns:
        Name of the weight to its statistics.

    Raises:
        TypeError: If a selected parameter is no weight of a Linear or Conv1d-3d layer, or the network's input is not
            floating point and signatures are asked for.
        ValueError: If there are no batches, a layer is never reached, the output is not connected to the parameters, or
            there are too many network inputs for signatures.
        RuntimeError: If another rank failed.

    Reference:
        The random-sign estimate is Hutchinson's (Communications in Statistics 18, 1989) applied to the Gauss-Newton
        diagonal. Deviation: signs are independent between samples, which does not bias it and lowers its variance.

    >>> from sparsecomp.selection import Selection
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> found = collect(net, Selection().resolve(net), [torch.randn(8, 3)], Probe(), gradients=True, signatures=True,
    ...                 generator=torch.Generator().manual_seed(0))
    >>> found["2.weight"].count, found["2.weight"].output_gradient.tolist(), found["2.weight"].input_signature.shape
    (8, [1.0], torch.Size([4, 3]))
    """
    check_int("max_inputs", max_inputs, "the largest number of network inputs that signatures are taken for", minimum=1)
    for entry in selected:
        check_layer(entry)
    if not selected:
        return {}
    run = LayerPasses(module, selected, probe, gradients, signatures, max_inputs)
    with failing_together(next(module.parameters()).device):
        with untouched(module), same_place(batches) as copied, run.hooks():
            for batch in itertools.islice(copied, probe.batches):
                run.add(like_module(batch, module), generator)
        if run.samples == 0:
            raise ValueError("`batches` yields what statistics are taken from and was empty; pass at least one batch.")
    samples, variance = run.samples_and_variance()
    return {layer.name: _divided(layer, samples, variance, gradients) for layer in run.layers}


def _divided(layer: LayerSums, samples: Tensor, variance: Tensor | None, gradients: bool) -> LayerStatistics:
    moments = list(layer.moments.values())
    count = added(layer.gradient.new_tensor(sum(m.count for m in moments)))
    if not count:
        raise ValueError(
            f"layer {layer.name!r} was never reached: no forward of the network calls it. Leave it out with "
            f"Selection(exclude=[{layer.name!r}]), or pass a Probe whose `outputs` runs it."
        )
    mean = added(sum((m.total() for m in moments[1:]), moments[0].total())) / count
    second = added(sum((m.second() for m in moments[1:]), moments[0].second())).div_(count)
    of_inputs = of_outputs = None
    if variance is not None and layer.input_squares is not None and layer.output_squares is not None:
        of_inputs = added(layer.input_squares) * (variance / count)
        of_outputs = added(layer.output_squares) * (variance / count)
    grouped = moments[0].groups > 1
    return LayerStatistics(
        count=int(count),
        mean=mean if grouped else mean[0],
        second_moment=second if grouped else second[0],
        output_gradient=added(layer.gradient) / samples if gradients else None,
        input_signature=of_inputs if grouped or of_inputs is None else of_inputs[0],
        output_signature=of_outputs,
    )


def check_layer(entry: PrunableParameter) -> None:
    """Refuse a parameter that is no weight of a layer which shows its inputs."""
    for holder in entry.holders:
        kind = type(holder).__name__
        leave_out = f"leave it out with Selection(exclude=[{entry.name!r}])"
        if isinstance(holder, nn.MultiheadAttention | NonDynamicallyQuantizableLinear):
            raise TypeError(
                f"layer statistics need the inputs of {entry.name!r}, which nn.MultiheadAttention does not show; build the "
                f"attention of nn.Linear modules, or {leave_out}."
            )
        if isinstance(holder, nn.RNNBase | nn.RNNCellBase):
            raise TypeError(
                f"layer statistics need the inputs of {entry.name!r}, which the fused {kind} does not show; build the cell "
                f"of nn.Linear modules, or {leave_out}."
            )
        supported = isinstance(holder, nn.Linear | _ConvNd) and not isinstance(holder, _ConvTransposeNd)
        if not supported or entry.attribute != "weight":
            raise TypeError(
                f"layer statistics are those of weights of Linear and Conv1d-3d layers; got {entry.name!r} of {kind}. To go "
                f"on, {leave_out}."
            )


@contextlib.contextmanager
def same_place(batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """A copy of a loader to iterate over; what the copy shares with it is put back."""
    if isinstance(batches, Iterator):
        yield batches
        return
    copied = copy.copy(batches)
    if isinstance(copied, torch.utils.data.DataLoader):
        copied._iterator = None  # persistent workers may be in the middle of an epoch
    states = [(generator, generator.get_state()) for generator in _generators(batches)]
    try:
        yield copied
    finally:
        for generator, state in states:
            generator.set_state(state)


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """The random generators of a loader and its samplers."""
    if isinstance(loader, torch.utils.data.DataLoader):
        holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        found = [getattr(holder, "generator", None) for holder in holders]
        yield from {id(g): g for g in found if isinstance(g, torch.Generator)}.values()
