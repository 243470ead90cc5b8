"""The pruner logs on the step axis of everything else, and moves no logger's step.

https://github.com/Lightning-AI/pytorch-lightning/issues/13382,
https://github.com/Lightning-AI/pytorch-lightning/issues/13016, https://github.com/wandb/wandb/issues/1507 and
https://github.com/wandb/wandb/issues/1626
"""

import csv
import json
import struct
import time
import zlib

import pytest
import torch
from helpers import Lit, assert_same, clone, loader, mlp, trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from sparsecomp import Levels, Magnitude, Pruning

BLOCK, HEADER = 32 * 1024, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(data):
    """The entries of a LevelDB log: fragments of a crc, a length and a type, in blocks, after a file header."""
    position, parts = 7, []
    assert data[:4] == b":W&B"
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:  # the rest of a block is padding
            position += BLOCK - position % BLOCK
            continue
        crc, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        fragment = data[position + HEADER : position + HEADER + length]
        if len(fragment) < length:  # still being written
            return
        assert crc == zlib.crc32(bytes([kind]) + fragment)
        parts = [fragment] if kind in (FULL, FIRST) else [*parts, fragment]
        if kind in (FULL, LAST):
            yield b"".join(parts)
        position += HEADER + length


def wandb_history(folder):
    """The rows of the one offline run under `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    records, deadline = [], time.monotonic() + 60
    # `wandb.finish` may return before its own process has written the file to its end, which is an exit record.
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"{path} was not finished"
        time.sleep(0.02)
        records = [Record.FromString(payload) for payload in payloads(path.read_bytes())]
    items = [record.history.item for record in records if record.HasField("history")]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in items]


def csv_rows(folder):
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def run(folder, monkeypatch, *pruners, epochs=3):
    """Both loggers side by side; returns the rows of each."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(folder / "data"))
    module = Lit(mlp())
    loggers = [WandbLogger(save_dir=folder, project="p"), CSVLogger(folder, "csv")]
    t = trainer(*pruners, logger=loggers, max_epochs=epochs, log_every_n_steps=2, default_root_dir=folder)
    t.fit(module, loader(), loader())
    wandb.finish()
    return wandb_history(folder), csv_rows(folder), module


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        pruner = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1))
        folders = [tmp_path_factory.mktemp(name) for name in ("sparse", "dense")]
        sparse = run(folders[0], monkeypatch, pruner)
        dense = run(folders[1], monkeypatch)
        return sparse, dense


def series(rows, name, step):
    return [(int(row[step]), float(row[name])) for row in rows if name in row]


def test_sparsity_shares_trainer_global_step_with_the_losses(runs):
    (rows, _, _), _ = runs
    sparsity = series(rows, "pruning/sparsity", "trainer/global_step")
    assert sparsity == [(3, 0.5), (7, float(torch.tensor(0.8))), (11, float(torch.tensor(0.8)))]
    assert [step for step, _ in sparsity] == [step for step, _ in series(rows, "val_loss", "trainer/global_step")]
    assert [step for step, _ in series(rows, "train_loss", "trainer/global_step")] == [1, 3, 5, 7, 9, 11]
    # Nothing is logged apart from that axis.
    assert all("trainer/global_step" in row for row in rows)


def test_steps_are_those_without_the_pruner(runs):
    (rows, csv_sparse, _), (dense_rows, csv_dense, _) = runs
    steps = [row["trainer/global_step"] for row in rows]
    assert steps == sorted(steps)
    assert set(steps) == {row["trainer/global_step"] for row in dense_rows} == {1, 3, 5, 7, 9, 11}
    assert {row["step"] for row in csv_sparse} == {row["step"] for row in csv_dense}


def test_the_number_of_logger_steps_is_the_same_in_wandb(runs):
    """Curves over wandb's own `_step` line up too: the sparsity comes with a row that is there anyway."""
    (rows, _, _), (dense_rows, _, _) = runs
    assert [row["_step"] for row in dense_rows] == list(range(len(dense_rows)))
    assert [row["_step"] for row in rows] == [row["_step"] for row in dense_rows]


def test_the_number_of_logger_steps_is_the_same_in_the_csv_file(runs):
    (_, csv_sparse, _), (_, csv_dense, _) = runs
    assert [row["step"] for row in csv_sparse] == [row["step"] for row in csv_dense]


def test_no_value_was_dropped(runs):
    """All that the dense run logs is there, at the same steps, and the sparsity besides."""
    (rows, csv_sparse, _), (dense_rows, csv_dense, _) = runs
    for sparse, dense, step in ((rows, dense_rows, "trainer/global_step"), (csv_sparse, csv_dense, "step")):
        for name in ("train_loss", "val_loss"):
            in_both = [[at for at, _ in series(of, name, step)] for of in (sparse, dense)]
            assert in_both[0] == in_both[1]
            assert len(in_both[0]) == {"train_loss": 6, "val_loss": 3}[name]
        assert len(series(sparse, "pruning/sparsity", step)) == 3
        assert series(dense, "pruning/sparsity", step) == []


def test_both_loggers_say_the_same(runs):
    (rows, csv_sparse, _), _ = runs
    for name in ("pruning/sparsity", "train_loss", "val_loss"):
        in_wandb, in_csv = series(rows, name, "trainer/global_step"), series(csv_sparse, name, "step")
        assert in_wandb == in_csv
        assert len(in_wandb) in (3, 6)


def test_without_a_logger_it_is_the_same_training(runs):
    (_, _, module), _ = runs
    pruner, other = Pruning(Magnitude(), Levels((0.5, 0.8), begin=1)), Lit(mlp())
    t = trainer(pruner, logger=False, max_epochs=3)
    t.fit(other, loader(), loader())
    assert pruner.sparsity == 0.8
    assert t.callback_metrics["pruning/sparsity"] == torch.tensor(0.8)
    assert_same(clone(other.state_dict()), clone(module.state_dict()))


def test_the_reader_joins_fragments_of_several_blocks():
    """A long entry is cut at the block's end; one that leaves under 7 bytes is followed by padding."""

    def fragment(kind, body):
        return struct.pack("<IHB", zlib.crc32(bytes([kind]) + body), len(body), kind) + body

    long = bytes(range(256)) * 300
    first = BLOCK - 7 - HEADER
    cut = [long[:first], long[first : first + BLOCK - HEADER], long[first + BLOCK - HEADER :]]
    data = b":W&B\x01\x02\x03" + b"".join(fragment(k, c) for k, c in zip((FIRST, MIDDLE, LAST), cut, strict=True))
    fill = BLOCK - len(data) % BLOCK - HEADER - 3
    data += fragment(FULL, bytes(fill)) + bytes(3) + fragment(FULL, b"end")
    assert list(payloads(data)) == [long, bytes(fill), b"end"]
