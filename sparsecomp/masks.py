"""Masks of a network, held outside its modules and applied in place."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsecomp._distributed import broadcast_from_rank_zero_
from sparsecomp.selection import PrunableParameter, Selection

_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MaskStore:
    """One bool mask per prunable parameter, True = kept, keyed by fully qualified parameter name.

    The weights stay plain parameters of plain modules: names, order, ties, pickling and export are as without masks.
    A hand-written loop calls `mask_grads_()` between `backward()` and `optimizer.step()`, before any clipping, and
    `apply_()` after the step; `sparsecomp.Pruning` does this inside Lightning.

    Masking is an AND of the tensor's bits with all ones or all zeros: as fast as a multiplication, and a NaN or an
    infinity in a pruned place becomes exactly 0.

    Args:
        module: The network.
        selection: What is prunable; the default of `Selection` if None.

    Raises:
        TypeError, ValueError: As `Selection.resolve`.

    >>> layer = nn.Linear(4, 2)
    >>> store = MaskStore(layer)
    >>> store.update_({"weight": torch.tensor([[True, False, True, False], [False, False, True, True]])})
    >>> store.sparsity, int((layer.weight == 0).sum())
    (0.5, 4)
    """

    def __init__(self, module: nn.Module, selection: Selection | None = None) -> None:
        self.selected = (selection or Selection()).resolve(module)
        self._entries: dict[str, PrunableParameter] = {entry.name: entry for entry in self.selected}
        self._masks: dict[str, Tensor] = {
            name: torch.ones_like(entry.parameter, dtype=torch.bool) for name, entry in self._entries.items()
        }
        self._bits: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    @property
    def masks(self) -> Mapping[str, Tensor]:
        """Name to bool tensor, of the parameter's shape, True = kept. Read only; change them with `update_`."""
        return MappingProxyType(self._masks)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Name to the selected weights, detached."""
        return {entry.name: entry.parameter.detach() for entry in self.selected}

    @property
    def sparsity(self) -> float:
        """Fraction of the selected weights that is masked, in [0, 1]."""
        pruned, total = (sum(column) for column in zip(*self.counts().values(), strict=True))
        return float(pruned / total)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Per selected parameter the number of masked weights and of all weights."""
        return count_pruned(self._masks, (entry.name for entry in self.selected))

    def layer_sparsity(self) -> dict[str, float]:
        """Per selected parameter the fraction masked, in [0, 1]."""
        return {name: pruned / total for name, (pruned, total) in self.counts().items()}

    def update_(self, masks: Mapping[str, Tensor]) -> None:
        """Set masks, the same on every rank, and zero the weights they remove; parameters not named keep theirs.

        A bias of a selected layer may be named too (whole units are removed with their bias); it is held like the
        others and not counted in the sparsity.

        Raises:
            TypeError, ValueError: As `check`. Nothing has changed.
        """
        entries = self.check(masks)
        agreed = {name: mask.detach().to(entries[name].parameter.device, copy=True) for name, mask in masks.items()}
        broadcast_from_rank_zero_(agreed.values())
        self._entries |= entries
        self._masks |= agreed
        for name in agreed:
            self._bits.pop(name, None)
        self.apply_()

    def check(self, masks: Mapping[str, Tensor]) -> dict[str, PrunableParameter]:
        """Return where each mask goes.

        Raises:
            TypeError: If a mask is no bool tensor.
            ValueError: If a name is neither selected nor the bias of a selected layer, or a mask's shape is not its
                parameter's (the message has both).
        """
        entries = {name: self._entries.get(name) or self._companion(name) for name in masks}
        for name, mask in masks.items():
            _check_mask(name, mask, entries[name].parameter)
        return entries

    @torch.no_grad()
    def apply_(self) -> None:
        """Zero masked weights in place, also after an optimizer or a load wrote to them.

        Raises:
            ValueError: If a parameter has another shape than its mask, as after a physical cut.
        """
        for name, parameter in self._parameters():
            _and_(parameter.data, self._bits_of(name, parameter))

    @torch.no_grad()
    def mask_grads_(self) -> None:
        """Zero the gradients of masked weights in place. Call it before gradients are clipped or stepped."""
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                _and_(parameter.grad, self._bits_of(name, parameter))

    @torch.no_grad()
    def apply_to_(self, tensors: Mapping[str, Tensor]) -> None:
        """Zero the masked places of any tensors that are named like the parameters: snapshots, averages."""
        for name, mask in self._masks.items():
            if name in tensors:
                tensor = tensors[name]
                _check_mask(name, mask, tensor)
                tensor.masked_fill_(~mask.to(tensor.device), 0)

    def sync_(self) -> None:
        """Take rank 0's masks on every rank and apply them."""
        self.update_(self._masks)

    def revived(self) -> list[str]:
        """Names of the parameters in which a masked weight is not zero."""
        return [
            name
            for name, parameter in self._parameters()
            if bool(parameter.detach().masked_fill(self._masks[name], 0).count_nonzero())
        ]

    @torch.no_grad()
    def zero_optimizer_state_(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Zero what the optimizers remember of masked weights: every state tensor that has the parameter's shape."""
        for optimizer in optimizers:
            for name, parameter in self._parameters():
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        value.masked_fill_(~self._masks[name].to(value.device), 0)

    def attach(self) -> Self:
        """Apply the masks again after every `load_state_dict` of the network, until `detach`."""
        if not self._hooks:
            reapply = _Reapply(self)
            owners = {id(holder): holder for entry in self._entries.values() for holder in entry.holders}
            self._hooks = [owner.register_load_state_dict_post_hook(reapply) for owner in owners.values()]
        return self

    def detach(self) -> Self:
        """Stop watching for loads; masks and weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Name to mask, one byte a weight."""
        return dict(self._masks)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the masks of a checkpoint and apply them.

        Raises:
            ValueError: If the masks do not fit the network: which parameter, and both shapes. Nothing has changed.
        """
        missing = [entry.name for entry in self.selected if entry.name not in state]
        if missing:
            raise ValueError(
                f"the saved masks have none for {', '.join(missing)}; saved are {', '.join(state)}. Resume with the "
                "selection that the masks were made with."
            )
        self.update_(state)

    def __getstate__(self) -> dict[str, Any]:
        # A copy watches its own network only once it is attached there.
        return self.__dict__ | {"_hooks": [], "_bits": {}}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, entry.parameter) for name, entry in self._entries.items())

    def _bits_of(self, name: str, parameter: Tensor) -> Tensor:
        bits = self._bits.get(name)
        mask = self._masks[name]
        width = _INTEGER_OF_WIDTH[parameter.element_size()]
        if bits is None or bits.dtype != width or bits.device != parameter.device or bits.shape != parameter.shape:
            _check_mask(name, mask, parameter)
            if mask.device != parameter.device:
                self._masks[name] = mask = mask.to(parameter.device)
            # -True is all ones.
            bits = self._bits[name] = mask.to(width).neg_()
        return bits

    def _companion(self, name: str) -> PrunableParameter:
        for entry in self.selected:
            if name == entry.bias_name and entry.bias is not None:
                return PrunableParameter(name, entry.owner, entry.bias, entry.layer, 0, None, (), (entry.owner,))
        raise ValueError(
            f"no mask can be set for {name!r}: it is neither selected nor the bias of a selected layer. Selected are "
            f"{', '.join(entry.name for entry in self.selected)}."
        )


def count_pruned(masks: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Per name the number of masked weights and of all weights."""
    return {name: (masks[name].numel() - int(masks[name].count_nonzero()), masks[name].numel()) for name in names}


class _Reapply:
    """Load hook that knows its store weakly, so that a pickled or copied network carries no masks with it."""

    def __init__(self, store: MaskStore | None = None) -> None:
        self._store: Callable[[], MaskStore | None] = (lambda: None) if store is None else weakref.ref(store)

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        store = self._store()
        if store is not None:
            store.apply_()

    def __reduce__(self) -> tuple[type["_Reapply"], tuple[()]]:
        return (_Reapply, ())


def _and_(tensor: Tensor, bits: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError("masks cannot hold on sparse gradients; build the embedding with sparse=False.")
    tensor.view(bits.dtype).bitwise_and_(bits)


def _check_mask(name: str, mask: Any, parameter: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"the mask of {name!r} says what is kept and must be a bool tensor; got {given}.")
    if mask.shape != parameter.shape:
        raise ValueError(
            f"the mask of {name!r} has shape {tuple(mask.shape)} and the parameter {tuple(parameter.shape)}; masks and "
            "network must have the same architecture. After a physical change build the masks anew."
        )
