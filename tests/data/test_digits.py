"""The digits: a fixed split into disjoint parts, sizes and orders."""

import pytest
import torch
from lightning import seed_everything
from sklearn.datasets import load_digits

from sparsecomp.data import DigitsDataModule

PARTS = ("train", "val", "test")


def parts(**options):
    """Pictures and labels of each part, in the order of an epoch."""
    data = DigitsDataModule(**options)
    data.setup("fit")
    found = {}
    for name in PARTS:
        loader = getattr(data, f"{name}_dataloader")()
        xs, ys = zip(*loader, strict=True)
        found[name] = torch.cat(xs), torch.cat(ys)
    return found


def rows(x, y):
    """One tuple for each sample."""
    return [(int(label), *picture.flatten().tolist()) for picture, label in zip(x, y, strict=True)]


def test_the_parts_are_all_digits_each_once():
    found = parts()
    assert {name: len(x) for name, (x, _) in found.items()} == {"train": 1000, "val": 200, "test": 597}
    digits = load_digits()
    pairs = zip(digits.images, digits.target, strict=True)
    wanted = [(int(y), *(image / 16).astype("float32").flatten().tolist()) for image, y in pairs]
    together = [row for x, y in found.values() for row in rows(x, y)]
    assert sorted(together) == sorted(wanted)


def test_shapes_and_types():
    for x, y in parts().values():
        assert (x.shape[1:], x.dtype, y.dtype) == ((1, 8, 8), torch.float32, torch.int64)
        assert (float(x.min()), float(x.max())) == (0.0, 1.0)
        assert sorted(set(y.tolist())) == list(range(10))


def test_the_split_is_the_same_whatever_the_seed_and_the_batch_size():
    first = parts(seed=1)
    torch.manual_seed(7)
    second = parts(seed=2, batch_size=7)
    for name in ("val", "test"):
        assert torch.equal(first[name][0], second[name][0])
        assert torch.equal(first[name][1], second[name][1])
    assert not torch.equal(first["train"][0], second["train"][0])
    assert sorted(rows(*first["train"])) == sorted(rows(*second["train"]))


def test_the_split_is_the_one_that_published_numbers_rest_on():
    """Computed apart from the module: a permutation with a fixed seed, the last 597 for testing."""
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    target = torch.from_numpy(load_digits().target)[order]
    found = parts()
    assert found["test"][1].tolist() == target[1200:].tolist()
    assert found["val"][1].tolist() == target[1000:1200].tolist()


@pytest.mark.parametrize("validation", [1, 500, 1199])
def test_validation_takes_from_training_and_never_from_the_test_set(validation):
    found = parts(validation=validation)
    assert [len(found[name][0]) for name in PARTS] == [1200 - validation, validation, 597]
    assert torch.equal(found["test"][0], parts()["test"][0])


def test_no_validation():
    data = DigitsDataModule(validation=0)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert sum(len(x) for x, _ in data.train_dataloader()) == 1200


def test_batches():
    data = DigitsDataModule(batch_size=300)
    data.setup("fit")
    assert [len(x) for x, _ in data.train_dataloader()] == [300, 300, 300, 100]
    # What is only looked at comes as one batch.
    assert [len(x) for x, _ in data.val_dataloader()] == [200]
    assert [len(x) for x, _ in data.test_dataloader()] == [597]


def test_the_run_has_the_seed_where_none_is_given():
    def order(run_seed, **options):
        seed_everything(run_seed, verbose=False)
        return parts(**options)["train"][1].tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, seed=4) == order(2, seed=4)


def test_a_second_setup_keeps_the_loaders():
    """`fit` and then `test` set up twice; the place in the epoch must survive."""
    data = DigitsDataModule()
    data.setup("fit")
    loader = data.train_dataloader()
    data.setup("test")
    assert data.train_dataloader() is loader


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` is the number of samples in a batch"),
        ({"batch_size": "64"}, TypeError, "`batch_size` .* got '64'"),
        ({"validation": -1}, ValueError, "`validation` is the number of pictures"),
        ({"validation": 1200}, ValueError, r"`validation` .* in \[0, 1199\]; got 1200"),
        ({"validation": 0.2}, TypeError, "`validation` .* got 0.2 of type float"),
        ({"seed": -1}, ValueError, "`seed` is the start of the training order"),
    ],
)
def test_what_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        DigitsDataModule(**options)
