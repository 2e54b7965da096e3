"""Programs as data: drawn from a seed, printed as source text."""

import dataclasses
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.random_programs.ops import (
    FLOW,
    GROUPS,
    OPS,
    PRELUDE,
    PYTHON_FLOW,
    Shape,
    Spec,
    argument,
    fits,
)

LAYERS = ("Dense", "LayerNorm")
LARGEST, SMALLEST, SIZE = 300.0, 1e-4, 200


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter or an input. Its numbers are exact in each dtype of 16 bits."""

    name: str
    shape: Shape
    is_param: bool
    seed: int
    is_positive: bool = False

    def value(self) -> np.ndarray:
        drawn = np.random.default_rng(self.seed).integers(-100, 100, self.shape) / 64
        return (np.abs(drawn) + 1 / 8 if self.is_positive else drawn).astype(np.float32)

    @property
    def code(self) -> str:
        drawn = f"np.random.default_rng({self.seed}).integers(-100, 100, {self.shape}) / 64"
        return f"np.float32(abs({drawn}) + 1 / 8)" if self.is_positive else f"np.float32({drawn})"


@dataclasses.dataclass(frozen=True)
class Op:
    name: str
    kind: str
    inputs: tuple[str, ...]
    args: tuple[tuple[str, Any], ...] = ()
    body: "Program | None" = None

    def replaced(self, **changes: Any) -> "Op":
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Program:
    """A list of operations on named values. In a body the leaves are the arguments."""

    leaves: tuple[Leaf, ...]
    ops: tuple[Op, ...]
    output: str

    def kinds(self) -> set[str]:
        bodies = [op.body for op in self.ops if op.body]
        return {op.kind for op in self.ops}.union(*(body.kinds() for body in bodies))

    def params(self) -> dict[str, Any]:
        """Returns the parameters, those of layers in a dict of their own."""
        params: dict[str, Any] = {}
        for leaf in self.leaves:
            if leaf.is_param:
                *layer, name = leaf.name.split("__")
                (params.setdefault(layer[0], {}) if layer else params)[name] = leaf.value()
        return params

    def arrays(self) -> dict[str, Any]:
        return {leaf.name: leaf.value() for leaf in self.leaves if not leaf.is_param}


def lines_of(op: Op, ref: bool = False, layers: bool = False) -> list[str]:
    """Returns the statements of an operation; those of references round and note choices."""
    spec, lines, names = OPS[op.kind], [], op.inputs
    if op.body:
        arguments = ", ".join(leaf.name for leaf in op.body.leaves)
        inner = [line for each in op.body.ops for line in lines_of(each, ref)]
        inner.append(f"return {op.body.output}")
        lines = [f"def {op.name}_body({arguments}):", *(f"    {line}" for line in inner)]
    rounds = ref and spec.kind in ("dot", "half", "move")
    if rounds:
        read = "read" if spec.kind == "dot" else "move"
        names = tuple(f"{read}({name})" for name in names)
    fields = dict(op.args) | {"body": f"{op.name}_body"}
    code = spec.code.format(*names, **fields)
    if layers and op.kind in LAYERS:
        code = f'layer("{op.inputs[1].split("__")[0]}", {op.inputs[0]})'
    if ref and spec.choice:
        stored = names if rounds else tuple(f"move({name})" for name in names)
        lines.append(f"note({spec.choice.format(*stored, **fields)})")
    return [*lines, f"{op.name} = {spec.kind}({code})" if rounds else f"{op.name} = {code}"]


def source(program: Program, ref: bool = False, layers: bool = False) -> str:
    """Returns a program as a function of parameters and inputs."""
    lines = []
    for leaf in program.leaves:
        path = "".join(f'["{name}"]' for name in leaf.name.split("__"))
        if not (layers and "__" in leaf.name):
            lines.append(f"{leaf.name} = {'p' if leaf.is_param else 'x'}{path}")
    lines += [line for op in program.ops for line in lines_of(op, ref, layers)]
    head = f"def f(p, x{', layer' if layers else ''}):"
    return "\n".join([head, *(f"    {line}" for line in [*lines, f"return {program.output}"])])


def rounding(half: str, noise: int | None = None) -> Any:
    """Returns a function that rounds numbers, and in the backward pass their cotangents, to a
    dtype; with noise of half of a unit in the last place.
    """
    rng = np.random.default_rng(noise)

    def rounded(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if noise is not None:
            x = x * (1 + float(jnp.finfo(half).eps) * rng.uniform(-0.5, 0.5, x.shape)).astype(
                x.dtype
            )
        return x.astype(half).astype(x.dtype)

    return rounded


def namespace(
    read: Any = None, dot: Any = None, half: Any = None, move: Any = None, ref: bool = False
) -> dict[str, Any]:
    """Returns what a program calls."""
    notes: list[np.ndarray] = []

    def note(*choices: Any) -> None:
        leaves = jax.tree.leaves(choices)
        notes.extend(np.asarray(c) for c in leaves if not isinstance(c, jax.core.Tracer))

    same = lambda x: x  # noqa: E731
    names = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "optax": optax, "notes": notes}
    names |= {"note": note, "read": read or same, "dot": dot or same}
    names |= {"half": half or same, "move": move or same}
    exec(PRELUDE + (PYTHON_FLOW if ref else FLOW), names)
    return names


def references(half: str, noises: Sequence[int] = (1, 2)) -> list[dict[str, Any]]:
    """Returns namespaces: of truth, of rounded matmuls, and of rounded activations, which are
    rounded in other ways too.
    """
    once = rounding(half)
    noisy = [rounding(half, noise) for noise in noises]
    chosen = [(None,) * 4, (once, once, None, None), (once,) * 4]
    chosen += [(once, each, each, once) for each in noisy]
    return [namespace(*roundings, ref=True) for roundings in chosen]


def distance(actual: Any, truth: Any) -> float:
    """Returns the error of an array, relative to the norm of the truth."""
    actual, truth = (np.asarray(each, np.float64) for each in (actual, truth))
    norm = np.linalg.norm(truth)
    return float(np.linalg.norm(actual - truth) / norm) if norm else float(np.abs(actual).max())


def same_choices(envs: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the discrete choices of all references are the same, and forgets them."""
    notes = [list(env["notes"]) for env in envs]
    for env in envs:
        env["notes"].clear()
    return all(
        len(each) == len(notes[0]) and all(map(np.array_equal, each, notes[0])) for each in notes
    )


class Drawer:
    """Draws operations one by one, and keeps those that are well-conditioned."""

    def __init__(self, rng: np.random.Generator, half: str):
        self.rng, self.half, self.count = rng, half, 0
        self.leaves: list[Leaf] = []

    def leaf(self, envs: list[dict[str, Any]], shape: Shape, is_param: bool, name: str = "") -> str:
        name = name or f"{'w' if is_param else 'x'}{len(self.leaves)}"
        leaf = Leaf(name, shape, is_param, int(self.rng.integers(2**31)))
        self.leaves.append(leaf)
        for env in envs:
            env[name] = jnp.asarray(leaf.value(), jnp.float64)
        return name

    def grow(
        self, envs: list[dict[str, Any]], pool: list[str], count: int, can_nest: bool
    ) -> list[Op]:
        """Returns so many operations, of which each may read all values before it."""
        ops: list[Op] = []
        for _ in range(20 * count):
            if len(ops) == count:
                break
            leaves = len(self.leaves)
            read = {name for op in ops for name in op.inputs}
            unread = [name for name in pool if name not in read]
            op = self.propose(envs, pool, unread or pool, can_nest)
            if op is not None and self.accepts(envs, op):
                ops.append(op)
                pool.append(op.name)
            else:
                del self.leaves[leaves:]
        return ops

    def propose(
        self, envs: list[dict[str, Any]], pool: list[str], unread: list[str], can_nest: bool
    ) -> Op | None:
        groups, weights = zip(*GROUPS.items(), strict=True)
        group = groups[self.rng.choice(len(groups), p=weights)]
        kind = str(self.rng.choice(group if self.count or not can_nest else groups[0]))
        spec = OPS[kind]
        if (spec.kind == "body" or kind in LAYERS) and not can_nest:
            return None
        name, recent = f"v{self.count + 1}", unread if self.rng.random() < 0.8 else pool
        first = str(self.rng.choice([each for each in recent if envs[0][each].ndim] or recent))
        shape = envs[0][first].shape
        if not fits(spec.need, np.asarray(envs[0][first])) or (not shape and "axis" in spec.code):
            return None
        fields = {field for _, field, _, _ in string.Formatter().parse(spec.code) if field}
        inputs = [first]
        for place in sorted(int(field) for field in fields if field.isdigit() and field != "0"):
            order = [*unread, *pool]
            inputs.append(self.operand(envs, order, spec, shape, place, can_nest, kind))
        drawn = sorted(field for field in fields if not field.isdigit() and field != "body")
        args = tuple((field, argument(field, self.rng, shape)) for field in drawn)
        self.count += 1
        op = Op(name, kind, tuple(inputs), args)
        return self.with_body(envs, op) if "body" in fields else op

    def operand(
        self,
        envs: Any,
        pool: list[str],
        spec: Spec,
        shape: Shape,
        place: int,
        fresh: bool,
        kind: str,
    ) -> str:
        """Returns another operand: a new parameter, or a value, if possible of the same shape."""
        if place in spec.fresh and fresh and (kind in LAYERS or self.rng.random() < 0.6):
            kernel = "kernel" if kind == "Dense" else "scale"
            layer = f"{kind.lower()}{self.count}__{kernel if place == 1 else 'bias'}"
            new = eval(spec.fresh[place], {"s": shape}) if shape else ()
            return self.leaf(envs, new, True, layer if kind in LAYERS else "")
        wanted = eval(spec.fresh[place], {"s": shape}) if place in spec.fresh and shape else shape
        same = [name for name in pool if envs[0][name].shape == wanted]
        return str(self.rng.choice(same or pool))

    def with_body(self, envs: list[dict[str, Any]], op: Op) -> Op | None:
        """Returns an operation with a body that keeps the shape of its first argument."""
        samples = {"scan": ("{1}", "{0}[0]", "{2}"), "map": ("{0}[0]", "{1}")}
        samples["vmap"] = samples["map"]
        codes = [code.format(*op.inputs) for code in samples.get(op.kind, ("{0}", "{1}"))]
        names, inner = [f"a{place}" for place in range(len(codes))], [dict(env) for env in envs]
        try:
            for env in inner:
                env |= {name: eval(code, env) for name, code in zip(names, codes, strict=True)}
        except (TypeError, IndexError):
            return None
        ops = self.grow(inner, list(names), int(self.rng.integers(1, 5)), can_nest=False)
        fitting = [each.name for each in ops if inner[0][each.name].shape == inner[0]["a0"].shape]
        if not fitting:
            return None
        leaves = tuple(Leaf(name, inner[0][name].shape, False, 0) for name in names)
        return op.replaced(body=live(Program(leaves, tuple(ops), fitting[-1])))

    def accepts(self, envs: list[dict[str, Any]], op: Op) -> bool:
        """Runs an operation in all references, and returns whether it can be judged there."""
        code = "\n".join(lines_of(op, ref=True))
        try:
            for env in envs:
                exec(code, env)
        except (TypeError, ValueError, IndexError, AttributeError):
            return False
        finally:
            agreed = same_choices(envs)
        truth, *others = (np.asarray(env[op.name]) for env in envs)
        if truth.dtype != np.float64 or not 0 < truth.size <= SIZE or truth.ndim > 4 or not agreed:
            return False
        if not all(np.isfinite(each).all() for each in (truth, *others)):
            return False
        if not SMALLEST < np.abs(truth).max() < LARGEST:
            return False
        if not truth.ndim and self.rng.random() < 0.7:  # else most programs end as scalars
            return False
        return bool(max(distance(v, truth) for v in others) < 16 * jnp.finfo(self.half).eps)


def live(program: Program) -> Program:
    """Returns a program without the operations and leaves that its output does not read. The
    arguments of a body stay.
    """
    needed, ops = {program.output}, []
    for op in reversed(program.ops):
        if op.name in needed:
            ops.append(op)
            needed |= set(op.inputs)
    is_body = any(leaf.name == "a0" for leaf in program.leaves)
    leaves = tuple(leaf for leaf in program.leaves if is_body or leaf.name in needed)
    return Program(leaves, tuple(reversed(ops)), program.output)


def draw(seed: int, half: str) -> Program:
    """Returns a random program of 5 to 25 operations that a dtype of 16 bits can run."""
    rng = np.random.default_rng(seed)
    while True:
        with jax.enable_x64(True):
            drawer, envs = Drawer(rng, half), references(half, (1,))[::3]
            shapes = [(4, 8), (2, 4, 8), (8,)]
            pool = [drawer.leaf(envs, shape, False) for shape in shapes[: rng.integers(1, 4)]]
            pool += [drawer.leaf(envs, (4, 8), True)]
            ops = drawer.grow(envs, pool, int(rng.integers(8, 36)), can_nest=True)
        if ops:
            whole = [live(Program(tuple(drawer.leaves), tuple(ops), op.name)) for op in ops]
            program = max(whole, key=lambda each: len(each.ops))
            if len(program.ops) >= 3 and any(leaf.is_param for leaf in program.leaves):
                return program
