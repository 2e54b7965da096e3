"""The result of an estimate: its rows, and the ways to show them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from policy.inspect.estimate.html import estimate_page
from policy.inspect.estimate.plot import estimate_figure
from policy.inspect.estimate.rows import EstimateRows
from policy.inspect.estimate.text import estimate_text
from policy.inspect.render.text import shows_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
      mesh: the axes of the mesh and their sizes.
      capacity: bytes of a device's memory; 0 if unknown.
      clock: Hz by which cycles become seconds; 0 where there are none.
      timing: where seconds come from: "the compiler's cycles", "a roofline of published peaks", or
        "" if there are none.
      source: the document of the device's figures.
      compiler: its name and version.
      rows: the costs, in the order of the policies.
      notes: remarks on the whole, as that nothing is sharded.
    """

    def to_html(self) -> str:
        """Returns the estimate as one self-contained HTML page."""
        return estimate_page(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draws the memory of each policy beside the device's, and its seconds, with matplotlib.

        Args:
          path: a file to write, in the format of its ending, as ``.png`` or ``.svg``.

        Returns:
          The figure, which belongs to no window.

        Raises:
          ImportError: matplotlib is not installed.
        """
        figure = estimate_figure(self)
        if path is not None:
            figure.savefig(path, bbox_inches="tight", dpi=120)
        return figure

    def save(self, path: str | Path) -> None:
        """Writes an HTML page, JSON, or a plot as ``.png`` or ``.svg``, by the file's ending.

        Raises:
          ValueError: the file's name has another ending.
          ImportError: matplotlib, which draws the plot, is not installed.
        """
        path = Path(path)
        texts = {".html": self.to_html, ".json": self.to_json}
        if path.suffix in (".png", ".svg"):
            self.plot(path)
        elif path.suffix in texts:
            path.write_text(texts[path.suffix](), encoding="utf-8")
        else:
            raise ValueError(
                f"An estimate is saved as .html, .json, .png or .svg, but got {str(path)!r}."
            )

    def show(self, file: TextIO | None = None) -> None:
        """Prints the estimate to `file` or the standard output.

        It is in colour on a terminal, unless NO_COLOR is set.
        """
        print(estimate_text(self, colour=shows_colour(file or sys.stdout)), file=file)

    def __str__(self) -> str:
        return estimate_text(self)
