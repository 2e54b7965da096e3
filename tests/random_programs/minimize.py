"""Makes a failing program smaller, and prints it as a script."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.random_programs.draw import Leaf, Op, Program, live, namespace, source
from tests.random_programs.judge import text_of
from tests.random_programs.ops import FLOW, PRELUDE


def shapes(program: Program) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Returns the shape of each value of a program, and whether it is positive."""
    names = namespace(ref=True)
    body = source(program, ref=True).rsplit("\n", 1)[0] + "\n    return locals()"
    with jax.enable_x64(True):
        exec(body, names)
        wide = lambda tree: jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), tree)  # noqa: E731
        found = names["f"](wide(program.params()), wide(program.arrays()))
    arrays = {name: np.asarray(v) for name, v in found.items() if hasattr(v, "dtype")}
    return {name: (v.shape, bool(v.min() > 0)) for name, v in arrays.items()}


def renamed(op: Op, old: str, new: str) -> Op:
    return op.replaced(inputs=tuple(new if name == old else name for name in op.inputs))


def without(program: Program, op: Op, by: str) -> Program:
    """Returns a program that reads another value in place of an operation's."""
    ops = tuple(renamed(each, op.name, by) for each in program.ops if each is not op)
    return live(Program(program.leaves, ops, by if program.output == op.name else program.output))


def smaller(program: Program) -> Iterator[Program]:
    """Yields smaller programs: of fewer last operations, of fewer first operations, or without one
    in between.
    """
    known = shapes(program)
    for op in program.ops[:-1]:
        yield live(Program(program.leaves, program.ops, op.name))
    for place, op in reversed(list(enumerate(program.ops[:-1]))):
        if op.name in known:
            shape, is_positive = known[op.name]
            for is_param in (True, False):
                leaf = Leaf(
                    f"{'w' if is_param else 'x'}_{op.name}", shape, is_param, place, is_positive
                )
                replaced = Program((*program.leaves, leaf), program.ops, program.output)
                yield without(replaced, op, leaf.name)
    for op in program.ops:
        for name in op.inputs:
            if known.get(name, ("",))[0] == known.get(op.name, (None,))[0]:
                yield without(program, op, name)
        if op.body:
            for body in smaller_bodies(op.body):
                ops = tuple(op.replaced(body=body) if each is op else each for each in program.ops)
                yield live(Program(program.leaves, ops, program.output))


def smaller_bodies(body: Program) -> Iterator[Program]:
    for op in body.ops:
        for name in op.inputs:
            yield without(body, op, name)


def minimized(program: Program, fails: Callable[[Program], bool], attempts: int = 60) -> Program:
    """Returns a smaller program that still fails."""
    while True:
        for candidate in smaller(program):
            if attempts <= 0:
                return program
            attempts -= 1
            if candidate.ops and any(leaf.is_param for leaf in candidate.leaves):
                try:
                    if not fails(candidate):
                        continue
                except (TypeError, ValueError, IndexError, NameError, AttributeError):
                    continue
                program = candidate
                break
        else:
            return program


HEAD = """import jax, jax.numpy as jnp, mpmodules, numpy as np, optax, policy
from jax import lax
from tests.random_programs.judge import results
"""
TAIL = """P, X = jax.tree.map(jnp.asarray, (P, X))
print(run(call, {params}, X)[{where!r}])  # ours
with jax.enable_x64(True):
    P, X = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), (P, X))
    print(results(f, P, X)[{where!r}])  # right"""


def snippet(program: Program, way: str, policy: str, mode: str, where: str) -> str:
    """Returns a script that prints the failing values, of a way of running."""
    params, arrays = {}, {}
    for leaf in program.leaves:
        *layer, name = leaf.name.split("__")
        at = params if leaf.is_param else arrays
        (at.setdefault(layer[0], {}) if layer else at)[name] = leaf.code

    def show(tree: Any) -> str:
        if isinstance(tree, str):
            return tree
        return "{" + ", ".join(f"{name!r}: {show(each)}" for name, each in tree.items()) + "}"

    run = {
        "eager value": 'run = lambda call, p, x: {"value": call(p, x)}',
        "eager": "run = results",
        "jit": "run = jax.jit(results, static_argnums=0)",
    }
    text = text_of(program, way)
    cast = "P" if way == "function" else "policy.get_policy(POLICY).cast_to_param(P)"
    head = HEAD + (PRELUDE if re.search("log_cosh|tanh|sigmoid|layer_norm", text) else "")
    head += FLOW if any(op.body for op in program.ops) else ""
    data = f"POLICY, P, X = {policy!r}, {show(params)}, {show(arrays)}"
    plain = "" if way == "function" else source(program)  # of the same name, for what is right
    tail = TAIL.format(params=cast, where=where)
    return "\n".join([head, data, text, run.get(mode, run["eager"]), plain, tail])
