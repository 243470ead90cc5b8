"""Second moments of the inputs of Linear and Conv1d-3d layers, summed batch by batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

# float32 sums go into float64 after so many batches: 6e-6 off in a damped inverse, where float32 alone is 7e-4 off.
_FLUSH = 8
# Up to this many inputs one product; above it, strips of the lower triangle of so many rows each.
_PLAIN = 512
_STRIP = 200
# Values of one unfolded piece of a batch, at most (32 MiB in float32).
_PIECE = 2**23

_TAPS = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
# Half of the differences of two taps: the correlation at a difference is the transpose of that at its negative.
_SHIFTS = [(0, 0), (0, 1), (0, 2), *((row, column) for row in (1, 2) for column in (-2, -1, 0, 1, 2))]


class InputMoments:
    r"""Sums over the inputs of a layer: how many, sum of a, sum of a a^T.

    Each output of the layer is w . a + b; `a` holds the d inputs that it reads, in the column order of
    `weight.reshape(out, -1)`, so that d = in_features, or channels / groups * kernel size. A Linear layer has one `a`
    per sample (per token), a convolution one per sample and position, zero where it reads padding. A grouped convolution
    has the moments of each group.

    Nothing is kept from batch to batch but the sums. They are taken in float32 (float64 for a float64 layer) and moved
    to float64 every 8 batches. 3 x 3 convolutions of stride 1 and padding 1 are not unfolded: the block of the taps t, s
    is

        sum_q x_q x_{q+s-t}^T   over the pixels q of the image for which q - t and q + s - t are in the image too,

    a correlation of the image with itself, shifted by s - t, minus an edge row where t and s agree in a row other than
    0, minus an edge column likewise, plus the corner that both had. There are 13 such correlations instead of 45 blocks.

    Args:
        layer: The layer, not to be changed.

    Raises:
        TypeError: If the layer is no Linear and no Conv1d-3d.

    >>> moments = InputMoments(nn.Linear(2, 3))
    >>> moments.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> moments.count, moments.total().tolist(), moments.second().tolist()
    (2, [[4.0, 6.0]], [[[10.0, 14.0], [14.0, 20.0]]])
    """

    def __init__(self, layer: nn.Module) -> None:
        if not isinstance(layer, nn.Linear | _ConvNd) or isinstance(layer, _ConvTransposeNd):
            raise TypeError(
                f"`layer` is where input moments are taken and must be a Linear or Conv1d-3d; got {type(layer).__name__}."
            )
        self.layer = layer
        self.groups = 1 if isinstance(layer, nn.Linear) else layer.groups
        self.features = layer.weight[0].numel()
        self.count = 0
        self._total = torch.zeros(self.groups, self.features, dtype=torch.float64, device=layer.weight.device)
        self._products: _Plain | _Shifted
        if _is_3x3(layer):
            self._products = _Shifted(layer.weight)
        else:
            self._products = _Plain(self.groups, self.features, layer.weight)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add what the layer was given: (..., in_features), or (n, channels, ...) or (channels, ...) of an image."""
        with torch.autocast(x.device.type, enabled=False):
            x = self._batched(x)
            self.count += self._rows(x)
            self._total += self.column_sums(x)
            self._products.add(self.layer, x)

    @torch.no_grad()
    def column_sums(self, x: Tensor) -> Tensor:
        """(groups, d) float64: the sum of `a` over all rows of `x`, which has the form of an input of the layer."""
        x = self._batched(x)
        # The sum over samples comes first: to unfold is linear, and then it unfolds a single sample.
        return _columns(self.layer, x.sum(0, keepdim=True).double()).sum(2)

    def total(self) -> Tensor:
        """(groups, d) float64: the sum of `a`."""
        return self._total.clone()

    def second(self) -> Tensor:
        """(groups, d, d) float64: the sum of a a^T, symmetric."""
        return self._products.sums()

    def _batched(self, x: Tensor) -> Tensor:
        x = widened(x.detach())
        if isinstance(self.layer, nn.Linear):
            return x.reshape(-1, x.shape[-1])
        return x if x.dim() == self.layer.weight.dim() else x.unsqueeze(0)

    def _rows(self, x: Tensor) -> int:
        if isinstance(self.layer, nn.Linear):
            return len(x)
        return len(x) * math.prod(_positions(self.layer, x))


class _Sums:
    """A float64 sum, some of whose last summands still wait in the precision that they were computed in."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, used: Sequence[tuple[slice, ...]] = ((),)) -> None:
        self._used = used  # places that are ever added to; everything by default
        self.part = torch.zeros(shape, dtype=widened(like[:0]).dtype, device=like.device)
        self.whole = torch.zeros(shape, dtype=torch.float64, device=like.device)
        self._waiting = 0

    def added(self) -> None:
        """Say that a batch was added to `part`."""
        self._waiting += 1
        if self._waiting == _FLUSH:
            self.flush()

    def flush(self) -> Tensor:
        for place in self._used:
            self.whole[place] += self.part[place].double()
            self.part[place] = 0
        self._waiting = 0
        return self.whole


class _Plain:
    """Sums of a a^T over unfolded inputs."""

    def __init__(self, groups: int, features: int, like: Tensor) -> None:
        # All rows with all columns; or strips of rows, each with the columns up to its diagonal.
        strip = features if features <= _PLAIN else _STRIP
        stops = [(start, min(start + strip, features)) for start in range(0, features, strip)]
        self._strips = [(slice(None), slice(start, stop), slice(stop)) for start, stop in stops]
        self._sums = _Sums((groups, features, features), like, self._strips)

    def add(self, layer: nn.Linear | _ConvNd, x: Tensor) -> None:
        for piece in _pieces(layer, x):
            columns = _columns(layer, piece)
            rows = columns.transpose(1, 2)
            if len(self._strips) == 1:
                self._sums.part.baddbmm_(columns, rows)
                continue
            for group, part in enumerate(self._sums.part):
                for _, down, across in self._strips:
                    part[down, across].addmm_(columns[group, down], rows[group, :, across])
        self._sums.added()

    def sums(self) -> Tensor:
        return _mirrored(self._sums.flush())


class _Shifted:
    """Sums of a a^T of a 3 x 3 convolution, from correlations of the image with itself."""

    def __init__(self, weight: Tensor) -> None:
        self._channels = channels = weight.shape[1]
        # 13 shifts of the image, 2 x 3 of its first and last row, 2 x 3 of its columns, 4 corners.
        self._sums = _Sums((len(_SHIFTS) + 6 + 6 + 4, channels, channels), weight)

    def add(self, layer: nn.Linear | _ConvNd, x: Tensor) -> None:
        samples, channels, height, width = x.shape
        part = iter(self._sums.part)
        # Rows outermost, so that a shift by rows is a slice; two zero columns, that a shift by columns runs into.
        grid = x.new_zeros(height, samples, width + 2, channels)
        grid[:, :, :width] = x.permute(2, 0, 3, 1)
        for down, right in _SHIFTS:
            _add_correlation(next(part), grid[: max(height - down, 0)], grid[down:], right)
        for row in (0, height - 1):
            for right in range(3):
                _add_correlation(next(part), grid[row], grid[row], right)
        for column in (0, width - 1):
            strip = grid[:, :, column]
            for down in range(3):
                _add_correlation(next(part), strip[: max(height - down, 0)], strip[down:], 0)
        for row in (0, height - 1):
            for column in (0, width - 1):
                _add_correlation(next(part), grid[row, :, column], grid[row, :, column], 0)
        self._sums.added()

    def sums(self) -> Tensor:
        whole = iter(self._sums.flush())
        shifts = {shift: next(whole) for shift in _SHIFTS}
        shifts |= {(-down, -right): sums.T for (down, right), sums in shifts.items() if (down, right) != (0, 0)}
        # The tap +1 never reads the first row (as its own pixel), the tap -1 never the last one.
        rows = {(tap, right): next(whole) for tap in (1, -1) for right in range(3)}
        rows |= {(tap, -right): sums.T for (tap, right), sums in rows.items() if right}
        columns = {(tap, down): next(whole) for tap in (1, -1) for down in range(3)}
        columns |= {(tap, -down): sums.T for (tap, down), sums in columns.items() if down}
        corners = {(row, column): next(whole) for row in (1, -1) for column in (1, -1)}

        blocks = self._sums.whole.new_empty(self._channels, 9, self._channels, 9)
        for i, first in enumerate(_TAPS):
            for j, second in enumerate(_TAPS):
                down, right = second[0] - first[0], second[1] - first[1]
                block = shifts[down, right].clone()
                if first[0] == second[0] != 0:
                    block -= rows[first[0], right]
                if first[1] == second[1] != 0:
                    block -= columns[first[1], down]
                if first == second in corners:
                    block += corners[first]
                blocks[:, i, :, j] = block
        return _mirrored(blocks.reshape(1, 9 * self._channels, 9 * self._channels))


def _mirrored(matrices: Tensor) -> Tensor:
    """The lower triangles, and above them the same again."""
    return matrices.tril() + matrices.tril(-1).transpose(1, 2)


def _add_correlation(to: Tensor, first: Tensor, second: Tensor, right: int) -> None:
    """Add sum_q first_q second_{q + right}^T over the (flattened) pixels q."""
    channels = to.shape[0]
    first, second = first.reshape(-1, channels), second.reshape(-1, channels)
    if right > 0:
        first, second = first[:-right], second[right:]
    elif right < 0:
        first, second = first[-right:], second[:right]
    to.addmm_(first.T, second)


def _is_3x3(layer: nn.Linear | _ConvNd) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and layer.kernel_size == (3, 3)
        and layer.stride == layer.dilation == (1, 1)
        and layer.padding in ((1, 1), "same")
    )


def _columns(layer: nn.Linear | _ConvNd, x: Tensor) -> Tensor:
    """(groups, d, rows): each row of inputs as a column."""
    if isinstance(layer, nn.Linear):
        return x.T.unsqueeze(0)
    axes = len(layer.kernel_size)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    for axis, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    x = x.unflatten(1, (layer.groups, -1))
    # (n, groups, channels, *positions, *kernel) -> (groups, channels, *kernel, n, *positions)
    positions, kernel = range(3, 3 + axes), range(3 + axes, 3 + 2 * axes)
    return x.permute(1, 2, *kernel, 0, *positions).reshape(layer.groups, layer.weight[0].numel(), -1)


def sample_columns(layer: nn.Module, x: Tensor) -> Tensor:
    """(n, groups, d, positions): what each output position of each sample of a batch reads."""
    if isinstance(layer, nn.Linear):
        return x.reshape(len(x), 1, -1, x.shape[-1]).transpose(2, 3)
    columns: Tensor = _columns(layer, x)  # type: ignore[arg-type]
    by_sample: Tensor = columns.unflatten(2, (len(x), -1)).permute(2, 0, 1, 3)
    return by_sample


def _pieces(layer: nn.Linear | _ConvNd, x: Tensor) -> Sequence[Tensor]:
    """The batch, cut so that no unfolded piece is large."""
    if isinstance(layer, nn.Linear):
        return [x]
    per_sample = math.prod(_positions(layer, x)) * layer.groups * layer.weight[0].numel()
    return torch.split(x, max(_PIECE // per_sample, 1))


def _positions(layer: _ConvNd, x: Tensor) -> list[int]:
    """Outputs along each axis of the image."""
    padding = layer._reversed_padding_repeated_twice
    axes = zip(x.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True)
    return [
        (length + padding[-2 * axis - 2] + padding[-2 * axis - 1] - dilation * (size - 1) - 1) // stride + 1
        for axis, (length, size, stride, dilation) in enumerate(axes)
    ]


def widened(x: Tensor) -> Tensor:
    """`x` in the precision that sums are taken in: float32, or float64 where it is that already."""
    return x if x.dtype is torch.float64 else x.float()
