"""The gate equations of recurrent cells, alike in both wings.

The functions take a cell of either wing and read its activations, which have the same names. The
arrays are (batch..., features); everything is computed in their dtype, which under a policy is
compute_dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax

Array = jax.Array


def lstm_step(cell: Any, gates: Iterable[Array], c: Array) -> tuple[tuple[Array, Array], Array]:
    """Takes a step of a long short-term memory: c' = f c + i g, h' = o tanh(c').

    Args:
      cell: its `gate_fn` activates i, f and o, and its `activation_fn` g and the memory.
      gates: i, f, g and o before activation, each the sum of what the inputs and h say.
      c: the memory.

    Returns:
      The carry (c', h'), and h'.
    """
    activations = cell.gate_fn, cell.gate_fn, cell.activation_fn, cell.gate_fn
    i, f, g, o = (run(gate) for run, gate in zip(activations, gates, strict=True))
    c = f * c + i * g
    h = o * cell.activation_fn(c)
    return (c, h), h


def gru_step(cell: Any, gates: Iterable[tuple[Array, Array]], h: Array) -> tuple[Array, Array]:
    """Takes a step of a gated recurrent unit: h' = (1 - z) n + z h, n = tanh(x_n + r h_n).

    Args:
      cell: its `gate_fn` activates r and z, and its `activation_fn` n.
      gates: r, z and n before activation, each a pair: of the inputs, and of h.
      h: the hidden state.

    Returns:
      h' as the carry and as the output.
    """
    gates = iter(gates)
    r, z = (cell.gate_fn(of_inputs + of_h) for of_inputs, of_h in itertools.islice(gates, 2))
    of_inputs, of_h = next(gates)
    return mixed(z, cell.activation_fn(of_inputs + r * of_h), h)


def mixed(kept: Array, new: Array, h: Array) -> tuple[Array, Array]:
    """Returns (1 - kept) new + kept h, as the carry and as the output."""
    h = (1.0 - kept) * new + kept * h
    return h, h


def simple_step(cell: Any, total: Array, h: Array) -> tuple[Array, Array]:
    """Takes a step of a simple cell: h' = tanh(total), or tanh(total + h) where it is residual."""
    h = cell.activation_fn(total + h if cell.residual else total)
    return h, h
