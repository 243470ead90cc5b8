"""The functions of one number that target functions and CPPNs are made of."""

from collections.abc import Callable

import torch
from torch import Tensor


def gauss(z: Tensor) -> Tensor:
    """2 exp(-z^2) - 1, in (-1, 1]: 1 at 0, and -1 far away.

    Reference:
        A. Kumar et al.: Questioning Representational Optimism in Deep Learning, arXiv 2505.11581, whose evolved networks
        have this form; it differs from exp(-z^2) by an affine map, which a standardised node does not show.

    >>> gauss(torch.tensor([0.0, 10.0]))
    tensor([ 1., -1.])
    """
    return 2.0 * torch.exp(-(z**2)) - 1.0


def identity(z: Tensor) -> Tensor:
    """The argument.

    >>> identity(torch.tensor([0.5]))
    tensor([0.5000])
    """
    return z


PRIMITIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "cos": torch.cos,
    "gauss": gauss,
    "identity": identity,
    "sin": torch.sin,
    "tanh": torch.tanh,
}
