"""A small convolutional network."""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from sparsecomp._checks import check_int


class SmallConvNet(nn.Sequential):
    """3 x 3 convolutions with BatchNorm and ReLU, halving the picture after each, and a linear readout.

    For pictures of 8 x 8 pixels, 16 and 32 channels, that is 1 -> 16 -> 32 -> linear 128 -> classes.

    Args:
        in_channels: Channels of the picture.
        out_features: Number of outputs.
        image_size: Height and width of the (square) picture, a multiple of 2 ** len(channels).
        channels: Channels after each convolution.

    Raises:
        ValueError: If a number is not positive or the picture cannot be halved that often.
        TypeError: If a number is no integer.

    >>> import torch
    >>> SmallConvNet(1, 10, image_size=8)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self, in_channels: int, out_features: int, image_size: int, channels: Sequence[int] = (16, 32)
    ) -> None:
        check_int("image_size", image_size, "the height and width of the picture", minimum=1)
        check_int("out_features", out_features, "the number of outputs", minimum=1)
        widths = [
            check_int("in_channels", in_channels, "the number of channels of the picture", minimum=1),
            *(check_int("channels", width, "the channels after each convolution", minimum=1) for width in channels),
        ]
        if image_size % 2 ** len(channels):
            raise ValueError(
                f"`image_size` is the height and width of the picture and must be a multiple of {2 ** len(channels)}, as "
                f"each of the {len(channels)} convolutions is followed by halving; got {image_size}."
            )
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [
                nn.Conv2d(fan_in, fan_out, kernel_size=3, padding=1, bias=False),
                nn.BatchNorm2d(fan_out),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        side = image_size // 2 ** len(channels)
        super().__init__(*layers, nn.Flatten(), nn.Linear(widths[-1] * side**2, out_features))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, image_size, image_size) -> (batch, out_features)."""
        out: Tensor = super().forward(x)
        return out
