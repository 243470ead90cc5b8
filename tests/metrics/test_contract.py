"""What every metric promises. A new one is found here by itself."""

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from helpers import assert_same
from observed import observed, permuted, rescaled, samples, structure, tree_network
from torch import nn

import sparsecomp.metrics
from sparsecomp.functions import Tree
from sparsecomp.metrics import NetworkBatch, Part
from sparsecomp.metrics.base import NetworkMetric

METRICS = [getattr(sparsecomp.metrics, name) for name in sparsecomp.metrics.MEMBERS]


def value(metric_class, batches):
    metric = metric_class()
    for batch in batches:
        metric.update(batch)
    result = metric.compute()
    assert result.shape == ()
    assert math.isfinite(result), (metric_class, metric.reason)
    assert metric.reason == ""
    return float(result)


def test_members_are_found():
    files = {path.stem for path in Path(sparsecomp.metrics.__path__[0]).glob("*.py")}
    assert files >= {"sparsity", "arity", "fan_in", "distinct", "fvu", "alignment", "purity", "decodability"}
    assert len(METRICS) == 10
    assert {m.label() for m in METRICS} == {
        "constituent_arity",
        "decodability",
        "distinct_functions",
        "effective_fan_in",
        "effective_sparsity",
        "fvu",
        "largest_arity",
        "node_alignment",
        "purity",
        "sparsity",
    }


@pytest.mark.parametrize("metric_class", METRICS)
class TestEvery:
    def test_is_declared(self, metric_class):
        metric = metric_class()
        assert isinstance(metric, NetworkMetric)
        assert metric_class.__doc__
        assert metric.needs <= set(Part)
        reductions = {name: reduction.__name__ for name, reduction in metric._reductions.items()}
        assert set(reductions.values()) <= {"dim_zero_sum", "dim_zero_max"}
        assert all(isinstance(default, torch.Tensor) for default in metric._defaults.values())

    def test_states_do_not_grow(self, metric_class):
        batches = observed(tree_network(), samples(count=12))
        metric = metric_class()
        metric.update(batches[0])
        before = {name: state.shape for name, state in metric.metric_state.items()}
        for batch in batches[1:]:
            metric.update(batch)
        assert {name: state.shape for name, state in metric.metric_state.items()} == before

    def test_two_halves_merge_into_the_whole(self, metric_class):
        batches = observed(tree_network())
        left, right = metric_class(), metric_class()
        for metric, part in ((left, batches[:1]), (right, batches[1:])):
            for batch in part:
                metric.update(batch)
        left.merge_state(right)
        assert float(left.compute()) == pytest.approx(value(metric_class, batches), rel=1e-6)

    def test_two_ranks_add_up(self, metric_class):
        batches = observed(tree_network())
        here, there = metric_class(), metric_class()
        here.update(batches[0])
        for batch in batches[1:]:
            there.update(batch)
        others = iter([getattr(there, name) for name in there._reductions])
        here.distributed_available_fn = lambda: True
        here.dist_sync_fn = lambda state, group: [state, next(others)]
        whole = value(metric_class, batches)
        assert float(here.compute()) == pytest.approx(whole, rel=1e-6)
        assert next(others, None) is None

    def test_the_order_of_batches_is_irrelevant(self, metric_class):
        batches = observed(tree_network())
        assert value(metric_class, batches[::-1]) == pytest.approx(value(metric_class, batches), rel=1e-6)

    def test_each_batch_counts(self, metric_class):
        batches = observed(tree_network())
        metric = metric_class()
        metric.update(batches[0])
        before = {name: state.clone() for name, state in metric.metric_state.items()}
        metric.update(batches[1])
        assert any(not torch.equal(state, before[name]) for name, state in metric.metric_state.items())

    def test_reset_forgets(self, metric_class):
        first, second = observed(tree_network(0)), observed(tree_network(1))
        metric = metric_class()
        for batch in first:
            metric.update(batch)
        metric.compute()
        metric.reset()
        assert_same(dict(metric.metric_state), dict(metric_class().metric_state))
        for batch in second:
            metric.update(batch)
        assert float(metric.compute()) == value(metric_class, second)

    def test_forward_is_the_value_of_the_batch(self, metric_class):
        batches = observed(tree_network())
        metric = metric_class()
        found = [float(metric(batch)) for batch in batches]
        assert found == pytest.approx([value(metric_class, [batch]) for batch in batches], rel=1e-6)
        assert float(metric.compute()) == pytest.approx(value(metric_class, batches), rel=1e-6)

    @pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy], ids=["pickle", "copy"])
    def test_a_copy_goes_on(self, metric_class, copied):
        batches = observed(tree_network())
        metric = metric_class()
        metric.update(batches[0])
        again = copied(metric)
        for batch in batches[1:]:
            again.update(batch)
        assert float(again.compute()) == value(metric_class, batches)
        assert float(metric.compute()) == value(metric_class, batches[:1])

    def test_persistent_states_survive_a_checkpoint(self, metric_class):
        batches = observed(tree_network())
        metric, loaded = metric_class(), metric_class()
        for batch in batches[:2]:
            metric.update(batch)
        metric.persistent(True)
        state = metric.state_dict()
        loaded.load_state_dict(state)
        loaded.update(batches[2])
        assert float(loaded.compute()) == pytest.approx(value(metric_class, batches[:3]), rel=1e-6)

    @pytest.mark.parametrize("change", [permuted, rescaled])
    def test_the_basis_of_units_is_irrelevant(self, metric_class, change):
        net = tree_network()
        changed = change(net)
        x = samples(1)[0][0]
        assert torch.allclose(net(x), changed(x), atol=1e-4)
        assert not any(
            torch.equal(a, b) for a, b in zip(net.parameters(), changed.parameters(), strict=True) if len(a) > 1
        )
        assert value(metric_class, observed(changed)) == pytest.approx(value(metric_class, observed(net)), rel=1e-4)

    def test_without_what_it_needs_it_is_nan_with_a_reason(self, metric_class):
        lacking = {
            Part.CONNECTIVITY: ({"graph": False}, "a loop"),
            Part.GROUND_TRUTH: ({"function": None}, "no ground truth"),
        }
        for part, (options, words) in lacking.items():
            metric = metric_class()
            for batch in observed(tree_network(), **options):
                metric.update(batch)
            result = metric.compute()
            assert bool(result.isnan()) == (part in metric.needs)
            assert (words in metric.reason) == (part in metric.needs)

    def test_a_reason_survives_a_good_batch_and_not_a_reset(self, metric_class):
        empty = NetworkBatch(structure(nn.Sequential(), graph=False, masks={}), torch.zeros(2, 4), torch.zeros(2, 1))
        good = observed(tree_network())[0]
        metric = metric_class()
        for batch in (empty, good):
            metric.update(batch)
        assert metric.compute().isnan()
        assert metric.reason
        metric.reset()
        metric.update(good)
        assert float(metric.compute()) == value(metric_class, [good])
        assert metric.reason == ""

    def test_nothing_is_changed(self, metric_class):
        batch = observed(tree_network())[0]
        tensors = {"x": batch.inputs, "o": batch.outputs, "y": batch.targets} | dict(batch.activations)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        metric = metric_class()
        metric.update(batch)
        metric.update(batch)
        metric.compute()
        assert_same(tensors, before)

    def test_no_batch_is_nan_with_a_reason(self, metric_class):
        metric = metric_class()
        with pytest.warns(UserWarning, match="before the ``update``"):
            result = metric.compute()
        assert result.isnan()
        assert metric.reason == "no batch was seen."


@pytest.mark.parametrize("metric_class", [m for m in METRICS if m.label() in {"distinct_functions", "node_alignment"}])
def test_one_live_unit_says_nothing(metric_class):
    net = tree_network()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.zero_()
            layer.bias.fill_(1.0)
        net[0].weight[0, 0] = 1.0
    metric = metric_class()
    for batch in observed(net):
        metric.update(batch)
    assert metric.compute().isnan()
    assert "there are 1 live hidden units" in metric.reason


def test_inputs_of_another_function_are_a_reason():
    metric = sparsecomp.metrics.Purity()
    metric.update(observed(tree_network(), function=Tree(depth=3))[0])
    assert metric.compute().isnan()
    assert metric.reason == "the target function has 8 inputs and the network 4."
