"""Reports of the casts inserted by autocast, by operation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from policy.programs.marks import without_marks
from policy.programs.paths import Path, naming, spelled
from policy.programs.primitives import MATMULS

OPAQUE_MATMUL = "opaque, contains a matmul"


@dataclasses.dataclass(frozen=True)
class Record:
    """One kind of operation at one place.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = policy.autocast(jnp.dot, "mixed_bfloat16", params=0)
    >>> [record] = fn.explain(jnp.eye(2), jnp.eye(2)).records
    >>> record.primitive, record.done
    ('dot_general', 'bfloat16')

    Attributes:
      path: the module path, as in rules; "" outside of any module.
      primitive: its name.
      done: the treatment: the dtype it was run in, or the reason it was left unchanged.
      dtypes: the dtypes of its results.
    """

    path: str
    primitive: str
    done: str
    dtypes: tuple[str, ...]


@dataclasses.dataclass
class Report:
    """The casts that autocast inserts, from ``autocast(fn, policy).explain(*args)``.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = policy.autocast(jnp.dot, "mixed_bfloat16", params=0)
    >>> fn.explain(jnp.eye(2), jnp.eye(2)).wide_matmuls
    []

    Attributes:
      records: each kind of operation, with the number of its occurrences in the program.
      parameters: the names of the arguments taken for parameters.
    """

    records: Counter[Record] = dataclasses.field(default_factory=Counter)
    parameters: list[str] = dataclasses.field(default_factory=list)
    _noted: Counter[tuple[Path, str, str, tuple[str, ...]]] = dataclasses.field(
        default_factory=Counter, init=False, repr=False, compare=False
    )

    def note(self, path: Path, primitive: str, done: str, arrays: Sequence[Any]) -> None:
        dtypes = tuple(str(array.dtype) for array in arrays if hasattr(array, "dtype"))
        self._noted[without_marks(path), primitive, done, dtypes] += 1

    def complete(self) -> None:
        """Turns the notes into records. The spelling of a path depends on all paths."""
        with naming(path for path, *_ in self._noted):
            for (path, primitive, done, dtypes), count in self._noted.items():
                self.records[Record(spelled(path), primitive, done, dtypes)] += count
        self._noted.clear()

    @property
    def opaque_matmuls(self) -> list[Record]:
        """The programs with a matmul that were left as traced."""
        return [record for record in self.records if record.done == OPAQUE_MATMUL]

    @property
    def wide_matmuls(self) -> list[Record]:
        """The matmuls that run in float32."""
        return [r for r in self.records if r.primitive in MATMULS and "float32" in r.dtypes]

    def __str__(self) -> str:
        lines = [f"parameters: {', '.join(self.parameters) or 'none'}"]
        width = max((len(record.path) for record in self.records), default=0)
        kind = max((len(record.primitive) for record in self.records), default=0)
        for record, count in self.records.items():
            operation = f"{record.path:<{width}}  {record.primitive:<{kind}}  {count:>4}"
            lines.append(f"{operation}  {record.done} -> {', '.join(record.dtypes)}")
        return "\n".join(lines)
