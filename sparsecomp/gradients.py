"""Gradients of the loss, streamed over batches: absolute per batch, squared per sample. Never all of them."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sparsecomp._layer_passes import added, failing_together
from sparsecomp.moments import sample_columns, widened
from sparsecomp.probe import Probe, like_module, untouched
from sparsecomp.selection import PrunableParameter
from sparsecomp.statistics import check_layer, same_place

# Values of the per-sample gradients that are held at once, at most (32 MiB in float32), unless one sample has more.
_PIECE = 2**23


@dataclass(frozen=True, eq=False)
class _Use:
    """One call of a layer: what it read, and where its output left by."""

    holder: nn.Module
    inputs: Tensor
    edge: GradientEdge


def batch_gradients(
    module: nn.Module,
    selected: Sequence[PrunableParameter],
    batches: Iterable[Any],
    probe: Probe,
    loss: Callable[[nn.Module, Any], Tensor],
) -> dict[str, Tensor]:
    """The mean over batches of |g|, g being the gradient of the loss of a batch, for any kind of parameter.

    In eval mode, over the first `probe.batches` batches; under a process group over those of all ranks. Nothing is left
    behind: see `untouched` and `same_place`. A parameter that the loss does not reach has zeros.

    Raises:
        ValueError: If there are no batches, the loss is not finite or no scalar, or it reaches none of the parameters.
        RuntimeError: If another rank failed.

    >>> from sparsecomp.selection import Selection
    >>> layer = nn.Linear(2, 1)
    >>> selected = Selection().resolve(layer)
    >>> batch_gradients(layer, selected, [torch.eye(2), -torch.eye(2)], Probe(), lambda net, x: net(x).mean())
    {'weight': tensor([[0.5000, 0.5000]])}
    """
    sums = {entry.name: torch.zeros_like(widened(entry.parameter.detach())) for entry in selected}
    parameters = [entry.parameter for entry in selected]

    def add(value: Tensor, _: Any) -> int:
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        _refuse_unreached(found)
        for entry, gradient in zip(selected, found, strict=True):
            if gradient is not None:
                sums[entry.name] += widened(gradient).abs()
        return 1

    count = _pass(module, selected, batches, probe, loss, add)
    return {name: added(total) / count for name, total in sums.items()}


def squared_sample_gradients(
    module: nn.Module,
    selected: Sequence[PrunableParameter],
    batches: Iterable[Any],
    probe: Probe,
    loss: Callable[[nn.Module, Any], Tensor],
) -> dict[str, Tensor]:
    """The mean over samples of g^2, g being the gradient of the loss of a single sample: the diagonal empirical Fisher.

    The loss of a batch must be a mean of losses of its n samples (a sum gives the same up to a factor where all batches
    are of one size); samples are the first dimension of the probe's input and of what a layer reads. With inputs a and
    derivatives delta of the outputs, g = n sum over positions and uses of delta a^T. Mode, batches, ranks and traces as
    `batch_gradients`.

    Raises:
        TypeError: If a selected parameter is no weight of a Linear or Conv1d-3d layer, or the probe finds no input.
        ValueError: As `batch_gradients`, or if a layer reads another number of rows than the batch has samples, as where
            tokens were flattened into the first dimension.
        RuntimeError: If another rank failed.

    >>> from sparsecomp.selection import Selection
    >>> layer = nn.Linear(2, 1)
    >>> selected = Selection().resolve(layer)
    >>> squared_sample_gradients(layer, selected, [torch.eye(2)], Probe(), lambda net, x: net(x).mean())
    {'weight': tensor([[0.5000, 0.5000]])}
    """
    for entry in selected:
        check_layer(entry)
    sums = {entry.name: torch.zeros_like(widened(entry.parameter.detach())) for entry in selected}
    uses: dict[str, list[_Use]] = {entry.name: [] for entry in selected}

    def add(value: Tensor, batch: Any) -> int:
        n = len(probe.inputs(batch))
        flat = [(name, use) for name, found in uses.items() for use in found]
        edges = [use.edge for _, use in flat]
        gradients = torch.autograd.grad(value, edges, allow_unused=True) if edges else ()
        _refuse_unreached(gradients)
        reached: dict[str, list[tuple[_Use, Tensor]]] = {name: [] for name in uses}
        for (name, use), gradient in zip(flat, gradients, strict=True):
            if gradient is not None:
                reached[name].append((use, gradient))
        for name, pairs in reached.items():
            if pairs:
                sums[name] += _squared(name, n, pairs).reshape(sums[name].shape)
            uses[name].clear()
        return n

    with _watching(selected, uses):
        samples = _pass(module, selected, batches, probe, loss, add)
    return {name: added(total) / samples for name, total in sums.items()}


def _pass(
    module: nn.Module,
    selected: Sequence[PrunableParameter],
    batches: Iterable[Any],
    probe: Probe,
    loss: Callable[[nn.Module, Any], Tensor],
    add: Callable[[Tensor, Any], int],
) -> Tensor:
    """Hand the loss of each batch to `add`, which says how many it was; how many all ranks had."""
    count = torch.zeros((), dtype=torch.float64, device=selected[0].parameter.device)
    with failing_together(count.device), untouched(module), same_place(batches) as copied:
        for entry in selected:
            entry.parameter.requires_grad_()  # a frozen one has a gradient to be ranked by, too
        for batch in itertools.islice(copied, probe.batches):
            moved = like_module(batch, module)
            value = loss(module, moved)
            if value.numel() != 1 or not bool(value.isfinite().all()):
                got = f"shape {tuple(value.shape)}" if value.numel() != 1 else f"{float(value.detach())}"
                raise ValueError(
                    f"`loss` is what gradients are taken of and must be a finite scalar; got {got}. Nothing was pruned; look "
                    "at the data and the training so far."
                )
            count += add(value.reshape(()), moved)
        if not count:
            raise ValueError("`data` yields what gradients are taken of and was empty; pass at least one batch.")
    return added(count)


@contextlib.contextmanager
def _watching(selected: Sequence[PrunableParameter], uses: Mapping[str, list[_Use]]) -> Iterator[None]:
    def hook_of(name: str) -> Callable[..., Tensor | None]:
        def hook(holder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], z: Tensor) -> None:
            if z.requires_grad:
                inputs = args[0] if args else kwargs["input"]
                uses[name].append(_Use(holder, inputs.detach(), get_gradient_edge(z)))

        return hook

    handles = [
        holder.register_forward_hook(hook_of(entry.name), with_kwargs=True, prepend=True)
        for entry in selected
        for holder in dict.fromkeys(entry.holders)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _squared(name: str, n: int, pairs: Sequence[tuple[_Use, Tensor]]) -> Tensor:
    """(groups, out, d) sums over the n samples of squared gradients, each of all uses of the weight together."""
    if any(use.inputs.dim() < 2 or not len(use.inputs) == len(gradient) == n for use, gradient in pairs):
        raise ValueError(
            f"layer {name!r} must read the {n} samples of a batch along its first dimension in all its uses, so that their "
            f"gradients can be told apart; got inputs of shapes {', '.join(str(tuple(use.inputs.shape)) for use, _ in pairs)}. "
            f"Hand it (samples, tokens, features), or leave it out with Selection(exclude=[{name!r}])."
        )
    columns = [sample_columns(use.holder, use.inputs[:1]).shape for use, _ in pairs]
    out = pairs[0][1].shape[-1 if isinstance(pairs[0][0].holder, nn.Linear) else 1]
    groups, d, positions = columns[0][1:]
    if len(pairs) == 1 and positions == 1:  # (delta a)^2 = delta^2 a^2: all samples in one product
        use, gradient = pairs[0]
        deltas, read = _by_group(use.holder, widened(gradient), groups), sample_columns(use.holder, widened(use.inputs))
        return torch.einsum("ngop,ngdp->god", deltas.square(), read.square()) * n**2
    per_sample = max(out * d, *(groups * d * shape[3] for shape in columns))
    total = widened(pairs[0][1]).new_zeros(groups, out // groups, d)
    size = max(_PIECE // per_sample, 1)
    for start in range(0, n, size):
        part = slice(start, start + size)
        gradients = [
            torch.matmul(
                _by_group(use.holder, widened(gradient[part]), groups),
                sample_columns(use.holder, widened(use.inputs[part])).transpose(2, 3),
            )
            for use, gradient in pairs
        ]
        total += sum(gradients[1:], gradients[0]).square_().sum(0)
    return total * n**2


def _by_group(holder: nn.Module, gradient: Tensor, groups: int) -> Tensor:
    """(n, groups, out / groups, positions) derivatives of a layer's outputs."""
    if isinstance(holder, nn.Linear):
        return gradient.reshape(len(gradient), 1, -1, gradient.shape[-1]).transpose(2, 3)
    return gradient.reshape(len(gradient), groups, gradient.shape[1] // groups, -1)


def _refuse_unreached(gradients: Sequence[Tensor | None]) -> None:
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "`loss` reaches none of the selected weights, so that there is nothing to rank them by; return the loss that "
            "training uses, not detached."
        )
