"""Effective fan-in."""

import torch
from torch import Tensor


def effective_fan_in(weight: Tensor, input_second_moment: Tensor) -> Tensor:
    """How many inputs each unit really reads.

    exp H(p) with p_i = w_i^2 E[h_i^2] / sum_k w_k^2 E[h_k^2] and H the entropy in nats: 1 if one input does it all, d if
    all d contribute equally. This is compositional sparsity, not compositionality.

    Args:
        weight: (out, in, *taps) of a layer, (out, in / groups, *taps) of a grouped convolution; each tap is an input.
        input_second_moment: (in,) E[h^2], not centred, >= 0; of a convolution the mean over positions, so that what
            padding takes away is not seen.

    Returns:
        (out,) float64 in [1, d]; 0 for a unit that reads nothing.

    Raises:
        ValueError: If the shapes do not fit.

    Invariant to a permutation of units and to rescaling one: h -> c h, w -> w / c.

    >>> weight = torch.tensor([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    >>> effective_fan_in(weight, torch.tensor([1.0, 4.0, 9.0])).round(decimals=2).tolist()
    [1.65, 2.0, 0.0]
    """
    groups, rest = divmod(len(input_second_moment), weight.shape[1]) if weight.dim() > 1 and weight.numel() else (0, 0)
    if rest or groups == 0 or len(weight) % groups:
        raise ValueError(
            f"`input_second_moment` has one number for each input of the weight {tuple(weight.shape)}, (in,) or groups "
            f"times that; got {tuple(input_second_moment.shape)}."
        )
    squares = weight.detach().double().square().reshape(groups, len(weight) // groups, weight.shape[1], -1)
    contributions = squares * input_second_moment.double().reshape(groups, 1, -1, 1)
    rows = contributions.reshape(len(weight), -1)
    total = rows.sum(1, keepdim=True)
    shares = rows / torch.where(total > 0, total, 1)
    return torch.where(total[:, 0] > 0, torch.special.entr(shares).sum(1).exp(), 0.0)
