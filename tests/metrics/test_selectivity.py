"""Selectivity and symmetry purity: by hand, invariances, and what is refused."""

import math

import pytest
import torch

from sparsecomp.metrics.functional import selectivity, selectivity_gain, symmetry_purity


def grid(side=9):
    axis = torch.linspace(-1, 1, side).double()
    return torch.meshgrid(axis, axis, indexing="ij")


def test_by_hand():
    x, y = grid()
    units = torch.stack([x, y**2, x * y, x + y, torch.ones_like(x)], 2)
    found = selectivity(units)
    # Of x + y both main effects have half: H = log 2.
    expected = torch.tensor([1, 1, 1, 1 - math.log(2) / math.log(3), math.nan], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, equal_nan=True)


def test_equal_thirds_are_least():
    x, y = grid()
    parts = [part / part.std(correction=0) for part in (x, y, x * y)]
    assert float(selectivity(sum(parts)[..., None])) == pytest.approx(0, abs=1e-12)


def test_invariances():
    torch.manual_seed(0)
    maps = torch.randn(6, 7, 5).double()
    order = torch.randperm(5)
    torch.testing.assert_close(selectivity(maps[..., order] * -3 + 2), selectivity(maps)[order])
    gains = [selectivity_gain(m, torch.Generator().manual_seed(1)) for m in (maps, maps * torch.rand(5) + 1)]
    assert gains[0] == pytest.approx(gains[1], abs=1e-9)
    h, flipped = maps.reshape(-1, 5), maps.flip(1).reshape(-1, 5)
    torch.testing.assert_close(
        symmetry_purity(h[:, order] * -3 + 2, flipped[:, order] * 5), symmetry_purity(h, flipped)[order]
    )


def test_a_rotated_basis_gains_nothing():
    torch.manual_seed(0)
    x, y = grid()
    units = torch.stack([x, y, x**2 - (x**2).mean(), y**2 - (y**2).mean()], 2)
    units = units / units.std((0, 1), correction=0)
    gain = selectivity_gain(units, torch.Generator().manual_seed(0), rotations=200)
    rotated = [
        selectivity_gain(units @ torch.linalg.qr(torch.randn(4, 4).double()).Q, torch.Generator().manual_seed(0), 50)
        for _ in range(50)
    ]
    assert gain > 0.2
    assert abs(sum(rotated) / 50) < 0.05


def test_undefined():
    x, _ = grid()
    one = torch.stack([x, torch.zeros_like(x)], 2)
    assert math.isnan(selectivity_gain(one, torch.Generator()))
    assert symmetry_purity(torch.zeros(4, 1), torch.rand(4, 1)).isnan().all()


def test_purity_by_hand():
    x = torch.linspace(-1, 1, 5).double()[:, None]
    h = torch.cat([x, x**2, x + x**2 - (x**2).mean()], 1)
    odd, even = float((x**2).mean()), float((x**2).var(correction=0))
    mixed = (1 + abs(even - odd) / (even + odd)) / 2
    found = symmetry_purity(h, torch.cat([-x, x**2, -x + x**2 - (x**2).mean()], 1))
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, mixed]).double())


@pytest.mark.parametrize("shape", [(3, 4), (1, 4, 2)])
def test_wrong_maps(shape):
    with pytest.raises(ValueError, match="`maps` is the response of each unit over a grid"):
        selectivity(torch.zeros(shape))


def test_wrong_pairs():
    with pytest.raises(ValueError, match="`responses` and `transformed`"):
        symmetry_purity(torch.zeros(3, 2), torch.zeros(4, 2))
