"""An embedding and a readout that share a weight keep one tensor with one mask.

https://github.com/huggingface/transformers/issues/16283
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, trainer
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp import Layerwise, Levels, LotteryTicketPruning, Magnitude, Pruning, Selection, load_ticket, prune


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(torch.relu(self.mid(self.emb(x)))).mean(1)


BOTH = Selection(include=["head.weight", "mid.weight"])
WAYS = {
    "embedding": ["emb.weight"],
    "readout": ["head.weight"],
    "both": ["emb.weight", "head.weight"],
    "module": ["head"],
    "type": [nn.Embedding],
}


def build(seed=0):
    torch.manual_seed(seed)
    return TinyLM(), torch.randint(0, 10, (2, 4))


def data():
    g = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randint(0, 10, (32, 4), generator=g), torch.randint(0, 10, (32,), generator=g)),
        batch_size=8,
    )


def tied(net):
    return net.emb.weight is net.head.weight


def test_not_by_default():
    net, _ = build()
    store = prune(net, Magnitude(), 0.5)
    assert list(store.masks) == ["mid.weight"]
    assert tied(net)
    assert (net.emb.weight != 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_one_entry_by_either_name(way):
    net, _ = build()
    (entry,) = Selection(include=WAYS[way]).resolve(net)
    assert (entry.name, entry.aliases) == ("emb.weight", ("head.weight",))
    store = prune(net, Magnitude(), 0.5, selection=Selection(include=WAYS[way]))
    assert list(store.masks) == ["emb.weight"]
    assert store.counts() == {"emb.weight": (30, 60)}  # counted once
    assert tied(net)
    assert int((net.head.weight == 0).sum()) == 30
    assert sum(p.numel() for p in net.parameters()) == 60 + 42


def test_with_another_layer_it_is_counted_once():
    net, _ = build()
    store = prune(net, Magnitude(), 0.5, selection=BOTH)
    assert store.sparsity == 48 / 96
    assert int((net.emb.weight == 0).sum() + (net.mid.weight == 0).sum()) == 48


@pytest.mark.parametrize("way", ["embedding", "readout"])
def test_excluded_by_either_name(way):
    net, _ = build()
    selection = Selection(include=["emb.weight", "mid.weight"], exclude=WAYS[way])
    assert [entry.name for entry in selection.resolve(net)] == ["mid.weight"]


@pytest.mark.parametrize("name", ["emb.weight", "head.weight"])
def test_pruning_rows_of_the_vocabulary_changes_both_sides(name):
    net, x = build()
    prune(net, Magnitude(), 0.3, selection=Selection(include=[name]), allocation=Layerwise("unit"))
    assert tied(net)
    gone = (net.emb.weight == 0).all(1)
    assert int(gone.sum()) == 3
    assert not net(x)[:, gone].any()
    assert not net.emb(gone.nonzero().flatten()).any()


@pytest.mark.parametrize("part", ["emb", "head", "whole"])
def test_a_load_through_either_side_obeys_the_mask(part):
    net, _ = build()
    store = prune(net, Magnitude(), 0.5, selection=BOTH)
    other = build(1)[0]
    target, source = (net, other) if part == "whole" else (getattr(net, part), getattr(other, part))
    target.load_state_dict(source.state_dict())
    assert tied(net)
    assert_same(net.emb.weight.detach(), other.emb.weight.detach() * store.masks["emb.weight"])


@pytest.mark.parametrize(
    "optimizer", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.05)]
)
def test_in_a_training_and_its_files(tmp_path, optimizer):
    module, steps = Lit(build()[0], optimizer), []
    start = module.net.mid.weight.detach().clone()
    selection = Selection(include=["net.head.weight", "net.mid.weight"])

    def look(trainer, module):
        assert tied(module.net)
        mask = pruner.masks["net.emb.weight"]
        assert not module.net.emb.weight[~mask].any()
        steps.append(sum(int((~mask).sum()) for mask in pruner.masks.values()))

    pruner = LotteryTicketPruning(Levels((0.25, 0.5), begin=1), selection=selection)
    t = trainer(pruner, Watch(on_train_batch_end=look), max_epochs=4, default_root_dir=tmp_path)
    t.fit(module, data())
    assert steps == [0] * 3 + [24] * 4 + [48] * 9
    assert pruner.sparsity == 0.5
    assert list(pruner.masks) == ["net.emb.weight", "net.mid.weight"]
    assert not torch.equal(module.net.mid.weight, start)
    # One tensor in the optimizer, one mask and one tensor in the checkpoint, one of each in the ticket.
    held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
    assert [p is module.net.emb.weight for p in held].count(True) == 1
    assert len(held) == len(t.optimizers[0].state) == 3
    t.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert list(saved["callbacks"]["sparsecomp.pruning"]["masks"]) == ["net.emb.weight", "net.mid.weight"]
    assert len(saved["optimizer_states"][0]["state"]) == 3
    both = [saved["state_dict"][f"net.{side}.weight"].data_ptr() for side in ("emb", "head")]
    assert both[0] == both[1]
    with safe_open(pruner.ticket_files["ticket"], "pt") as file:
        names = sorted(file.keys())
    assert names == ["mask.net.emb.weight", "mask.net.mid.weight"] + [
        f"weight.net.{name}" for name in ("emb.weight", "mid.bias", "mid.weight")
    ]
    fresh = Lit(build(5)[0])
    store = load_ticket(pruner.ticket_files["trained"], fresh, selection)
    assert tied(fresh.net)
    assert_same(clone(fresh.state_dict()), clone(module.state_dict()))
    assert store.sparsity == 0.5


def test_resume_keeps_the_tie(tmp_path):
    def fit(epochs, seed=0, ckpt_path=None):
        module = Lit(build(seed)[0])
        selection = Selection(include=["net.emb.weight"])
        pruner = Pruning(Magnitude(), Levels((0.25, 0.5), begin=1, every=2), selection=selection)
        t = trainer(pruner, max_epochs=epochs)
        t.fit(module, data(), ckpt_path=ckpt_path)
        t.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    whole = fit(4)
    fit(2)
    resumed = fit(4, seed=3, ckpt_path=tmp_path / "2.ckpt")
    assert tied(resumed.net)
    assert_same(clone(resumed.state_dict()), clone(whole.state_dict()))


def test_two_tied_linears_are_selected_by_default_and_once():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    store = prune(net, Magnitude(), 0.5)
    assert store.counts() == {"0.weight": (18, 36)}
    assert net[2].weight is net[0].weight
