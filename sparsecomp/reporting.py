"""What a run leaves for its reader: a closing table, and a picture of the curves beside the CSV."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from sparsecomp.callbacks.base import PruningBase


def closing_table(
    test_metrics: Mapping[str, float],
    pruner: PruningBase | None,
    folder: Path,
    files: Mapping[str, Path],
    compositionality: Mapping[str, float] | None = None,
) -> Table:
    """Test metrics, sparsity per layer and in all, compositionality metrics, and where the files are in the folder."""
    table = Table(title="Result", title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    for name, value in test_metrics.items():
        table.add_row(name, f"{value:.4f}")
    if not test_metrics:
        table.add_row("test metrics", "none: the module has no test_step or the data no test set")
    table.add_section()
    if pruner is None:
        table.add_row("sparsity", "dense: no pruning")
    else:
        for name, (pruned, total) in pruner.counts.items():
            table.add_row(f"sparsity of {name}", f"{pruned / total:.4f}  ({total - pruned:,} of {total:,} kept)")
        table.add_row("sparsity in all", f"{pruner.sparsity:.4f}")
        effective = pruner.effective_sparsity
        table.add_row(
            "effective sparsity", pruner.effective_sparsity_reason if math.isnan(effective) else f"{effective:.4f}"
        )
    table.add_section()
    for name, value in (compositionality or {}).items():
        table.add_row(name, f"{value:.4f}")
    table.add_section()
    table.add_row("files in", str(folder))
    for name, path in files.items():
        table.add_row(name, str(path.relative_to(folder) if path.is_relative_to(folder) else path))
    return table


def read_curves(metrics_csv: Path) -> dict[str, dict[int, float]]:
    """Each metric of a CSVLogger file by epoch; of several values in an epoch the last."""
    curves: dict[str, dict[int, float]] = {}
    with metrics_csv.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name not in {"epoch", "step"} and value and row.get("epoch"):
                    curves.setdefault(name, {})[int(row["epoch"])] = float(value)
    return curves


def plot_curves(metrics_csv: Path, picture: Path) -> bool:
    """Draw the validation accuracy (else the losses) and the sparsity over epochs; False if there is nothing to draw."""
    from matplotlib.figure import Figure

    # Test metrics are one point after the end and stand in the table.
    curves = {name: curve for name, curve in read_curves(metrics_csv).items() if not name.startswith("test")}
    scores = [name for name in curves if "acc" in name.lower()] or [name for name in curves if "loss" in name.lower()]
    if not scores:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in sorted(scores):
        axes.plot(*_line(curves[name]), marker=".", label=name)
    axes.set_xlabel("completed epochs")
    axes.set_ylabel(", ".join(sorted({name.rpartition("/")[2] for name in scores})))
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if "pruning/sparsity" in curves:
        right = axes.twinx()
        right.plot(*_line(curves["pruning/sparsity"]), color="black", drawstyle="steps-post", label="sparsity")
        right.set_ylabel("sparsity (fraction of weights removed)")
        right.set_ylim(0, 1)
        more, names = right.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    axes.legend(handles, labels, loc="lower right")
    figure.savefig(picture, dpi=150, metadata={"Software": None})
    return True


def _line(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return [epoch + 1 for epoch in curve], list(curve.values())
