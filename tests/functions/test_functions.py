"""What every target function promises; each by hand is in the files beside this one. A new one is found by itself."""

import copy
import inspect
import math
import pickle

import networkx as nx
import pytest
import torch
from helpers import assert_same

import sparsecomp.functions
from sparsecomp._discovery import concrete_subclasses
from sparsecomp.functions import TargetFunction
from sparsecomp.functions.base import generators
from sparsecomp.functions.graph import add_input, add_node, node_value, standardise
from sparsecomp.functions.primitives import PRIMITIVES, gauss

FUNCTIONS = [c for c in concrete_subclasses(TargetFunction) if c.__module__.startswith("sparsecomp.")]
NAIVE = {
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "identity": lambda z: z,
    "gauss": lambda z: 2 / math.e ** (z * z) - 1,
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def naive_values(graph, row):
    """Every node's value at one input, by walking the graph in plain Python."""
    values = {}
    for name in nx.topological_sort(graph):
        node = graph.nodes[name]
        if node["kind"] == "input":
            values[name] = row[node["index"]]
            continue
        parents = [values[parent] for parent in node["parents"]]
        if node["kind"] == "product":
            raw = math.prod(parents)
        else:
            z = math.fsum(w * p for w, p in zip(node["weights"], parents, strict=True)) + node["bias"]
            raw = NAIVE[node["kind"]](z)
        values[name] = (raw - node["mean"]) / node["scale"]
    return values


def hand_made():
    """h = 3 sin(a - 2 b + 0.5) and o = h c, with a distractor e."""
    graph = nx.DiGraph()
    for name in ("a", "b", "c", "e"):
        add_input(graph, name)
    add_node(graph, "h", "sin", ("a", "b"), (1.0, -2.0), 0.5)
    graph.nodes["h"].update(mean=0.0, scale=1 / 3)
    add_node(graph, "o", "product", ("h", "c"))
    return graph


class HandMade(TargetFunction):
    def __init__(self, graph=None, outputs=("o",)):
        super().__init__(hand_made() if graph is None else graph, outputs)

    def sample_inputs(self, n, generator):
        return torch.rand(n, 4, generator=generator)


def test_members_are_found():
    assert {c.__name__ for c in FUNCTIONS} >= {"Pattern", "Tree"}
    assert set(sparsecomp.functions.MEMBERS) == {c.__name__ for c in FUNCTIONS}
    assert all(getattr(sparsecomp.functions, c.__name__) is c for c in FUNCTIONS)
    with pytest.raises(AttributeError, match=r"has no target function 'Bush'; there are .*Tree"):
        _ = sparsecomp.functions.Bush


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        TargetFunction(hand_made(), ("o",))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("class_", FUNCTIONS)
class TestFunction:
    def test_graph(self, class_, seed):
        function = class_(seed=seed)
        graph = function.graph
        assert isinstance(graph, nx.DiGraph)
        assert nx.is_directed_acyclic_graph(graph)
        assert set(graph) == {*function.input_names, *function.node_names}
        assert len(function.input_names) + len(function.node_names) == len(graph)
        assert (function.in_features, function.out_features) == (len(function.input_names), len(function.output_names))
        for index, name in enumerate(function.input_names):
            node = graph.nodes[name]
            assert (node["kind"], node["level"], node["index"], node["leaves"]) == ("input", 0, index, {name})
            assert graph.in_degree(name) == 0
        for name in function.node_names:
            node = graph.nodes[name]
            assert set(node["parents"]) == set(graph.predecessors(name))
            assert node["leaves"] == nx.ancestors(graph, name) & set(function.input_names)
            assert node["level"] == 1 + max(graph.nodes[parent]["level"] for parent in node["parents"])
        levels = [graph.nodes[name]["level"] for name in function.node_names]
        assert levels == sorted(levels)

    def test_every_node_matters(self, class_, seed):
        function = class_(seed=seed)
        for name in set(function.node_names) - set(function.output_names):
            assert nx.descendants(function.graph, name) & set(function.output_names)

    def test_graph_cannot_be_changed(self, class_, seed):
        function = class_(seed=seed)
        with pytest.raises(nx.NetworkXError, match="Frozen"):
            function.graph.remove_node(function.node_names[0])

    def test_values_are_those_of_a_walk_through_the_graph(self, class_, seed):
        function = class_(seed=seed)
        x = function.sample_inputs(20, seeded(seed)).double()
        values, outputs = function.node_values(x), function(x)
        assert (values.shape, outputs.shape) == ((20, len(function.node_names)), (20, function.out_features))
        for row, inputs in enumerate(x.tolist()):
            expected = naive_values(function.graph, inputs)
            assert values[row].tolist() == pytest.approx([expected[n] for n in function.node_names], abs=1e-12)
            assert outputs[row].tolist() == pytest.approx([expected[n] for n in function.output_names], abs=1e-12)

    def test_unit_variance_on_new_samples(self, class_, seed):
        function = class_(seed=seed)
        values = function.node_values(function.sample_inputs(50000, seeded(100 + seed)))
        assert values.isfinite().all()
        assert values.var(dim=0).tolist() == pytest.approx([1.0] * len(function.node_names), abs=0.06)

    def test_dtype_and_gradient(self, class_, seed):
        function = class_(seed=seed)
        x = function.sample_inputs(50, seeded(0))
        assert (x.dtype, function(x).dtype) == (torch.float32, torch.float32)
        wide = x.double().requires_grad_()
        assert function(wide).dtype == torch.float64
        assert (function(x) - function(x.double())).abs().max() < 1e-4
        (gradient,) = torch.autograd.grad(function(wide).sum(), wide)
        used = frozenset().union(*(function.graph.nodes[name]["leaves"] for name in function.output_names))
        depends = {name for name, column in zip(function.input_names, gradient.T, strict=True) if column.any()}
        assert depends == used

    def test_same_seed_same_function(self, class_, seed):
        function, twin, other = class_(seed=seed), class_(seed=seed), class_(seed=seed + 1)
        assert dict(function.graph.nodes(data=True)) == dict(twin.graph.nodes(data=True))
        assert list(function.graph.edges) == list(twin.graph.edges)
        x = function.sample_inputs(30, seeded(3))
        assert_same(function.sample_inputs(30, seeded(3)), x)
        assert_same(twin.node_values(x), function.node_values(x))
        assert not torch.equal(other(x), function(x))
        assert not torch.equal(function.sample_inputs(30, seeded(4)), x)

    @pytest.mark.parametrize(
        "copied",
        [
            lambda f: pickle.loads(pickle.dumps(f)),
            copy.deepcopy,
            lambda f: eval(repr(f), vars(sparsecomp.functions)),
        ],
    )
    def test_copy_and_repr_are_the_same_function(self, class_, seed, copied):
        function = class_(seed=seed)
        twin = copied(function)
        x = function.sample_inputs(30, seeded(3))
        assert_same(twin.node_values(x), function.node_values(x))
        assert repr(twin) == repr(function)


@pytest.mark.parametrize("class_", FUNCTIONS)
class TestArguments:
    def test_threads_and_global_random_state_do_not_matter(self, class_):
        torch.manual_seed(1)
        before, threads = torch.get_rng_state(), torch.get_num_threads()
        function = class_(seed=0)
        function.sample_inputs(5, seeded(0))
        assert_same(torch.get_rng_state(), before)
        torch.manual_seed(2)
        try:
            torch.set_num_threads(2)
            twin = class_(seed=0)
        finally:
            torch.set_num_threads(threads)
        assert dict(function.graph.nodes(data=True)) == dict(twin.graph.nodes(data=True))

    def test_wrong_inputs(self, class_):
        function = class_()
        columns = function.in_features
        for shape in [(5, columns + 1), (columns,), (2, 5, columns)]:
            for call in (function, function.node_values):
                with pytest.raises(
                    ValueError, match=rf"`x` .* shape \(n, {columns}\); got \({shape[0]},.*{columns - 1}|bias"
                ):
                    call(torch.zeros(shape))
        with pytest.raises(TypeError, match=r"`x` .* must be floating point; got torch.int64"):
            function(torch.zeros(2, columns, dtype=torch.long))

    @pytest.mark.parametrize("n", [0, -1, 1.5, True, None])
    def test_wrong_number_of_samples(self, class_, n):
        with pytest.raises((ValueError, TypeError), match=f"`n` is .* integer >= 1; got {n}"):
            class_().sample_inputs(n, seeded(0))

    def test_no_generator(self, class_):
        with pytest.raises(TypeError, match=r"`generator` is .* must be a Generator, .*; got 3"):
            class_().sample_inputs(4, 3)

    @pytest.mark.parametrize("value", [-1, 0.5, "1", None, True])
    def test_wrong_integers(self, class_, value):
        names = {"seed", "depth", "distractors", "width", "out_features", "max_tries"}
        names &= set(inspect.signature(class_).parameters)
        assert {"seed", "depth"} <= names
        for name in names:
            with pytest.raises((ValueError, TypeError), match=f"`{name}` is .* must be an integer >= .; got {value!r}"):
                class_(**{name: value})


def test_the_seed_means_the_same_in_every_run():
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).unsqueeze(0)
    assert float(sparsecomp.functions.Tree(seed=5)(x)) == pytest.approx(1.731576150816, abs=1e-8)
    place = torch.tensor([[0.5, -0.25, 0.75, 1.0]], dtype=torch.float64)
    assert float(sparsecomp.functions.Pattern(seed=5)(place)) == pytest.approx(1.259323437081, abs=1e-8)


def test_hand_made_graph():
    function = HandMade()
    assert (function.input_names, function.node_names) == (("a", "b", "c", "e"), ("h", "o"))
    assert function.graph.nodes["o"]["leaves"] == {"a", "b", "c"}
    # 3 sin(0.5 - 0.5 + 0.5) = 1.43827661581, times 2
    x = torch.tensor([[0.5, 0.25, 2.0, 9.0]], dtype=torch.float64)
    assert function.node_values(x).tolist() == [pytest.approx([1.43827661581, 2.87655323162])]
    assert function(x).tolist() == [pytest.approx([2.87655323162])]


def test_primitives_by_hand():
    z = torch.tensor([0.0, math.pi / 2, -1.0], dtype=torch.float64)
    values = {name: primitive(z).tolist() for name, primitive in PRIMITIVES.items()}
    assert values == {
        "cos": pytest.approx([1, 0, 0.54030230587]),
        "gauss": pytest.approx([1, -0.83039005506, -0.26424111766]),
        "identity": pytest.approx([0, 1.57079632679, -1]),
        "sin": pytest.approx([0, 1, -0.84147098481]),
        "tanh": pytest.approx([0, 0.91715233567, -0.76159415596]),
    }
    assert gauss(z).tolist() == values["gauss"]


def test_standardise_by_hand():
    graph = hand_made()
    raw = torch.tensor([1.0, 3.0, 5.0, 7.0])  # mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    assert standardise(graph, "o", raw).tolist() == pytest.approx([x / math.sqrt(5) for x in (-3, -1, 1, 3)])
    assert (graph.nodes["o"]["mean"], graph.nodes["o"]["scale"]) == (4.0, pytest.approx(math.sqrt(5)))
    # From now on the node itself gives standardised values: (2 * 6 - 4) / sqrt(5).
    assert float(node_value(graph, "o", [torch.tensor(2.0), torch.tensor(6.0)])) == pytest.approx(8 / math.sqrt(5))
    standardise(graph, "o", raw, centred=False)
    assert (graph.nodes["o"]["mean"], graph.nodes["o"]["scale"]) == (0.0, pytest.approx(math.sqrt(5)))


def test_wrong_nodes():
    graph = hand_made()
    with pytest.raises(ValueError, match=r"`kind` is what node 'n' computes .* 'tanh', 'product'; got 'relu'"):
        add_node(graph, "n", "relu", ("a", "b"), (1.0, 1.0))
    for parents in [(), ("a", "z"), ("a", "a")]:
        with pytest.raises(ValueError, match=r"`parents` of 'n' must be different nodes of the graph"):
            add_node(graph, "n", "product", parents)
    with pytest.raises(ValueError, match=r"`weights` of 'n' has one number a parent, here 2; got \[1\.0\]"):
        add_node(graph, "n", "sin", ("a", "b"), (1.0,))
    with pytest.raises(ValueError, match=r"`weights` of 'n' .* here 0; got \[1\.0, 1\.0\]"):
        add_node(graph, "n", "product", ("a", "b"), (1.0, 1.0))
    for add in (lambda: add_input(graph, "h"), lambda: add_node(graph, "a", "product", ("b", "c"))):
        with pytest.raises(ValueError, match=r"`name` .* must not be taken; got '[ha]'"):
            add()
    assert set(graph) == {"a", "b", "c", "e", "h", "o"}


def test_wrong_outputs():
    for outputs in [(), ("a",), ("o", "z")]:
        with pytest.raises(ValueError, match=r"`outputs` names internal nodes, .*\['h', 'o'\]; got"):
            HandMade(outputs=outputs)
    with pytest.raises(ValueError, match=r"`graph` must have a node of kind 'input'"):
        HandMade(nx.DiGraph())


def test_generators_are_unrelated_streams():
    draws = [torch.rand(1000, generator=g) for s in (0, 1) for g in generators(s, 3)]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(6)
    assert float(correlations.abs().max()) < 0.15
    assert_same(torch.rand(1000, generator=generators(1, 1)[0]), draws[3])  # whatever the count
