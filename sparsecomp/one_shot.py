"""Prune a plain network once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp._checks import check_instance, check_sparsity
from sparsecomp.allocation import Allocation, resolve_allocation
from sparsecomp.criteria import Criterion, ScoreContext
from sparsecomp.masks import MaskStore
from sparsecomp.planning import make_plan
from sparsecomp.probe import Probe
from sparsecomp.selection import Selection


def prune(
    model: nn.Module,
    criterion: Criterion,
    final_sparsity: float,
    data: Iterable[Any] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    selection: Selection | None = None,
    allocation: Allocation | str = "global",
    probe: Probe | None = None,
) -> MaskStore:
    """Prune `model` in place, once, and return its masks.

    The masks are applied again after each `load_state_dict`, as long as the returned store lives and until its
    `detach()`. A hand-written training loop keeps them with `store.mask_grads_()` before and `store.apply_()` after
    each `optimizer.step()`.

    Args:
        model: The network.
        criterion: What to keep.
        final_sparsity: Fraction of the selected weights removed, in [0, 1).
        data: Batches, for a criterion that looks at activations or gradients.
        loss: Scalar loss of (model, batch), for a criterion that looks at gradients.
        selection: What is prunable; the default of `Selection` if None.
        allocation: Scores to masks: an `Allocation`, or "global", "layerwise" or "erk".
        probe: What the input and the output of the model are where batches are not (x, y), and how many are looked at.

    Raises:
        ValueError: If a value is out of its range, nothing is selected, the scores are not finite, or the criterion
            needs data or a loss that is not given. The model is as it was.
        TypeError: If an argument has the wrong type.

    >>> from sparsecomp.criteria.magnitude import Magnitude
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> store = prune(model, Magnitude(), 0.75)
    >>> store.sparsity
    0.75
    """
    check_sparsity("final_sparsity", final_sparsity)
    check_instance("criterion", criterion, "what to keep", Criterion, "Magnitude()")
    if selection is not None:
        check_instance("selection", selection, "what is prunable", Selection, "Selection(exclude=['head'])")
    store = MaskStore(model, selection)
    context = ScoreContext(
        model, store.weights, store.masks, torch.initial_seed(), data, loss, store.selected, probe or Probe()
    )
    make_plan(criterion, resolve_allocation(allocation), final_sparsity, context, store).commit(model, store)
    return store.attach()
