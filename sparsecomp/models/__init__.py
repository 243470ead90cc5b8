"""Networks and the LightningModule that trains them from a config."""

from sparsecomp.models.cppn import CPPN, MixedActivation
from sparsecomp.models.masked_module import MaskedModule
from sparsecomp.models.mlp import MLP
from sparsecomp.models.plain_network import PlainNetwork, UnitActivations, load_plain_network
from sparsecomp.models.row_transformer import RowTransformer
from sparsecomp.models.small_conv_net import SmallConvNet

__all__ = [
    "CPPN",
    "MLP",
    "MaskedModule",
    "MixedActivation",
    "PlainNetwork",
    "RowTransformer",
    "SmallConvNet",
    "UnitActivations",
    "load_plain_network",
]
