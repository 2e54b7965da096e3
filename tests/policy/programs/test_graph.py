"""A program as one graph, across the programs inside it."""

import jax
import jax.numpy as jnp
from jax import lax

from policy.programs.reading.graph import Graph, is_joint


def body(total, row):
    with jax.named_scope("inner"):
        return total + row @ row, None


def scanned(x):
    with jax.named_scope("Net"):
        return lax.scan(body, jnp.float32(0), x)


def test_a_node_holds_the_kind_and_the_module_path_of_its_operation():
    graph = Graph(jax.make_jaxpr(scanned)(jnp.ones((3, 4))))
    (dot,) = [node for node in graph.nodes if node.kind == "dot"]
    assert (dot.name, dot.path) == ("dot_general", ("Net", "inner"))
    joints = [node for node in graph.nodes if is_joint(node)]
    assert {node.name for node in joints} == {"carry", "row"}
    assert {(node.kind, node.path) for node in joints} == {("other", ("Net",))}


def test_a_carry_is_made_of_its_first_value_and_of_the_result_of_the_body():
    graph = Graph(jax.make_jaxpr(scanned)(jnp.ones((3, 4))))
    (carry,) = [node for node in graph.nodes if node.name == "carry"]
    first, result = carry.inputs
    assert first.is_literal and result.maker is not None and result.maker.name == "add"
    assert carry in result.readers and graph.outputs[0] is result


def test_operations_that_nothing_depends_on_are_traced_and_no_nodes():
    graph = Graph(jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x))[0])(1.0))
    assert [node.name for node in graph.nodes] == ["sin"]
    assert [node.name for node in graph.traced] == ["sin", "cos"]
