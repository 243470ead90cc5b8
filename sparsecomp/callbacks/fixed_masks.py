"""Train under masks that are already there."""

from pathlib import Path

import lightning as L

from sparsecomp.callbacks.base import PruningBase
from sparsecomp.callbacks.position import Position
from sparsecomp.selection import Selection
from sparsecomp.tickets import load_ticket


class FixedMasks(PruningBase):
    """Puts a ticket file on the network when fit starts and holds its masks; nothing more is pruned.

    For training a lottery ticket from its rewind point, or for fine-tuning a sparse network.

    Args:
        ticket: Path of a file that `save_ticket` or a run with rewinding wrote.
        selection: What the masks were made for; the default of `Selection` if None.

    Raises:
        ValueError: When fit starts, if the file is no ticket or does not fit the network.
    """

    def __init__(self, ticket: str | Path, selection: Selection | None = None) -> None:
        super().__init__(selection)
        self.ticket = Path(ticket)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the ticket on, unless a checkpoint or an earlier fit of this network has the masks."""
        fresh = not (self.masks and self._made_for(pl_module))
        super().on_fit_start(trainer, pl_module)
        if fresh:
            self._held.update_(load_ticket(self.ticket, pl_module, self.selection).detach().masks)

    def _act(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position) -> None:
        """Nothing is ever due."""
