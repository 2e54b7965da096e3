"""The dtypes in which devices exchange numbers, read from the program.

Under `jax.jit` with sharded arrays the written program has no collectives; XLA's partitioner
inserts them. The compiled program doesn't show them either: XLA:CPU sums a bfloat16 all-reduce in
float32. So the module is read as it leaves the partitioner.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from policy.core.messages import require_function
from policy.inspect.hlo.dump import without_cache
from policy.inspect.hlo.text import Instruction, numpy_name, parse
from policy.programs.frameworks import make_jaxpr
from policy.programs.paths import Path, naming, path_of, spelled
from policy.programs.primitives import HLO_COLLECTIVES
from policy.programs.reading.walk import walk


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    >>> import policy
    >>> Collective = policy.sharding.Collective
    >>> print(Collective("all-reduce", "bfloat16", (8,), ("data",), "jit(step)/psum"))
    all-reduce bfloat16[8] over data: jit(step)/psum

    Attributes:
      operation: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute".
      dtype: the name of the exchanged dtype: "bfloat16".
      shape: the shape of one device's result.
      axes: names of the mesh axes over which devices exchange; () if they are unknown.
      name: the originating JAX operation, with its name scopes.
      path: the module path, as in rules; "" outside of any module.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    name: str
    path: str = ""

    @property
    def size(self) -> int:
        """The number of elements in one device's result."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        place = f"{self.name.rpartition('/')[2]} at '{self.path}'" if self.path else self.name
        return f"{self.operation} {self.dtype}[{shape}] over {','.join(self.axes) or '?'}: {place}"


def collectives_of(
    fn: Callable[..., Any], *args: Any, stage: Literal["partitioned", "traced"] = "partitioned"
) -> list[Collective]:
    """Returns every exchange between devices in a call of `fn`, with its dtype.

    Nothing is run. A collective inside a loop is listed once, and the collectives of both branches
    of a `lax.cond` are listed.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> auto = (jax.sharding.AxisType.Auto,)
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=auto)
    >>> total = lambda x: jax.lax.psum(x.astype(jnp.bfloat16), "data")
    >>> fn = jax.shard_map(total, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    >>> policy.sharding.collectives_of(fn, jnp.ones(4), stage="traced")[0].dtype
    'bfloat16'

    Args:
      fn: a function, or a jitted one, with its shardings and donated arguments.
      *args: arrays, or `jax.ShapeDtypeStruct`, with the shardings of the call.
      stage: "partitioned" compiles `fn` for the available devices and reads the program as XLA's
        partitioner left it, with the collectives of `jax.jit` over sharded arrays and of
        `jax.shard_map` alike. Later changes by a backend are not included: the CPU's widens
        bfloat16 sums to float32, a GPU's joins several into one. A program for one device has none.
        "traced" reads the jaxpr: the collectives written in `jax.shard_map`, backward included. It
        compiles nothing, needs no devices (`jax.sharding.AbstractMesh`), and doesn't see the
        partitioner's additions.

    Returns:
      Collectives, in the order of the program's text.

    Raises:
      TypeError: `fn` is not a function.
      ValueError: `stage` is unknown.
      RuntimeError: the partitioned program can't be read: this backend writes none.
    """
    require_function(fn, "collectives_of")
    if stage == "traced":
        return list(_traced(make_jaxpr(fn)(*args)))
    if stage != "partitioned":
        raise ValueError(f"stage should be 'partitioned' or 'traced', but got {stage!r}.")
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    lowered = jitted.lower(*args)
    return list(_partitioned(*_partitioned_text(lowered)))


def _traced(jaxpr: Any) -> Iterator[Collective]:
    sites = list(walk(jaxpr))
    with naming(site.path for site in sites):
        for site in sites:
            if site.name not in HLO_COLLECTIVES:
                continue
            params, kind = site.equation.params, HLO_COLLECTIVES[site.name]
            axes = params.get("axes", params.get("axis_name"))
            every = axes if isinstance(axes, (tuple, list)) else (axes,)
            names = tuple(str(axis) for axis in every if not isinstance(axis, int))
            name, path = "/".join((*site.path, site.name)), spelled(site.path)
            for x in site.equation.outvars if names else ():
                yield Collective(kind, x.aval.dtype.name, tuple(x.aval.shape), names, name, path)


def _partitioned_text(lowered: Any) -> tuple[str, Any]:
    """Returns the partitioned HLO module ("" for one device) and its mesh, or None."""
    with tempfile.TemporaryDirectory() as folder, without_cache():
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
            "xla_dump_hlo_as_text": True,
        }
        compiled = lowered.compile(compiler_options=options)
        files = sorted(pathlib.Path(folder).glob("*after_spmd-partitioning*.txt"))
        text = files[-1].read_text() if files else ""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    named = (s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    mesh = next((mesh for mesh in named if mesh.size > 1), None)
    if not text and any(s.num_devices > 1 for s in shardings):
        raise RuntimeError(
            "The partitioned program can't be read: this backend wrote none. stage='traced' reads "
            "the collectives written in shard_map."
        )
    return text, mesh


def _partitioned(text: str, mesh: Any) -> Iterator[Collective]:
    computations = parse(text).computations.values() if text else ()
    found = [one for computation in computations for one in computation.instructions.values()]
    with naming(_path_of(instruction) for instruction in found):
        for one in found:
            if one.opcode in HLO_COLLECTIVES.values():
                axes, path = _axes(one.rest, mesh), spelled(_path_of(one))
                for array in one.results:
                    dtype = numpy_name(array.dtype)
                    yield Collective(one.opcode, dtype, array.shape, axes, one.op_name, path)


def _path_of(instruction: Instruction) -> Path:
    """Returns the module path in an operation's name, whose last part is the primitive's."""
    return path_of(instruction.op_name.rpartition("/")[0])


def _axes(attributes: str, mesh: Any) -> tuple[str, ...]:
    """Returns the axes of `mesh` whose devices form the groups of a collective.

    Partitions are numbered as in the mesh.
    """
    if mesh is None:
        return ()
    pairs = re.search(r"source_target_pairs=\{(\{[^=]*?\})\}", attributes)
    if pairs:
        ends = np.array(
            [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([0-9,]+)\}", pairs[1])]
        )
        places = [np.unravel_index(ends[:, i], mesh.axis_sizes) for i in (0, 1)]
        return tuple(a for a, x, y in zip(mesh.axis_names, *places, strict=True) if (x != y).any())
    groups = _groups(attributes)
    # an axis of one device is part of no exchange
    split = [axis for axis, size in enumerate(mesh.axis_sizes) if size > 1]
    for count in range(1, len(split) + 1):
        for axes in itertools.combinations(split, count):
            if groups == _groups_over(mesh.axis_sizes, axes):
                return tuple(mesh.axis_names[a] for a in axes)
    return ()


Groups = frozenset[frozenset[int]]


def _groups(attributes: str) -> Groups | None:
    """Returns the groups of partitions that exchange, from any of HLO's three notations."""
    if listed := re.search(r"replica_groups=\{(\{[0-9,{} ]*\})\}", attributes):
        found = re.findall(r"\{([0-9,]+)\}", listed[1])
        return frozenset(frozenset(_ints(group)) for group in found)
    counts = r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?"
    if counted := re.search(counts, attributes):
        numbers = _numbers(counted[2], counted[3]).reshape(_ints(counted[1])[0], -1)
        return frozenset(frozenset(map(int, row)) for row in numbers)
    order = r"(?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))?"
    if meshed := re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} \{{([^}}]*)\}}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=([0-9]+)", meshed[1])}
        named = re.findall(r"'([^']*)'", meshed[4])
        if ":" not in meshed[4] and set(named) <= set(sizes):
            numbers = _numbers(meshed[2] or str(math.prod(sizes.values())), meshed[3])
            axes = [list(sizes).index(name) for name in named]
            return _groups_over(list(sizes.values()), axes, numbers)
    return None


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _numbers(sizes: str, order: str | None) -> np.ndarray:
    """Returns partition numbers counted along axes of these sizes, then transposed."""
    shape = _ints(sizes)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_ints(order) if order else None)


def _groups_over(sizes: Any, axes: Any, numbers: np.ndarray | None = None) -> Groups:
    """Returns the groups of partitions whose positions differ along the given mesh axes only.

    Partitions are counted along the mesh's axes, or numbered by `numbers`.
    """
    numbers = (np.arange(math.prod(sizes)) if numbers is None else numbers).reshape(sizes)
    length = math.prod(sizes[a] for a in axes)
    rows = np.moveaxis(numbers, axes, range(-len(axes), 0)).reshape(-1, length)
    return frozenset(frozenset(map(int, row)) for row in rows)
