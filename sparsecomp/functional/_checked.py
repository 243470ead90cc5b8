"""Tensors that the functions of this folder are given, checked and widened to float64."""

import torch
from torch import Tensor

# A negative eigenvalue of this share of the mean variance is no more than float64 leaves, and harmless.
_ROUNDING = 1e-12


def floats(
    name: str, value: Tensor, meaning: str, shape: tuple[int, ...], form: str, minimum: float | None = None
) -> Tensor:
    """Return `value` in float64, detached, if it is finite and has this shape; a -1 in `shape` fits every length."""
    fits = value.dim() == len(shape) and all(want in (-1, got) for want, got in zip(shape, value.shape, strict=False))
    if not fits:
        raise ValueError(f"`{name}` is {meaning} and must have the shape {form}; got {tuple(value.shape)}.")
    value = value.detach().double()
    if not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"`{name}` is {meaning} and must be finite; got NaN or infinity. Look for overflow in the network or its data."
        )
    if minimum is not None and value.numel() and float(value.min()) < minimum:
        raise ValueError(f"`{name}` is {meaning} and must be >= {minimum:g}; got {float(value.min()):g}.")
    return value


def weight_rows(weight: Tensor) -> Tensor:
    """Return a weight (out, ...) as float64 rows (out, d), one a target unit."""
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            "`weight` is the weight of a layer and must have the shape (out, in, ...), none of them 0; got "
            f"{tuple(weight.shape)}."
        )
    rows = weight.detach().reshape(weight.shape[0], -1)
    return floats("weight", rows, "the weight of a layer", (-1, -1), "(out, in, ...)")


def covariance_of(value: Tensor, d: int) -> Tensor:
    """Return the covariance (d, d) of d units in float64, symmetric."""
    meaning = "the centred second moments E[a a^T] - E[a] E[a]^T of the units a of a layer"
    value = floats("covariance", value, meaning, (d, d), f"({d}, {d}), a row per unit or input")
    if float(value.diagonal().min()) < 0:
        raise ValueError(
            f"`covariance` is {meaning}, so no variance on its diagonal may be below 0; got "
            f"{float(value.diagonal().min()):g}. Sum in float64, and clamp what rounding leaves."
        )
    return (value + value.T) / 2


def positive(value: Tensor) -> Tensor:
    """Return a covariance with its negative eigenvalues, which rounding of the sums leaves, set to 0."""
    d = len(value)
    slack = _ROUNDING * value.trace() / d + torch.finfo(value.dtype).tiny
    if int(torch.linalg.cholesky_ex(value + slack * torch.eye(d, dtype=value.dtype, device=value.device)).info) == 0:
        return value
    eigenvalues, vectors = torch.linalg.eigh(value)
    return torch.mm(vectors * eigenvalues.clamp(min=0), vectors.T)


def factor(damped: Tensor, name: str, value: float) -> Tensor:
    """Return the Cholesky factor of a damped covariance, or of each of a batch, or say that damping was too small."""
    lower, info = torch.linalg.cholesky_ex(damped)
    if bool(info.any()):
        raise ValueError(
            f"`{name}` makes a covariance invertible and must be large enough for this one, which is singular; got "
            f"{value!r}. Leave it at its default."
        )
    return torch.as_tensor(lower)
