"""Which connections are live: kept, and on a path from an input to an output."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from sparsecomp.connectivity.graph import ConnectivityGraph
from sparsecomp.connectivity.steps import Mixing, WeightUse

_BLOCK = 1 << 20  # bytes worked on at once, so that intermediate results stay in the cache
_WORDS = 255  # words of eight counters of one byte that can be added without overflow

Across = Callable[[WeightUse, Tensor], Tensor]


def live_connections(graph: ConnectivityGraph, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which weights are live.

    live_uv = mask_uv and (u is reachable from an input) and (an output is reachable from v), over kept connections.
    A bias makes no unit reachable: a unit without a live input is a constant. A weight used at several places is live
    if any use is. Weights of the network that have no mask count as kept.

    Args:
        graph: The network's connectivity.
        masks: Parameter name to bool tensor of the parameter's shape, True = kept. Biases and other parameters that
            connect no units are passed over.

    Returns:
        For each mask of a weight a bool tensor of its shape; all False where the forward pass does not use the weight.

    Raises:
        TypeError: If a mask is not bool.
        ValueError: If a name is not the network's or a shape not the weight's.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> masks = {"0.weight": torch.tensor([[True, False], [True, True]]), "1.weight": torch.tensor([[True, False]])}
    >>> live_connections(ConnectivityGraph.trace(net), masks)["0.weight"].tolist()
    [[True, False], [False, False]]
    """
    matrices, forward, backward, _ = _reach(graph, masks)
    live = {name: torch.zeros_like(mask) for name, mask in masks.items() if name in graph.unused}
    for name, uses in graph.uses.items():
        if name in matrices:
            matrix = matrices[name]
            found = torch.zeros_like(matrix)
            for use in uses:
                rows, columns = sides(use, forward, backward)
                for part, groups in blocks(use, matrix):
                    found[part] |= matrix[part] & columns[groups].bool() & rows[part, None].bool()
            live[name] = found.view(masks[name].shape)
    return {name: live[name] for name in masks if name in live}


def effective_sparsity(graph: ConnectivityGraph, masks: Mapping[str, Tensor]) -> float:
    """Fraction of the masked weights that are not live, 1 - live / all, in [0, 1]; never under the nominal sparsity.

    Args:
        graph: The network's connectivity.
        masks: As for `live_connections`.

    Raises:
        TypeError, ValueError: As `live_connections`, and ValueError if there is a mask of no weight.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> masks = {"0.weight": torch.tensor([[True, False], [True, True]]), "1.weight": torch.tensor([[True, False]])}
    >>> round(effective_sparsity(ConnectivityGraph.trace(net), masks), 3)  # nominal: 2 of 6
    0.667
    """
    matrices, forward, backward, counts = _reach(graph, masks)
    total = sum(mask.numel() for name, mask in masks.items() if name in matrices or name in graph.unused)
    if total == 0:
        raise ValueError(f"`masks` must hold a weight of the network; the weights are {', '.join(graph.weights)}.")
    live, shared = 0, {}
    for name, uses in graph.uses.items():
        if name not in matrices:
            continue
        if len(uses) == 1 and name in counts:
            live += int(counts[name][backward[uses[0].target].bool()].sum())
        elif len(uses) == 1:
            live += _count(uses[0], matrices[name], *sides(uses[0], forward, backward))
        else:
            shared[name] = masks[name]
    if shared:
        others = {name: masks[name] for name in matrices}
        live += sum(int(live_connections(graph, others)[name].count_nonzero()) for name in shared)
    return (total - live) / total


def propagate(
    graph: ConnectivityGraph, across: Across, across_back: Across, bottom: Tensor, top: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The best that reaches each unit from the inputs, and each unit's best towards the outputs.

    The best of several is their maximum; `across` says what comes through a weight from its source units, and
    `across_back` what from its target units. Bool reachability is the case 0 and 1; with scores, a path is worth the
    smallest score on it.

    Args:
        graph: The network's connectivity.
        across: (use, (source units,)) -> (target units,).
        across_back: (use, (target units,)) -> (source units,).
        bottom: Scalar, of a unit that nothing reaches.
        top: Scalar, of an input or output.

    Returns:
        For each space (units,) forward and backward.
    """
    forward = [bottom.expand(size).clone() for size in graph.sizes]
    backward = [bottom.expand(size).clone() for size in graph.sizes]
    for space in graph.inputs:
        forward[space].copy_(top)
    for space, unit in graph.input_units:
        forward[space][unit] = top
    for space in graph.outputs:
        backward[space].copy_(top)
    for step in graph.steps:
        if isinstance(step, WeightUse):
            forward[step.target] = torch.maximum(forward[step.target], across(step, forward[step.source]))
        else:
            forward[step.target] = step.forward(forward[step.source], forward[step.target])
    for step in reversed(graph.steps):
        if isinstance(step, WeightUse):
            backward[step.source] = torch.maximum(backward[step.source], across_back(step, backward[step.target]))
        else:
            backward[step.source] = step.backward(backward[step.target], backward[step.source])
    return forward, backward


def through_all(use: WeightUse, units: Tensor, size: int) -> Tensor:
    """What comes through a weight without a mask: all source units of a group reach all of its target units."""
    return Mixing(use.source, use.target, use.groups).forward(units, units.new_full((), _least(units)).expand(size))


def sides(use: WeightUse, forward: list[Tensor], backward: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Values of the weight's rows (rows,) and of its columns (groups, columns): sources forward, targets backward."""
    source, target = forward[use.source], backward[use.target]
    return (source, use.columns(target)) if use.transposed else (target, use.columns(source))


def blocks(use: WeightUse, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Row ranges of a matrix that fit into the cache, and the group of each row (one for all without groups)."""
    rows, columns = matrix.shape
    height = max(1, _BLOCK // max(1, columns * matrix.element_size()))
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        if use.groups == 1:
            groups = torch.zeros(1, dtype=torch.long, device=matrix.device)
        else:
            groups = torch.arange(part.start, part.stop, device=matrix.device) // (rows // use.groups)
        yield part, groups


def _least(units: Tensor) -> float:
    return -float("inf") if units.is_floating_point() else 0


def _reach(
    graph: ConnectivityGraph, masks: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Masks as matrices, for each space which units an input reaches and which reach an output, as uint8.

    And, for the weights where it costs nothing, of each row the number of kept weights that an input reaches.
    """
    graph.check_masks("masks", masks)
    uses = graph.uses
    device = next(iter(masks.values())).device if masks else torch.device("cpu")
    # Contiguous, so that the bytes can be read as words.
    matrices = {n: m.to(device).contiguous().view(m.shape[0], -1) for n, m in masks.items() if n in uses}

    counts: dict[str, Tensor] = {}

    def across(use: WeightUse, units: Tensor) -> Tensor:
        if use.name not in matrices:
            return through_all(use, units, use.target_size)
        if not use.transposed and _as_words(use, matrices[use.name]):
            counts[use.name] = _row_counts(matrices[use.name], use.columns(units)[0])
            return (counts[use.name] > 0).to(torch.uint8)
        return _columns_hit(use, matrices[use.name], units) if use.transposed else _rows_hit(use, matrices, units)

    def across_back(use: WeightUse, units: Tensor) -> Tensor:
        if use.name not in matrices:
            return through_all(use, units, use.source_size)
        return _rows_hit(use, matrices, units) if use.transposed else _columns_hit(use, matrices[use.name], units)

    zero = torch.zeros((), dtype=torch.uint8, device=device)
    forward, backward = propagate(graph, across, across_back, zero, zero + 1)
    return matrices, forward, backward, counts


def _rows_hit(use: WeightUse, matrices: Mapping[str, Tensor], units: Tensor) -> Tensor:
    """Rows that keep a weight in a marked column."""
    matrix, columns = matrices[use.name], use.columns(units)
    if _as_words(use, matrix):
        return (_row_counts(matrix, columns[0]) > 0).to(torch.uint8)
    hit = torch.empty(len(matrix), dtype=torch.uint8, device=matrix.device)
    for part, groups in blocks(use, matrix):
        hit[part] = (matrix[part].view(torch.uint8) & columns[groups]).amax(1)
    return hit


def _columns_hit(use: WeightUse, matrix: Tensor, units: Tensor) -> Tensor:
    """Units on the column side that keep a weight in a marked row."""
    marked = units.bool()
    if _as_words(use, matrix) and matrix.device.type == "cpu":
        rows = matrix if bool(marked.all()) else matrix[marked]
        words = np.bitwise_or.reduce(rows.view(torch.int64).numpy(), axis=0)
        return use.units(torch.from_numpy(words.view(np.uint8))[None])
    hit = torch.zeros(use.groups, matrix.shape[1], dtype=torch.uint8, device=matrix.device)
    for part, groups in blocks(use, matrix):
        rows = matrix[part] if bool(marked[part].all()) else matrix[part][marked[part]]
        if use.groups == 1:
            if len(rows):
                hit[0] = torch.maximum(hit[0], rows.view(torch.uint8).amax(0))
        else:
            index = groups[marked[part]][:, None].expand(rows.shape)
            hit.scatter_reduce_(0, index, rows.view(torch.uint8), "amax")
    return use.units(hit)


def _count(use: WeightUse, matrix: Tensor, rows: Tensor, columns: Tensor) -> int:
    """Number of kept weights in marked rows and columns."""
    if _as_words(use, matrix):
        return int(_row_counts(matrix, columns[0])[rows.bool()].sum())
    return sum(
        int((matrix[part].view(torch.uint8) & columns[groups] & rows[part, None]).count_nonzero())
        for part, groups in blocks(use, matrix)
    )


def _as_words(use: WeightUse, matrix: Tensor) -> bool:
    return use.groups == 1 and matrix.shape[1] % 8 == 0 and matrix.storage_offset() % 8 == 0


def _row_counts(matrix: Tensor, columns: Tensor) -> Tensor:
    """Kept weights in marked columns of each row, eight at a time: a word of eight bools is eight counters."""
    words, marked = matrix.view(torch.int64), columns.view(torch.int64)
    if matrix.device.type == "cpu":  # numpy counts bits, which torch does not
        seen = words.numpy() if bool(columns.all()) else words.numpy() & marked.numpy()
        return torch.from_numpy(np.bitwise_count(seen).sum(1, dtype=np.int64))
    counts = torch.zeros(len(matrix), dtype=torch.int64, device=matrix.device)
    height = max(1, _BLOCK // max(1, words.shape[1] * words.element_size()))
    for start in range(0, len(matrix), height):
        part = slice(start, start + height)
        both = words[part] & marked
        for summands in both.split(_WORDS, dim=1):
            counts[part] += summands.sum(1).view(torch.uint8).view(-1, 8).sum(1)
    return counts
