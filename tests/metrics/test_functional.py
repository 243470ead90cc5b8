"""Each function against a case by hand and an independent naive reference."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score
from torch import nn

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.functions import Pattern, Tree
from sparsecomp.metrics import functional as mf
from sparsecomp.metrics.functional.ground_truth import Subtrees
from sparsecomp.metrics.functional.supports import hidden_spaces, reaching_outputs, unit_depths
from sparsecomp.models import MLP, SmallConvNet


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_masks(net, density, seed):
    generator = seeded(seed)
    return {n: torch.rand(p.shape, generator=generator) < density for n, p in net.named_parameters() if p.dim() > 1}


class Skip(nn.Module):
    """x -> a, a -> b, out(cat(b, x) + residual of a)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(9, 2)

    def forward(self, x):
        a = self.a(x).relu()
        return self.out(torch.cat([a + self.b(a).relu(), x], dim=-1))


NETWORKS = {
    "mlp": lambda: MLP(6, 3, hidden=(7, 5)),
    "conv": lambda: SmallConvNet(2, 3, image_size=4, channels=(4, 6)),
    "grouped": lambda: nn.Sequential(nn.Conv2d(4, 8, 1, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)),
    "skip": Skip,
}


def paths(graph, masks):
    """The same graph in networkx, weight by weight in plain loops."""
    net = nx.DiGraph()
    net.add_nodes_from((space, unit) for space, size in enumerate(graph.sizes) for unit in range(size))
    for step in graph.steps:
        if hasattr(step, "source_units"):
            edges = zip(step.source_units.tolist(), step.target_units.tolist(), strict=True)
        elif hasattr(step, "name"):
            edges = []
            for index in masks[step.name].nonzero().tolist():
                per_group = step.shape[0] // step.groups
                row, column = index[0], index[1] + index[0] // per_group * step.shape[1]
                edges.append((row, column) if step.transposed else (column, row))
        else:
            sources, targets = graph.sizes[step.source], graph.sizes[step.target]
            edges = [
                (s, t)
                for s in range(sources)
                for t in range(targets)
                if s * step.groups // sources == t * step.groups // targets
            ]
        net.add_edges_from(((step.source, s), (step.target, t)) for s, t in edges)
    return net


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("density", [0.15, 0.4, 1.0])
def test_supports_are_what_paths_lead_to(name, density):
    torch.manual_seed(0)
    net = NETWORKS[name]()
    graph, masks = (
        ConnectivityGraph.trace(net, torch.zeros(2, 4) if name == "skip" else None),
        random_masks(net, density, 1),
    )
    supports, reaching, arity = mf.unit_supports(graph, masks), reaching_outputs(graph, masks), []
    walks = paths(graph, masks)
    for space, size in enumerate(graph.sizes):
        for unit in range(size):
            above = nx.ancestors(walks, (space, unit)) | {(space, unit)}
            below = nx.descendants(walks, (space, unit)) | {(space, unit)}
            expected = {k for source, k in above if source in graph.inputs}
            assert set(supports[space][unit].nonzero().flatten().tolist()) == expected
            on = any(target in graph.outputs for target, _ in below)
            assert bool(reaching[space][unit]) == on
            if expected and on and space in hidden_spaces(graph):
                arity.append(len(expected))
    assert sorted(mf.constituent_arity(graph, masks).tolist()) == sorted(arity)
    assert arity or density < 1


def test_supports_by_derivatives():
    """An input outside of the support has no influence at all."""
    torch.manual_seed(0)
    net = MLP(6, 3, hidden=(7, 5), activation=nn.Tanh)
    masks = random_masks(net, 0.3, 2)
    with torch.no_grad():
        for name, mask in masks.items():
            net.get_parameter(name).mul_(mask)
    supports = mf.unit_supports(ConnectivityGraph.trace(net), masks)
    x = torch.randn(6, generator=seeded(3))
    for last, space in ((2, 1), (4, 2)):
        jacobian = torch.autograd.functional.jacobian(
            lambda x, last=last: nn.Sequential(*list(net)[:last])(x[None])[0], x
        )
        assert torch.equal(jacobian != 0, supports[space])


def test_depths():
    assert unit_depths(ConnectivityGraph.trace(MLP(4, 2, hidden=(3, 3)))) == [0, 1, 2, 3]
    skip = ConnectivityGraph.trace(Skip(), torch.zeros(2, 4))
    assert max(unit_depths(skip)[space] for space in hidden_spaces(skip)) == 2


def test_declared_inputs():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    masks = random_masks(net, 0.5, 0)
    traced = ConnectivityGraph.trace(net)
    declared = ConnectivityGraph.declare(net, [("0.weight", "2.weight")])
    assert torch.equal(mf.constituent_arity(traced, masks), mf.constituent_arity(declared, masks))


@pytest.mark.parametrize(("shape", "groups"), [((5, 4), 1), ((6, 3, 3, 3), 1), ((6, 2, 3), 2)])
def test_fan_in(shape, groups):
    weight = torch.randn(shape, generator=seeded(0)) * (torch.rand(shape, generator=seeded(1)) < 0.6)
    weight[2] = 0
    moment = torch.rand(shape[1] * groups, generator=seeded(2))
    expected = []
    for unit, row in enumerate(weight):
        group = unit // (len(weight) // groups)
        parts = [
            float(w) ** 2 * float(moment[group * shape[1] + channel])
            for channel, taps in enumerate(row)
            for w in taps.flatten()
            if w != 0
        ]
        shares = [part / sum(parts) for part in parts]
        expected.append(math.exp(-sum(p * math.log(p) for p in shares)) if parts else 0.0)
    assert mf.effective_fan_in(weight, moment).tolist() == pytest.approx(expected)
    assert expected[2] == 0


def test_fan_in_of_equal_inputs_is_their_number():
    weight = torch.ones(1, 8)
    assert float(mf.effective_fan_in(weight, torch.ones(8))) == pytest.approx(8)
    assert float(mf.effective_fan_in(weight, torch.tensor([1.0] + [0.0] * 7))) == pytest.approx(1)


@pytest.mark.parametrize("moment", [torch.ones(3), torch.ones(0), torch.ones(12)])
def test_fan_in_refuses_other_inputs(moment):
    with pytest.raises(ValueError, match=r"one number for each input of the weight \(2, 4\)"):
        mf.effective_fan_in(torch.ones(2, 4), moment)


def test_sums_and_correlation():
    first, second, coarse = (torch.randn(n, d, generator=seeded(n)) + 3 for n, d in ((40, 3), (40, 2), (10, 2)))
    second[:, 1] = 5.0
    sums = mf.unit_sums([first, coarse, second])
    found = mf.correlation(sums)
    assert sums.counts.tolist() == [40, 40, 40, 10, 10, 40, 40]
    fine = np.corrcoef(torch.cat([first, second[:, :1]], 1).double().numpy(), rowvar=False)
    assert np.allclose(found[[0, 1, 2, 5]][:, [0, 1, 2, 5]], fine)
    assert np.allclose(found[3:5, 3:5], np.corrcoef(coarse.double().numpy(), rowvar=False))
    assert found[3:5][:, [0, 1, 2, 5, 6]].count_nonzero() == 0
    assert found[6].count_nonzero() == 0  # constant
    assert mf.live_units(sums.counts, sums.totals, sums.products.diagonal()).tolist() == [True] * 6 + [False]


def test_live_is_a_share_of_the_second_moment():
    noise = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    layers = torch.stack([1 + 4e-4 * noise, 1 + 2e-4 * noise, 1e-9 * noise, 0 * noise], dim=1)  # 1.6e-7 and 0.4e-7
    counts, totals, products = mf.unit_sums([layers])
    assert mf.live_units(counts, totals, products.diagonal()).tolist() == [True, False, True, False]


def test_distinct_functions():
    base = torch.randn(500, 4, generator=seeded(0), dtype=torch.float64)
    noise = torch.randn(500, generator=seeded(1), dtype=torch.float64)
    near, far = base[:, 0] + 0.1 * noise, base[:, 1] + 0.2 * noise  # |r| about .995 and .98
    units = torch.cat([base, -3 * base[:, :1] + 1, near[:, None], far[:, None]], dim=1)
    r = np.corrcoef(units.numpy(), rowvar=False)
    naive = nx.Graph([(i, j) for i, j in itertools.product(range(7), repeat=2) if abs(r[i, j]) >= 0.99])
    assert nx.number_connected_components(naive) == 5
    assert mf.distinct_functions(mf.correlation(mf.unit_sums([units[:, :3], units[:, 3:]]))) == 5


def test_distinct_functions_are_transitive_and_include_the_limit():
    chain = torch.eye(3)
    chain[0, 1] = chain[1, 0] = 0.99
    chain[1, 2] = chain[2, 1] = -0.995
    assert mf.distinct_functions(chain.double()) == 1
    assert mf.distinct_functions(torch.full((2, 2), 0.9899).double()) == 2


def test_fvu():
    outputs, targets = (torch.randn(30, 3, generator=seeded(k)) * torch.tensor([1.0, 2, 5]) + 7 for k in (0, 1))
    expected = 1 - r2_score(targets, outputs, multioutput="variance_weighted")
    assert mf.fvu(outputs, targets) == pytest.approx(expected, rel=1e-6)
    assert mf.fvu(targets, targets) == 0
    assert mf.fvu(targets.mean(0).expand(30, 3), targets) == pytest.approx(1)
    assert mf.fvu(targets[:, :1] + 1, targets[:, 0]) > 0


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.zeros(4, dtype=torch.long), "real numbers of the shape of the outputs"),
        (torch.zeros(4, 3), "real numbers of the shape of the outputs"),
        (torch.full((4, 2), 3.3), "do not vary"),
    ],
)
def test_fvu_says_why_not(targets, words):
    with pytest.raises(mf.UndefinedError, match=words):
        mf.fvu(torch.zeros(4, 2), targets)


@pytest.mark.parametrize(("nodes", "units"), [(3, 5), (4, 4), (4, 2)])
def test_alignment_is_the_best_of_all_matches(nodes, units):
    for seed in range(10):
        r = torch.rand(nodes, units, generator=seeded(seed)) * 2 - 1
        small, large = sorted((nodes, units))
        cost = r.abs().numpy() if nodes <= units else r.abs().numpy().T
        best = max(
            sum(cost[i, j] for i, j in enumerate(order)) for order in itertools.permutations(range(large), small)
        )
        assert mf.node_alignment(r) == pytest.approx(best / nodes)


@pytest.mark.parametrize("permuted", [False, True])
def test_purity(permuted):
    tree = Tree(permuted=permuted, distractors=2)
    nodes = Subtrees.of(tree)
    inputs = torch.rand(60, tree.in_features, generator=seeded(0)) < 0.15
    layers = torch.randint(1, 5, (60,), generator=seeded(1))
    expected = []
    for support, layer in zip(inputs, layers.tolist(), strict=True):
        columns = {f"x{k}" for k in support.nonzero().flatten().tolist()}
        below = [name for name in tree.node_names if name.startswith(f"h{layer}_") and name not in tree.output_names]
        pure = any(columns <= tree.graph.nodes[name]["leaves"] for name in below)
        expected.append(float(pure) if below else math.nan)
    found = mf.pure_units(inputs, layers, nodes.leaves, nodes.levels)
    assert found.tolist() == pytest.approx(expected, nan_ok=True)
    assert {0.0, 1.0} <= set(expected)
    live = torch.rand(60, generator=seeded(2)) < 0.5
    counted = [p for p, on in zip(expected, live.tolist(), strict=True) if on and not math.isnan(p)]
    assert mf.purity(found, live) == pytest.approx(sum(counted) / len(counted))


def test_subtrees_of_a_picture():
    pattern = Pattern(depth=3, out_features=2)
    nodes = Subtrees.of(pattern)
    assert set(nodes.names) == set(pattern.node_names) - set(pattern.output_names)
    assert [pattern.node_names[column] for column in nodes.columns.tolist()] == list(nodes.names)
    for name, leaves, level in zip(nodes.names, nodes.leaves, nodes.levels.tolist(), strict=True):
        assert {pattern.input_names[k] for k in leaves.nonzero().flatten().tolist()} == pattern.graph.nodes[name][
            "leaves"
        ]
        assert pattern.graph.nodes[name]["level"] == level


def test_subtrees_of_outputs_alone():
    with pytest.raises(mf.UndefinedError, match="all internal nodes of Tree"):
        Subtrees.of(Tree(depth=1))


def test_decodability():
    generator = seeded(0)
    fit, held = (torch.randn(n, 6, generator=generator, dtype=torch.float64) * 3 + 2 for n in (80, 50))
    for rows in (fit, held):
        rows[:, 5] = 1.0  # not live
    nodes = [r[:, :1] * r[:, 1:2] + 2 * r[:, 2:3] for r in (fit, held)]
    nodes = [torch.cat([n, n.sin(), r[:, 3:4]], 1) for n, r in zip(nodes, (fit, held), strict=True)]
    inside = torch.tensor([[1, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    sums = [mf.unit_sums([r, n]) for r, n in zip((fit, held), nodes, strict=True)]
    expected = []
    for k in range(2):
        chosen = [j for j in range(5) if inside[k, j]]
        mean, std = fit[:, chosen].mean(0).numpy(), fit[:, chosen].std(0, correction=0).numpy()
        z, y = (fit[:, chosen].numpy() - mean) / std, nodes[0][:, k].numpy()
        scores = z.T @ (y - y.mean()) / len(y)
        beta = np.linalg.solve(z.T @ z / len(y) + 1e-4 * np.eye(len(chosen)), scores)
        predicted = (held[:, chosen].numpy() - mean) / std @ beta + y.mean()
        expected.append(r2_score(nodes[1][:, k].numpy(), predicted))
    found = mf.decodability(*sums, inside).tolist()
    assert found[:2] == pytest.approx(expected, rel=1e-6)
    assert found[2] == 0  # no live unit inside
    assert 0.2 < found[0] < 0.99


def test_decodability_of_copies():
    """Collinear units are no trouble: that is what the ridge is for."""
    x = torch.randn(100, 1, generator=seeded(0), dtype=torch.float64)
    sums = [mf.unit_sums([torch.cat([h, 2 * h, h + 1], 1), h]) for h in (x[:50], x[50:])]
    assert float(mf.decodability(*sums, torch.ones(1, 3, dtype=torch.bool))) == pytest.approx(1, abs=1e-4)


def test_sparsity():
    masks = {"a": torch.tensor([True, False, False]), "b": torch.ones(2, 1, dtype=torch.bool)}
    assert mf.sparsity(masks) == pytest.approx(0.4)
    with pytest.raises(mf.UndefinedError, match="no masks"):
        mf.sparsity({})
