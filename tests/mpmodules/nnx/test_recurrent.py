"""Cells of nnx that are built under class rules, or stacked by nnx's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import use_policy
from tests.mpmodules.recurrent_cells import HIDDEN, WIDTH, dtypes, matmul_dtypes, sequence


def test_class_rules_in_a_scope_reach_a_cell_that_is_built_there():
    with use_policy("bfloat16", {nnx.GRUCell: "float32"}):
        rnn: Any = nnx.RNN(nnx.GRUCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0)))
    assert dtypes(flax_nnx.state(rnn, flax_nnx.Param)) == {"float32"}
    assert rnn.cell.dense_i.dtype == jnp.float32


def test_a_scan_over_stacked_rnns_and_a_rematerialised_rnn_run_in_compute_dtype():
    class Stack(nnx.Module):
        def __init__(self) -> None:
            @flax_nnx.vmap(in_axes=0, out_axes=0)
            def build(key: Any) -> Any:
                return nnx.RNN(nnx.GRUCell(HIDDEN, HIDDEN, rngs=flax_nnx.Rngs(key)))

            self.rnns = build(jax.random.split(jax.random.key(0), 2))

        def __call__(self, x: Any) -> Any:
            @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
            @flax_nnx.remat
            def layers(rnn: Any, x: Any) -> Any:
                return rnn(x)

            return layers(self.rnns, x)

    x = sequence()[..., :HIDDEN]
    with use_policy("mixed_bfloat16"):
        graph, params, rest = flax_nnx.split(Stack(), flax_nnx.Param, ...)
    call = lambda params, x: flax_nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
    assert matmul_dtypes(call, params, x) == {"bfloat16"}
    y = jax.jit(call)(params, x)
    assert (y.dtype, y.shape) == (jnp.float32, x.shape)
    loss = lambda params: jnp.square(call(params, x)).sum()  # noqa: E731
    assert dtypes(jax.eval_shape(jax.grad(loss), params)) == {"float32"}
