"""Batches in memory: the order is a function of seed and epoch, and the place in it is kept."""

import itertools

import lightning as L
import pytest
import torch
from helpers import Lit, assert_same, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from sparsecomp.data import TensorBatches, batches


def samples(loader):
    """What an epoch yields, batch by batch."""
    return [batch.tolist() for (batch,) in loader]


def flat(loader):
    return [sample for batch in samples(loader) for sample in batch]


def make(n=10, batch_size=3, shuffle=True, seed=0, epoch=0):
    loader = TensorBatches(torch.arange(n), batch_size=batch_size, shuffle=shuffle, seed=seed)
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (1, 5), (10, 1), (10, 3), (9, 3), (10, 10), (10, 99)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_an_epoch(n, batch_size, shuffle):
    loader = make(n, batch_size, shuffle)
    for epoch in range(3):
        loader.set_epoch(epoch)
        found = samples(loader)
        assert sorted(itertools.chain(*found)) == list(range(n))
        assert len(found) == len(loader) == -(-n // batch_size)
        assert all(len(batch) == min(batch_size, n) for batch in found[:-1])


def test_without_shuffling_the_order_is_that_of_the_tensors():
    assert samples(make(5, 2, shuffle=False, epoch=7)) == [[0, 1], [2, 3], [4]]


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    orders = {(seed, epoch): flat(make(50, 7, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len({tuple(order) for order in orders.values()}) == 16
    # Neither the global random state, nor which epochs came before, nor the batch size matters.
    loader = make(50, 7, seed=2)
    for epoch in (3, 0, 0, 2):
        torch.manual_seed(epoch + 100)
        loader.set_epoch(epoch)
        state = torch.get_rng_state()
        assert flat(loader) == orders[2, epoch]
        assert torch.equal(torch.get_rng_state(), state)
    assert flat(make(50, 50, seed=2, epoch=3)) == orders[2, 3]


def test_large_seeds_are_taken():
    # torch.initial_seed() goes up to 2 ** 64 - 1.
    assert sorted(flat(make(seed=2**64 - 1, epoch=9))) == list(range(10))


def test_tensors_stay_together():
    x, y = torch.randn(20, 3), torch.arange(20)
    for a, b in TensorBatches(x, y, batch_size=6, shuffle=True):
        assert torch.equal(a, x[b])


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_place_in_the_middle_goes_on_with_what_remains(shuffle):
    whole = samples(make(shuffle=shuffle, seed=3, epoch=2))
    for done in range(len(whole)):
        loader = make(shuffle=shuffle, seed=3, epoch=2)
        iterator = iter(loader)
        assert [next(iterator)[0].tolist() for _ in range(done)] == whole[:done]
        # A resume has another seed and another epoch until it is told.
        resumed = make(shuffle=shuffle, seed=8)
        resumed.load_state_dict(loader.state_dict())
        resumed.set_epoch(2)
        assert samples(resumed) == whole[done:]
        # Once only: the epochs after that are whole.
        resumed.set_epoch(3)
        assert samples(resumed) == samples(make(shuffle=shuffle, seed=3, epoch=3))
        resumed.set_epoch(2)
        assert samples(resumed) == whole


def test_a_place_of_another_epoch_or_at_the_end_is_a_whole_epoch():
    loader = make(seed=3, epoch=2)
    list(loader)
    at_the_end = make()
    at_the_end.load_state_dict(loader.state_dict())
    at_the_end.set_epoch(2)
    assert samples(at_the_end) == samples(make(seed=3, epoch=2))
    iterator = iter(loader)
    next(iterator)
    another = make()
    another.load_state_dict(loader.state_dict())
    another.set_epoch(3)
    assert samples(another) == samples(make(seed=3, epoch=3))


def test_the_state_is_plain():
    loader = make()
    next(iter(loader))
    assert loader.state_dict() == {"seed": 0, "epoch": 0, "done": 1}


@pytest.mark.parametrize(("n", "ranks"), [(10, 1), (10, 2), (10, 3), (10, 4), (7, 5), (2, 2), (1, 2), (3, 8)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_an_epoch(monkeypatch, n, ranks, shuffle):
    whole = flat(make(n, 2, shuffle, seed=1, epoch=4))
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr(batches, "_ranks", lambda rank=rank: (rank, ranks))
        loader = make(n, 2, shuffle, seed=1, epoch=4)
        found = samples(loader)
        assert len(found) == len(loader)
        shares.append([sample for batch in found for sample in batch])
    # Of equal length, or a rank would wait for the others; together the order of one rank, its start repeated.
    assert {len(share) for share in shares} == {-(-n // ranks)}
    together = [sample for group in zip(*shares, strict=True) for sample in group]
    assert together[:n] == whole
    assert set(together[n:]) <= set(whole)


def test_lightning_tells_the_epoch_and_keeps_the_place(tmp_path):
    """Through a real Trainer: the state of the loader is part of the checkpoint."""

    class Data(L.LightningDataModule):
        def __init__(self, seed):
            super().__init__()
            g = torch.Generator().manual_seed(0)
            x, y = torch.randn(20, 16, generator=g), torch.randint(0, 4, (20,), generator=g)
            self.loader = TensorBatches(x, y, torch.arange(20), batch_size=6, shuffle=True, seed=seed)

        def train_dataloader(self):
            return self.loader

    class Module(Lit):
        def training_step(self, batch, batch_idx):
            seen.append(batch[2].tolist())
            return super().training_step(batch[:2], batch_idx)

    def fit(seed, ckpt_path=None):
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        t = trainer(save, max_epochs=3, enable_checkpointing=True, default_root_dir=tmp_path)
        module = Module(mlp())
        t.fit(module, datamodule=Data(seed), ckpt_path=ckpt_path)
        return module

    seen = []
    whole_module = fit(seed=5)
    whole = list(seen)
    assert [sorted(itertools.chain(*whole[i : i + 4])) for i in (0, 4, 8)] == [list(range(20))] * 3
    assert whole[:4] != whole[4:8]
    first = TensorBatches(torch.arange(20), batch_size=6, shuffle=True, seed=5)
    assert whole[:4] == samples(first)
    for step in (1, 4, 6, 11):
        seen.clear()
        module = fit(seed=99, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert seen == whole[step:]
        assert_same(dict(module.state_dict()), dict(whole_module.state_dict()))


@pytest.mark.parametrize(
    ("tensors", "options", "error", "match"),
    [
        ([], {}, ValueError, "`tensors` must be non-empty"),
        ([torch.zeros(0)], {}, ValueError, "`tensors` must be non-empty"),
        ([torch.zeros(2), torch.zeros(3)], {}, ValueError, r"equal length; got lengths \[2, 3\]"),
        ([torch.zeros(2)], {"batch_size": 0}, ValueError, "`batch_size` is the number of samples"),
        ([torch.zeros(2)], {"batch_size": 1.5}, TypeError, "`batch_size` .* got 1.5 of type float"),
        ([torch.zeros(2)], {"seed": -1}, ValueError, "`seed` is the start of the orders"),
    ],
)
def test_what_is_refused(tensors, options, error, match):
    with pytest.raises(error, match=match):
        TensorBatches(*tensors, **{"batch_size": 2} | options)
