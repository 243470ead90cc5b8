"""The similarity criterion: reference numbers, function preservation, what it refuses, and two real ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import Lit, assert_same, clone, loader, on_two_ranks, trainer
from torch import nn

from sparsecomp import (
    Global,
    MaskStore,
    OneShot,
    Probe,
    Pruning,
    ScoreContext,
    Selection,
    Similarity,
    SimilarityPruning,
    prune,
)
from sparsecomp.models import MixedActivation
from sparsecomp.planning import make_plan

REFERENCE = Path(__file__).parent.parent / "data" / "sp_reference.npz"


def reference():
    """The network of the reference file, its data, and the file."""
    import json

    file = np.load(REFERENCE, allow_pickle=False)
    names = ["identity" if name == "id" else name for name in json.loads(str(file["activations"]))]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    assert names == [name for name, count in counts.items() for _ in range(count)]
    layers = []
    for index in range(4):
        weight = torch.from_numpy(file[f"weight_{index}"])
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.weight.data, layer.bias.data = weight.clone(), torch.from_numpy(file[f"bias_{index}"]).clone()
        layers += [layer, MixedActivation(counts)] if index < 3 else [layer]
    return nn.Sequential(*layers), torch.from_numpy(file["X"]), file


def context_of(module, data):
    store = MaskStore(module)
    return ScoreContext(module, store.weights, store.masks, 0, data, None, store.selected, Probe())


def test_scores_are_those_of_the_reference():
    network, x, file = reference()
    assert torch.allclose(network(x), torch.from_numpy(file["output"]), rtol=1e-9, atol=1e-12)
    scores = Similarity(gamma=2).score(context_of(network, [x]))
    plain = Similarity(gamma=0).score(context_of(network, [x]))
    for index in range(4):
        expected = torch.from_numpy(file[f"score_gamma2_{index}"])
        torch.testing.assert_close(scores[f"{2 * index}.weight"], expected, rtol=1e-6, atol=1e-12)
        without = torch.from_numpy(file[f"elimination_{index}"] * file[f"unit_credit_{index}"][:, None])
        torch.testing.assert_close(plain[f"{2 * index}.weight"], without, rtol=1e-6, atol=1e-12)


def test_refits_are_those_of_the_reference():
    network, x, file = reference()
    masks = {f"{2 * index}.weight": torch.from_numpy(file[f"mask_{index}"]) for index in range(4)}
    fitted = Similarity().refit(context_of(network, [x]), masks)
    for index in range(4):
        for kind in ("weight", "bias"):
            expected = torch.from_numpy(file[f"refit_{kind}_{index}"])
            torch.testing.assert_close(fitted[f"{2 * index}.{kind}"], expected, rtol=1e-6, atol=1e-9)


def copies():
    """Hidden units 1, 3, 5 are the same as, the negated, and the scaled and shifted one of units 0, 2, 4."""
    torch.manual_seed(0)
    mixed = MixedActivation({"tanh": 2, "sin": 2, "identity": 2})
    network = nn.Sequential(nn.Linear(4, 6), mixed, nn.Linear(6, 3)).double()
    first = network[0]
    with torch.no_grad():
        first.weight[1], first.bias[1] = first.weight[0], first.bias[0]
        first.weight[3], first.bias[3] = -first.weight[2], -first.bias[2]
        first.weight[5], first.bias[5] = 2.5 * first.weight[4], 2.5 * first.bias[4] - 0.7
    return network, torch.randn(200, 4).double()


def test_merging_copies_preserves_the_function():
    network, x = copies()
    before = network(x).detach()
    store = prune(network, Similarity(merge=0.999), 0.5, data=[x])  # 3 of 6 units: 12 + 9 of 24 + 18 weights
    assert store.sparsity == 0.5
    assert float((network(x) - before).detach().abs().max()) < 1e-5
    assert int(store.masks["0.weight"].any(1).sum()) == 3


def test_without_a_refit_of_merged_weights_the_function_would_change():
    network, x = copies()
    before = network(x).detach()
    with torch.no_grad():
        network[2].weight[:, 1::2] = 0
    assert float((network(x) - before).detach().abs().max()) > 0.1


@pytest.mark.parametrize("norm", [False, True])
def test_offsets_go_where_there_is_a_place_for_them(norm):
    """An input that is nearly constant is removed; its part of the mean must not go with it."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=not norm)
    network = nn.Sequential(layer, nn.BatchNorm1d(2)) if norm else nn.Sequential(layer)
    x = torch.randn(64, 3)
    x[:, 2] = 5.0
    network.train()
    for _ in range(50):
        network(x)
    network.eval()
    before = network(x).detach()
    store = prune(network, Similarity(), 1 / 3, data=[x], allocation=Global(min_keep=0))
    assert store.masks["0.weight"].tolist() == [[True, True, False]] * 2
    assert float((network(x) - before).detach().abs().max()) < 1e-4


def test_layers_that_hide_their_inputs_are_refused_by_name_and_nothing_changes():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0]).mean(1)

    network = Attending()
    before = clone(network.state_dict())
    with pytest.raises(TypeError, match=r"'attention\.in_proj_weight', which nn\.MultiheadAttention does not show"):
        prune(network, Similarity(), 0.5, data=[torch.randn(4, 5, 8)])
    assert_same(clone(network.state_dict()), before)
    store = prune(network, Similarity(), 0.5, data=[torch.randn(4, 5, 8)], selection=Selection(exclude=["attention"]))
    assert store.sparsity == 0.5


def test_it_needs_data():
    with pytest.raises(ValueError, match="`data` yields the batches that Similarity takes input moments from"):
        prune(nn.Linear(4, 2), Similarity(), 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"gamma": 3}, "0, 1 or 2; got 3"), ({"merge": 1.5}, r"in \(0, 1\]")]
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Similarity(**arguments)


class Residual(nn.Module):
    """A user's network: convolutions, BatchNorm, a residual sum."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x.reshape(-1, 1, 4, 4))
        return self.head(torch.relu(x + self.block(x)).mean((2, 3)))


def test_a_users_module_with_batchnorm_and_residuals(tmp_path):
    torch.manual_seed(0)
    module, pruner = Lit(Residual()), SimilarityPruning()
    trainer(pruner, max_epochs=5).fit(module, loader(n=64), loader())
    assert pruner.sparsity == pytest.approx(0.9, abs=1 / 680)
    assert [event.after for event in pruner.events] == sorted(event.after for event in pruner.events)
    assert len(pruner.events) == 4
    weights = dict(module.named_parameters())
    assert not any(bool(weights[name][~mask].any()) for name, mask in pruner.masks.items())
    assert pruner.effective_sparsity >= pruner.sparsity


def test_events_leave_the_batches_of_a_resumable_loader_alone():
    from sparsecomp.data import TensorBatches

    def orders(*callbacks):
        x = torch.arange(32.0)[:, None].repeat(1, 16)
        seen = []

        class Recording(Lit):
            def training_step(self, batch, index):
                seen.extend(batch[0][:, 0].tolist())
                return super().training_step(batch, index)

        torch.manual_seed(0)
        batches = TensorBatches(x, torch.arange(32) % 4, batch_size=8, shuffle=True, seed=3)
        trainer(*callbacks, max_epochs=2).fit(Recording(nn.Linear(16, 4)), batches)
        return seen

    assert orders(Pruning(Similarity(), OneShot(0.5, at=2, unit="step"))) == orders()


class Stream(nn.Module):
    """A residual stream that two layers write and two read, and hidden units inside the block."""

    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down, self.head = (nn.Linear(a, b) for a, b in ((5, 6), (6, 8), (8, 6), (6, 3)))

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(x + self.down(torch.tanh(self.up(x))))


def test_units_of_a_residual_stream_do_not_merge_and_those_inside_a_block_do():
    torch.manual_seed(0)
    net = Stream().double()
    with torch.no_grad():
        for layer in (net.stem, net.up, net.down):  # units 0 and 1 of each are copies
            layer.weight[1], layer.bias[1] = -layer.weight[0], -layer.bias[0]
    x = torch.randn(400, 5).double()
    before = net(x)
    dropped = 6  # what writes the dropped unit: a row of `up`
    total = sum(p.numel() for p in net.parameters() if p.dim() > 1)
    store = prune(net, Similarity(merge=0.999), (dropped + 3) / total, data=[x])
    rows = {name: mask.flatten(1).any(1) for name, mask in store.masks.items()}
    assert rows["up.weight"].sum() == 7
    assert rows["stem.weight"].all()
    assert rows["down.weight"].all()
    assert (net(x) - before).abs().max() < 0.02 * before.std()  # three weights more than the copy went


@pytest.mark.parametrize("reader", ["bias", "norm"])
def test_dead_and_constant_units_fold_into_what_follows(reader):
    torch.manual_seed(0)
    after = [nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)] if reader == "norm" else [nn.Linear(6, 4)]
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), *after, nn.Tanh(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        net[0].bias[0] = -100.0  # dead
        net[0].weight[1], net[0].bias[1] = 0.0, 2.0  # constant
    x = torch.randn(300, 3).double()
    before = net(x)
    store = prune(net, Similarity(), 14 / 50, data=[x])
    assert store.masks["0.weight"].any(1).tolist() == [False, False, True, True, True, True]
    assert store.masks["2.weight"].any(0).tolist() == [False, False, True, True, True, True]
    assert store.masks["0.weight"][2:].all()
    torch.testing.assert_close(net(x), before, rtol=0, atol=1e-5)


def test_overlap_of_a_grouped_convolution_is_that_of_its_blocks():
    def network(groups):
        return nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), nn.Conv1d(4, 6, 1, groups=groups), nn.Tanh(), nn.Flatten())

    torch.manual_seed(0)
    grouped, whole = network(2).double(), network(1).double()
    whole.load_state_dict(grouped.state_dict() | {"2.weight": torch.zeros(6, 4, 1).double()})
    with torch.no_grad():
        whole[2].weight[:3, :2], whole[2].weight[3:, 2:] = grouped[2].weight[:3], grouped[2].weight[3:]
    x = torch.randn(50, 4, 2).double()

    def overlaps(net):
        store = MaskStore(net)
        context = ScoreContext(net, store.weights, store.masks, 0, [x], None, store.selected, Probe())
        with_overlap, without = (Similarity(gamma).score(context)["2.weight"] for gamma in (1, 0))
        return with_overlap / without

    of_blocks = overlaps(whole)
    torch.testing.assert_close(overlaps(grouped), torch.cat([of_blocks[:3, :2], of_blocks[3:, 2:]]))


# Two ranks


def plan_of_a_rank(folder, rank):
    """Scores and masks where each rank sees half of the data."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        return planned(slice(rank, None, 2))
    finally:
        dist.destroy_process_group()


def planned(part):
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).double()[part]
    store = MaskStore(network)
    context = ScoreContext(network, store.weights, store.masks, 0, [x], None, store.selected, Probe())
    scores = Similarity(gamma=2).score(context)
    plan = make_plan(Similarity(gamma=2), Global(), 0.6, context, store)
    return {"scores": scores, "masks": plan.masks, "refit": plan.refit}


def test_two_ranks_score_as_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ours, theirs = on_two_ranks(plan_of_a_rank, tmp_path)
    alone = planned(slice(None))
    assert_same(theirs["masks"], ours["masks"])
    assert_same(theirs["refit"], ours["refit"])
    assert_same(ours["masks"], alone["masks"])
    for name, score in alone["scores"].items():
        torch.testing.assert_close(ours["scores"][name], score, rtol=1e-6, atol=1e-12)
