"""The tree of the inputs, a mask that follows it, and similarity-based pruning inside (SP-H)."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from sparsecomp._checks import check_int, check_number
from sparsecomp._stopwatch import Stopwatch
from sparsecomp.callbacks.live import LiveConnections
from sparsecomp.callbacks.position import Position
from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.chains import LinearChain, linear_chain
from sparsecomp.criteria.similarity import Similarity
from sparsecomp.functional.hierarchy import InputTree, Level, infer_levels, layout_mask
from sparsecomp.input_derivatives import InputDerivatives, input_derivatives
from sparsecomp.planning import Plan
from sparsecomp.probe import Probe
from sparsecomp.rewinding import Rewind
from sparsecomp.schedules import Schedule
from sparsecomp.schedules.levels import Levels
from sparsecomp.selection import Selection
from sparsecomp.tickets import unused_path
from sparsecomp.tree_report import draw_tree, tree_text

# Samples at the start, to see whether there are second derivatives at all.
_LOOKED_AT = 32
_PIECEWISE_LINEAR = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.Hardtanh,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Hardsigmoid,
    nn.Threshold,
)
_LAYOUT_AT = "the place in the schedule's unit at which the tree is inferred"


class HierarchicalSimilarityPruning(Pruning):
    """Infers which inputs belong together, connects units along that tree only, and prunes inside by similarity.

    1. The network trains dense until `layout_at`. Then first and second derivatives by the inputs tell how similar inputs
       are (`input_similarity`); inputs with less than 1% of the largest effect, E[f_a^2] var(x_a), are dropped; the
       others are grouped level by level (`infer_levels`).
    2. Units are dealt over the clusters of their level, and a connection stays where the cluster it comes from is part of
       the one it goes to (`layout_mask`). Weights go back to the rewind point, once.
    3. The schedule then prunes inside that mask by `Similarity` with gamma 0. An event whose sparsity the layout already
       has changes nothing.

    The tree is printed, lies as tree.json and tree.png in the Trainer's `log_dir`, and goes as a picture to a WandbLogger;
    the mean similarity of what merged at level l is logged as `pruning/tree_level_l`. For functions of a balanced
    hierarchy, which the dense network must have learned by then. Look at the similarities: what merges was chosen for being
    most similar, so that a tree is found in anything. A warning comes only where at every level the merged pairs are no
    more similar than the others; the layout follows what was found all the same.

    Networks that are a chain of Linear layers, at least two of them hidden, with smooth activations, all of them selected,
    that torch.func can map, of 3 to 64 continuous inputs and one or several outputs (over which the similarity is summed);
    anything else is refused at the start. ReLU is no smooth activation: its second derivatives are 0.

    Args:
        schedule: When to prune inside the layout, and to what total sparsity; sparsity 0.5, 0.7, 0.8, 0.9 at 50, 60, 70,
            80% of the training if None.
        layout_at: Position of the layout in the schedule's unit, before the schedule's first event; half way to it if
            None. 0 infers the tree of the untrained network.
        rewind: The early point that the layout goes back to; the initialisation if None.
        samples: How many training samples derivatives are taken of, >= 1.
        selection: What is prunable; must take in every layer.
        target: Whether the sparsity is "nominal" or "effective"; see `Pruning`.
        probe: What the input and the output of the module are; see `Probe`.

    Raises:
        ValueError: If a value is out of its range; at the start of training, if the network is out of scope.
        TypeError: If an argument has the wrong type; at the start, if inputs are not continuous or torch.func cannot map
            the network.

    Reference:
        Similarity-based pruning is the idea of arXiv 2606.19941, whose recipe is not public; this one is ours.

    >>> HierarchicalSimilarityPruning().layout_at
    0.25
    """

    rewind: Rewind
    tree: InputTree | None
    _planned: bool  # a tree was inferred, but not kept under fast_dev_run

    def __init__(
        self,
        schedule: Schedule | None = None,
        layout_at: float | None = None,
        rewind: Rewind | None = None,
        samples: int = 400,
        selection: Selection | None = None,
        target: Literal["nominal", "effective"] = "nominal",
        probe: Probe | None = None,
    ) -> None:
        schedule = schedule or Levels((0.5, 0.7, 0.8, 0.9), begin=0.5, every=0.1, unit="fraction")
        rewind = rewind or Rewind()
        super().__init__(Similarity(0), schedule, "global", selection, rewind, target, probe)
        self.samples = check_int("samples", samples, "the number of samples derivatives are taken of", minimum=1)
        first = schedule.positions[0]
        self.layout_at = check_number("layout_at", first / 2 if layout_at is None else layout_at, _LAYOUT_AT)
        if not 0 <= self.layout_at <= first:
            raise ValueError(
                f"`layout_at` is {_LAYOUT_AT} and must be in [0, {first:g}], before the schedule's first event; got "
                f"{layout_at!r}."
            )
        if rewind.unit == schedule.unit and rewind.at > self.layout_at:
            raise ValueError(
                f"`rewind.at` is the {rewind.unit} of the rewind point and must not come after the layout at "
                f"{self.layout_at:g}; got {rewind.at}."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a network that is out of scope before it trains for nothing."""
        if self.tree is None:
            chain = self._chain(LiveConnections.of(trainer, pl_module, self.probe), pl_module)
            _check_smooth(pl_module)
            found = self._derivatives(trainer, pl_module, chain, samples=min(self.samples, _LOOKED_AT))
            if not bool(found.sums.square.any()) and bool(found.effects.any()):
                raise ValueError(
                    f"{type(pl_module).__name__} has no second derivatives by its inputs, from which the tree is inferred; "
                    "use smooth activations such as tanh, not ReLU."
                )
            for inputs in range(1, chain.inputs + 1):  # are layers wide enough, however many inputs are dropped?
                layout_mask(_pairs(inputs), inputs, chain.activations, chain.outputs)
        self._planned = False
        super().on_train_start(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """That of `Pruning`, and the tree."""
        return super().state_dict() | ({} if self.tree is None else {"tree": self.tree.to_record()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the network is there to hold it."""
        super().load_state_dict(state_dict)
        if state_dict.get("tree") is not None:
            self.tree = InputTree.from_record(state_dict["tree"])

    def _forget(self) -> None:
        super()._forget()
        self.tree = None
        self._planned = False

    @property
    def _rewinds_each_event(self) -> bool:
        return False

    def _run_due(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position) -> None:
        if self.tree is None and not self._planned and position.in_unit(self.schedule.unit) >= self.layout_at:
            self._lay_out(trainer, pl_module, position)
        super()._run_due(trainer, pl_module, position)

    def _lay_out(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position) -> None:
        self._check_snapshot(self.layout_at)
        store, stopwatch = self._held, Stopwatch()
        chain = self._chain(self._live, pl_module)
        with stopwatch("statistics"):
            found = self._derivatives(trainer, pl_module, chain, self.samples)
        relevant = found.relevant()
        if not relevant:
            raise ValueError(
                f"no input of {type(pl_module).__name__} has an effect on its output, so that there is no tree; look at "
                "the data and the training so far. Nothing was pruned."
            )
        tree = infer_levels(found.sums, relevant)
        layout = layout_mask(tree.levels, chain.inputs, chain.activations, chain.outputs)
        device = next(pl_module.parameters()).device
        masks = {name: store.masks[name] & mask.to(device) for name, mask in zip(chain.names, layout, strict=True)}
        kept = sum(int(mask.sum()) for mask in masks.values())
        target = 1 - kept / sum(mask.numel() for mask in masks.values())
        rank_zero_info(f"The tree of the inputs, from {found.samples} samples:\n{tree_text(tree)}")
        if tree.contradicted:
            rank_zero_warn(
                "No tree shows: at no level are the inputs that were grouped more similar than the others "
                f"({'; '.join(tree_text(tree).splitlines()[1:])}). The layout follows it all the same; SimilarityPruning "
                "needs no tree."
            )
        self._carry_out(
            trainer, pl_module, position, self.layout_at, target, Plan(masks, {}), self.rewind, stopwatch.seconds
        )
        self._planned = True
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.tree = tree
            _save(trainer, tree)
            for level, mean in enumerate(tree.mean_similarity, start=1):
                if not math.isnan(mean):
                    pl_module.log(f"pruning/tree_level_{level}", mean, on_step=False, on_epoch=True)

    def _chain(self, live: LiveConnections, pl_module: L.LightningModule) -> LinearChain:
        if live.graph is None:
            raise ValueError(f"the layers of the network must be a chain, and are not known: {live.reason}")
        chain = linear_chain(live.graph, pl_module, self._held.selected)
        if len(chain.activations) < 2 or chain.inputs < 3:
            raise ValueError(
                "a layout needs at least two hidden layers and three inputs to have anything to cut; the network has "
                f"{len(chain.activations)} and {chain.inputs}. Use SimilarityPruning, or another network."
            )
        return chain

    def _derivatives(
        self, trainer: L.Trainer, pl_module: L.LightningModule, chain: LinearChain, samples: int
    ) -> InputDerivatives:
        found = input_derivatives(pl_module, trainer.train_dataloader or (), self.probe, samples)
        if len(found.effects) != chain.inputs:
            raise ValueError(
                f"{chain.names[0]} must read the {len(found.effects)} inputs of the network; it reads {chain.inputs}."
            )
        return found


def _check_smooth(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, _PIECEWISE_LINEAR):
            raise ValueError(
                f"{name} ({type(layer).__name__}) is piecewise linear and has no second derivatives, from which the tree is "
                "inferred; use smooth activations such as tanh."
            )


def _pairs(inputs: int) -> list[Level]:
    """As many clusters as there can be at each level."""
    clusters: Level = tuple((a,) for a in range(inputs))
    levels: list[Level] = []
    while len(clusters) > 1 or not levels:
        clusters = tuple(sum(clusters[start : start + 2], ()) for start in range(0, len(clusters), 2))
        levels.append(clusters)
    return levels


def _save(trainer: L.Trainer, tree: InputTree) -> None:
    folder = Path(trainer.log_dir or trainer.default_root_dir)  # asks all ranks
    if not trainer.is_global_zero:
        return
    folder.mkdir(parents=True, exist_ok=True)
    record, picture = unused_path(folder, "tree", ".json"), unused_path(folder, "tree", ".png")
    record.write_text(json.dumps(tree.to_record(), indent=1) + "\n")
    draw_tree(tree, picture)
    rank_zero_info(f"Saved tree: {record}, {picture}")
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image("pruning/tree", [str(picture)], step=trainer.global_step)
