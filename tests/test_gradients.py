"""Gradients of the loss against loops over batches and samples, and what they leave behind."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, on_two_ranks, trainer
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from sparsecomp import (
    Fisher,
    Global,
    Levels,
    MaskStore,
    Probe,
    Pruning,
    ScoreContext,
    Selection,
    Similarity,
    Taylor,
    WeightTimesInput,
    prune,
)
from sparsecomp.gradients import batch_gradients, squared_sample_gradients
from sparsecomp.models import MaskedModule
from sparsecomp.planning import make_plan


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Tied(nn.Module):
    """A weight shared by two layers, one of which is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.first(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tokens(nn.Module):
    """A Linear layer over tokens, of which the loss sees the mean."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.token(x)).mean(1))


def networks():
    torch.manual_seed(3)
    conv = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6 * 4, 3),
    )
    return {
        "mlp": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), (5,)),
        "conv": (conv, (2, 6, 6)),
        "conv1d": (nn.Sequential(nn.Conv1d(3, 4, 3, dilation=2), nn.Tanh(), nn.Flatten()), (3, 9)),
        "tied": (Tied(), (6,)),
        "tokens": (Tokens(), (5, 3)),
    }


NAMES = list(networks())


def case(name):
    network, shape = networks()[name]
    network = network.double()
    batches = [normal(8, *shape, seed=1), normal(5, *shape, seed=2)]
    return network, Selection().resolve(network), batches


def loss(network, x):
    return network(x).square().sum(1).mean()


def naive(network, selected, batches, each):
    """By a backward pass each: of every batch, or of every sample."""
    network.eval()
    sums = {entry.name: torch.zeros_like(entry.parameter) for entry in selected}
    count = 0
    for batch in batches:
        for part in [batch] if each == "batch" else batch.split(1):
            network.zero_grad()
            loss(network, part).backward()
            count += 1
            for entry in selected:
                gradient = entry.parameter.grad
                sums[entry.name] += gradient.abs() if each == "batch" else gradient.square()
    network.zero_grad()
    network.train()
    return {name: (total / count).detach() for name, total in sums.items()}


@pytest.mark.parametrize("name", NAMES)
def test_batch_gradients_are_those_of_backward(name):
    network, selected, batches = case(name)
    found = batch_gradients(network, selected, batches, Probe(), loss)
    torch.testing.assert_close(found, naive(network, selected, batches, "batch"))


@pytest.mark.parametrize("piece", [1, 300, 2**23])
@pytest.mark.parametrize("name", NAMES)
def test_squared_sample_gradients_are_those_of_each_sample(name, piece, monkeypatch):
    monkeypatch.setattr("sparsecomp.gradients._PIECE", piece)
    network, selected, batches = case(name)
    found = squared_sample_gradients(network, selected, batches, Probe(), loss)
    torch.testing.assert_close(found, naive(network, selected, batches, "sample"))


def test_the_probe_says_how_many_batches():
    network, selected, batches = case("mlp")
    found = batch_gradients(network, selected, batches, Probe(batches=1), loss)
    torch.testing.assert_close(found, naive(network, selected, batches[:1], "batch"))


@pytest.mark.parametrize("take", [batch_gradients, squared_sample_gradients])
def test_nothing_is_left_behind(take):
    network, selected, batches = case("conv")
    selected[0].parameter.requires_grad_(False)
    network.train()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = clone(network.state_dict())
    with torch.no_grad():
        found = take(network, selected, batches, Probe(), loss)
    assert_same(clone(network.state_dict()), before)
    assert network.training
    assert not selected[0].parameter.requires_grad
    assert all(bool((p.grad == 1).all()) for p in network.parameters())
    assert all(bool(values.any()) for values in found.values())  # a frozen weight has a gradient too
    assert not any(module._forward_hooks for module in network.modules())


def test_metrics_of_a_module_do_not_count_the_batches_looked_at():
    module = MaskedModule(nn.Linear(4, 3), nn.CrossEntropyLoss(), metrics={"accuracy": MulticlassAccuracy(3)})
    batch = (torch.randn(9, 4), torch.randint(3, (9,)))
    module.train_metrics.update(module(batch[0]), batch[1])
    before = module.train_metrics.compute()
    store = MaskStore(module)
    context = ScoreContext(module, store.weights, store.masks, 0, [batch], Probe().loss, store.selected)
    Taylor().score(context)
    assert module.train_metrics["accuracy"]._update_count == 1
    module.train_metrics["accuracy"]._computed = None
    assert_same(module.train_metrics.compute(), before)


class ByHand(nn.Module):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        raise AssertionError("this would train")


@pytest.mark.parametrize("take", [batch_gradients, squared_sample_gradients])
@pytest.mark.parametrize(
    ("batches", "value", "message"),
    [
        ([], lambda net, x: net(x).mean(), "`data` yields what gradients are taken of and was empty"),
        ([torch.ones(2, 4)], lambda net, x: net(x), r"`loss` .* must be a finite scalar; got shape \(2, 3\)"),
        ([torch.ones(2, 4)], lambda net, x: net(x).mean() * torch.nan, "`loss` .* must be a finite scalar; got nan"),
        ([torch.ones(2, 4)], lambda net, x: x.mean().requires_grad_(), "`loss` reaches none of the selected weights"),
    ],
)
def test_what_is_refused(take, batches, value, message):
    layer = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=message):
        take(layer, Selection().resolve(layer), batches, Probe(), value)
    assert layer.weight.grad is None
    assert not layer._forward_hooks


def test_a_module_that_optimizes_by_hand_is_not_trained():
    module = ByHand()
    with pytest.raises(ValueError, match=r"ByHand optimizes by hand.*Pass a Probe"):
        Probe().loss(module, torch.ones(1, 2))


def test_samples_must_come_first():
    layer = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="layer 'weight' must read the 4 samples of a batch along its first"):
        squared_sample_gradients(layer, Selection().resolve(layer), [torch.ones(4)], Probe(), lambda n, x: n(x).mean())


class Flattened(nn.Module):
    """Its first layer reads the tokens of all samples as rows."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.token(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1))


def test_rows_that_are_not_samples_are_refused_by_name():
    network = Flattened().double()
    x = normal(6, 5, 3)
    with pytest.raises(ValueError, match=r"'token\.weight' must read the 6 samples .* got inputs of shapes \(30, 3\)"):
        prune(network, Fisher(), 0.5, [x], loss)
    store = prune(network, Fisher(), 0.5, [x], loss, selection=Selection(exclude=["token"]))
    assert store.sparsity == 0.5


def test_taylor_takes_batches_of_any_kind():
    layer = nn.Linear(4, 3).double()
    x = normal(6, 4)
    found = batch_gradients(layer, Selection().resolve(layer), [{"x": x}], Probe(), lambda net, b: loss(net, b["x"]))
    torch.testing.assert_close(found, naive(layer, Selection().resolve(layer), [x], "batch"))


def test_taylor_takes_any_layer_and_the_others_refuse_by_name():
    torch.manual_seed(0)
    network = nn.LSTM(3, 4, batch_first=True)
    data = [torch.randn(6, 5, 3)]

    def last(net, x):
        return net(x)[0].square().mean()

    before = clone(network.state_dict())
    for criterion in (Fisher(), Taylor(refit=True), WeightTimesInput()):
        with pytest.raises(TypeError, match="layer statistics need the inputs of 'weight_ih_l0'"):
            prune(network, criterion, 0.5, data, last)
    assert_same(clone(network.state_dict()), before)
    assert prune(network, Taylor(), 0.5, data, last).sparsity == 0.5


# The criteria


def context_of(network, batches, value=loss):
    store = MaskStore(network)
    return store, ScoreContext(network, store.weights, store.masks, 0, batches, value, store.selected)


def test_scores_by_hand():
    """z = 2 a - b of the samples (1, 0) and (1, 2), loss mean z^2: z = 2, 0, so g = 2 z a = (4, 0) and 0; E[a^2] = 1, 2."""
    layer = nn.Linear(2, 1, bias=False).double()
    layer.weight.data = torch.tensor([[2.0, -1.0]]).double()
    _, context = context_of(layer, [torch.tensor([[1.0, 0.0], [1.0, 2.0]]).double()])
    assert Taylor().score(context)["weight"].tolist() == [[4.0, 0.0]]
    assert Fisher().score(context)["weight"].tolist() == [[32.0, 0.0]]
    assert WeightTimesInput().score(context)["weight"].tolist() == [[2.0, pytest.approx(2**0.5)]]


def test_weight_times_input_of_groups_is_that_of_the_unfolded_input():
    torch.manual_seed(1)
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=2).double()
    x = normal(5, 4, 6, 6)
    _, context = context_of(layer, [x])
    rms = nn.functional.unfold(x, 3, padding=1).square().mean((0, 2)).sqrt().reshape(2, 1, 2, 3, 3)
    expected = (layer.weight.detach().abs().reshape(2, 3, 2, 3, 3) * rms).reshape(6, 2, 3, 3)
    torch.testing.assert_close(WeightTimesInput().score(context)["weight"], expected)


@pytest.mark.parametrize("class_", [Taylor, Fisher, WeightTimesInput])
def test_the_refit_is_that_of_similarity(class_):
    network, _, batches = case("conv")
    store, context = context_of(network, batches)
    masks = {name: torch.rand(mask.shape) < 0.5 for name, mask in store.masks.items()}
    assert_same(class_(refit=True).refit(context, masks), Similarity().refit(context, masks))
    assert class_().refit(context, masks) == {}


def test_small_weights_in_half_precision_are_told_apart():
    """1e-4 squared is less than half precision holds."""
    layer = nn.Linear(2, 1, bias=False).half()
    layer.weight.data = torch.tensor([[1e-4, 2e-4]]).half()
    _, context = context_of(layer, [torch.ones(1, 2).half()], lambda net, x: net(x).sum())
    low, high = Fisher().score(context)["weight"][0].tolist()
    assert 0 < low == pytest.approx(high / 4, rel=0.01)


class Images(nn.Module):
    """A user's network, with a convolution and a norm that take the refit's offsets."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.head(self.stem(x.reshape(-1, 1, 4, 4)).flatten(1))


@pytest.mark.parametrize("class_", [Taylor, Fisher, WeightTimesInput])
def test_a_users_module_through_a_trainer(class_):
    """Before the first step the pruned network is that of `prune`, with and without the refit; then it stays sparse."""
    torch.manual_seed(0)
    start = Lit(Images())
    seen = {}
    for refit in (False, True):
        module = copy.deepcopy(start)
        store = prune(copy.deepcopy(start), class_(refit), 0.6, loader(), Probe().loss)
        alone = clone(store.weights)
        begun = Watch(on_train_batch_start=lambda _, net: seen.setdefault("now", clone(net.state_dict())))
        pruner = Pruning(class_(refit=refit), Levels([0.6, 0.8], begin=0))
        trainer(pruner, begun, max_epochs=2).fit(module, loader())
        now = seen.pop("now")
        assert_same({name: now[name] for name in alone}, alone)
        seen[refit] = now
        assert [event.after for event in pruner.events] == pytest.approx([0.6, 0.8], abs=1e-3)
        assert not masked_values(module, pruner.masks).any()
    first, second = seen[False], seen[True]
    assert_same(first["net.head.weight"] != 0, second["net.head.weight"] != 0)
    kept = first["net.head.weight"] != 0
    assert bool((first["net.head.weight"] != second["net.head.weight"])[kept].any())
    assert bool(
        (first["net.stem.1.running_mean"] != second["net.stem.1.running_mean"]).any()
    )  # what lost no input stays


@pytest.mark.parametrize("class_", [Taylor, Fisher])
def test_it_says_what_it_needs(class_):
    network, _, batches = case("mlp")
    with pytest.raises(ValueError, match="takes gradients from"):
        prune(network, class_(), 0.5)
    with pytest.raises(ValueError, match="`loss` is the scalar"):
        prune(network, class_(), 0.5, batches)
    with pytest.raises(ValueError, match="takes gradients and input moments from"):
        prune(network, class_(refit=True), 0.5)


@pytest.mark.parametrize("class_", [Taylor, Fisher, WeightTimesInput])
def test_refit_is_a_bool(class_):
    with pytest.raises(TypeError, match="`refit` is whether kept weights are refitted"):
        class_(refit=1)


# Two ranks


def of_a_rank(folder, rank):
    """Gradients and plans where each rank sees one of the two batches."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        return of_batches(slice(rank, rank + 1))
    finally:
        dist.destroy_process_group()


def of_batches(part):
    network, selected, batches = case("conv")
    arguments = (network, selected, batches[part], Probe(), loss)
    found = [batch_gradients(*arguments), squared_sample_gradients(*arguments)]
    for criterion in (Taylor(refit=True), Fisher(refit=True), WeightTimesInput(refit=True)):
        store, context = context_of(network, batches[part])
        plan = make_plan(criterion, Global(), 0.6, context, store)
        found += [plan.masks, plan.refit]
    return found


def test_two_ranks_see_what_one_process_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ours, theirs = on_two_ranks(of_a_rank, tmp_path)
    assert_same(theirs, ours)
    torch.testing.assert_close(ours, of_batches(slice(None)))
