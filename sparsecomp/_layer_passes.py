"""Passes of a network over batches, and the sums that hooks on its layers take of them."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsecomp.moments import InputMoments, widened
from sparsecomp.probe import Probe
from sparsecomp.selection import PrunableParameter

# Random-sign mixes of the outputs of a batch.
_DRAWS = 4


class _Use:
    """One call of a layer: the edge of the autograd graph that its output z left by, and which weight it was."""

    def __init__(self, layer: "LayerSums", edge: GradientEdge, unit_dim: int) -> None:
        self.layer = layer
        self.edge = edge
        self.unit_dim = unit_dim


class LayerSums:
    """The sums of one selected weight."""

    def __init__(self, entry: PrunableParameter) -> None:
        self.name = entry.name
        self.moments = {holder: InputMoments(holder) for holder in dict.fromkeys(entry.holders)}
        weight = entry.parameter
        self.gradient = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
        self.input_squares: Tensor | None = None  # (groups, d, inputs)
        self.output_squares: Tensor | None = None  # (out, inputs)

    def expect(self, inputs: int) -> None:
        """Make room for derivatives with respect to so many inputs of the network."""
        if self.input_squares is None:
            first = next(iter(self.moments.values()))
            self.input_squares = self.gradient.new_zeros(first.groups, first.features, inputs)
            self.output_squares = self.gradient.new_zeros(len(self.gradient), inputs)


class LayerPasses:
    """Passes of a network over batches, and what hooks on the selected layers add up."""

    def __init__(
        self,
        module: nn.Module,
        selected: Sequence[PrunableParameter],
        probe: Probe,
        gradients: bool,
        signatures: bool,
        max_inputs: int,
    ) -> None:
        self.module, self.probe = module, probe
        self.gradients, self.signatures, self.max_inputs = gradients, signatures, max_inputs
        self.layers = [LayerSums(entry) for entry in selected]
        self.samples = 0
        self._uses: list[_Use] = []
        self._listening = False
        self._direction: int | None = None
        self._input_sums: Tensor | None = None  # (3, inputs): how many, sum of x, sum of x^2

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the layers. Ours come first, so that they see what the layers themselves return."""
        handles = [
            holder.register_forward_hook(_Hook(self, layer), with_kwargs=True, prepend=True)
            for layer in self.layers
            for holder in layer.moments
        ]
        try:
            yield
        finally:
            self._uses.clear()
            for handle in handles:
                handle.remove()

    def add(self, batch: Any, generator: torch.Generator) -> None:
        """Add a batch to all sums."""
        with torch.set_grad_enabled(self.gradients), self._watching():
            outputs = self.probe(self.module, batch).outputs
        if outputs.dim() == 0:
            raise ValueError(
                "the output of the network must be (n, ...), a row per sample; got a scalar. Pass a Probe whose `outputs` "
                "picks what comes before the loss."
            )
        self.samples += len(outputs)
        if self.gradients:
            self._add_credits(outputs, generator)
        if self.signatures:
            self._add_signatures(batch)

    def saw(self, layer: LayerSums, holder: nn.Module, x: Tensor, z: Tensor) -> Tensor | None:
        """Take in one use of a layer; return its output again where it must be another tensor."""
        if not self._listening:
            return None
        if self._direction is not None:
            self._saw_tangents(layer, holder, x, z)
            return None
        layer.moments[holder].update(x)
        if not self.gradients:
            return None
        if not torch.is_grad_enabled():
            raise ValueError(
                f"layer {layer.name!r} runs under torch.no_grad, so that its credit cannot be seen; leave the layer out, "
                "or take the no_grad out of the forward of the network."
            )
        changed = None
        if not z.requires_grad:
            # Nothing before it is trainable. The copy is no leaf, so that a later in-place activation is allowed.
            z = changed = z.detach().requires_grad_().clone()
        # The edge stays that of z itself when an in-place activation overwrites z.
        self._uses.append(_Use(layer, get_gradient_edge(z), _unit_dim(holder, z)))
        return changed

    def samples_and_variance(self) -> tuple[Tensor, Tensor | None]:
        """Over all ranks, the number of samples and (inputs,) the variance of each network input, where it was taken."""
        samples = self.layers[0].gradient.new_tensor(self.samples)
        return added(samples), None if self._input_sums is None else _variance(added(self._input_sums))

    def _add_credits(self, outputs: Tensor, generator: torch.Generator) -> None:
        if not outputs.requires_grad:
            raise ValueError(
                "the output of the network is not connected to its layers, so that there are no credits; pass a Probe "
                "whose `outputs` returns what the loss is computed from, not detached and not an index."
            )
        edges = [use.edge for use in self._uses]
        draws = 1 if outputs[0].numel() == 1 else _DRAWS
        for draw in range(draws):
            signs = torch.randint(0, 2, outputs.shape, generator=generator, device=generator.device) * 2 - 1
            found = torch.autograd.grad(
                outputs, edges, signs.to(outputs), retain_graph=draw < draws - 1, allow_unused=True
            )
            for use, gradient in zip(self._uses, found, strict=True):
                if gradient is not None:
                    use.layer.gradient += _squares(gradient, use.unit_dim) / draws
        self._uses.clear()

    def _add_signatures(self, batch: Any) -> None:
        x = self.probe.inputs(batch).detach()
        inputs = self._check_inputs(x)
        values = x.reshape(len(x), -1).double()
        sums = torch.stack([torch.full_like(values[0], len(values)), values.sum(0), values.square().sum(0)])
        self._input_sums = sums if self._input_sums is None else self._input_sums + sums
        for layer in self.layers:
            layer.expect(inputs)
        # The fused kernels of attention have no forward-mode derivative; torch's own first use of one warns of jit.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), self._watching(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            for self._direction in range(inputs):
                tangent = torch.zeros_like(x, memory_format=torch.contiguous_format)
                tangent.view(len(x), -1)[:, self._direction] = 1
                with forward_ad.dual_level():
                    self.probe.outputs(self.module, forward_ad.make_dual(x, tangent), batch)
        self._direction = None

    def _check_inputs(self, x: Tensor) -> int:
        if not x.is_floating_point():
            raise TypeError(
                f"signatures are derivatives with respect to the network's inputs, which must be floating point; got "
                f"{x.dtype}. Collect without signatures, or pass a Probe that starts at the embedded inputs."
            )
        inputs = x[0].numel()
        if inputs > self.max_inputs:
            raise ValueError(
                f"signatures take one pass per network input, and {inputs} inputs are more than `max_inputs` = "
                f"{self.max_inputs}; collect without signatures (gamma = 0), or raise `max_inputs`."
            )
        if self._input_sums is not None and self._input_sums.shape[1] != inputs:
            raise ValueError(
                f"signatures need the same number of network inputs in every batch; got {inputs} after "
                f"{self._input_sums.shape[1]}. Collect without signatures."
            )
        return inputs

    def _saw_tangents(self, layer: LayerSums, holder: nn.Module, x: Tensor, z: Tensor) -> None:
        into, out = forward_ad.unpack_dual(x).tangent, forward_ad.unpack_dual(z).tangent
        if into is not None and layer.input_squares is not None:
            layer.input_squares[..., self._direction] += layer.moments[holder].column_sums(widened(into).square())
        if out is not None and layer.output_squares is not None:
            layer.output_squares[:, self._direction] += _squares(out, _unit_dim(holder, z))

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        # Off during the backward passes: activation checkpointing calls layers again in there.
        self._listening = True
        try:
            yield
        finally:
            self._listening = False


class _Hook:
    """Hands the input and the output of a layer to a run."""

    def __init__(self, run: LayerPasses, layer: LayerSums) -> None:
        self.run, self.layer = run, layer

    def __call__(self, holder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], z: Tensor) -> Tensor | None:
        return self.run.saw(self.layer, holder, args[0] if args else kwargs["input"], z)


@contextlib.contextmanager
def failing_together(device: torch.device) -> Iterator[None]:
    """Where one rank fails, the others do too, instead of waiting for its sums."""
    try:
        yield
    except Exception:
        added(torch.ones((), dtype=torch.float64, device=device))
        raise
    if added(torch.zeros((), dtype=torch.float64, device=device)):
        raise RuntimeError("layer statistics failed on another rank; its own error says why.")


def added(sums: Tensor) -> Tensor:
    """The sum over the ranks of a process group, in place; without one `sums` itself."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        buffer = sums.cuda() if dist.get_backend() == "nccl" and not sums.is_cuda else sums.contiguous()
        dist.all_reduce(buffer)
        sums.copy_(buffer)
    return sums


def _squares(values: Tensor, unit_dim: int) -> Tensor:
    """Float64 sums of squares per unit."""
    others = [dim for dim in range(values.dim()) if dim != unit_dim]
    squares = widened(values).square()
    return (squares.sum(others) if others else squares).double()


def _unit_dim(layer: nn.Module, z: Tensor) -> int:
    """Where units are counted: the last dimension, or that before the axes of an image."""
    axes = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)  # type: ignore[arg-type]
    return z.dim() - 1 - axes


def _variance(sums: Tensor) -> Tensor:
    """From how many, sum and sum of squares."""
    mean = sums[1:] / sums[0]
    return (mean[1] - mean[0].square()).clamp(min=0)
