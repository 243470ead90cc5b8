"""How the operations of a forward pass move units."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from sparsecomp.connectivity.declaring import weight_use
from sparsecomp.connectivity.graph import GraphBuilder, UntraceableError
from sparsecomp.connectivity.reshaping import Reshaping
from sparsecomp.connectivity.steps import WeightUse
from sparsecomp.connectivity.values import GONE, Constant, Flattened, Input, Units, Value, Weight

Argument = Callable[..., Any]
Handler = Callable[[fx.Node, Argument], Value]
LayerHandler = Callable[[Any, Argument, fx.Node], Value]

_SIZES = {"size", "dim", "numel", "ndimension"}
_SIZE_ATTRIBUTES = {"shape", "ndim", "dtype", "device"}
_ELEMENTWISE = """
    relu relu_ relu6 leaky_relu prelu elu selu celu gelu silu mish tanh sigmoid softplus softsign hardtanh hardswish
    hardsigmoid logsigmoid tanhshrink rrelu threshold dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_alpha_dropout abs neg exp log log1p expm1 sqrt rsqrt square pow sin cos atan erf clamp clamp_min clamp_max
    reciprocal contiguous clone float double half bfloat16 to type type_as detach identity add sub mul truediv div iadd
    isub imul itruediv add_ sub_ mul_ div_ rsub maximum minimum where lerp addcmul batch_norm instance_norm sign round
    floor ceil nan_to_num masked_fill logical_not gt lt ge le eq ne
"""
_POOLS = {"max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "std", "var", "logsumexp"}
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}
_RESHAPING = (
    "flatten",
    "view",
    "reshape",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "cat",
    "chunk",
    "split",
    "getitem",
    "expand",
)
_MIXING = {"softmax", "log_softmax", "softmin", "normalize"}
_FAMILIES = {"activation", "dropout", "batchnorm", "instancenorm"}


class Operations(Reshaping):
    """Handlers of all operations that are understood, by kind of module, function or method."""

    def __init__(self, builder: GraphBuilder, root: nn.Module, names: dict[int, str]) -> None:
        super().__init__(builder)
        self.root, self.names = root, names
        self.unitwise: set[str] = set()
        self._layers: list[tuple[tuple[type, ...], LayerHandler]] = [
            ((nn.Linear, _ConvNd, nn.Embedding), self._weighted),
            ((nn.GLU, nn.MultiheadAttention, nn.Softmax2d), self._refuse),
            ((nn.Flatten,), self._flatten_layer),
            ((nn.Softmax, nn.LogSoftmax, nn.Softmin), self._softmax_layer),
            ((nn.LayerNorm, nn.RMSNorm), self._norm_layer),
            ((nn.GroupNorm,), self._group_norm),
            ((_BatchNorm,), self._batch_norm),
            ((nn.Identity, nn.Upsample), self._pass),
        ]
        self._functions: dict[str, Handler] = dict.fromkeys(_ELEMENTWISE.split(), self.elementwise)
        self._functions |= dict.fromkeys((f"{pool}{k}d" for pool in _POOLS for k in "123"), self._pool)
        self._functions |= dict.fromkeys(_REDUCTIONS, self.reduce) | dict.fromkeys(_MIXING, self._softmax)
        self._functions |= dict.fromkeys(_CONVOLUTIONS | _TRANSPOSED, self._convolve)
        self._functions |= {name: getattr(self, name) for name in _RESHAPING}
        self._functions |= {"swapaxes": self.transpose, "concat": self.cat}
        self._functions |= {"linear": self._linear, "matmul": self._matmul, "layer_norm": self._layer_norm}
        self._functions["attend"] = self._attend

    def find(self, node: fx.Node) -> tuple[str, Handler | None]:
        """The kind of operation, for messages, and what follows units through it."""
        if node.op == "call_module":
            layer = self.root.get_submodule(str(node.target))
            of_layer = self._of_layer(layer)

            def call(node: fx.Node, argument: Argument) -> Value:
                return (of_layer or self._refuse)(layer, argument, node)

            return type(layer).__name__, call
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if name in _SIZES or (name == "getattr" and node.args[1] in _SIZE_ATTRIBUTES):
            return "size", None
        return name, self._functions.get(name)

    def has_parameters(self, target: str) -> bool:
        """Whether a layer turns inputs into something that depends on weights."""
        layer = self.root.get_submodule(target)
        return next(layer.parameters(), None) is not None and not isinstance(layer, _BatchNorm)

    def attribute(self, target: str) -> Value:
        """A parameter or buffer of the network."""
        owner, _, name = target.rpartition(".")
        value = getattr(self.root.get_submodule(owner), name)
        if id(value) in self.names:
            return Weight(self.names[id(value)], value)
        return Constant()

    def output(self, value: Value) -> None:
        """Note what the network returns."""
        if isinstance(value, Units | Flattened):
            self.builder.outputs.append(value.space)
        elif isinstance(value, Weight):
            self.unitwise.add(value.name)

    def note(self, value: Value) -> None:
        """A parameter that acts on each unit by itself."""
        if isinstance(value, Weight):
            self.unitwise.add(value.name)

    # layers

    def _of_layer(self, layer: nn.Module) -> LayerHandler | None:
        for types, handler in self._layers:
            if isinstance(layer, types):
                return handler
        family = type(layer).__module__.rpartition(".")[2]
        if family in {"pooling", "padding"} and any(c.isdigit() for c in type(layer).__name__):
            return self._spatial_layer
        return self._pass if family in _FAMILIES else None

    def _pass(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        value: Value = argument(0, "input")
        return value

    def _flatten_layer(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        return self.flatten_dims(argument(0, "input"), layer.start_dim, layer.end_dim, node)

    def _softmax_layer(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        return self.mix(argument(0, "input"), layer.dim)

    def _norm_layer(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        return self._norm(argument(0, "input"), layer.normalized_shape)

    def _spatial_layer(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        return self._spatial(argument(0, "input"), next(int(c) for c in type(layer).__name__ if c.isdigit()))

    def _refuse(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        raise UntraceableError("it is not known how this layer moves units")

    def _weighted(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        weight = layer._parameters.get("weight")
        if weight is None or id(weight) not in self.names:
            raise UntraceableError("its weight is computed from other tensors (a parametrization or hook); remove that")
        use = weight_use(self.names[id(weight)], weight, layer)
        value = argument(0, "input")
        if isinstance(layer, nn.Embedding):
            if not isinstance(value, Input | Constant):
                raise UntraceableError("its indices are computed by the network")
            source = self.builder.space(use.source_size, is_input=isinstance(value, Input))
            return self._use(use, source, -1, None)
        dims = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
        return self._apply(use, value, -1 - dims, dims)

    def _apply(self, use: WeightUse, value: Value, axis: int, spatial: int) -> Value:
        """A weight that reads units at `axis` and writes them there."""
        units = self.bind(value, use.source_size, axis)
        dims = units.dims if units.dims is not None or not spatial else spatial + 2
        return self._use(use, units.space, axis, dims)

    def _use(self, use: WeightUse, source: int, axis: int, dims: int | None) -> Units:
        target = self.builder.space(use.target_size)
        self.builder.steps.append(WeightUse(use.name, source, target, use.shape, use.groups, use.transposed))
        return Units(target, axis, dims)

    def _batch_norm(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        value: Value = argument(0, "input")
        size = int(layer.num_features)
        if isinstance(value, Flattened):
            value = self.bind(value, size, -1)
        if isinstance(value, Units) and self.builder.sizes[value.space] != size:
            raise UntraceableError(f"it normalises {size} channels that are not the {self._size(value)} units")
        return value

    def _norm(self, value: Value, shape: Sequence[int]) -> Value:
        if isinstance(value, Flattened | Input):
            value = self.bind(value, int(shape[-1]), -1)
        if isinstance(value, Units) and value.axis != GONE and -value.axis <= len(shape):
            return self.mix(value, value.axis)
        return value

    def _group_norm(self, layer: Any, argument: Argument, node: fx.Node) -> Value:
        value: Value = argument(0, "input")
        if isinstance(value, Flattened):
            value = self.bind(value, layer.num_channels, -1)
        if not isinstance(value, Units):
            return value
        if self._size(value) != layer.num_channels:
            raise UntraceableError(f"it normalises {layer.num_channels} channels, not the {self._size(value)} units")
        space = self.builder.mix(value.space, layer.num_channels, layer.num_groups)
        return Units(space, value.axis, value.dims)

    def _spatial(self, value: Value, dims: int) -> Value:
        if isinstance(value, Flattened) or (isinstance(value, Units) and (value.axis == GONE or -value.axis <= dims)):
            raise UntraceableError(f"it acts on the last {dims} dimensions, and the units are among them")
        return value

    # functions and methods

    def _pool(self, node: fx.Node, argument: Argument) -> Value:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return self._spatial(argument(0, "input"), int(name[-2]))

    def _linear(self, node: fx.Node, argument: Argument) -> Value:
        weight = self._parameter(argument(1, "weight"))
        self.note(argument(2, "bias"))
        return self._apply(WeightUse(weight.name, 0, 0, tuple(weight.tensor.shape)), argument(0, "input"), -1, 0)

    def _matmul(self, node: fx.Node, argument: Argument) -> Value:
        weight = self._parameter(argument(1, "other"))
        if weight.tensor.dim() != 2:
            raise UntraceableError(
                f"the weight {weight.name!r} must be a matrix; it has {weight.tensor.dim()} dimensions"
            )
        use = WeightUse(weight.name, 0, 0, tuple(weight.tensor.shape), transposed=True)
        return self._apply(use, argument(0, "input"), -1, 0)

    def _convolve(self, node: fx.Node, argument: Argument) -> Value:
        name = getattr(node.target, "__name__", "")
        transposed = name in _TRANSPOSED
        weight = self._parameter(argument(1, "weight"))
        self.note(argument(2, "bias"))
        groups = argument(6, "groups", 1)
        use = WeightUse(weight.name, 0, 0, tuple(weight.tensor.shape), groups, transposed)
        spatial = (_CONVOLUTIONS | _TRANSPOSED)[name]
        return self._apply(use, argument(0, "input"), -1 - spatial, spatial)

    def _softmax(self, node: fx.Node, argument: Argument) -> Value:
        return self.mix(argument(0, "input"), argument(1, "dim"))

    def _layer_norm(self, node: fx.Node, argument: Argument) -> Value:
        for position, name in ((2, "weight"), (3, "bias")):
            self.note(argument(position, name))
        return self._norm(argument(0, "input"), argument(1, "normalized_shape"))

    def _attend(self, node: fx.Node, argument: Argument) -> Value:
        """Of each head, queries and keys reach all units that its values have.

        An upper bound: queries and keys of a head whose values are all dead count as live.
        """
        from sparsecomp.models.row_transformer import attend

        if node.target is not attend:
            raise UntraceableError("it is not known how this operation moves units")
        names, heads = ("queries", "keys", "values"), argument(3, "heads")
        queries, keys, values = (self._units(argument(place, name)) for place, name in enumerate(names))
        mixed = [
            Units(self.builder.mix(part.space, self._size(values), heads), values.axis, values.dims)
            for part in (queries, keys)
        ]
        return self.join([values, *mixed])

    def _parameter(self, value: Any) -> Weight:
        if not isinstance(value, Weight):
            raise UntraceableError("its weight is not a parameter of the network but computed")
        return value
