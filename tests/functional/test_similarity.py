"""The functions of similarity-based pruning: a reference network, cases by hand, naive references, what they preserve."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sparsecomp.functional import elimination as elimination_module
from sparsecomp.functional import merging as merging_module
from sparsecomp.functional import refitting as refitting_module
from sparsecomp.functional.similarity import (
    UnitMerge,
    apply_merge,
    elimination_cost,
    input_signature,
    merge_units,
    refit,
    signature_overlap,
    similarity_score,
    unit_credit,
)

REFERENCE = Path(__file__).parents[1] / "data" / "sp_reference.npz"
LAYERS = range(4)
ACTIVATIONS = {"tanh": torch.tanh, "sin": torch.sin, "gauss": lambda z: 2 * torch.exp(-(z**2)) - 1, "id": lambda z: z}


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mixed(n, d, seed=0):
    """Samples of correlated inputs with different means and variances."""
    return normal(n, d, seed=seed) @ normal(d, d, seed=seed + 1) / d**0.5 + normal(d, seed=seed + 2)


def moments(a):
    """Mean and covariance divided by n, streamed as sums."""
    a = a.double()
    total, second = sum(row for row in a), sum(torch.outer(row, row) for row in a)
    mean = total / len(a)
    return mean, second / len(a) - torch.outer(mean, mean)


def output_variance(weight, covariance):
    return ((weight @ covariance) * weight).sum(1)


def close(got, expected, rtol=1e-6, atol=0.0):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


# The reference network.


class Reference:
    """The network of the file, and the statistics that the functions are given."""

    def __init__(self):
        with np.load(REFERENCE, allow_pickle=False) as file:
            self.file = {name: torch.from_numpy(file[name]) for name in file.files if file[name].dtype.kind in "fb"}
            names = json.loads(str(file["activations"]))
        self.weights, self.biases = ([self[f"{kind}_{i}"] for i in LAYERS] for kind in ("weight", "bias"))
        x = self["X"].requires_grad_()
        a, z = [x], []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            z.append(a[-1] @ weight.T + bias)
            if i < 3:
                a.append(
                    torch.stack([ACTIVATIONS[name](column) for name, column in zip(names, z[-1].T, strict=True)], 1)
                )
        self.output = z[-1]
        self.z = [tensor.detach() for tensor in z]
        self.moments = [moments(tensor.detach()) for tensor in a]
        self.gradients = [g.square().mean(0) for g in torch.autograd.grad(z[-1].sum(), z, retain_graph=True)]
        variance = x.detach().var(0, correction=0)
        self.signatures = [input_signature(self.derivatives(units, x), variance) for units in [*a, z[-1]]]

    def __getitem__(self, name):
        return self.file[name].clone()

    @staticmethod
    def derivatives(units, x):
        """E[(da_i / dx_k)^2]."""
        rows = [torch.autograd.grad(column.sum(), x, retain_graph=True)[0].square().mean(0) for column in units.T]
        return torch.stack(rows)


@pytest.fixture(scope="module")
def reference():
    return Reference()


@pytest.mark.parametrize("layer", LAYERS)
class TestReference:
    def cost(self, reference, layer):
        _, covariance = reference.moments[layer]
        return elimination_cost(reference.weights[layer], covariance, reference.z[layer].var(0, correction=0))

    def test_network_is_rebuilt(self, reference, layer):
        close(reference.output.detach(), reference["output"], rtol=1e-12)
        assert reference.weights[layer].shape == reference[f"elimination_{layer}"].shape

    def test_elimination(self, reference, layer):
        close(self.cost(reference, layer), reference[f"elimination_{layer}"])

    def test_unit_credit(self, reference, layer):
        credit = unit_credit(reference.gradients[layer], reference.z[layer].var(0, correction=0))
        close(credit, reference[f"unit_credit_{layer}"])

    def test_overlap(self, reference, layer):
        overlap = signature_overlap(reference.signatures[layer], reference.signatures[layer + 1])
        close(overlap, reference[f"overlap_{layer}"])

    def test_score(self, reference, layer):
        credit = unit_credit(reference.gradients[layer], reference.z[layer].var(0, correction=0))
        overlap = signature_overlap(reference.signatures[layer], reference.signatures[layer + 1])
        score = similarity_score(self.cost(reference, layer), credit, overlap, gamma=2.0)
        close(score, reference[f"score_gamma2_{layer}"])

    def test_refit(self, reference, layer):
        mask = reference[f"mask_{layer}"]
        weight, bias = refit(reference.weights[layer], reference.biases[layer], mask, *reference.moments[layer])
        close(weight, reference[f"refit_weight_{layer}"])
        close(bias, reference[f"refit_bias_{layer}"])
        assert not weight[~mask].any()


# Elimination.


def best_cost(weight, gram, kept):
    """min over v supported on `kept` of (w - v)^T G (w - v)."""
    v = torch.zeros_like(weight)
    if kept:
        v[kept] = torch.linalg.solve(gram[kept][:, kept], gram[kept] @ weight)
    return float((weight - v) @ gram @ (weight - v))


def brute_force_cost(weight, gram):
    """Backward elimination that refits from the beginning for every candidate."""
    kept, cost = list(range(len(weight))), torch.zeros_like(weight)
    while kept:
        candidates = [(best_cost(weight, gram, [k for k in kept if k != i]), i) for i in kept]
        cost[candidates[0][1]], _ = candidates[0]
        value, gone = min(candidates)
        cost[gone] = value
        kept.remove(gone)
    return cost


def test_elimination_by_hand():
    # Of z = 2 a + b with var 1, 4 and covariance 1: without a, b takes over 2 * 1 / 4: 4 (1 - 1/4) = 3 is lost; without
    # b, a takes over 1: 4 - 1 = 3 too; then all of the variance 4 + 4 + 4 = 12. For z = a only b goes free.
    gram = double([1.0, 1.0], [1.0, 4.0])
    weight = double([2.0, 1.0], [1.0, 0.0])
    cost = elimination_cost(weight, gram, double(12.0, 1.0), damping=0.0)
    close(cost[0].sort().values, double(0.25, 1.0), rtol=1e-7)
    close(cost[1], double(1.0, 0.0), rtol=1e-7)
    assert cost[1, 1] == 0


def test_elimination_follows_the_refitted_remainder():
    # Independent inputs of variance 1 would go in the order of w^2; a copy makes its twin cheap, then dear.
    gram = double([1.0, 0.99, 0.0], [0.99, 1.0, 0.0], [0.0, 0.0, 1.0])
    cost = elimination_cost(double([1.0, 1.1, 0.5]), gram, double(1.0), damping=0.0)[0]
    assert cost.argsort().tolist() == [0, 2, 1]
    assert cost[0] == pytest.approx(1 - 0.99**2, rel=1e-6)
    assert cost[2] == pytest.approx(1 - 0.99**2 + 0.25, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("damping", [0.0, 1e-5, 0.3])
def test_elimination_is_the_brute_force_one(seed, damping):
    _, covariance = moments(mixed(60, 7, seed))
    weight = normal(5, 7, seed=seed + 10)
    variance = output_variance(weight, covariance)
    damped = covariance + torch.eye(7).double() * (damping * covariance.trace() / 7 + 1e-9)
    expected = torch.stack([brute_force_cost(row, damped) for row in weight]) / (variance + 1e-9)[:, None]
    close(elimination_cost(weight, covariance, variance, damping=damping), expected, rtol=1e-7)


def test_elimination_ends_at_the_whole_variance_and_is_cumulative():
    _, covariance = moments(mixed(200, 20))
    weight = normal(6, 20, seed=3)
    cost = elimination_cost(weight, covariance, output_variance(weight, covariance), damping=0.0)
    close(cost.max(1).values, torch.ones(6).double(), rtol=1e-7)
    assert bool((cost > 0).all())


def test_elimination_of_convolution_weights_and_float32():
    _, covariance = moments(mixed(90, 12))
    weight = normal(4, 12, seed=5)
    variance = output_variance(weight, covariance)
    flat = elimination_cost(weight, covariance, variance)
    kernel = elimination_cost(weight.reshape(4, 3, 2, 2), covariance, variance)
    assert torch.equal(kernel, flat.reshape(4, 3, 2, 2))
    narrow = elimination_cost(weight.float(), covariance.float(), variance.float())
    assert narrow.dtype is torch.float64
    close(narrow, flat, rtol=1e-3)


def test_elimination_in_chunks(monkeypatch):
    _, covariance = moments(mixed(90, 8))
    weight = normal(7, 8, seed=5)
    whole = elimination_cost(weight, covariance, output_variance(weight, covariance))
    sizes = []
    eliminate = elimination_module._eliminate
    monkeypatch.setattr(elimination_module, "_eliminate", lambda b, h: (sizes.append(len(b)), eliminate(b, h))[1])
    for chunk, expected in [(1, [1] * 7), (3 * 64, [3, 3, 1])]:
        monkeypatch.setattr(elimination_module, "_CHUNK", chunk)
        sizes.clear()
        close(elimination_cost(weight, covariance, output_variance(weight, covariance)), whole, rtol=1e-12)
        assert sizes == expected


def test_elimination_invariances():
    _, covariance = moments(mixed(150, 9))
    weight = normal(5, 9, seed=4)

    def cost(w, c, damping):
        return elimination_cost(w, c, output_variance(w, c), damping=damping)

    exact, damped = cost(weight, covariance, 0.0), cost(weight, covariance, 1e-5)
    scale = normal(9, seed=6).abs() + 0.5
    close(cost(weight / scale, covariance * torch.outer(scale, scale), 0.0), exact, rtol=1e-5)
    close(cost(weight / 3, covariance * 9, 1e-5), damped, rtol=1e-5)
    close(cost(weight * double(2.0, -1.0, 0.5, 3.0, 7.0)[:, None], covariance, 1e-5), damped, rtol=1e-5)
    inputs, targets = torch.randperm(9, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 1, 0, 4, 2])
    permuted = cost(weight[targets][:, inputs], covariance[inputs][:, inputs], 1e-5)
    close(permuted, damped[targets][:, inputs], rtol=1e-7)


def test_elimination_of_dead_inputs_dead_targets_and_removed_weights():
    a = mixed(50, 6)
    a[:, 2] = 5.0
    a[:, 5] = a[:, 4]
    _, covariance = moments(a)
    covariance[2], covariance[:, 2] = 0.0, 0.0
    weight = normal(3, 6, seed=2)
    weight[0, :2] = 0.0
    weight[1] = 0.0
    cost = elimination_cost(weight, covariance, output_variance(weight, covariance))
    assert bool(torch.isfinite(cost).all())
    assert cost[0, :2].tolist() == [0.0, 0.0]
    assert cost[1].tolist() == [0.0] * 6
    assert 0 < cost[2, 2] < 1e-4
    assert min(cost[2, 4], cost[2, 5]) < 1e-4 < max(cost[2, 4], cost[2, 5])
    assert bool(torch.isfinite(elimination_cost(weight, torch.zeros(6, 6), torch.zeros(3))).all())


def test_elimination_survives_covariances_rounded_below_zero():
    a = mixed(4000, 3) @ normal(3, 40, seed=7)
    rounded = torch.cov(a.T, correction=0).float()
    rounded += normal(40, 40, seed=8).float() * 2e-5
    rounded = (rounded + rounded.T) / 2
    rounded.diagonal().clamp_(min=0)
    assert torch.linalg.eigvalsh(rounded.double())[0] < -2e-5
    weight = normal(5, 40, seed=9)
    cost = elimination_cost(weight, rounded, output_variance(weight, rounded.double()), damping=1e-7)
    assert bool(torch.isfinite(cost).all())
    assert float(cost.min()) >= 0
    close(cost.max(1).values, torch.ones(5).double(), rtol=0.02)


# Credits, signatures, scores.


def test_credit_of_a_rescaled_unit():
    gradient, variance = double(1.0, 4.0), double(3.0, 0.25)
    scale = double(10.0, -0.1)
    close(unit_credit(gradient, variance), double(3.0, 1.0), rtol=1e-12)
    close(unit_credit(gradient / scale**2, variance * scale**2), double(3.0, 1.0), rtol=1e-12)


def test_signatures_by_hand():
    signature = input_signature(double([1.0, 3.0, 0.0], [0.0, 0.0, 0.0], [2e-200, 6e-200, 0.0]), double(2.0, 2.0, 9.0))
    close(signature, double([0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.25, 0.75, 0.0]), rtol=1e-12)
    multiplied = double([2.0, 6.0, 0.0])
    close(input_signature(multiplied), signature[:1], rtol=1e-12)
    close(input_signature(multiplied * 7), signature[:1], rtol=1e-12)


def test_signature_of_a_rescaled_input():
    derivative, variance, scale = normal(4, 3).square(), double(1.0, 2.0, 3.0), double(10.0, 0.1, 2.0)
    close(
        input_signature(derivative / scale**2, variance * scale**2), input_signature(derivative, variance), rtol=1e-12
    )


def test_overlap_is_the_naive_sum():
    source, target = input_signature(normal(5, 4).square()), input_signature(normal(3, 4, seed=1).square())
    overlap = signature_overlap(source, target)
    naive = [[sum(min(float(a), float(b)) for a, b in zip(u, v, strict=True)) for u in source] for v in target]
    close(overlap, torch.tensor(naive, dtype=torch.float64), rtol=1e-12)
    close(signature_overlap(source, source).diagonal(), torch.ones(5).double(), rtol=1e-12)
    # A small overlap is a small number, not the rest of a cancellation.
    assert signature_overlap(double([1e-14, 1.0]), double([1.0, 0.0])).item() == 1e-14


def test_score_of_kernels():
    cost, credit, overlap = normal(2, 3, 1, 2).square(), double(1.0, 10.0), normal(2, 6, seed=1).square()
    for gamma in (0.0, 0.5, 2.0):
        score = similarity_score(cost, credit, overlap, gamma=gamma)
        for j, i in itertools.product(range(2), range(6)):
            expected = float(cost[j].flatten()[i] * credit[j] * overlap[j, i] ** gamma)
            assert score[j].flatten()[i] == pytest.approx(expected, rel=1e-12)
    assert torch.equal(similarity_score(cost, credit), similarity_score(cost, credit, overlap * 0, gamma=0.0))
    assert torch.equal(
        similarity_score(cost, credit, overlap.reshape(cost.shape), gamma=2.0),
        similarity_score(cost, credit, overlap, gamma=2.0),
    )


# Merging.


def copies(n=300):
    """Hidden units of which 1 duplicates 0, 3 is 2 scaled, 4 is 2 negated, 6 is 5 scaled, negated and shifted."""
    a = normal(n, 8).tanh()
    a[:, 1] = a[:, 0]
    a[:, 3], a[:, 4] = 3 * a[:, 2], -a[:, 2]
    a[:, 6] = 4 - 0.5 * a[:, 5]
    return a


def test_merge_by_hand():
    merge = merge_units(*moments(copies()))
    assert merge.kept.tolist() == [0, 0, 2, 2, 2, 5, 5, 7]
    assert merge.dropped.tolist() == [False, True, False, True, True, False, True, False]
    close(merge.slope, double(1.0, 1.0, 1.0, 3.0, -1.0, 1.0, -0.5, 1.0), rtol=1e-10)
    close(merge.offset, double(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_copies_preserves_the_network(dtype):
    a = copies()
    rest = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    layer, before = rest[0], rest(a.to(dtype)).detach()
    merge = merge_units(*moments(a), tau=1.0)
    given = layer.weight.detach().clone(), layer.bias.detach().clone()
    weight, bias = apply_merge(merge, layer.weight, layer.bias)
    assert weight.dtype is bias.dtype is dtype
    assert not weight.requires_grad
    assert not bias.requires_grad
    assert torch.equal(layer.weight, given[0])
    assert torch.equal(layer.bias, given[1])
    assert not weight[:, merge.dropped].any()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    assert (rest(a.to(dtype)) - before).abs().max() < 1e-5
    without = a.clone()
    without[:, merge.dropped] = 1e3  # what was dropped is not read
    assert torch.equal(rest(without.to(dtype)), rest(a.to(dtype)))


def test_merge_is_least_squares():
    a = mixed(200, 2)
    a[:, 1] = 0.7 * a[:, 0] + 0.1 * a[:, 1]
    merge = merge_units(*moments(a), tau=0.5)
    assert merge.kept.tolist() == [0, 0]
    design = torch.stack([a[:, 0], torch.ones(200).double()], 1)
    slope, offset = torch.linalg.lstsq(design, a[:, 1]).solution.tolist()
    assert merge.slope[1].item() == pytest.approx(slope, rel=1e-9)
    assert merge.offset[1].item() == pytest.approx(offset, rel=1e-9)


def covariance_from(correlation, deviation):
    return torch.tensor(correlation, dtype=torch.float64) * torch.outer(deviation, deviation)


def test_merge_is_not_transitive_and_counts_neighbours():
    # 1 is like 0 and 2, which are not alike: 1 is kept for both. 3 is like 2 only, which is dropped: 3 stays.
    # (2 is like as many as 1, which comes first.)
    correlation = [[1.0, 0.9, 0.63, 0.5], [0.9, 1.0, 0.9, 0.75], [0.63, 0.9, 1.0, 0.87], [0.5, 0.75, 0.87, 1.0]]
    assert torch.linalg.eigvalsh(torch.tensor(correlation))[0] > 0
    deviation = double(1.0, 5.0, 0.1, 2.0)
    for sign in (1.0, -1.0):
        merge = merge_units(torch.zeros(4), covariance_from(correlation, deviation * double(1.0, sign, 1.0, 1.0)), 0.86)
        assert merge.kept.tolist() == [1, 1, 1, 3]
        close(merge.slope, double(0.9 * sign / 5, 1.0, 0.9 * sign * 0.1 / 5, 1.0), rtol=1e-10)


def test_merge_goes_to_the_most_similar_kept_unit():
    # 1 is kept first for 0, 2 and 3; then 4, which 3 is more like.
    correlation = torch.eye(5).double()
    for i, k, value in [(1, 0, 0.8), (1, 2, 0.8), (1, 3, 0.8), (4, 3, 0.85), (1, 4, 0.7)]:
        correlation[i, k] = correlation[k, i] = value
    for i, k, value in [(0, 2, 0.6), (0, 3, 0.6), (2, 3, 0.6), (0, 4, 0.5), (2, 4, 0.5)]:
        correlation[i, k] = correlation[k, i] = value
    assert torch.linalg.eigvalsh(correlation)[0] > 0
    merge = merge_units(torch.zeros(5), correlation, 0.75)
    assert merge.kept.tolist() == [1, 1, 1, 4, 4]
    assert merge.slope[3].item() == pytest.approx(0.85, rel=1e-9)


def test_merge_counts_only_units_not_yet_covered():
    # 0 covers 1, 2, 3. Of the rest 4 is like more units (2, 3, 5), but 5 covers more: 4 and 6.
    similar = torch.eye(7, dtype=torch.bool)
    for i, k in [(0, 1), (0, 2), (0, 3), (4, 2), (4, 3), (4, 5), (5, 6)]:
        similar[i, k] = similar[k, i] = True
    assert merging_module._cover(similar).nonzero().flatten().tolist() == [0, 5]


def test_merge_threshold_is_inclusive_and_tau_matters():
    covariance = covariance_from([[1.0, 0.9], [0.9, 1.0]], double(1.0, 1.0))
    assert merge_units(torch.zeros(2), covariance, 0.9).kept.tolist() == [0, 0]
    assert merge_units(torch.zeros(2), covariance, 0.91).kept.tolist() == [0, 1]


def test_merge_does_not_depend_on_units():
    a = mixed(300, 12)
    a[:, 6:] = a[:, :6] + 0.2 * a[:, 6:]
    plain = merge_units(*moments(a), tau=0.9)
    assert 0 < int(plain.dropped.sum()) < 12
    scale, shift = normal(12, seed=3) * 3, normal(12, seed=4)
    scaled = merge_units(*moments(a * scale + shift), tau=0.9)
    assert scaled.kept.tolist() == plain.kept.tolist()
    close(scaled.slope, plain.slope * scale / scale[plain.kept], rtol=1e-8)


def test_dead_and_constant_units_stay():
    a = copies()
    a[:, 0] = 0.0
    a[:, 1] = 0.0
    a[:, 5] = 1e6 + 100 * a[:, 2]  # float32 sums could not tell it from a constant
    a[:, 7] = 3.0
    mean, covariance = moments(a)
    covariance.diagonal().clamp_(min=0)
    merge = merge_units(mean, covariance, 0.5)
    assert merge.kept.tolist() == [0, 1, 2, 2, 2, 5, 6, 7]
    assert bool(torch.isfinite(merge.slope).all())
    assert bool(torch.isfinite(merge.offset).all())
    all_dead = merge_units(torch.zeros(3), torch.zeros(3, 3))
    assert all_dead.kept.tolist() == [0, 1, 2]
    assert all_dead.slope.tolist() == [1.0] * 3
    assert all_dead.offset.tolist() == [0.0] * 3


def test_merged_channels_of_a_convolution_and_of_a_flattened_one():
    image = normal(5, 3, 6, 6)
    image[:, 2] = 2 * image[:, 0] - 1
    merge = merge_units(*moments(image.transpose(0, 1).reshape(3, -1).T))
    assert merge.kept.tolist() == [0, 1, 0]
    conv, linear = nn.Conv2d(3, 4, 3).double(), nn.Linear(3 * 36, 4).double()
    weight, bias = apply_merge(merge, conv.weight, conv.bias)
    close(nn.functional.conv2d(image, weight, bias), conv(image), rtol=0, atol=1e-9)
    weight, bias = apply_merge(merge, linear.weight.reshape(4, 3, 36), linear.bias)
    got = nn.functional.linear(image.flatten(1), weight.flatten(1), bias)
    close(got, linear(image.flatten(1)), rtol=0, atol=1e-9)
    assert not weight[:, 2].any()


# Refit.


@pytest.mark.parametrize("seed", range(3))
def test_refit_is_lstsq_on_the_data(seed):
    n, d, out = 120, 9, 6
    a, weight, bias = mixed(n, d, seed), normal(out, d, seed=seed + 5), normal(out, seed=seed + 6)
    mask = normal(out, d, seed=seed + 7) > 0
    mask[0], mask[1] = True, False
    z = a @ weight.T + bias
    ridge = 1e-3
    got_weight, got_bias = refit(weight, bias, mask, *moments(a), ridge=ridge)
    for j in range(2, out):
        kept = mask[j].nonzero().flatten()
        centred = a[:, kept] - a[:, kept].mean(0)
        shrink = ridge * centred.square().mean(0).mean() + 1e-8
        # The ridge as samples: sqrt(n r) times each unit vector, with target 0.
        design = torch.cat([centred, (n * shrink).sqrt() * torch.eye(len(kept)).double()])
        target = torch.cat([z[:, j] - z[:, j].mean(), torch.zeros(len(kept)).double()])
        solution = torch.linalg.lstsq(design, target).solution
        close(got_weight[j, kept], solution, rtol=1e-7)
        assert got_bias[j].item() == pytest.approx(float(z[:, j].mean() - a[:, kept].mean(0) @ solution), rel=1e-7)
    assert torch.equal(got_weight[0], weight[0])
    assert got_bias[0] == bias[0]
    assert not got_weight[1].any()
    assert got_bias[1].item() == pytest.approx(float(z[:, 1].mean()), rel=1e-9)
    assert not got_weight[~mask].any()
    close((a @ got_weight.T + got_bias).mean(0), z.mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_refit_of_an_over_complete_layer_is_exact(dtype):
    basis = normal(400, 6).tanh()
    a = torch.cat([basis, basis @ normal(6, 10, seed=1) + normal(10, seed=2)], 1)
    a[:, :6] *= double(1.0, 0.03, 10.0, 1.0, 1.0, 0.3)  # units of different scales
    weight, bias = normal(5, 16, seed=3).to(dtype), normal(5, seed=4).to(dtype)
    mask = torch.zeros(5, 16, dtype=torch.bool)
    mask[:, :6] = True
    mask[1, 8:12] = True  # more than needed, so that the kept ones are dependent
    before = nn.functional.linear(a.to(dtype), weight, bias)
    got_weight, got_bias = refit(weight, bias, mask, *moments(a))
    assert got_weight.dtype is got_bias.dtype is dtype
    after = nn.functional.linear(a.to(dtype), got_weight, got_bias)
    assert (after - before).abs().max() < 1e-5 * before.std()
    assert not got_weight[~mask].any()
    ridged, _ = refit(weight, bias, mask, *moments(a), exact_below=0.0)
    assert (ridged - got_weight).abs().max() > 1e-3


def test_refit_is_exact_from_the_difference_of_similar_inputs():
    a = normal(300, 3)
    a[:, 1] = a[:, 0] + 0.01 * a[:, 1]
    a[:, 2] = 100 * (a[:, 1] - a[:, 0])
    weight, bias = refit(double([0.5, 0.25, 1.0]), None, torch.tensor([[True, True, False]]), *moments(a))
    close(weight, double([-99.5, 100.25, 0.0]), rtol=1e-6)
    close(bias, double(0.0), atol=1e-6)


def test_refit_is_ridged_where_the_kept_inputs_do_not_determine_the_unit():
    a, weight, mask = mixed(50, 4), normal(1, 4, seed=9), torch.tensor([[True, True, True, False]])
    assert torch.equal(
        refit(weight, None, mask, *moments(a))[0], refit(weight, None, mask, *moments(a), exact_below=0.0)[0]
    )
    exact, _ = refit(weight, None, mask, *moments(a), exact_below=0.999)
    _, covariance = moments(a)
    close(exact[0, :3], torch.linalg.solve(covariance[:3, :3], covariance[:3] @ weight[0]), rtol=1e-7)


def test_refit_by_hand_of_kernels_and_of_a_missing_bias():
    # z = a + 2 b with b = a + noise of variance 1: keeping a, its weight is 3, and 2 E[b - a] = 2 goes into the bias.
    covariance, mean = double([4.0, 4.0], [4.0, 5.0]), double(1.0, 2.0)
    mask = torch.tensor([True, False]).reshape(1, 1, 2, 1)
    weight, bias = refit(double(1.0, 2.0).reshape(1, 1, 2, 1), None, mask, mean, covariance, ridge=0.0)
    close(weight, double(3.0, 0.0).reshape(1, 1, 2, 1), rtol=1e-7)
    close(bias, double(2.0), rtol=1e-7)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_refit_takes_eigenvectors_of_rows_that_may_need_them_only(monkeypatch, noise):
    a = normal(400, 12)
    # The last six are combinations of the first ones up to noise; one is nearly a copy, one is constant.
    a[:, 6:] = a[:, :6] @ normal(6, 6, seed=1) + noise * normal(400, 6, seed=2)
    a[:, 1], a[:, 2] = a[:, 0] + 1e-4 * a[:, 1], 3.0
    weight, mask = normal(20, 12, seed=3), torch.rand(20, 12, generator=torch.Generator().manual_seed(4)) < 0.6
    asked = []
    smallest = refitting_module._smallest
    monkeypatch.setattr(refitting_module, "_smallest", lambda g, m: (asked.append(len(g)), smallest(g, m))[1])
    screened = refit(weight, None, mask, *moments(a))
    few = sum(asked)
    every = lambda gram, *_: torch.ones(len(gram), dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(refitting_module, "_may_be_determined", every)
    for got, expected in zip(screened, refit(weight, None, mask, *moments(a)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert few < sum(asked) - few


def test_refit_in_chunks(monkeypatch):
    a, weight, bias, mask = mixed(90, 8), normal(9, 8, seed=1), normal(9, seed=2), normal(9, 8, seed=3) > 0.3
    whole = refit(weight, bias, mask, *moments(a))
    sizes = []
    fit = refitting_module._fit
    monkeypatch.setattr(refitting_module, "_fit", lambda rows, *rest: (sizes.append(len(rows)), fit(rows, *rest))[1])
    monkeypatch.setattr(refitting_module, "_CHUNK", 1)
    for got, expected in zip(refit(weight, bias, mask, *moments(a)), whole, strict=True):
        close(got, expected, rtol=1e-9, atol=1e-12)
    assert sizes == [1] * 9


def test_refit_of_constant_inputs():
    a = mixed(60, 4)
    a[:, 0], a[:, 3] = 2.0, 0.0
    mean, covariance = moments(a)
    covariance[0], covariance[:, 0] = 0.0, 0.0
    weight = normal(3, 4, seed=1)
    mask = torch.tensor([[True, False, True, True], [False, True, True, False], [True, False, False, True]])
    got_weight, got_bias = refit(weight, None, mask, mean, covariance)
    assert bool(torch.isfinite(got_weight).all())
    z = a @ weight.T
    close((a @ got_weight.T + got_bias)[:, 1], z[:, 1], rtol=0, atol=1e-9)
    close((a @ got_weight.T + got_bias).mean(0), z.mean(0), rtol=1e-9)
    dead, bias = refit(weight, None, mask, torch.zeros(4), torch.zeros(4, 4))
    assert bool(torch.isfinite(dead).all())
    assert bias.tolist() == [0.0] * 3


def test_refit_is_equivariant():
    a, weight, bias, mask = mixed(90, 6), normal(4, 6, seed=1), normal(4, seed=2), normal(4, 6, seed=3) > 0
    got_weight, got_bias = refit(weight, bias, mask, *moments(a))
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    permuted_weight, permuted_bias = refit(weight[:, order], bias, mask[:, order], *moments(a[:, order]))
    close(permuted_weight, got_weight[:, order], rtol=1e-8)
    close(permuted_bias, got_bias, rtol=1e-8)
    scaled_weight, _ = refit(weight / 5, bias, mask, *moments(a * 5))
    close(scaled_weight, got_weight / 5, rtol=1e-5)


def test_nothing_given_is_changed():
    a, weight, bias, mask = mixed(40, 5), normal(3, 5, seed=1), normal(3, seed=2), normal(3, 5, seed=3) > 0
    mean, covariance = moments(a)
    given = [weight, bias, mask, mean, covariance]
    before = [tensor.clone() for tensor in given]
    refit(weight, bias, mask, mean, covariance)
    elimination_cost(weight, covariance, output_variance(weight, covariance))
    apply_merge(merge_units(mean, covariance, 0.1), weight, bias)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


# Errors.

MERGE = UnitMerge(torch.tensor([0, 0]), double(1.0, 1.0), double(0.0, 0.0))
EYE, ONES, ONE = torch.eye(2), torch.ones(2), torch.ones(1)
WEIGHT, MASK = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: merge_units(ONES, EYE, 0.0), r"`tau` is .* must be in \(0, 1\]; got 0.0\. To merge nothing"),
        (lambda: merge_units(ONES, EYE, 1.5), r"`tau` is .* got 1.5"),
        (lambda: merge_units(EYE, EYE), r"`mean` is .* shape \(units,\); got \(2, 2\)"),
        (lambda: merge_units(ONES * NAN, EYE), r"`mean` is .* must be finite; got NaN .* Look for overflow"),
        (lambda: merge_units(ONES, torch.eye(3)), r"`covariance` is .* shape \(2, 2\), .*; got \(3, 3\)"),
        (lambda: merge_units(ONES, -EYE), r"`covariance` is .* below 0; got -1\. Sum in float64"),
        (lambda: apply_merge(MERGE, torch.ones(1, 3)), r"`weight` is .* shape \(out, 2, \.\.\.\); got \(1, 3\)"),
        (lambda: apply_merge(MERGE, WEIGHT, ONES), r"`bias` is .* shape \(1,\); got \(2,\)"),
        (lambda: elimination_cost(ONES, EYE, ONE), r"`weight` is .* shape \(out, in, \.\.\.\), .*; got \(2,\)"),
        (lambda: elimination_cost(WEIGHT * NAN, EYE, ONE), r"`weight` is .* must be finite"),
        (lambda: elimination_cost(WEIGHT, torch.eye(3), ONE), r"`covariance` is .*; got \(3, 3\)"),
        (lambda: elimination_cost(WEIGHT, EYE, ONES), r"`output_variance` is .* shape \(1,\); got \(2,\)"),
        (lambda: elimination_cost(WEIGHT, EYE, -ONE), r"`output_variance` is .* must be >= 0; got -1"),
        (lambda: elimination_cost(WEIGHT, EYE, ONE, damping=-1.0), r"`damping` is .* must be >= 0; got -1.0"),
        (
            lambda: elimination_cost(torch.ones(1, 3), 1e9 * torch.ones(3, 3), ONE, damping=0.0),
            r"`damping` makes .* singular; got 0.0\. Leave it",
        ),
        (lambda: unit_credit(-ONES, ONES), r"`output_gradient` is .* must be >= 0; got -1"),
        (lambda: unit_credit(ONES, ONE), r"`output_variance` is .* shape \(2,\); got \(1,\)"),
        (lambda: input_signature(ONES), r"`squared_derivative` is .* shape \(units, inputs\); got \(2,\)"),
        (lambda: input_signature(EYE, torch.ones(3)), r"`input_variance` is .* shape \(2,\); got \(3,\)"),
        (lambda: signature_overlap(EYE, torch.eye(3)), r"`target_signature` is .* shape \(out, 2\); got \(3, 3\)"),
        (lambda: similarity_score(WEIGHT, ONE, WEIGHT, gamma=4.0), r"`gamma` is .* in \[0, 4\); got 4.0\. Use 0"),
        (lambda: similarity_score(WEIGHT, ONE, WEIGHT, gamma=-1.0), r"`gamma` is .* got -1.0"),
        (
            lambda: similarity_score(WEIGHT, ONE, gamma=2.0),
            r"`overlap` is .* got None with gamma 2.0\. Pass `signature_",
        ),
        (lambda: similarity_score(WEIGHT, ONES), r"`credit` is .* shape \(1,\); got \(2,\)"),
        (lambda: similarity_score(WEIGHT, ONE, EYE, gamma=2.0), r"`overlap` is .* shape \(1, 2\); got \(2, 2\)"),
        (
            lambda: refit(WEIGHT, None, MASK[:, :1], ONES, EYE),
            r"`mask` says .* shape of `weight`, \(1, 2\); got \(1, 1\)",
        ),
        (lambda: refit(WEIGHT, ONES, MASK, ONES, EYE), r"`bias` is .* shape \(1,\); got \(2,\)"),
        (lambda: refit(WEIGHT, None, MASK, ONE, EYE), r"`mean` is .* shape \(2,\); got \(1,\)"),
        (lambda: refit(WEIGHT, None, MASK, ONES, EYE, ridge=-1.0), r"`ridge` is .* must be >= 0; got -1.0"),
        (lambda: refit(WEIGHT, None, MASK, ONES, EYE, exact_below=1.0), r"`exact_below` is .* in \[0, 1\); got 1.0"),
    ],
)
def test_errors_say_what_came(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match=r"`mask` says what is kept and must be bool, .*; got torch.float32\. Pass"):
        refit(WEIGHT, None, torch.ones(1, 2), ONES, EYE)
