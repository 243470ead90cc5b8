"""Data that needs no download."""

from sparsecomp.data.batches import TensorBatches
from sparsecomp.data.digits import DigitsDataModule

__all__ = ["DigitsDataModule", "TensorBatches"]
