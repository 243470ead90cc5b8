"""Costs by forward selection: by hand, a naive reference on the data, invariances, beside exact elimination."""

import numpy as np
import pytest
import torch

from sparsecomp.functional import forward_selection as module
from sparsecomp.functional.similarity import elimination_cost, forward_selection_cost


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def correlated(n, d, seed=0):
    return normal(n, d, seed=seed) @ (torch.eye(d).double() + 0.5 * normal(d, d, seed=seed + 1) / d**0.5)


def covariance_of(a):
    return torch.cov(a.T, correction=0)


def variance_of(weight, covariance):
    return ((weight @ covariance) * weight).sum(1)


def left(z, columns):
    """The variance of z that a least-squares fit with an offset on these columns leaves."""
    design = np.column_stack([*columns, np.ones(len(z))])
    return float(np.mean((z - design @ np.linalg.lstsq(design, z, rcond=None)[0]) ** 2))


def naive(a, weight):
    """Forward selection of one target on the data, each candidate by a fit of its own."""
    a, weight = a.numpy(), weight.numpy()
    z = a @ weight
    d = len(weight)
    cost, chosen = np.zeros(d), []
    error = left(z, [])
    total = error
    for _ in range(-(-d // 4)):
        open_ = [i for i in range(d) if i not in chosen and weight[i] != 0]
        after, i = min((left(z, [a[:, k] for k in [*chosen, i]]), i) for i in open_)
        cost[i] = error
        chosen.append(i)
        error = after
    for i in range(d):
        if i not in chosen and weight[i] != 0:
            cost[i] = min(error - left(z, [a[:, k] for k in [*chosen, i]]), error)
    return torch.from_numpy(cost / (total + 1e-9))


def close(got, expected, rtol=1e-6, atol=1e-9):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def test_by_hand():
    # z = 3 a + 2 b + c + 0 d, independent of variance 1: m = 1. a is chosen and all of 14 goes with it; without a the
    # error is 5, of which b explains 4 and c 1.
    cost = forward_selection_cost(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.eye(4), torch.tensor([14.0]))
    close(cost[0], torch.tensor([14.0, 4.0, 1.0, 0.0]).double() / 14)


def test_a_chosen_input_costs_all_that_came_later():
    # 8 independent inputs, m = 2: 36 of z's 36 + 25 + 6 go with the first, 25 + 6 with the second.
    weight = torch.tensor([[6.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0]])
    cost = forward_selection_cost(weight, torch.eye(8), torch.tensor([67.0]))
    close(cost[0] * 67, torch.tensor([67.0, 1, 1, 31, 1, 1, 1, 1]).double(), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("d", [3, 8, 13])
def test_is_the_naive_one_on_the_data(seed, d):
    a = correlated(120, d, seed)
    weight = normal(5, d, seed=seed + 9)
    weight[0, :2] = 0.0
    covariance = covariance_of(a)
    cost = forward_selection_cost(weight, covariance, variance_of(weight, covariance))
    close(cost, torch.stack([naive(a, row) for row in weight]))


def test_invariances():
    covariance, weight = covariance_of(correlated(200, 12)), normal(5, 12, seed=3)
    cost = forward_selection_cost(weight, covariance, variance_of(weight, covariance))
    scale = normal(12, seed=4).abs() + 0.5
    scaled = weight / scale, covariance * torch.outer(scale, scale)
    close(forward_selection_cost(*scaled, variance_of(*scaled)), cost)
    larger = weight * torch.tensor([2.0, -1.0, 0.5, 3.0, 7.0])[:, None]
    close(forward_selection_cost(larger, covariance, variance_of(larger, covariance)), cost)
    inputs = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    permuted = weight[:, inputs], covariance[inputs][:, inputs]
    close(forward_selection_cost(*permuted, variance_of(*permuted)), cost[:, inputs])


def test_copies_dead_inputs_dead_targets_and_removed_weights():
    a = correlated(50, 8)
    a[:, 2] = 5.0
    a[:, 5] = a[:, 4]
    covariance = covariance_of(a)
    covariance[2], covariance[:, 2] = 0.0, 0.0
    weight = normal(3, 8, seed=2)
    weight[0, :2] = 0.0
    weight[1] = 0.0
    weight[2, 4] = 9.0
    cost = forward_selection_cost(weight, covariance, variance_of(weight, covariance))
    assert cost[0, :2].tolist() == [0.0, 0.0]
    assert cost[1].tolist() == [0.0] * 8
    assert cost[2, 2] == 0
    # One of the copies is chosen and does the work of both.
    assert sorted(cost[2, 4:6].tolist()) == [0.0, pytest.approx(1.0)]
    assert bool((forward_selection_cost(weight, torch.zeros(8, 8), torch.zeros(3)) == 0).all())


def test_keeps_what_exact_elimination_keeps():
    """The quarter of the inputs that each ranks first reproduces units nearly as well; at random it is far worse."""
    covariance, weight = covariance_of(correlated(600, 64)), normal(16, 64, seed=3)
    variance = variance_of(weight, covariance)

    def lost(scores):
        total = 0.0
        for row, score in zip(weight, scores, strict=True):
            kept = score.topk(16).indices
            fit = torch.linalg.solve(covariance[kept][:, kept], covariance[kept] @ row)
            total += float(row @ covariance @ row - fit @ covariance[kept] @ row)
        return total / float(variance.sum())

    exact = lost(elimination_cost(weight, covariance, variance))
    forward = lost(forward_selection_cost(weight, covariance, variance))
    assert forward < 1.1 * exact
    assert lost(torch.rand(16, 64, generator=torch.Generator().manual_seed(0))) > 1.4 * exact


def test_kernels_float32_and_chunks(monkeypatch):
    covariance, weight = covariance_of(correlated(90, 12)), normal(7, 12, seed=5)
    variance = variance_of(weight, covariance)
    flat = forward_selection_cost(weight, covariance, variance)
    kernel = forward_selection_cost(weight.reshape(7, 3, 2, 2), covariance, variance)
    assert torch.equal(kernel, flat.reshape(7, 3, 2, 2))
    narrow = forward_selection_cost(weight.float(), covariance.float(), variance.float())
    assert narrow.dtype is torch.float64
    close(narrow, flat, rtol=1e-3)
    sizes = []
    select = module._select
    monkeypatch.setattr(module, "_select", lambda r, *rest: (sizes.append(len(r)), select(r, *rest))[1])
    monkeypatch.setattr(module, "_CHUNK", 3 * 12 * 3)
    close(forward_selection_cost(weight, covariance, variance), flat, rtol=1e-12)
    assert sizes == [3, 3, 1]


def test_nothing_given_is_changed():
    covariance, weight = covariance_of(correlated(90, 12)), normal(7, 12, seed=5)
    given = weight, covariance, variance_of(weight, covariance)
    before = [tensor.clone() for tensor in given]
    forward_selection_cost(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_errors_say_what_came():
    weight, covariance, variance = torch.ones(2, 3), torch.eye(3), torch.ones(2)
    with pytest.raises(ValueError, match=r"`covariance` .* must have the shape \(3, 3\).*got \(2, 2\)"):
        forward_selection_cost(weight, torch.eye(2), variance)
    with pytest.raises(ValueError, match=r"`output_variance` .* must be >= 0; got -1"):
        forward_selection_cost(weight, covariance, -variance)
    with pytest.raises(ValueError, match=r"`weight` .* must be finite"):
        forward_selection_cost(weight * torch.nan, covariance, variance)
