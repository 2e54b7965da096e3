"""The result of an estimate: its rows, and the ways to show them."""

from __future__ import annotations

import dataclasses
import sys
from typing import TextIO

from policy.inspect.estimate.rows import EstimateRows
from policy.inspect.estimate.text import estimate_text
from policy.inspect.render.text import shows_color


@dataclasses.dataclass(frozen=True)
class Estimate(EstimateRows):
    """The costs of a step under each policy on a target; returned by `policy.estimate`.

    >>> import jax, jax.numpy as jnp, policy
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> found = policy.estimate(jnp.matmul, x, x, policies=["float32", "bfloat16"], on="cpu")
    >>> [row.name for row in found.rows], dict(found["bfloat16"].matmul_flops)
    (['float32', 'bfloat16'], {'bfloat16': 1024})

    Attributes:
      name: of the function.
      target: the target's name.
      devices: how many it has.
      mesh: the axes of the mesh and their sizes; empty where rows have several.
      capacity: bytes of a device's memory; 0 if unknown.
      clock: Hz by which cycles become seconds; 0 where there are none.
      timing: where seconds come from: "the compiler's cycles", "a roofline of published peaks", or
        "" if there are none.
      source: the document of the device's figures.
      compiler: its name and version.
      rows: the costs, in the order of the policies.
      notes: remarks on the whole, as that nothing is sharded.
    """

    def show(self, file: TextIO | None = None) -> None:
        """Prints the estimate to `file` or the standard output.

        It is in color on a terminal, unless NO_COLOR is set.
        """
        print(estimate_text(self, color=shows_color(file or sys.stdout)), file=file)

    def __str__(self) -> str:
        return estimate_text(self)
