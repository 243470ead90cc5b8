"""Networks from plain .npz files: against a reference in NumPy, on real files, and what is refused."""

import io
import json
import math
import pickle
import zipfile

import numpy as np
import pytest
import torch

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.functions.coordinates import pixel_grid
from sparsecomp.models import UnitActivations, load_plain_network

ACTIVATIONS = ["cache", "gaussian", "sin", "sigmoid", "identity"]
REFERENCE = {
    "cache": lambda z: z,
    "identity": lambda z: z,
    "gaussian": lambda z: 2 * np.exp(-(z**2)) - 1,
    "sin": np.sin,
    "sigmoid": lambda z: 2 / (1 + np.exp(-z)) - 1,
}


def arrays(activations=ACTIVATIONS):
    rng = np.random.default_rng(0)
    width = len(activations)
    weights = {f"w{i:02d}": rng.normal(size=s) for i, s in enumerate([(4, width), (width, width), (width, 3)])}
    return weights | {"meta": np.array(json.dumps({"activations": activations, "name": "ours"}))}


def saved(folder, **changed):
    path = folder / "net.npz"
    np.savez(path, **{name: array for name, array in (arrays() | changed).items() if array is not None})
    return path


def reference(weights, activations, x):
    h = x
    for weight in weights[:-1]:
        z = h @ weight
        h = np.stack([REFERENCE[name](z[:, i]) for i, name in enumerate(activations)], axis=1)
    return h @ weights[-1]


def test_it_computes_what_the_file_says(tmp_path):
    loaded = load_plain_network(saved(tmp_path, target=np.full((2, 3, 3), 0.5, "f4")))
    x = np.random.default_rng(1).normal(size=(7, 4))
    held = arrays()
    expected = reference([held[f"w0{i}"] for i in range(3)], ACTIVATIONS, x)
    np.testing.assert_allclose(loaded.network(torch.tensor(x)).detach().numpy(), expected, rtol=0, atol=1e-12)
    assert loaded.meta["name"] == "ours"
    assert {name: tuple(picture.shape) for name, picture in loaded.pictures.items()} == {"target": (2, 3, 3)}
    graph = ConnectivityGraph.trace(loaded.network)
    assert len(graph.inputs) == 1
    assert [name for name, _ in loaded.network.named_parameters()] == ["0.weight", "2.weight", "4.weight"]


@pytest.mark.parametrize("name", ["picbreeder", "sgd"])
@pytest.mark.parametrize("picture", ["skull", "butterfly", "apple"])
def test_real_networks_draw_their_picture(fer, name, picture):
    loaded = load_plain_network(fer / f"{name}_{picture}.npz")
    with torch.no_grad():
        h, s, v = loaded.network.double()(pixel_grid(256, 256).double()).unbind(1)
    import matplotlib.colors

    hsv = torch.stack([(h + 1) % 1, s.clamp(0, 1), v.abs().clamp(0, 1)], 1).reshape(256, 256, 3).numpy()
    drawn = matplotlib.colors.hsv_to_rgb(hsv)
    # Their own picture was rendered in TF32, up to .153 away at single pixels.
    assert float(np.abs(drawn - loaded.pictures["own_img"].numpy()).mean()) < 0.01


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"w01": None}, "must have the matrices w00, w01, ..., at least two; it has w00, w02"),
        ({"w01": np.zeros((5, 4))}, "w02 reads 5 units, the matrix before it makes 4, and there are 5 activations"),
        ({"meta": np.array(json.dumps({"activations": ["sin"] * 4}))}, "makes 5, and there are 4 activations"),
        ({"w01": np.zeros(5)}, "w01 must be a finite float matrix; it is float64 of shape"),
        ({"w01": np.full((5, 5), math.nan)}, "w01 must be a finite float matrix"),
        ({"w01": np.zeros((5, 5), dtype=int)}, "w01 must be a finite float matrix; it is int64"),
        ({"w01": np.array([[{}] * 5] * 5, dtype=object)}, "Object arrays cannot be loaded|is broken"),
        ({"meta": None}, "it has no 'meta'"),
        ({"meta": np.array("{")}, "Expecting property name"),
        ({"meta": np.array("{}")}, "it has no 'activations'"),
        ({"meta": np.array("3")}, "is broken"),
        ({"meta": np.array(json.dumps({"activations": ["relu6"] * 5}))}, "must be one of 'cache', .*; got 'relu6'"),
    ],
)
def test_wrong_files_are_refused(tmp_path, changed, words):
    with pytest.raises(ValueError, match=f"`path` is the .npz file of a network, and .*({words})"):
        load_plain_network(saved(tmp_path, **changed))


def test_truncated_and_foreign_files_are_refused(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PK\x03\x04", pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is none, or is broken"):
            load_plain_network(path)
    with pytest.raises(FileNotFoundError, match="must exist; got"):
        load_plain_network(tmp_path / "no.npz")


def test_size_is_checked_before_arrays_are_read(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="more than `max_bytes`=100 "):
        load_plain_network(path, max_bytes=100)
    load_plain_network(path, max_bytes=10_000)


def test_a_header_that_promises_more_than_the_file_has(tmp_path):
    path = tmp_path / "net.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**20)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w00.npy", header.getvalue())
    with pytest.raises(ValueError, match=f"unpack to {2**43} bytes"):
        load_plain_network(path)


def test_unit_activations():
    with pytest.raises(ValueError, match="`names` is the activation of each unit and must be one of"):
        UnitActivations(["cache", "relu"])
    assert not UnitActivations(ACTIVATIONS).state_dict()
