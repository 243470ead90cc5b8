"""A PNG file as a regression: its pixels in their places, held-out pixels, and files that are none."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch
from helpers import assert_same, trainer
from PIL import Image
from torch import nn

from sparsecomp.data import PictureDataModule
from sparsecomp.data.picture import read_png
from sparsecomp.models import CPPN, MaskedModule

# Two rows of three pixels.
PIXELS = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [51, 102, 204], [255, 255, 255]]], np.uint8)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.png"
    Image.fromarray(PIXELS).save(path)
    return path


@pytest.fixture
def large(tmp_path):
    """20 x 10 pixels, no two alike: red is the column, green the row, each in tenths of 250."""
    path = tmp_path / "large.png"
    rows, columns = np.meshgrid(np.arange(10), np.arange(20), indexing="ij")
    Image.fromarray(np.stack([columns * 12, rows * 25, columns * 0], axis=-1).astype(np.uint8)).save(path)
    return path


def ready(path, **options):
    data = PictureDataModule(path, **options)
    data.setup("fit")
    return data


def parts(data):
    return {
        "train": data.train_dataloader().tensors,
        "val": data.val_dataloader().tensors,
        "test": data.test_dataloader().tensors,
    }


def test_pixels_by_hand(small):
    data = ready(small, validation=0.17, test=0.17)
    assert data.size == (2, 3)
    assert data.inputs.tolist() == [
        pytest.approx([x, y, 1.4 * math.hypot(x, y), 1]) for y in (-1, 1) for x in (-1, 0, 1)
    ]
    assert data.targets.tolist() == [
        pytest.approx(rgb) for rgb in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0.2, 0.4, 0.8], [1, 1, 1])
    ]
    assert {name: len(x) for name, (x, _) in parts(data).items()} == {"train": 4, "val": 1, "test": 1}


def test_grey_by_hand(small):
    data = ready(str(small), channels="grey", bias=False, validation=0.17, test=0.17)
    assert (data.in_features, data.out_features) == (3, 1)
    assert data.inputs.shape == (6, 3)
    mixed = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.8
    assert data.targets.tolist() == [pytest.approx([g], abs=1e-6) for g in (0.299, 0.587, 0.114, 0, mixed, 1)]
    assert float(data.targets.max()) <= 1.0


def test_held_out_pixels(large):
    data = ready(large, validation=0.1, test=0.2)
    assert (data.in_features, data.out_features) == (4, 3)
    split = parts(data)
    assert {name: len(x) for name, (x, _) in split.items()} == {"train": 140, "val": 20, "test": 40}
    # Together they are all pixels, once, and each target is that of its place.
    x, y = (torch.cat(column) for column in zip(*split.values(), strict=True))
    columns, rows = ((x[:, 0] + 1) * 9.5, (x[:, 1] + 1) * 4.5)
    assert sorted((rows * 20 + columns).round().int().tolist()) == list(range(200))
    assert y[:, 0].tolist() == pytest.approx((columns * 12 / 255).tolist(), abs=1e-5)
    assert y[:, 1].tolist() == pytest.approx((rows * 25 / 255).tolist(), abs=1e-5)


def test_what_the_seeds_change(large):
    first, other = ready(large, batch_size=200, seed=1), ready(large, batch_size=200, seed=2)
    assert_same(parts(first), parts(other))
    orders = [next(iter(data.train_dataloader()))[0] for data in (first, ready(large, batch_size=200, seed=1), other)]
    assert_same(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(parts(ready(large, split_seed=1))["test"][0], parts(first)["test"][0])
    torch.manual_seed(1)
    assert_same(next(iter(ready(large, batch_size=200).train_dataloader()))[0], orders[0])


def test_no_validation(large):
    assert ready(large, validation=0).val_dataloader() == []


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes(tmp_path, mode):
    black_and_white = np.array([[0, 255], [255, 0]], np.uint8)
    Image.fromarray(black_and_white).convert(mode).save(tmp_path / "it.png")
    read = read_png(tmp_path / "it.png", 4)
    assert (read.shape, read.dtype) == ((2, 2, 3), torch.float32)
    assert_same(read, torch.tensor([[0.0, 1.0], [1.0, 0.0]]).unsqueeze(-1).expand(2, 2, 3).contiguous())


def test_sixteen_bits_are_not_clipped(tmp_path):
    Image.fromarray(np.array([[0, 300, 32768, 65535]], np.uint16)).save(tmp_path / "deep.png")
    read = read_png(tmp_path / "deep.png", 4)
    assert read[0, :, 1].tolist() == pytest.approx([0, 300 / 65535, 32768 / 65535, 1])


def test_transparent_pixels_lie_on_white(tmp_path):
    Image.fromarray(np.array([[[255, 0, 0, 0], [255, 0, 0, 51], [255, 0, 0, 255]]], np.uint8)).save(tmp_path / "it.png")
    assert read_png(tmp_path / "it.png", 3)[0].tolist() == [
        pytest.approx(rgb) for rgb in ([1, 1, 1], [1, 0.8, 0.8], [1, 0, 0])
    ]


def test_missing_file(tmp_path):
    for path in (tmp_path / "none.png", tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"`path` is the PNG file and must exist; got '{path}'"):
            ready(path)


def test_foreign_file(tmp_path, small):
    Image.open(small).convert("RGB").save(tmp_path / "photo.png", format="JPEG")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    for name in ("photo", "text", "empty"):
        with pytest.raises(
            ValueError, match=rf"`path` is the PNG file, and .*{name}\.png is none: .* Convert it to PNG"
        ):
            ready(tmp_path / f"{name}.png")


def test_truncated_file(tmp_path, small):
    content, whole = small.read_bytes(), read_png(small, 6)
    place = content.index(b"IDAT")
    half = place + 4 + int.from_bytes(content[place - 4 : place], "big") // 2
    path = tmp_path / "cut.png"
    for kept in range(8, len(content)):
        path.write_bytes(content[:kept])
        if kept < half:
            with pytest.raises(ValueError, match=r"`path` is the PNG file, and .*cut\.png is broken: "):
                read_png(path, 6)
            continue
        try:  # it may end within what follows the pixels, checksums for one
            read = read_png(path, 6)
        except ValueError as error:
            assert "is broken: " in str(error)  # noqa: PT017
        else:
            assert_same(read, whole)


def test_corrupt_file(tmp_path, large):
    content = bytearray(large.read_bytes())
    place = content.index(b"IDAT") + 10
    content[place] ^= 0xFF
    (tmp_path / "bad.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"`path` is the PNG file, and .*bad\.png is broken"):
        ready(tmp_path / "bad.png")


def test_size_limit(small, tmp_path):
    assert ready(small, max_pixels=6, validation=0.17, test=0.17).size == (2, 3)
    with pytest.raises(
        ValueError, match=r"at most `max_pixels`=5 pixels; .*small\.png has 3 x 2\. Scale it down or raise"
    ):
        ready(small, max_pixels=5)
    # A header that claims more than any machine has is refused before anything is decoded.
    header = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"`max_pixels`=1048576 pixels; .* has 2147483647 x 2147483647"):
        ready(tmp_path / "bomb.png")


def test_too_small_a_picture(small):
    with pytest.raises(ValueError, match=r"has 3 x 2, of which 5 are for training and 0 for testing"):
        ready(small, validation=0.17, test=0.01)
    with pytest.raises(ValueError, match=r"of which 0 are for training and 3 for testing"):
        ready(small, validation=0.45, test=0.45)


def test_wrong_arguments():
    for name, minimum in {"batch_size": 1, "max_pixels": 1, "split_seed": 0, "seed": 0}.items():
        with pytest.raises(ValueError, match=f"`{name}` is .* integer >= {minimum}; got {minimum - 1}"):
            PictureDataModule("it.png", **{name: minimum - 1})
    for shares in [{"validation": -0.1}, {"test": 0.0}, {"validation": 0.5, "test": 0.5}, {"test": 1.0}]:
        with pytest.raises(ValueError, match=r"`validation` and `test` are shares .* with a sum below 1; got"):
            PictureDataModule("it.png", **shares)
    with pytest.raises(
        TypeError, match=r"`test` is the share of pixels for testing and must be in \(0, 1\); got '0.1'"
    ):
        PictureDataModule("it.png", test="0.1")
    with pytest.raises(ValueError, match=r"`channels` is what the outputs are .* 'grey', 'rgb'; got 'cmyk'"):
        PictureDataModule("it.png", channels="cmyk")
    with pytest.raises(TypeError, match=r"`bias` is .* True or False; got 1"):
        PictureDataModule("it.png", bias=1)
    with pytest.raises(TypeError, match=r"`path` is the PNG file and must be a string or a Path; got 3"):
        PictureDataModule(3)


def test_a_cppn_learns_a_picture(large):
    data = PictureDataModule(large, batch_size=20, seed=0)
    torch.manual_seed(0)
    network = CPPN(data.in_features, data.out_features, depth=1, bias=False)
    module = MaskedModule(network, nn.MSELoss(), lambda p: torch.optim.Adam(p, lr=0.01))
    fit = trainer(max_epochs=10)
    fit.fit(module, data)
    (result,) = fit.test(module, data, verbose=False)
    assert result["test/loss"] < 0.01 < float(data.targets.var(dim=0)[:2].min())
