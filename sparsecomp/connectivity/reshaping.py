"""How units move when tensors are joined, flattened, turned, cut and reduced."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from sparsecomp.connectivity.graph import GraphBuilder, UntraceableError
from sparsecomp.connectivity.values import GONE, Constant, Flattened, Input, Several, Units, Value, Weight

Argument = Callable[..., Any]
_GIVE = "give `example_inputs`, so that shapes are known"


class Reshaping:
    """Handlers of operations without weights. Each takes the node and a function that returns its arguments."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder

    def note(self, value: Value) -> None:
        """A parameter that acts on each unit by itself."""

    # joining

    def bind(self, value: Value, size: int, axis: int) -> Units:
        """The units at `axis`, of which a layer reads `size`."""
        if isinstance(value, Input | Constant):
            return Units(self.builder.space(size, is_input=isinstance(value, Input)), axis, None)
        if isinstance(value, Flattened) and axis == -1:
            have = self.builder.sizes[value.space]
            if size % have:
                raise UntraceableError(f"{size} features are no multiple of the {have} units that were flattened")
            inner, outer = (size // have, 1) if value.channels_first else (1, size // have)
            return self._flat(value.space, outer, inner, None)
        if not isinstance(value, Units):
            raise UntraceableError(f"it reads units at dimension {axis}, and its input is {_described(value)}")
        if value.axis != axis:
            where = "gone" if value.axis == GONE else f"at dimension {value.axis}"
            raise UntraceableError(f"it reads units at dimension {axis}, and the units of its input are {where}")
        if self._size(value) != size:
            raise UntraceableError(f"it reads {size} units, and its input has {self._size(value)}")
        return value

    def elementwise(self, node: fx.Node, argument: Argument) -> Value:
        """Unit by unit: a function of one value, or a sum or product of several."""
        entries = [argument(position) for position in range(len(node.args))]
        entries += [argument(len(node.args), name) for name in node.kwargs]
        for entry in entries:
            self.note(entry)
        return self.join([entry for entry in entries if isinstance(entry, Units | Flattened | Input | Several)])

    def join(self, values: Iterable[Value]) -> Value:
        """One value of which a unit is reachable if it is in any."""
        distinct = list(dict.fromkeys(values))
        if not distinct:
            return Constant()
        if len(distinct) == 1:
            return distinct[0]
        known = [value for value in distinct if isinstance(value, Units)]
        if any(isinstance(value, Several) for value in distinct) or not known:
            raise UntraceableError(f"it joins values of unknown size; {_GIVE}")
        largest = max(known, key=self._size)
        size, axis = self._size(largest), largest.axis
        dims = [value.dims for value in known]
        target = self.builder.space(size)
        for value in distinct:
            bound = self.bind(value, size, axis) if not isinstance(value, Units) else value
            if bound.axis not in (axis, GONE):
                raise UntraceableError(
                    f"it joins units at dimension {axis} with units at dimension {bound.axis}, counted from the last"
                )
            have = self.builder.sizes[bound.space]
            if have not in (1, size):
                raise UntraceableError(f"it joins {size} units with {have}")
            units = torch.zeros(size, dtype=torch.long) if have == 1 else None
            self.builder.link(bound.space, target, units)
        return Units(target, axis, None if None in dims else max(d for d in dims if d is not None))

    def cat(self, node: fx.Node, argument: Argument) -> Value:
        """Concatenation: over units by offset, over another dimension unit by unit."""
        values = argument(0, "tensors")
        known = [value for value in values if isinstance(value, Units)]
        for value in values:
            self.note(value)
        if not known:
            raise UntraceableError(f"it concatenates values whose units are not known; {_GIVE}")
        axis, dims = known[0].axis, known[0].dims
        dim = self._negative(argument(1, "dim", 0), known[0])
        if any(value.axis != axis for value in known):
            raise UntraceableError("it concatenates values with units at different dimensions")
        if dim != axis:
            return self.join([value for value in values if not isinstance(value, Weight | Constant)])
        spaces = []
        parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
        for value, part in zip(values, parts, strict=True):
            shape = shape_of(part)
            if isinstance(value, Units):
                spaces.append(value.space)
            elif shape is None:
                raise UntraceableError(f"the size of {part} is not known; {_GIVE}")
            else:
                spaces.append(self.bind(value, shape[axis], axis).space)
        target = self.builder.space(sum(self.builder.sizes[space] for space in spaces))
        offset = 0
        for space in spaces:
            self.builder.link(space, target, offset=offset)
            offset += self.builder.sizes[space]
        return Units(target, axis, dims)

    def mix(self, value: Value, dim: int | None) -> Value:
        """All units with each other if `dim` is theirs."""
        if not isinstance(value, Units):
            raise UntraceableError(f"it mixes the units of {_described(value)}; {_GIVE}")
        if dim is None or self._negative(dim, value) == value.axis:
            return Units(self.builder.mix(value.space, self._size(value)), value.axis, value.dims)
        return value

    # reshaping

    def flatten(self, node: fx.Node, argument: Argument) -> Value:
        """torch.flatten and Tensor.flatten."""
        return self.flatten_dims(argument(0, "input"), argument(1, "start_dim", 0), argument(2, "end_dim", -1), node)

    def flatten_dims(self, value: Value, start: int, end: int, node: fx.Node) -> Value:
        """Dimensions start to end as one."""
        if isinstance(value, Flattened) and (start, end) in ((1, -1), (-1, -1)):
            return value
        units = self._units(value)
        if shape_of(node) is not None and shape_of(node.all_input_nodes[0]) is not None:
            return self._reshaped(units, node)
        if units.dims == 2 and start in (1, -1):
            return units
        first = start - units.dims if start >= 0 and units.dims is not None else start
        last = end - units.dims if end >= 0 and units.dims is not None else end
        if last >= 0 or (first >= 0 and units.axis != -1):
            raise UntraceableError(f"it flattens a value of an unknown number of dimensions; {_GIVE}")
        if first < 0 and (first > units.axis or last < units.axis):
            moved = units.axis if last < units.axis else units.axis + (last - first)
            return Units(units.space, moved, None if units.dims is None else units.dims - (last - first))
        if (first < 0 and first == -(units.dims or 0)) or start == 0:
            raise UntraceableError("it merges the batch with the units")
        if last != -1 or units.axis not in (-1, first):
            raise UntraceableError(f"it merges the units with dimensions of unknown size; {_GIVE}")
        return Flattened(units.space, channels_first=units.axis != -1)

    def view(self, node: fx.Node, argument: Argument) -> Value:
        """Tensor.view and reshape."""
        value = self._units_or_flat(argument(0, "input"))
        if isinstance(value, Units) and shape_of(node) is not None:
            return self._reshaped(value, node)
        sizes = [argument(position) for position in range(1, len(node.args))]
        sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
        if len(sizes) == 2 and isinstance(sizes[0], Constant) and sizes[1] == -1:  # x.view(x.size(0), -1)
            return self.flatten_dims(value, 1, -1, node)
        raise UntraceableError(f"the new shape is not known; {_GIVE}")

    reshape = view

    def _reshaped(self, units: Units, node: fx.Node) -> Value:
        before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
        if before is None or after is None:
            raise UntraceableError(f"the new shape is not known; {_GIVE}")
        if units.axis == GONE:
            raise UntraceableError("the units have no dimension any more")
        axis = len(before) + units.axis
        size, outer, inner = before[axis], math.prod(before[:axis]), math.prod(before[axis + 1 :])
        places = [axis, *range(len(after))] if axis < len(after) else list(range(len(after)))
        for place in places:
            if after[place] == size and math.prod(after[:place]) == outer:
                return Units(units.space, place - len(after), len(after))
        for place, merged in enumerate(after):
            left, right = math.prod(after[:place]), math.prod(after[place + 1 :])
            if merged % size == 0 and outer % left == 0 and inner % right == 0 and merged > size:
                if place == 0 and axis > 0:
                    raise UntraceableError("it merges the batch with the units")
                return self._flat(units.space, outer // left, inner // right, len(after), place - len(after))
        raise UntraceableError(f"it splits the units: {before} with units at {axis} becomes {after}")

    def _flat(self, space: int, outer: int, inner: int, dims: int | None, axis: int = -1) -> Units:
        """Units merged with `outer` positions before and `inner` after them."""
        have = self.builder.sizes[space]
        if outer * inner == 1:
            return Units(space, axis, dims)
        target = self.builder.space(have * outer * inner)
        self.builder.link(space, target, torch.arange(have).repeat_interleave(inner).repeat(outer))
        return Units(target, axis, dims)

    def transpose(self, node: fx.Node, argument: Argument) -> Value:
        """Two dimensions exchanged."""
        units = self._units(argument(0, "input"))
        one, two = (self._negative(argument(k, f"dim{k - 1}"), units) for k in (1, 2))
        return Units(units.space, {one: two, two: one}.get(units.axis, units.axis), units.dims)

    def permute(self, node: fx.Node, argument: Argument) -> Value:
        """Dimensions in another order."""
        units = self._units(argument(0, "input"))
        order = [argument(position) for position in range(1, len(node.args))] or [argument(9, "dims")]
        order = list(order[0]) if isinstance(order[0], tuple | list) else order
        dims = len(order)
        moved = [d % dims for d in order].index(units.axis + dims)
        return Units(units.space, moved - dims, dims)

    def squeeze(self, node: fx.Node, argument: Argument) -> Value:
        """A dimension of size 1 removed."""
        units = self._units(argument(0, "input"))
        dim = argument(1, "dim")
        if dim is None:
            raise UntraceableError("it removes all dimensions of size 1; name the one meant")
        return self._removed(units, [self._negative(dim, units)])

    def unsqueeze(self, node: fx.Node, argument: Argument) -> Value:
        """A dimension of size 1 inserted."""
        units, dim = self._units(argument(0, "input")), argument(1, "dim")
        if dim >= 0:
            if units.dims is None:
                raise UntraceableError(f"the number of dimensions is not known; {_GIVE}")
            dim -= units.dims + 1
        axis = units.axis - 1 if units.axis != GONE and dim >= units.axis else units.axis
        return Units(units.space, axis, None if units.dims is None else units.dims + 1)

    def reduce(self, node: fx.Node, argument: Argument) -> Value:
        """Mean, sum, largest over some dimensions."""
        units = self._units(argument(0, "input"))
        dim, keep = argument(1, "dim"), argument(2, "keepdim", False)
        if dim is None:
            return Units(self.builder.mix(units.space, 1), GONE, 0)
        gone = [self._negative(d, units) for d in (dim if isinstance(dim, tuple | list) else [dim])]
        if units.axis in gone and units.axis != GONE:
            units = Units(self.builder.mix(units.space, 1), units.axis, units.dims)
        return units if keep else self._removed(units, gone)

    def chunk(self, node: fx.Node, argument: Argument) -> Value:
        """Cut into equal parts."""
        units, count = self._units(argument(0, "input")), argument(1, "chunks")
        return self._cut(units, argument(2, "dim", 0), lambda size: math.ceil(size / count), count)

    def split(self, node: fx.Node, argument: Argument) -> Value:
        """Cut into parts of a size, or of given sizes."""
        units, size = self._units(argument(0, "input")), argument(1, "split_size_or_sections")
        if self._negative(argument(2, "dim", 0), units) != units.axis:
            raise UntraceableError("it cuts another dimension than the units'; use chunk")
        return self._cut(units, argument(2, "dim", 0), lambda _: size, 0)

    def _cut(self, units: Units, dim: int, size: Callable[[int], Any], count: int) -> Value:
        if self._negative(dim, units) != units.axis:
            return Several((units,) * count)
        parts = torch.arange(self._size(units)).split(size(self._size(units)))
        return Several(tuple(self._picked(units, part) for part in parts))

    def getitem(self, node: fx.Node, argument: Argument) -> Value:
        """An entry of a tuple, or an index of whole numbers and slices."""
        value, index = argument(0), argument(1)
        if isinstance(value, Several):
            return value.values[index]
        units = self._units(value)
        entries = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in entries or units.dims is None:
            if entries[:1] != [Ellipsis]:
                raise UntraceableError(f"the number of dimensions is not known; {_GIVE}")
            dims, entries = list(range(-len(entries) + 1, 0)), entries[1:]
        else:
            dims = list(range(-units.dims, 0))[: len(entries)]
        removed = []
        for dim, entry in zip(dims, entries, strict=True):
            if not isinstance(entry, int | slice) or (isinstance(entry, slice) and not _plain(entry)):
                raise UntraceableError(f"an index of {entry!r} is not understood; whole numbers and slices are")
            if isinstance(entry, int):
                removed.append(dim)
            if dim == units.axis and entry != slice(None):
                places = torch.arange(self._size(units))[entry].reshape(-1)
                units = self._picked(units, places)
        return self._removed(units, removed)

    def expand(self, node: fx.Node, argument: Argument) -> Value:
        """A dimension of size 1 repeated."""
        value = argument(0, "input")
        self.note(value)
        if isinstance(value, Weight | Constant):
            return Constant()
        units, shape = self._units(value), shape_of(node)
        if shape is None or shape[units.axis] != self._size(units):
            raise UntraceableError(f"it may repeat units; {_GIVE}")
        return Units(units.space, units.axis, len(shape))

    # help

    def _picked(self, units: Units, places: Tensor) -> Units:
        target = self.builder.space(len(places))
        self.builder.link(units.space, target, places)
        return Units(target, units.axis, units.dims)

    def _removed(self, units: Units, gone: list[int]) -> Units:
        if units.axis in gone:
            if self._size(units) != 1:
                raise UntraceableError(f"it removes the dimension of {self._size(units)} units")
            axis = GONE
        else:
            axis = units.axis + sum(dim > units.axis for dim in gone) if units.axis != GONE else GONE
        return Units(units.space, axis, None if units.dims is None else units.dims - len(gone))

    def _size(self, value: Value) -> int:
        return self.builder.sizes[value.space] if isinstance(value, Units) else 0

    def _units(self, value: Any) -> Units:
        if not isinstance(value, Units):
            raise UntraceableError(f"its input is {_described(value)}; {_GIVE}")
        return value

    def _units_or_flat(self, value: Any) -> Units | Flattened:
        return value if isinstance(value, Flattened) else self._units(value)

    def _negative(self, dim: Any, units: Units) -> int:
        """A dimension counted from the last."""
        if not isinstance(dim, int):
            raise UntraceableError(f"the dimension must be a whole number; got {dim!r}")
        if dim < 0:
            return dim
        if units.dims is None:
            raise UntraceableError(f"dimension {dim} of a value with an unknown number of dimensions; {_GIVE}")
        return dim - units.dims


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Shape of a node's value, None if it is not known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _plain(index: slice) -> bool:
    return all(bound is None or isinstance(bound, int) for bound in (index.start, index.stop, index.step))


def _described(value: Any) -> str:
    return {
        Flattened: "flattened to an unknown size",
        Weight: f"the parameter {getattr(value, 'name', '')!r} itself",
        Several: "a tuple",
    }.get(type(value), "no tensor with units")
