"""`prune` on plain networks."""

import re

import pytest
import torch
from helpers import assert_same, clone, mlp
from torch import nn

from sparsecomp import Criterion, Global, Layerwise, Magnitude, MaskStore, Need, Random, Selection, prune


def filled(layer, values):
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values))
    return layer


def test_by_hand():
    """The 4 smallest of all 8 magnitudes go: .1, .2, .3 and -.4."""
    module = nn.Sequential(
        filled(nn.Linear(2, 2, bias=False), [[0.1, -0.9], [0.2, 0.8]]),
        filled(nn.Linear(2, 2, bias=False), [[-0.4, 0.3], [0.7, -0.6]]),
    )
    store = prune(module, Magnitude(), 0.5, allocation=Global(min_keep=0))
    assert isinstance(store, MaskStore)
    expected = [torch.tensor(rows) for rows in ([[0.0, -0.9], [0.0, 0.8]], [[0.0, 0.0], [0.7, -0.6]])]
    assert_same([module[0].weight.detach(), module[1].weight.detach()], expected)
    assert store.layer_sparsity() == {"0.weight": 0.5, "1.weight": 0.5}


def test_zero_sparsity_changes_nothing():
    module = mlp()
    before = clone(module.state_dict())
    assert prune(module, Magnitude(), 0.0).sparsity == 0.0
    assert_same(clone(module.state_dict()), before)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.MultiheadAttention(8, 2), lambda: (torch.ones(3, 1, 8),) * 3),
        (
            nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
            lambda: (torch.ones(3, 1, 8), torch.ones(3, 1, 4), torch.ones(3, 1, 6)),
        ),
        (nn.LSTM(4, 6, bidirectional=True, proj_size=2), lambda: (torch.ones(3, 1, 4),)),
        (nn.GRU(4, 6, num_layers=2), lambda: (torch.ones(3, 1, 4),)),
        (nn.ConvTranspose2d(2, 4, 3), lambda: (torch.ones(1, 2, 5, 5),)),
    ],
    ids=["attention", "attention_qkv", "lstm", "gru", "transposed"],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_layers_go_on_working(module, x):
    """Forward, backward and masked gradients, in the layers that torch's own pruning breaks."""
    store = prune(module, Magnitude(), 0.75)
    total = sum(pruned for pruned, _ in store.counts().values())
    assert total == round(0.75 * sum(size for _, size in store.counts().values()))
    for _ in range(2):
        output = module(*x())
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    store.mask_grads_()
    parameters = dict(module.named_parameters())
    for name, mask in store.masks.items():
        assert parameters[name].detach()[~mask].count_nonzero() == 0
        assert parameters[name].grad[~mask].count_nonzero() == 0
    assert store.revived() == []


def test_lstm_uses_the_pruned_weights():
    """Also where cuDNN-style flat weights might be remembered: zero input weights mean no input."""
    lstm = nn.LSTM(4, 3, bias=False)
    store = MaskStore(lstm)
    x = torch.randn(5, 1, 4)
    assert not torch.equal(lstm(x)[0], lstm(2 * x)[0])
    store.update_({"weight_ih_l0": torch.zeros(12, 4, dtype=torch.bool)})
    assert torch.equal(lstm(x)[0], torch.zeros(5, 1, 3))


def test_tied_weights_are_counted_and_pruned_once():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    store = prune(module, Magnitude(), 0.5)
    assert store.counts() == {"0.weight": (8, 16)}
    assert module[0].weight is module[1].weight


def test_units_of_a_linear_go_with_their_biases():
    module = filled(nn.Linear(2, 3), [[1.0, 1.0], [0.1, -3.0], [0.5, 0.2]])
    nn.init.ones_(module.bias)
    prune(module, Magnitude(), 1 / 3, allocation=Layerwise("unit"))
    assert module.weight.tolist()[2] == [0.0, 0.0]
    assert module.bias.tolist() == [1.0, 1.0, 0.0]
    assert module.weight.count_nonzero() == 4


def test_units_of_a_transposed_convolution_are_its_second_dimension():
    """(in, out, k): the output channel with the smallest mean goes, and its bias; so its output is exactly zero."""
    layer = nn.ConvTranspose1d(2, 3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[5.0], [0.1], [4.0]], [[5.0], [0.2], [0.3]]]))
        layer.bias.fill_(1.0)
    store = prune(layer, Magnitude(), 1 / 3, allocation=Layerwise("unit"))
    assert store.masks["weight"].squeeze(-1).tolist() == [[True, False, True], [True, False, True]]
    assert store.masks["bias"].tolist() == [True, False, True]
    output = layer(torch.ones(1, 2, 4))
    assert output[0, 1].count_nonzero() == 0
    assert output[0, [0, 2]].count_nonzero() == 8


def test_units_of_a_recurrent_layer_and_attention():
    for module in (nn.LSTM(3, 4), nn.MultiheadAttention(4, 2)):
        store = prune(module, Random(seed=0), 0.5, allocation=Layerwise("unit"))
        for entry in store.selected:
            rows = store.masks[entry.name].any(1)
            assert torch.equal(store.masks[entry.name].all(1), rows)
            assert torch.equal(store.masks[entry.bias_name], rows)
            assert int(rows.sum()) == len(rows) // 2


def test_selection_and_named_allocations():
    module = mlp()
    store = prune(module, Magnitude(), 0.5, selection=Selection(include=["2"]), allocation="layerwise")
    assert store.counts() == {"2.weight": (64, 128)}
    assert module[0].weight.count_nonzero() == 512


def test_random_follows_torch_seed():
    def mask(seed):
        module = mlp()
        torch.manual_seed(seed)
        return clone(prune(module, Random(), 0.5).masks)

    assert_same(mask(1), mask(1))
    assert not torch.equal(mask(1)["0.weight"], mask(2)["0.weight"])


# Errors


class NeedsGradients(Criterion):
    needs = frozenset({Need.GRADIENTS})

    def score(self, context):
        batch = next(iter(context.data))
        with torch.enable_grad():
            grads = torch.autograd.grad(
                context.loss(context.module, batch),
                [p for n, p in context.module.named_parameters() if n in context.weights],
            )
        return {name: grad.abs() for name, grad in zip(context.weights, grads, strict=True)}


class NeedsActivations(NeedsGradients):
    needs = frozenset({Need.ACTIVATIONS})

    def score(self, context):
        return {name: weight.abs() for name, weight in context.weights.items()}


def loss(module, batch):
    return module(batch).square().mean()


def test_a_criterion_that_needs_data_or_a_loss_says_so():
    module, data = mlp(), [torch.ones(2, 16)]
    before = clone(module.state_dict())
    with pytest.raises(
        ValueError, match=r"`data` yields the batches that NeedsGradients takes gradients from.*pass `data`"
    ):
        prune(module, NeedsGradients(), 0.5, loss=loss)
    with pytest.raises(
        ValueError, match=r"`loss` is the scalar that NeedsGradients takes gradients of.*\(module, batch\)"
    ):
        prune(module, NeedsGradients(), 0.5, data)
    with pytest.raises(ValueError, match="`data` yields the batches that NeedsActivations takes activations from"):
        prune(module, NeedsActivations(), 0.5)
    assert_same(clone(module.state_dict()), before)
    assert prune(module, NeedsActivations(), 0.5, data).sparsity == 0.5


def test_a_criterion_gets_data_and_loss():
    """With input zero but for one place, only that column of the first layer has gradients: it is kept."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    x = torch.zeros(2, 4)
    x[:, 2] = 1.0
    store = prune(module, NeedsGradients(), 0.75, [x], loss, allocation=Global(min_keep=0))
    assert store.masks["weight"].tolist() == [[False, False, True, False]] * 3


class Failing(Criterion):
    """Returns what it is given, or raises it."""

    def __init__(self, outcome, refitted=None):
        self.outcome, self.refitted = outcome, refitted or {}

    def score(self, context):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        scores = {name: weight.abs() for name, weight in context.weights.items()} | self.outcome
        return {name: score for name, score in scores.items() if score is not None}

    def refit(self, context, masks):
        return self.refitted


@pytest.mark.parametrize(
    ("criterion", "error", "message"),
    [
        (Failing(ArithmeticError("no luck")), ArithmeticError, "no luck"),
        (
            Failing({"2.weight": None}),
            ValueError,
            "Failing.score must return a tensor for each weight; missing are 2.weight",
        ),
        (Failing({"9.weight": torch.ones(2)}), ValueError, "Failing.score returned '9.weight' with shape (2,)"),
        (
            Failing({"2.weight": torch.ones(4, 3)}),
            ValueError,
            "Failing.score returned '2.weight' with shape (4, 3); in the network: (4, 32)",
        ),
        (Failing({"2.weight": torch.full((4, 32), float("nan"))}), ValueError, "scores of '2.weight' must be finite"),
        (Failing({}, {"2.bias": torch.ones(5)}), ValueError, "Failing.refit returned '2.bias' with shape (5,)"),
        (Failing({}, {"2.what": torch.ones(5)}), ValueError, "in the network: no such tensor"),
        (
            Failing({}, {"0.bias": torch.ones(32), "2.bias": torch.tensor([1.0, float("inf"), 1.0, 1.0])}),
            ValueError,
            "Failing.refit returned values for '2.bias' that are not finite. Nothing was pruned",
        ),
    ],
)
def test_a_failing_criterion_changes_nothing(criterion, error, message):
    module = mlp()
    before = clone(module.state_dict())
    with pytest.raises(error, match=re.escape(message)):
        prune(module, criterion, 0.5)
    assert_same(clone(module.state_dict()), before)
    # And no hook of the failed attempt is left behind.
    module.load_state_dict({name: torch.ones_like(t) for name, t in module.state_dict().items()})
    assert all(bool((p == 1).all()) for p in module.parameters())


def test_refitted_values_are_written_and_masked():
    module = mlp()
    refitted = {"0.weight": torch.full((32, 16), 3.0), "2.bias": torch.arange(4.0)}
    store = prune(module, Failing({}, refitted), 0.5)
    assert torch.equal(module[0].weight.detach(), 3.0 * store.masks["0.weight"])
    assert torch.equal(module[2].bias.detach(), torch.arange(4.0))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Magnitude, 0.5), {}, TypeError, r"`criterion` is what to keep and must be a Criterion.*the class Magnitude"),
        (("magnitude", 0.5), {}, TypeError, r"`criterion` is what to keep .* got 'magnitude'"),
        ((Magnitude(), 90), {}, ValueError, r"`final_sparsity` is .* in \[0, 1\); got 90\. For 90% write 0\.9"),
        ((Magnitude(), 1.0), {}, ValueError, r"`final_sparsity` is .* in \[0, 1\); got 1\.0\.$"),
        ((Magnitude(), -0.1), {}, ValueError, r"`final_sparsity` is .* in \[0, 1\); got -0\.1"),
        ((Magnitude(), float("nan")), {}, ValueError, r"`final_sparsity` is .* in \[0, 1\); got nan"),
        ((Magnitude(), "0.5"), {}, TypeError, r"`final_sparsity` is .* in \[0, 1\); got '0\.5' of type str"),
        ((Magnitude(), True), {}, TypeError, r"`final_sparsity` is .* in \[0, 1\); got True of type bool"),
        (
            (Magnitude(), 0.5),
            {"allocation": "uniform"},
            ValueError,
            r"`allocation` .* 'erk', 'global', 'layerwise'; got 'un",
        ),
        (
            (Magnitude(), 0.5),
            {"selection": ["2"]},
            TypeError,
            r"`selection` is what is prunable and must be a Selection",
        ),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    module = mlp()
    before = clone(module.state_dict())
    with pytest.raises(error, match=message):
        prune(module, *arguments, **options)
    assert_same(clone(module.state_dict()), before)


def test_no_network():
    with pytest.raises(TypeError, match=r"`module` is the network to prune and must be an nn.Module; got dict"):
        prune({}, Magnitude(), 0.5)
