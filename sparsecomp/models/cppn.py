"""A compositional pattern producing network with mixed activations."""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsecomp._checks import check_choice, check_int
from sparsecomp.functions.primitives import PRIMITIVES

_DEFAULT = {"tanh": 8, "sin": 6, "gauss": 6, "identity": 4}


class MixedActivation(nn.Module):
    """Another activation for each group of units of a layer.

    Args:
        counts: Name of an activation (cos, gauss, identity, sin or tanh, with gauss(z) = 2 exp(-z^2) - 1) to the number
            of units that have it, >= 1; the first group is the first units.

    Attributes:
        activations: The name of the activation of each unit.

    Raises:
        ValueError: If there is no activation, one is unknown, or a number is not positive.
        TypeError: If a number is no integer, or `counts` no mapping.

    >>> mixed = MixedActivation({"identity": 2, "gauss": 1})
    >>> mixed.activations
    ('identity', 'identity', 'gauss')
    >>> mixed(torch.tensor([[3.0, -3.0, 0.0]]))
    tensor([[ 3., -3.,  1.]])
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__()
        if not isinstance(counts, Mapping):
            raise TypeError(
                f"`counts` is the number of units of each activation and must be a mapping; got {counts!r}."
            )
        if not counts:
            raise ValueError("`counts` is the number of units of each activation and must not be empty; got {}.")
        for name, count in counts.items():
            check_choice("counts", name, "the number of units of each activation, whose name", tuple(PRIMITIVES))
            check_int(f"counts[{name!r}]", count, "the number of units with this activation", minimum=1)
        self._sizes = list(counts.values())
        self._functions = [PRIMITIVES[name] for name in counts]
        self.activations: tuple[str, ...] = tuple(name for name, count in counts.items() for _ in range(count))

    def forward(self, z: Tensor) -> Tensor:
        """(..., units) -> (..., units)."""
        groups = z.split(self._sizes, dim=-1)  # by index, as torch.fx cannot loop over what it traces
        return torch.cat([function(groups[index]) for index, function in enumerate(self._functions)], dim=-1)

    def extra_repr(self) -> str:
        """The number of units of each activation."""
        return ", ".join(f"{name}={self.activations.count(name)}" for name in dict.fromkeys(self.activations))


class CPPN(nn.Sequential):
    """Linear layers with mixed activations between them.

    Weights are drawn from N(0, 1 / fan_in) and biases are 0, in every layer. Random numbers are torch's global ones.

    Args:
        in_features: Number of inputs.
        out_features: Number of outputs.
        activations: Name of an activation to the number of units that have it in each hidden layer, see
            `MixedActivation`; the width is their sum. By default tanh 8, sin 6, gauss 6, identity 4.
        depth: Number of hidden layers, >= 1.
        bias: Whether layers have biases; for coordinates with an input of ones they need none.

    Raises:
        ValueError: If a number is not positive or an activation unknown.
        TypeError: If a number is no integer.

    Reference:
        K. O. Stanley: Compositional pattern producing networks, Genetic Programming and Evolvable Machines 8, 2007.
        There the graph is evolved; here it is layered and starts fully connected.

    >>> network = CPPN(8, 1)
    >>> network(torch.zeros(5, 8)).shape, sum(weight.numel() for weight in network.parameters() if weight.ndim == 2)
    (torch.Size([5, 1]), 1368)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activations: Mapping[str, int] | None = None,
        depth: int = 3,
        bias: bool = True,
    ) -> None:
        counts = _DEFAULT if activations is None else activations
        hidden = [MixedActivation(counts) for _ in range(check_int("depth", depth, "the number of hidden layers", 1))]
        widths = [
            check_int("in_features", in_features, "the number of inputs", minimum=1),
            *(len(mixed.activations) for mixed in hidden),
            check_int("out_features", out_features, "the number of outputs", minimum=1),
        ]
        linear = [_linear(fan_in, fan_out, bias) for fan_in, fan_out in itertools.pairwise(widths)]
        pairs = zip(linear, hidden, strict=False)  # the readout has no activation
        super().__init__(*itertools.chain.from_iterable(pairs), linear[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        out: Tensor = super().forward(x)
        return out


def _linear(fan_in: int, fan_out: int, bias: bool) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    nn.init.normal_(layer.weight, std=fan_in**-0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
