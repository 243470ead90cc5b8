"""What happened in a network on one batch, as the metrics see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import NetworkStructure


@dataclass(frozen=True, eq=False)
class NetworkBatch:
    """What happened in a network on one batch of n samples.

    Attributes:
        network: What does not change from batch to batch.
        inputs: (n, ...) what the network was given.
        outputs: (n, ...) what it returned.
        targets: (n, ...) what it should have returned; None if not known.
        activations: Parameter name to (rows, in) what its layer was given; a row is a sample, a token or a place of a
            picture. Of a layer that is called several times, the first call.
    """

    network: NetworkStructure
    inputs: Tensor
    outputs: Tensor
    targets: Tensor | None = None
    activations: Mapping[str, Tensor] = field(default_factory=dict)

    def hidden(self) -> list[Tensor]:
        """Activations (rows, units) of the hidden units, in the order of `NetworkStructure.hidden`.

        Raises:
            UndefinedError: As there, or if the forward pass did not call the layer of one.
        """
        missing = [name for name in self.network.hidden if name not in self.activations]
        if missing:
            raise UndefinedError(f"the forward pass did not call the layers of {', '.join(missing)}.")
        return [self.activations[name] for name in self.network.hidden]

    def node_values(self) -> Tensor:
        """(n, nodes) values of the internal nodes of the target function, without the outputs.

        Raises:
            UndefinedError: If there is no target function, or the inputs are not its inputs.
        """
        nodes, function = self.network.nodes, self.network.function
        if function is None or self.inputs.shape[1:] != (function.in_features,) or not self.inputs.is_floating_point():
            raise UndefinedError(f"the network is given {tuple(self.inputs.shape)}, not the inputs of {function!r}.")
        x = self.inputs.detach()
        return function.node_values(x.to(torch.promote_types(x.dtype, torch.float32)))[:, nodes.columns]
