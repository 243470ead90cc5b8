"""Selecting at an effective target against a plain search over all prefixes of the ranking."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS, mlp, selected
from torch import nn

from sparsecomp.connectivity import (
    ConnectivityGraph,
    allocate_effective,
    allocating,
    effective_sparsity,
    live_connections,
)


def scores_of(module, seed, levels=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: module.get_parameter(name).shape for name in dict.fromkeys(selected(module).values())}
    if levels is None:
        return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return {name: torch.randint(levels, shape, generator=generator).float() for name, shape in shapes.items()}


def plain(graph, scores, target, masks=None):
    """The longest prefix whose live connections are few enough, by bisection over whole masks."""
    joined = torch.cat([score.flatten() for score in scores.values()])
    alive = torch.cat([(masks or {}).get(n, torch.ones_like(s) > 0).flatten() for n, s in scores.items()])
    order = [i for i in joined.argsort(stable=True).flip(0).tolist() if alive[i]]

    def live(count):
        kept = torch.zeros(joined.numel(), dtype=torch.bool)
        kept[order[:count]] = True
        parts = kept.split([score.numel() for score in scores.values()])
        return live_connections(graph, {n: p.view(s.shape) for (n, s), p in zip(scores.items(), parts, strict=True)})

    fits, too_many = 0, len(order) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        dropped = joined.numel() - sum(int(mask.sum()) for mask in live(middle).values())
        fits, too_many = (middle, too_many) if dropped / joined.numel() >= target else (fits, middle)
    return live(fits), live(fits + 1) if fits < len(order) else None


def equal(one, two):
    return {n: m.tolist() for n, m in one.items()} == {n: m.tolist() for n, m in two.items()}


@pytest.mark.parametrize("name", NETWORKS)
@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    target=st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.85]),
    levels=st.sampled_from([None, 1, 3, 12]),
)
def test_as_the_plain_search(name, seed, target, levels):
    torch.manual_seed(0)
    module = NETWORKS[name][0]()
    graph = ConnectivityGraph.trace(module)
    scores = scores_of(module, seed, levels)
    expected, next_ = plain(graph, scores, target)
    if not any(bool(mask.any()) for mask in expected.values()):
        with pytest.raises(ValueError, match="Lower the target"):
            allocate_effective(graph, scores, target)
        return
    kept = allocate_effective(graph, scores, target)
    assert equal(kept, expected)
    assert effective_sparsity(graph, kept) >= target
    assert next_ is None or effective_sparsity(graph, next_) < target
    assert equal(live_connections(graph, kept), kept)


@pytest.mark.parametrize("name", NETWORKS)
@settings(derandomize=True, deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**31), levels=st.sampled_from([None, 4]))
def test_what_was_dropped_stays_dropped(name, seed, levels):
    torch.manual_seed(0)
    module = NETWORKS[name][0]()
    graph = ConnectivityGraph.trace(module)
    before = allocate_effective(graph, scores_of(module, seed), 0.3)
    scores = scores_of(module, seed + 1, levels)
    expected, _ = plain(graph, scores, 0.6, before)
    if any(bool(mask.any()) for mask in expected.values()):
        after = allocate_effective(graph, scores, 0.6, before)
        assert equal(after, expected)
        assert not any(bool((after[n] & ~before[n]).any()) for n in after)
        assert equal(allocate_effective(graph, scores, 0.1, after), after)
    else:
        with pytest.raises(ValueError, match="Lower the target"):
            allocate_effective(graph, scores, 0.6, before)


def test_rising_targets_are_nested():
    module = NETWORKS["residual"][0]()
    graph, scores = ConnectivityGraph.trace(module), scores_of(module, 5)
    masks = [allocate_effective(graph, scores, target) for target in (0.0, 0.3, 0.5, 0.6, 0.7)]
    for more, fewer in itertools.pairwise(masks):
        assert all(bool((more[n] | ~fewer[n]).all()) for n in more)
        assert sum(int(m.sum()) for m in more.values()) > sum(int(m.sum()) for m in fewer.values())


@pytest.mark.parametrize("scale", [0.0, 1e9])
def test_an_unlucky_sample_changes_nothing(monkeypatch, scale):
    """A bracket of no width misses, one of all width holds everything; both come to the same."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8))
    graph, scores = ConnectivityGraph.trace(module), {n: p for n, p in module.named_parameters() if p.dim() == 2}
    monkeypatch.setattr(allocating, "_SAMPLE", 500)
    monkeypatch.setattr(allocating, "_WIDTH", scale)
    expected, _ = plain(graph, {n: s.detach() for n, s in scores.items()}, 0.9)
    assert equal(allocate_effective(graph, scores, 0.9), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    module = mlp()
    graph = ConnectivityGraph.trace(module)
    scores = {name: score.to(dtype) for name, score in scores_of(module, 2).items()}
    assert equal(allocate_effective(graph, scores, 0.4), plain(graph, scores, 0.4)[0])


def test_what_cannot_be_selected_is_refused():
    graph = ConnectivityGraph.trace(mlp())
    scores = scores_of(mlp(), 0)
    with pytest.raises(ValueError, match=r"`target` is the fraction of weights that are not live .* in \[0, 1\)"):
        allocate_effective(graph, scores, 1.0)
    with pytest.raises(ValueError, match=r"0.bias connects none"):
        allocate_effective(graph, scores | {"0.bias": torch.ones(4)}, 0.5)
    with pytest.raises(ValueError, match=r"leaves 1 of 30 weights, fewer than the best path .* needs, at 0.95"):
        allocate_effective(graph, scores, 0.95)
    with pytest.raises(ValueError, match=r"the scores of '0.weight' must be finite"):
        allocate_effective(graph, scores | {"0.weight": torch.full((4, 3), float("nan"))}, 0.5)
