"""Layerwise and ERK budgets."""

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomp import ERK, Layerwise

modest = settings(deadline=None, derandomize=True, max_examples=80, database=None)
sparsities = st.integers(0, 999).map(lambda i: i / 1000)
shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 60), st.integers(1, 60)),
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=5,
)


def dropped(masks):
    return {name: int((~mask).sum()) for name, mask in masks.items()}


def random(drawn, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.rand(shape, generator=generator) for i, shape in enumerate(drawn)}


# Layerwise


def test_layerwise_by_hand():
    scores = {"a": torch.tensor([[4.0, 1.0], [2.0, 3.0]]), "b": torch.tensor([[10.0, 20.0]])}
    masks = Layerwise(min_keep=0)(scores, 0.5)
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "a": [[True, False], [False, True]],
        "b": [[False, True]],
    }


def test_layerwise_rounds_the_largest_remainder_up():
    """0.3 of 4, 5 and 1 is 1.2, 1.5 and 0.3: in all 3, of which the floors are 2; b has the largest remainder."""
    assert dropped(Layerwise(min_keep=0)(random([(4,), (5,), (1,)]), 0.3)) == {"layer0": 1, "layer1": 2, "layer2": 0}


@modest
@given(drawn=shapes, sparsity=sparsities)
def test_layerwise_is_within_one_weight_of_its_share(drawn, sparsity):
    scores = random(drawn)
    counts = dropped(Layerwise(min_keep=0)(scores, sparsity))
    assert all(abs(counts[name] - sparsity * score.numel()) < 1 for name, score in scores.items())
    assert sum(counts.values()) == math.floor(sparsity * sum(s.numel() for s in scores.values()) + 0.5)


@modest
@given(drawn=shapes, sparsity=sparsities, seed=st.integers(0, 9))
def test_the_lowest_of_each_layer_go(drawn, sparsity, seed):
    for allocation in (Layerwise(), ERK()):
        scores = random(drawn, seed)
        for name, mask in allocation(scores, sparsity).items():
            gone = scores[name].flatten().argsort(stable=True)[: int((~mask).sum())]
            assert not bool(mask.flatten()[gone].any())


def test_layerwise_takes_what_an_earlier_mask_took_too_much():
    """a lost 3 of 4 before; of the 4 that 50% of both are, b loses only one."""
    before = {"a": torch.tensor([False, False, False, True]), "b": torch.ones(4, dtype=torch.bool)}
    masks = Layerwise(min_keep=0)({"a": torch.ones(4), "b": torch.arange(4.0)}, 0.5, before)
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "a": [False, False, False, True],
        "b": [False, True, True, True],
    }


@pytest.mark.parametrize(("sparsity", "units"), [(0.0, 0), (0.1, 0), (0.125, 1), (0.3, 1), (0.5, 2), (0.9, 3)])
def test_layerwise_units(sparsity, units):
    """Of 4 rows the nearest number goes, and one stays."""
    masks = Layerwise("unit")(random([(4, 3)]), sparsity)
    assert int((~masks["layer0"].any(1)).sum()) == units


def test_layerwise_min_keep_says_where_it_acted(caplog):
    with caplog.at_level(logging.WARNING, "sparsecomp"):
        masks = Layerwise(min_keep=3)({"small": torch.arange(4.0), "large": torch.arange(36.0)}, 0.5)
    assert dropped(masks) == {"small": 1, "large": 19}
    assert caplog.messages == ["min_keep acted: small keeps 3; other layers lose more instead."]


# ERK


def naive_erk(drawn, sparsity):
    """By bisection of eps in density_l = min(1, eps * sum(shape) / prod(shape)), unlike the code's elimination."""
    sizes = [math.prod(shape) for shape in drawn]
    raw = [sum(shape) / size for shape, size in zip(drawn, sizes, strict=True)]
    low, high = 0.0, max(1 / r for r in raw)
    for _ in range(200):
        eps = (low + high) / 2
        kept = sum(min(1.0, eps * r) * size for r, size in zip(raw, sizes, strict=True))
        low, high = (eps, high) if kept < (1 - sparsity) * sum(sizes) else (low, eps)
    return [1 - min(1.0, high * r) for r in raw]


def test_erk_by_hand():
    """raw densities (4 + 2) / 8 and (2 + 2 + 3 + 3) / 36; eps = 22 / (6 + 10) would exceed 1 in none at half."""
    result = ERK().layer_sparsities({"linear": (4, 2), "conv": (2, 2, 3, 3)}, 0.5)
    # eps * 6/8 > 1, so linear stays dense; conv keeps the other 22 - 8 = 14 of 36.
    assert result == pytest.approx({"linear": 0.0, "conv": 1 - 14 / 36})


def test_erk_by_hand_where_no_layer_is_dense():
    result = ERK().layer_sparsities({"linear": (10, 10), "conv": (4, 4, 3, 3)}, 0.8)
    eps = 0.2 * 244 / (20 + 14)
    assert result == pytest.approx({"linear": 1 - eps * 20 / 100, "conv": 1 - eps * 14 / 144})


@modest
@given(drawn=shapes, sparsity=sparsities)
def test_erk_against_an_independent_formula(drawn, sparsity):
    named = {str(i): shape for i, shape in enumerate(drawn)}
    result = ERK().layer_sparsities(named, sparsity)
    assert list(result.values()) == pytest.approx(naive_erk(drawn, sparsity), abs=1e-9)
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    assert sum(result[name] * sizes[name] for name in named) == pytest.approx(sparsity * sum(sizes.values()))
    assert all(-1e-12 <= share <= 1 for share in result.values())


def test_erk_masks_follow_their_densities():
    drawn = [(64, 32), (16, 8, 3, 3), (10, 64)]
    masks = ERK()(random(drawn), 0.9)
    counts = dropped(masks)
    for (name, count), share, shape in zip(counts.items(), naive_erk(drawn, 0.9), drawn, strict=True):
        assert abs(count - share * math.prod(shape)) < 1, name
    assert sum(counts.values()) == round(0.9 * (64 * 32 + 16 * 8 * 9 + 640))


def test_a_dense_erk_layer_stays_dense_until_min_keep_and_totals_allow():
    counts = dropped(ERK()(random([(100, 100), (4, 4)]), 0.9))
    assert counts["layer1"] == 0
    assert counts["layer0"] == round(0.9 * 10016)
