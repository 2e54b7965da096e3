"""Faults, clean programs, and the places that users write them in."""

import ast
import dataclasses
import functools
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import policy

BF16, F16, F32, I8, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.int32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def shape(*dims: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with one fault in it, or a clean one.

    Attributes:
      name: what is wrong, or right.
      run, args: the function, and the shapes that it is called with.
      kind, primitive: of the finding, "any" of all; "" of a clean program.
      backward: whether the fault shows in the gradients only, or the gradients are clean too.
      never: parts of the names of places that it is not planted in.
      states: the primitives of findings about states, by the key paths in their messages.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str = ""
    primitive: str = ""
    backward: bool = False
    never: tuple[str, ...] = ()
    states: dict[str, str] | None = None


FAULTS: list[Program] = []
CLEAN: list[Program] = []

# A kind of finding and a primitive, or "clean"; arguments and options; dtypes.
_HEADER = re.compile(r"([\w-]+)(?: ([\w-]+))?(?:\((.*)\))?(?: in ([\w, ]+))?")
_OPTIONS = ("backward", "never", "states")


def plant(table: str) -> None:
    """Adds the programs of a table.

    A line that is not indented is a header, ``mixed-matmul dot_general(x=X, w=W)`` for
    faults or ``clean(x=X)``: shapes by argument, or dtypes of arrays of (4, 4), one in bfloat16 if
    there is none; and the options of `Program`. Below are names of programs, and expressions of the
    arguments or statements that end with one, with the names of this module and of the caller's. A
    header that ends with ``in bfloat16, float16`` plants them in each of these dtypes.
    """
    names = {"np": numpy, "policy": policy, **globals(), **sys._getframe(1).f_globals}
    for section in re.split(r"\n(?=\S)", table.strip()):
        header, *rows = re.split(r"\n {4}(?=\S)", section)
        for row in rows:
            name, _, expression = row.partition(":")
            _add(header, names, name, expression)


def planted(header: str) -> Callable[[Any], Any]:
    """Adds a function by its name, under a header of a table."""
    names = {"np": numpy, "policy": policy, **globals(), **sys._getframe(1).f_globals}

    def add(function: Any) -> Any:
        _add(header, names, function.__name__.strip("_").replace("_", " "), function)
        return function

    return add


def _add(header: str, names: dict[str, Any], name: str, run: Any) -> None:
    found = _HEADER.fullmatch(header)
    assert found is not None, header
    kind, primitive, given, dtypes = found.groups()
    options = {"backward": kind == "clean", **eval(f"dict({given or ''})", names)}
    args = {key: options.pop(key) for key in list(options) if key not in _OPTIONS} or {"x": BF16}
    if isinstance(run, str):
        run = _function(", ".join(args), run, names)
    for dtype in (dtypes or "bfloat16").split(", "):
        title = f"{name} in {dtype}" if dtypes else name
        shapes = tuple(_shaped(one, dtype) for one in args.values())
        if kind == "clean":
            CLEAN.append(Program(title, run, shapes, **options))
        else:
            FAULTS.append(Program(title, run, shapes, kind, primitive, **options))


def _function(args: str, text: str, names: dict[str, Any]) -> Any:
    """Returns a function of an expression, or of statements that end with the result."""
    try:
        return eval(compile(f"lambda {args}: ({text})", names["__file__"], "eval"), names)
    except SyntaxError:
        body = textwrap.indent(textwrap.dedent(text.strip("\n")), "    ")
    tree = ast.parse(f"def program({args}):\n{body}")
    statements: Any = tree.body[0]
    statements.body[-1] = ast.Return(statements.body[-1].value)
    exec(compile(ast.fix_missing_locations(tree), names["__file__"], "exec"), names)
    return names["program"]


def _shaped(arg: Any, dtype: str) -> Any:
    """Returns the shape of an argument, in `dtype` if it is in bfloat16."""
    arg = shape(4, 4, dtype=arg) if isinstance(arg, type(BF16)) else arg
    is_half = isinstance(arg, jax.ShapeDtypeStruct) and arg.dtype == BF16
    return shape(*arg.shape, dtype=jnp.dtype(dtype)) if is_half else arg


# --------------------------------------------------------------------------------------------------
# Parts of programs
# --------------------------------------------------------------------------------------------------

KEY = jax.random.key(0)
X, H, W = shape(4, 4), shape(4, 4, dtype=F16), shape(12, 4, 4, dtype=F32)


def product(w: Any, x: Any, i: int = 0) -> Any:
    return x @ w[i].astype(x.dtype)


def between_matmuls(activation: Any) -> Any:
    return lambda w, x: product(w, activation(product(w, x)), 1)


# --------------------------------------------------------------------------------------------------
# Places
# --------------------------------------------------------------------------------------------------


def _zeros(run: Any, *args: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, *args))


def _in_scan(run: Any) -> Any:
    return lambda *args: lax.scan(lambda n, _: (n + 1, run(*args)), 0, None, length=3)[1]


def _in_cond(run: Any) -> Any:
    def placed(*args: Any) -> Any:
        is_chosen = jax.tree.leaves(args)[0].sum() > 0
        return lax.cond(is_chosen, run, functools.partial(_zeros, run), *args)

    return placed


def _in_while(run: Any) -> Any:
    return lambda *args: lax.while_loop(
        lambda state: state[0] < 3,
        lambda state: (state[0] + 1, run(*args)),
        (0, _zeros(run, *args)),
    )[1]


def _in_shard_map(run: Any) -> Any:
    mesh = jax.make_mesh((1,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return lambda *args: jax.shard_map(
        run, mesh=mesh, in_specs=tuple(spec for _ in args), out_specs=spec, check_vma=False
    )(*args)


def _in_custom_vjp(run: Any) -> Any:
    ruled = jax.custom_vjp(run)
    ruled.defvjp(lambda *args: jax.vjp(run, *args), lambda backward, ct: backward(ct))
    return ruled


def _in_vmap(run: Any) -> Any:
    repeated = lambda leaf: jnp.broadcast_to(leaf[None], (2, *leaf.shape))  # noqa: E731
    return lambda *args: jax.vmap(run)(*jax.tree.map(repeated, args))


def _in_custom_vmap(run: Any) -> Any:
    ruled = jax.custom_batching.custom_vmap(run)
    ruled.def_vmap(lambda size, batched, *args: (jax.vmap(run)(*args), batched))
    return lambda *args: ruled(*args)


def _in_a_gradient(run: Any) -> Any:
    def loss(scale: Any, *args: Any) -> Any:
        out = run(*args)
        leaves = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return scale * sum(jnp.tanh(leaf.astype(F32)).mean() for leaf in leaves), out

    return lambda *args: jax.value_and_grad(loss, has_aux=True)(jnp.ones(()), *args)


def _in_an_optimizer_step(run: Any) -> Any:
    tx = optax.adam(1e-3)

    def step(*args: Any) -> Any:
        scale = jnp.ones(())
        (_, out), gradient = _in_a_gradient(run)(*args)
        updates, _ = tx.update(gradient, tx.init(scale))
        return optax.apply_updates(scale, updates), out

    return step


class LinenInner(nn.Module):
    run: Any

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class LinenStep(nn.Module):
    run: Any

    def __call__(self, n: Any, *args: Any) -> Any:
        return n + 1, self.run(*args)


class LinenNet(nn.Module):
    """An inner module, or one as a step of `nn.scan` if `wrap` is None."""

    run: Any
    wrap: Any = None

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        if self.wrap is not None:
            return self.wrap(LinenInner)(self.run, name="inner")(*args)
        axes: Any = nn.broadcast
        return nn.scan(LinenStep, in_axes=axes, length=3)(self.run, name="inner")(0, *args)[1]


class NnxInner(nnx.Module):
    def __init__(self, run: Any):
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class NnxNet(nnx.Module):
    def __init__(self, run: Any, wrap: Any):
        self.inner, self.wrap = NnxInner(run), wrap

    def __call__(self, *args: Any) -> Any:
        return self.wrap(lambda inner, *args: inner(*args))(self.inner, *args)


def _applied(model: Any) -> Any:
    return lambda *args: model.apply({}, *args)


def scoped(run: Any) -> Any:
    """The function, in two modules' scopes: ``Net/inner``."""

    @functools.wraps(run)
    def named(*args: Any) -> Any:
        with jax.named_scope("Net"), jax.named_scope("inner"):
            return run(*args)

    return named


IN_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "scan": _in_scan,
    "custom_vjp": _in_custom_vjp,
    "a gradient": _in_a_gradient,
    "while": _in_while,
    "cond": _in_cond,
    "vmap": _in_vmap,
    "an optimizer's step": _in_an_optimizer_step,
    "remat": jax.checkpoint,
    "custom_vmap": _in_custom_vmap,
    "shard_map": _in_shard_map,
    "jit in remat in scan": lambda run: _in_scan(jax.checkpoint(jax.jit(run))),
}
IN_MODULES: dict[str, Callable[[Any], Any]] = {
    "linen": lambda run: _applied(LinenNet(run, lambda cls: cls)),
    "nnx": lambda run: NnxNet(run, lambda call: call),
    "linen in remat": lambda run: _applied(LinenNet(run, nn.remat)),
    "nnx in remat": lambda run: NnxNet(run, nnx.remat),
    "linen in jit": lambda run: _applied(LinenNet(run, nn.jit)),
    "nnx in jit": lambda run: NnxNet(run, nnx.jit),
    "linen in scan": lambda run: _applied(LinenNet(run)),
}
REVERSES = ("custom_vjp", "a gradient", "an optimizer's step")
"""Places that differentiate: none of programs without gradients."""
IRREVERSIBLE = ("while", "custom_vmap")
"""Places that can't be differentiated."""
AS_CALLS: dict[str, Callable[[Any], Any]] = {
    "a call": lambda run: run,
    "jit": jax.jit,
    "jit that donates": functools.partial(jax.jit, donate_argnums=0),
    "cond": lambda run: functools.wraps(run)(_in_cond(run)),
    "remat": jax.checkpoint,
}
"""Places of functions that are given a state and return it."""


def places_of(program: Program, place: int) -> dict[str, Any]:
    """Returns a program in its places: as it is, in one of functions and in one of modules.

    Args:
      place: its own in the corpus, which chooses.
    """
    if program.states is not None:
        return {name: put(scoped(program.run)) for name, put in AS_CALLS.items()}
    found = {"a function": scoped(program.run)}
    never = (*program.never, *(IRREVERSIBLE if program.backward and program.kind else ()))
    for puts, run in ((IN_FUNCTIONS, scoped(program.run)), (IN_MODULES, program.run)):
        names = [name for name in puts if not any(part in name for part in never)]
        found |= {name: puts[name](run) for name in names[place % max(len(names), 1) :][:1]}
    return found
