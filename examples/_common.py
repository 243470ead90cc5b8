"""What the examples share: training by hand under masks, a seed's trials side by side, CSV and table."""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed
from scipy.stats import wilcoxon
from torch import Tensor, nn

from sparsecomp import Criterion, MaskStore, Probe, ScoreContext
from sparsecomp.allocation import resolve_allocation
from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.data import TensorBatches
from sparsecomp.planning import make_plan
from sparsecomp.rewinding import Snapshot

EVIDENCE = Path(__file__).parent.parent / "docs" / "evidence"
Row = dict[str, Any]


class Run:
    """A network in training, with its masks and an order of data that goes on from phase to phase."""

    def __init__(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        settings: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.network, self.x, self.y, self.loss, self.settings, self.seed = network, x, y, loss, settings, seed
        self.store = MaskStore(network)
        self.graph = ConnectivityGraph.trace(network, x[:2])
        self.steps = self.epoch = 0

    def train(self, steps: int, rate: float, snapshot_at: int | None = None) -> Snapshot | None:
        """Adam with warm-up, then cosine; returns the snapshot after `snapshot_at` steps."""
        optimizer = torch.optim.Adam(self.network.parameters(), lr=rate, fused=True)
        warm_up, last = self.settings["schedule"]["warm_up"], self.settings["schedule"]["last"]

        def factor(step: int) -> float:
            cosine = last + (1 - last) * (1 + math.cos(math.pi * step / steps)) / 2
            return min(1.0, (step + 1) / warm_up) * cosine

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        batches = TensorBatches(self.x, self.y, batch_size=self.settings["batch_size"], shuffle=True, seed=self.seed)
        self.network.train()
        done, taken = 0, None
        while done < steps:
            batches.set_epoch(self.epoch)
            self.epoch += 1
            for x, y in batches:
                optimizer.zero_grad()
                self.loss(self.network(x), y).backward()
                self.store.mask_grads_()
                optimizer.step()
                schedule.step()
                done += 1
                if done == snapshot_at:
                    taken = Snapshot.take(self.network)
                if done == steps:
                    break
        self.steps += steps
        self.network.eval()
        return taken

    def prune(self, criterion: Criterion, sparsity: float, points: int) -> None:
        """To an effective sparsity, with scores from the first so many training points."""
        size = self.settings.get("score_batch", points)
        data = list(zip(self.x[:points].split(size), self.y[:points].split(size), strict=True))
        context = ScoreContext(
            self.network,
            self.store.weights,
            self.store.masks,
            self.seed,
            data,
            lambda network, batch: self.loss(network(batch[0]), batch[1]),
            self.store.selected,
            Probe(len(data)),
        )
        plan = make_plan(criterion, resolve_allocation("global"), sparsity, context, self.store, self.graph)
        plan.commit(self.network, self.store)


def arguments_of(doc: str | None, name: str, seeds: int) -> argparse.Namespace:
    """The number of seeds, the CSV, and how many seeds run at a time."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--csv", type=Path, default=EVIDENCE / f"{name}.csv")
    parser.add_argument("--jobs", type=int, default=-1, help="seeds at a time; -1 for one on each core")
    return parser.parse_args()


def side_by_side(trials: Callable[..., list[Row]], calls: Sequence[tuple[Any, ...]], jobs: int) -> list[Row]:
    """The rows of all calls, in order, each call in a process of its own with one thread."""

    def one(*call: Any) -> list[Row]:
        torch.set_num_threads(1)
        return trials(*call)

    return [row for rows in Parallel(jobs, verbose=5)(delayed(one)(*call) for call in calls) for row in rows]


def write(path: Path, rows: Sequence[Row]) -> None:
    """One row a trial."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def mean_and_deviation(values: Iterable[float], digits: int = 2) -> str:
    """Over seeds; the standard deviation is that of a sample."""
    values = list(values)
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def paired(name: str, ours: Sequence[float], theirs: Sequence[float], digits: int = 3) -> str:
    """Mean difference over seeds, how often it is above 0, and the p of a two-sided Wilcoxon signed-rank test."""
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    above = sum(gain > 0 for gain in gains)
    p = wilcoxon(gains).pvalue if any(gains) else 1.0
    return f"{name}: {statistics.mean(gains):+.{digits}f}, above in {above} of {len(gains)}, p = {p:.2g}"
