"""Data that needs no download."""

from sparsecomp.data.batches import TensorBatches
from sparsecomp.data.digits import DigitsDataModule
from sparsecomp.data.function import FunctionDataModule
from sparsecomp.data.picture import PictureDataModule

__all__ = ["DigitsDataModule", "FunctionDataModule", "PictureDataModule", "TensorBatches"]
