"""Where in the training we are, in each of the units that schedules count in."""

from dataclasses import dataclass

import lightning as L

from sparsecomp.schedules.base import Unit


@dataclass(frozen=True)
class Position:
    """What is complete.

    Attributes:
        step: Optimizer steps, of all optimizers together.
        epoch: Epochs; the one that is running counts from its last batch on.
        fraction: Share of the training in [0, 1], or None where its length is not known.
    """

    step: int
    epoch: int
    fraction: float | None

    @classmethod
    def of(cls, trainer: L.Trainer, *, epoch_complete: bool = False) -> "Position":
        """The position of a running `trainer`; `epoch_complete` on the last batch of an epoch."""
        epoch = trainer.current_epoch + int(epoch_complete)
        shares = []
        if trainer.max_steps > 0:
            shares.append(trainer.global_step / trainer.max_steps)
        batches = trainer.num_training_batches
        if trainer.max_epochs is not None and trainer.max_epochs > 0 and batches not in (0, float("inf")):
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            # While a batch is running it counts as ready, not yet as completed.
            done = epoch * batches if epoch_complete else trainer.current_epoch * batches + progress.ready % batches
            shares.append(done / (trainer.max_epochs * batches))
        return cls(trainer.global_step, epoch, min(max(shares), 1.0) if shares else None)

    def in_unit(self, unit: Unit) -> float:
        """The position as a schedule of that unit counts it.

        Raises:
            ValueError: If `unit` is "fraction" and the length of the training is not known.
        """
        if unit == "step":
            return self.step
        if unit == "epoch":
            return self.epoch
        if self.fraction is None:
            raise ValueError(
                "`unit`='fraction' counts the share of the training, and this training has no known length: give the "
                "Trainer `max_epochs` and a data loader with a length, or `max_steps`, or use unit='step' or 'epoch'."
            )
        return self.fraction
