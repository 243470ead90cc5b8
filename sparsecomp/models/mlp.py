"""A multilayer perceptron."""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from sparsecomp._checks import check_int


class MLP(nn.Sequential):
    """Linear layers with an activation between them.

    Args:
        in_features: Number of inputs; an input of shape (batch, ...) is flattened to (batch, in_features).
        out_features: Number of outputs.
        hidden: Width of each hidden layer, in order.
        activation: Class of the activation, one instance after each hidden layer.

    Raises:
        ValueError: If a width is not positive.
        TypeError: If a width is no integer.

    >>> import torch
    >>> MLP(64, 10, hidden=(128, 128))(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: Sequence[int] = (128, 128),
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        widths = [
            check_int("in_features", in_features, "the number of inputs", minimum=1),
            *(check_int("hidden", width, "the width of each hidden layer", minimum=1) for width in hidden),
            check_int("out_features", out_features, "the number of outputs", minimum=1),
        ]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in itertools.pairwise(widths[:-1]):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        super().__init__(*layers, nn.Linear(widths[-2], widths[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) with in_features values each -> (batch, out_features)."""
        out: Tensor = super().forward(x)
        return out
