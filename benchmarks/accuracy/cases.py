"""What is measured: cases, the data they run on, and the error of every column of a case."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accuracy import torch_peer
from benchmarks.accuracy.ulps import FLOOR, max_ulps
from policy import Policy

OURS: tuple[str, ...] = ("ours linen", "ours nnx", "ours")
PEERS: tuple[str, ...] = ("flax linen", "flax nnx", "jax, optax", "torch")
PROMISED: tuple[str, ...] = ("norms", "softmax", "pooling", "losses", "sums")  # within 1 ulp


@dataclasses.dataclass(frozen=True)
class Precision:
    """What operands and results are in.

    Attributes:
      operands: the half dtype that inputs (and the kernels of matmul layers) are rounded to.
      output: the dtype that errors are counted in: `operands`, or float32 behind a boundary that
        returns it.
    """

    operands: Any
    output: Any

    @property
    def policy(self) -> Policy:
        return Policy("float32", self.operands, self.output)

    @property
    def wide(self) -> bool:
        return self.operands != self.output

    def __str__(self) -> str:
        operands, output = jnp.dtype(self.operands).name, jnp.dtype(self.output).name
        return f"{output} from {operands}" if self.wide else operands


BFLOAT16 = Precision(jnp.bfloat16, jnp.bfloat16)
FLOAT16 = Precision(jnp.float16, jnp.float16)
FLOAT32 = Precision(jnp.bfloat16, jnp.float32)
PRECISIONS = (BFLOAT16, FLOAT16, FLOAT32)

Program = Callable[..., Any]  # (precision, arrays) -> a result


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
      name: the layer or function, and what of it is measured where that is not its output.
      inputs: the distribution of the inputs, in words.
      family: what is promised of it; see PROMISED.
      data: a generator to the input arrays, in float64 and not rounded yet; integers as they are.
      columns: by column, ``program(precision, *arrays)``; the arrays as `given` says. A peer may
        raise: no figure.
      truth: the same in float64: ``truth(precision, *arrays)``.
      truth_of_nnx: of the nnx columns, where their parameters have other names and so other values.
      floor: see `ulps.max_ulps`.
      given: "half" where the inputs come in half precision, "float32" where a layer gets them
        unrounded.
      wide: whether it is also measured where the result is float32.
      torch: the name in `torch_peer.RUNS`.
      values: ``values(precision, path, shape)``, the value of a parameter in float64.
      gradient: the parameter whose gradient is measured, by name.
      accepted: why ours may be worse than the columns `against`, where that is so by contract.
    """

    name: str
    inputs: str
    family: str
    data: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    columns: dict[str, Program]
    truth: Program
    floor: float = FLOOR
    given: str = "half"
    wide: bool = False
    torch: str | None = None
    values: Callable[[Precision, str, tuple[int, ...]], np.ndarray] | None = None
    gradient: str | None = None
    accepted: str = ""
    against: tuple[str, ...] = ("torch",)
    truth_of_nnx: Program | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.inputs})"


@dataclasses.dataclass(frozen=True)
class Row:
    """The largest errors of a case, in ulps of the output dtype, by column. None: it raised."""

    case: Case
    precision: Precision
    ulps: dict[str, float | None]

    @property
    def worst_of_ours(self) -> float:
        return max(value for column in OURS if (value := self.ulps.get(column)) is not None)

    @property
    def best_of_peers(self) -> float | None:
        """Of those that count: not those that the case says why for."""
        counted = [
            column for column in PEERS if not (self.case.accepted and column in self.case.against)
        ]
        return min(
            (value for column in counted if (value := self.ulps.get(column)) is not None),
            default=None,
        )


def measure(case: Case, precision: Precision) -> Row:
    """Runs every column of a case on the same data."""
    exact = _inputs(case, precision)
    truth = _exactly(case.truth, precision, exact)
    truth_of_nnx = (
        truth if case.truth_of_nnx is None else _exactly(case.truth_of_nnx, precision, exact)
    )
    given = [
        jnp.asarray(x, jnp.float32 if case.given == "float32" else precision.operands)
        if np.issubdtype(x.dtype, np.floating)
        else jnp.asarray(x, jnp.int32 if np.issubdtype(x.dtype, np.integer) else x.dtype)
        for x in exact
    ]
    floor = 1.0 if precision.wide else case.floor
    ulps: dict[str, float | None] = {}
    for column, program in case.columns.items():
        result = (
            program(precision, *given) if column in OURS else _attempt(program, precision, *given)
        )
        expected = truth_of_nnx if column.endswith("nnx") else truth
        ulps[column] = (
            None if result is None else max_ulps(result, expected, precision.output, floor)
        )
    if case.torch is not None and torch_peer.available():
        result = torch_peer.run(case, precision, exact)
        ulps["torch"] = None if result is None else max_ulps(result, truth, precision.output, floor)
    return Row(case, precision, ulps)


def _exactly(program: Program, precision: Precision, inputs: list[np.ndarray]) -> np.ndarray:
    with jax.enable_x64(True), lenient():
        return np.asarray(program(precision, *(jnp.asarray(x) for x in inputs)), np.float64)


def _inputs(case: Case, precision: Precision) -> list[np.ndarray]:
    """The inputs in float64, rounded to what the layer is given."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    dtype = np.float32 if case.given == "float32" else jnp.dtype(precision.operands)
    return [
        x.astype(dtype).astype(np.float64) if x.dtype == np.float64 else x for x in case.data(rng)
    ]


def _attempt(program: Program, precision: Precision, *arrays: Any) -> Any:
    """What a peer returns, or None where it raises: some of Flax's layers do in half precision."""
    with lenient():
        try:
            return program(precision, *arrays)
        except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return None


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """For code that is not ours: it promotes dtypes and ranks, and warns."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def normal(
    *shape: int, mean: float = 0.0, scale: float = 1.0
) -> Callable[[np.random.Generator], tuple[np.ndarray]]:
    """The data of a case of one normally distributed input."""
    return lambda rng: (mean + scale * rng.normal(size=shape),)


def offsets(*shape: int) -> dict[str, Callable[[np.random.Generator], tuple[np.ndarray]]]:
    """The two distributions that most cases run on."""
    return {"normal": normal(*shape), "mean 1000": normal(*shape, mean=1000.0)}
