"""Second moments of layer inputs: against an explicit unfold in float64."""

import copy
import itertools

import pytest
import torch
from torch import nn

from sparsecomp import moments as moments_module
from sparsecomp.moments import InputMoments


def naive_rows(layer, x):
    """(groups, rows, d) float64, gathered one output position after the other."""
    x = x.double()
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, layer.in_features)
    axes = len(layer.kernel_size)
    x = x if x.dim() == axes + 2 else x[None]
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        padding = [(t // 2, t - t // 2) for t in total]
    else:
        padding = [(p, p) for p in (layer.padding if layer.padding != "valid" else (0,) * axes)]
    mode = {"zeros": "constant"}.get(layer.padding_mode, layer.padding_mode)
    x = nn.functional.pad(x, [p for pair in reversed(padding) for p in pair], mode=mode)
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    starts = [
        range(0, size - span + 1, stride) for size, span, stride in zip(x.shape[2:], spans, layer.stride, strict=True)
    ]
    rows = []
    for sample in x:
        for corner in itertools.product(*starts):
            window = [
                slice(begin, begin + span, d) for begin, span, d in zip(corner, spans, layer.dilation, strict=True)
            ]
            rows.append(sample[(slice(None), *window)].reshape(layer.groups, -1))
    return torch.stack(rows, dim=1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def assert_moments(layer, batches, tolerance=1e-5):
    moments = InputMoments(layer)
    for batch in batches:
        moments.update(batch)
    rows = torch.cat([naive_rows(layer, batch) for batch in batches], dim=1)
    second = rows.transpose(1, 2) @ rows
    assert moments.count == rows.shape[1]
    assert moments.total().dtype == moments.second().dtype == torch.float64
    assert moments.second().shape == (moments.groups, moments.features, moments.features)
    torch.testing.assert_close(moments.total(), rows.sum(1), rtol=0, atol=tolerance * float(rows.abs().sum(1).max()))
    torch.testing.assert_close(moments.second(), second, rtol=0, atol=tolerance * float(second.abs().max()))
    assert torch.equal(moments.second(), moments.second().transpose(1, 2))
    return moments


def test_by_hand():
    moments = InputMoments(nn.Conv1d(1, 1, 2, padding=1))
    moments.update(torch.tensor([[[1.0, 2.0]]]))  # rows (0, 1), (1, 2), (2, 0)
    assert moments.count == 3
    assert moments.total().tolist() == [[3.0, 3.0]]
    assert moments.second().tolist() == [[[5.0, 2.0], [2.0, 5.0]]]


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (7,)])
def test_linear(shape):
    assert_moments(nn.Linear(7, 3), [draw(*shape, seed=s) for s in range(3)])


def test_wide_linear_sums_only_the_lower_triangle(monkeypatch):
    monkeypatch.setattr(moments_module, "_PLAIN", 10)
    monkeypatch.setattr(moments_module, "_STRIP", 4)
    moments = assert_moments(nn.Linear(11, 3), [draw(6, 11, seed=s) for s in range(3)])
    assert not moments._products._sums.whole[0].triu(4).any()


GENERAL = {
    "1d": (nn.Conv1d(3, 4, 3), (2, 3, 9)),
    "1d strided": (nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), (2, 3, 10)),
    "1d groups": (nn.Conv1d(4, 4, 2, groups=2), (3, 4, 5)),
    "2d even": (nn.Conv2d(3, 4, (2, 4), padding=(1, 0)), (2, 3, 6, 7)),
    "2d strided": (nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1), (2, 3, 7, 6)),
    "2d dilated": (nn.Conv2d(3, 4, 3, dilation=(1, 2), padding=2), (2, 3, 6, 7)),
    "2d groups": (nn.Conv2d(6, 4, 3, padding=1, groups=2), (2, 6, 4, 5)),
    "2d depthwise": (nn.Conv2d(3, 6, 3, padding=1, groups=3), (2, 3, 4, 5)),
    "2d 1x1": (nn.Conv2d(5, 2, 1), (2, 5, 4, 4)),
    "2d 3x3 valid": (nn.Conv2d(3, 2, 3), (2, 3, 4, 5)),
    "2d 3x3 strided": (nn.Conv2d(3, 2, 3, stride=2, padding=1), (2, 3, 5, 5)),
    "2d reflect": (nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), (2, 3, 4, 5)),
    "2d circular": (nn.Conv2d(3, 2, 3, padding=(2, 1), padding_mode="circular"), (2, 3, 4, 5)),
    "2d same": (nn.Conv2d(3, 2, (2, 4), padding="same", dilation=(1, 2)), (2, 3, 5, 8)),
    "2d unbatched": (nn.Conv2d(3, 2, 2), (3, 5, 4)),
    "3d": (nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1)), (2, 2, 3, 4, 5)),
}


@pytest.mark.parametrize("case", GENERAL)
def test_convolutions(case):
    layer, shape = GENERAL[case]
    assert isinstance(assert_moments(layer, [draw(*shape, seed=s) for s in range(2)])._products, moments_module._Plain)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GENERAL)
def test_rows_are_in_the_order_of_the_weight(case):
    layer, shape = GENERAL[case]
    x = draw(*shape)
    total = naive_rows(layer, x).sum(1)
    moments = InputMoments(layer)
    moments.update(x)
    outputs = layer(x if x.dim() == layer.weight.dim() else x[None])
    outputs = (outputs - layer.bias.view(-1, *[1] * len(layer.kernel_size))).transpose(0, 1).flatten(1).sum(1)
    weight = layer.weight.reshape(layer.groups, -1, moments.features).double()
    by_moments = (weight @ moments.total().unsqueeze(-1)).flatten()
    torch.testing.assert_close(moments.total(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_moments, outputs.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 1), (2, 2), (2, 5), (3, 3), (6, 4)])
@pytest.mark.parametrize("padding", [1, "same"])
def test_shifted_correlations_of_3x3(size, padding):
    moments = assert_moments(nn.Conv2d(3, 2, 3, padding=padding), [draw(n + 1, 3, *size, seed=n) for n in range(3)])
    assert isinstance(moments._products, moments_module._Shifted)


def test_unbatched_and_channels_last_images():
    layer = nn.Conv2d(3, 2, 3, padding=1)
    assert_moments(layer, [draw(3, 5, 4), draw(2, 3, 5, 4).to(memory_format=torch.channels_last)])


def test_a_large_batch_is_unfolded_in_pieces(monkeypatch):
    monkeypatch.setattr(moments_module, "_PIECE", 200)
    sizes = []
    unfold = moments_module._columns
    monkeypatch.setattr(moments_module, "_columns", lambda layer, x: sizes.append(len(x)) or unfold(layer, x))
    assert_moments(nn.Conv2d(3, 2, 2), [draw(7, 3, 4, 4)])
    assert sizes == [1, *[1] * 7]  # the column sums, then the pieces


def test_float32_sums_do_not_lose_what_many_batches_add():
    # Inputs with mean 10: pure float32 sums would be off by more than this in the small variance.
    layer = nn.Linear(4, 2)
    batches = [0.1 * draw(50, 4, seed=s) + 10 for s in range(400)]
    moments = InputMoments(layer)
    for batch in batches:
        moments.update(batch)
    rows = torch.cat(batches).double()
    mean = moments.total()[0] / moments.count
    covariance = moments.second()[0] / moments.count - mean.outer(mean)
    torch.testing.assert_close(covariance, rows.T.cov(correction=0), rtol=0, atol=2e-5)


def test_reading_in_between_changes_nothing():
    once, twice = InputMoments(nn.Linear(3, 2)), InputMoments(nn.Linear(3, 2))
    for seed in range(11):
        once.update(draw(4, 3, seed=seed))
        twice.update(draw(4, 3, seed=seed))
        twice.second().zero_()
        twice.total().zero_()
    torch.testing.assert_close(once.second(), twice.second(), rtol=1e-6, atol=0)
    assert torch.equal(once.total(), twice.total())


def test_precisions():
    layer, x = nn.Linear(3, 2), draw(8, 3)
    exact = assert_moments(copy.deepcopy(layer).double(), [x.double()], tolerance=1e-14)
    assert exact._products._sums.part.dtype is torch.float64
    half = assert_moments(copy.deepcopy(layer).bfloat16(), [x.bfloat16()], tolerance=1e-6)
    assert half._products._sums.part.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert_moments(layer, [x], tolerance=1e-6)
    conv = nn.Conv2d(2, 2, 3, padding=1).bfloat16()
    assert_moments(conv, [draw(2, 2, 4, 4).bfloat16()], tolerance=1e-6)


def test_nothing_is_kept_of_a_batch():
    x = draw(4, 3).requires_grad_()
    moments = InputMoments(nn.Linear(3, 2))
    moments.update(x)
    assert not moments.second().requires_grad
    with torch.no_grad():
        x.zero_()
    assert moments.second().any()


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(2, 2, 3), nn.Embedding(3, 2), nn.LSTM(2, 2)])
def test_other_layers_are_refused(layer):
    with pytest.raises(TypeError, match=f"must be a Linear or Conv1d-3d; got {type(layer).__name__}"):
        InputMoments(layer)
