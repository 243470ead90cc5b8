"""A connectivity graph read from the forward pass."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from sparsecomp.connectivity.graph import ConnectivityGraph, GraphBuilder, UntraceableError
from sparsecomp.connectivity.operations import Operations
from sparsecomp.connectivity.values import Constant, Input, Several, Value

_REMEDY = "Declare the graph with ConnectivityGraph.declare, or select by nominal sparsity."


def trace(module: nn.Module, example_inputs: Any = None, submodule: str = "") -> ConnectivityGraph:
    """See `ConnectivityGraph.trace`."""
    root = module.get_submodule(submodule)
    try:
        graph = fx.Tracer().trace(root)
    except Exception as error:  # whatever a user's forward raises on a proxy
        raise UntraceableError(
            f"the forward pass of {type(root).__name__} cannot be traced: {type(error).__name__}: {error} {_REMEDY}"
        ) from error
    if example_inputs is not None:
        _propagate_shapes(root, graph, example_inputs)
    # Of a tied weight the first name in the whole module counts, as in a Selection.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    builder = GraphBuilder()
    operations = Operations(builder, root, names)
    values: dict[fx.Node, Value] = {}
    for node in graph.nodes:
        values[node] = _Step(node, values, operations).value()
    if not builder.outputs:
        raise UntraceableError(
            f"no output of {type(root).__name__}.forward depends on a weight, so that nothing is connected. {_REMEDY}"
        )
    used = {step.name for step in builder.steps if hasattr(step, "name")}
    idle = {n: p.dim() for n, p in module.named_parameters() if n not in used and n not in operations.unitwise}
    return builder.build(
        unitwise=frozenset(operations.unitwise | {name for name, dims in idle.items() if dims < 2}),
        unused=frozenset(name for name, dims in idle.items() if dims >= 2),
    )


@torch.no_grad()
def _propagate_shapes(root: nn.Module, graph: fx.Graph, example_inputs: Any) -> None:
    """Run the graph on tensors without storage: no memory, no random numbers drawn, no running statistics moved."""
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]  # BatchNorm counts batches even so
    try:
        FakeTensorProp(fx.GraphModule(root, graph), FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    except Exception as error:
        raise UntraceableError(
            f"`example_inputs` is what forward takes, and {type(root).__name__}.forward fails on it: "
            f"{type(error).__name__}: {error}. Give a batch, or a tuple of positional arguments."
        ) from error
    finally:
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


class _Step:
    """One node of the traced graph, with its arguments."""

    def __init__(self, node: fx.Node, values: dict[fx.Node, Value], operations: Operations) -> None:
        self.node, self.values, self.operations = node, values, operations

    def value(self) -> Value:
        node, operations = self.node, self.operations
        if node.op == "placeholder":
            return Input()
        if node.op == "get_attr":
            return operations.attribute(str(node.target))
        if node.op == "output":
            for value in self._flat(node.args):
                operations.output(value)
            return Constant()
        kind, handler = operations.find(node)
        inputs = list(self._flat((node.args, node.kwargs)))
        if kind == "size" or (node.op != "call_module" and all(isinstance(value, Constant) for value in inputs)):
            return Constant()
        weighted = node.op == "call_module" and operations.has_parameters(str(node.target))
        if not weighted and all(isinstance(value, Input | Constant) for value in inputs):
            return Input()  # any function of inputs alone is an input
        try:
            if handler is None:
                raise UntraceableError("it is not known how this operation moves units")
            return handler(node, self._argument)
        except UntraceableError as error:
            raise UntraceableError(
                f"node {node.name!r} ({node.op} of {kind}) cannot be followed: {error}. {_REMEDY}"
            ) from error

    def _argument(self, position: int, name: str = "", default: Any = None) -> Any:
        """An argument of the call, with values in place of nodes."""
        if position < len(self.node.args):
            return self._resolve(self.node.args[position])
        return self._resolve(self.node.kwargs.get(name, default))

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, tuple | list):
            return type(argument)(self._resolve(entry) for entry in argument)
        return argument

    def _flat(self, argument: Any) -> Iterator[Value]:
        for node in _nodes(argument):
            value = self.values[node]
            yield from value.values if isinstance(value, Several) else (value,)


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return found
