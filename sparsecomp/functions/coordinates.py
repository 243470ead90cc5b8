"""Places in a picture as the inputs of a CPPN."""

import torch
from torch import Tensor

from sparsecomp._checks import check_int

INPUT_NAMES = ("x", "y", "d", "bias")


def coordinate_inputs(x: Tensor, y: Tensor, bias: bool = True) -> Tensor:
    """Columns x, y, d = 1.4 sqrt(x^2 + y^2), and 1 if `bias`.

    Args:
        x: Column coordinate, (n,), -1 at the left edge and 1 at the right one.
        y: Row coordinate, (n,), -1 at the top and 1 at the bottom.
        bias: Whether a column of ones is added.

    Returns:
        (n, 4), or (n, 3) without bias.

    Reference:
        The inputs of Picbreeder, J. Secretan et al.: Picbreeder: Evolving Pictures Collaboratively Online, CHI 2008;
        the factor 1.4 is that of arXiv 2505.11581.

    >>> coordinate_inputs(torch.tensor([0.6]), torch.tensor([-0.8]))
    tensor([[ 0.6000, -0.8000,  1.4000,  1.0000]])
    """
    columns = [x, y, 1.4 * torch.sqrt(x**2 + y**2)]
    return torch.stack([*columns, torch.ones_like(x)] if bias else columns, dim=1)


def pixel_grid(height: int, width: int, bias: bool = True) -> Tensor:
    """Inputs of all pixels, row by row from the top: (height * width, 4), or 3 columns without bias; float32.

    Both coordinates run from -1 to 1 over the pixels, also where the picture is not square; a single pixel is at -1.

    Raises:
        ValueError: If a side is not positive.
        TypeError: If a side is no integer.

    >>> pixel_grid(2, 3)[:, :2].tolist()
    [[-1.0, -1.0], [0.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    """
    rows = torch.linspace(-1, 1, check_int("height", height, "the number of rows of pixels", minimum=1))
    columns = torch.linspace(-1, 1, check_int("width", width, "the number of columns of pixels", minimum=1))
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return coordinate_inputs(x.flatten(), y.flatten(), bias)
