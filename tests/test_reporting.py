"""The closing table and the curves, from values written by hand."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib import image
from rich.console import Console

from sparsecomp.reporting import closing_table, plot_curves, read_curves

CSV = """\
epoch,pruning/sparsity,step,train/loss,val/accuracy,val/loss
0,,15,2.5,,
0,0.25,15,,0.5,2.0
1,,31,,0.1,9.0
1,0.5,31,,0.75,1.5
1,,31,1.25,,
,,32,7.0,,
2,0.5,32,,,
"""
RUN = Path("runs/fit/version_0")


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(CSV)
    return path


def test_read_curves(metrics):
    assert read_curves(metrics) == {
        "pruning/sparsity": {0: 0.25, 1: 0.5, 2: 0.5},
        "train/loss": {0: 2.5, 1: 1.25},  # a row without an epoch belongs to none
        "val/accuracy": {0: 0.5, 1: 0.75},  # of two values in an epoch the last
        "val/loss": {0: 2.0, 1: 1.5},
    }


def test_read_curves_of_an_empty_file(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("")
    assert read_curves(path) == {}
    path.write_text("epoch,step,val/loss\n")
    assert read_curves(path) == {}


def test_read_curves_keeps_what_is_not_finite(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,val/loss\n0,1,inf\n1,2,nan\n")
    first, second = read_curves(path)["val/loss"].values()
    assert first == float("inf")
    assert second != second


def test_plot_curves_draws_a_png(metrics, tmp_path):
    picture = tmp_path / "curves.png"
    assert plot_curves(metrics, picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert image.imread(picture).shape[:2] == (600, 1050)  # 7 x 4 inches of 150 dots
    # The same file is the same picture: no date, no version.
    assert plot_curves(metrics, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == picture.read_bytes()


def test_plot_curves_shows_accuracy_and_sparsity_by_completed_epochs(metrics, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot_curves(metrics, tmp_path / "curves.png")
    left, right = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for axes in (left, right) for line in axes.lines}
    assert lines == {"val/accuracy": [[1, 0.5], [2, 0.75]], "sparsity": [[1, 0.25], [2, 0.5], [3, 0.5]]}
    assert left.get_ylabel() == "accuracy"
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["val/accuracy", "sparsity"]


def test_plot_curves_falls_back_to_losses_and_leaves_test_metrics_out(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,test/accuracy,train/loss,val/loss\n0,1,,3,2\n1,2,,2,1\n2,2,0.5,,\n")
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    assert plot_curves(path, tmp_path / "curves.png")
    (axes,) = figures[0].axes  # without a pruner there is no axis for sparsity
    assert sorted(line.get_label() for line in axes.lines) == ["train/loss", "val/loss"]


def test_plot_curves_without_anything_to_draw_leaves_no_file(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,pruning/sparsity\n0,1,0.5\n")
    assert not plot_curves(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def rows(table, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    return dict([cell.strip() for cell in line.strip("│").split("│")] for line in lines)


PRUNER = SimpleNamespace(
    counts={"a.weight": (1, 3), "b.weight": (900, 1200)},
    sparsity=901 / 1203,
    effective_sparsity=0.8,
    effective_sparsity_reason="",
)


def test_closing_table():
    files = {"metrics": RUN / "metrics.csv", "checkpoint": Path("/elsewhere/last.ckpt")}
    assert rows(closing_table({"test/accuracy": 0.98765, "test/loss": 0.1}, PRUNER, RUN, files)) == {
        "test/accuracy": "0.9877",
        "test/loss": "0.1000",
        "sparsity of a.weight": "0.3333  (2 of 3 kept)",
        "sparsity of b.weight": "0.7500  (300 of 1,200 kept)",
        "sparsity in all": "0.7490",
        "effective sparsity": "0.8000",
        "files in": "runs/fit/version_0",
        "metrics": "metrics.csv",
        "checkpoint": "/elsewhere/last.ckpt",
    }


def test_closing_table_without_pruner_and_test_metrics():
    found = rows(closing_table({}, None, RUN, {}))
    assert found["sparsity"] == "dense: no pruning"
    assert found["test metrics"].startswith("none: ")
    assert "sparsity in all" not in found


def test_closing_table_says_whole_names_in_a_narrow_terminal():
    """A name that is cut cannot be found again in the network."""
    name = "network.encoder.layers.11.self_attention.out_projection.weight"
    reason = "it branches on data"
    pruner = SimpleNamespace(
        counts={name: (1, 2)}, sparsity=0.5, effective_sparsity=math.nan, effective_sparsity_reason=reason
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(closing_table({}, pruner, RUN, {}))
    text = "".join(line.strip("│").split("│")[0].strip() for line in console.export_text().splitlines() if "│" in line)
    assert name in text
