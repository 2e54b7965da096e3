"""jraphx: graph networks in nnx; e3x: an equivariant network in linen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.packages.cases import Case

NODES, EDGES = 12, 30


def cases() -> Iterator[Case]:
    """Tiny models of jraphx and e3x."""
    for name, options in (
        ("GCN", {"norm": "batch_norm"}),
        ("GAT", {"heads": 2}),
        ("GraphSAGE", {"norm": "layer_norm"}),
        ("GIN", {"jk": "cat"}),
    ):
        yield Case(f"jraphx: {name}", _maker(name, options), _graph)
    yield Case("e3x: message passing", _equivariant, _atoms, has_option=True)


def _maker(name: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    def make(dtype: Any) -> Any:
        models: Any = importlib.import_module("jraphx.nn.models")
        return getattr(models, name)(8, 32, 3, out_features=4, **options, rngs=nnx.Rngs(0))

    return make


def _graph(generator: np.random.Generator) -> tuple[Any, ...]:
    x = generator.normal(size=(NODES, 8)).astype(np.float32)
    return x, generator.integers(0, NODES, (2, EDGES), dtype=np.int32)


def _equivariant(dtype: Any) -> Any:
    e3x: Any = importlib.import_module("e3x")

    class Net(flax.linen.Module):
        """Energies of atoms, as in e3x's own examples."""

        dtype: Any = None

        @flax.linen.compact
        def __call__(self, numbers: Any, positions: Any, targets: Any, sources: Any) -> Any:
            options = {} if self.dtype is None else {"dtype": self.dtype}
            basis = e3x.nn.basis(
                positions[sources] - positions[targets],
                max_degree=2,
                num=8,
                radial_fn=e3x.nn.reciprocal_bernstein,
                cutoff_fn=e3x.nn.smooth_cutoff,
            )
            x = e3x.nn.Embed(10, 16, **options)(numbers)
            for _ in range(2):
                y = e3x.nn.MessagePass(**options)(x, basis, dst_idx=targets, src_idx=sources)
                x = e3x.nn.add(
                    x, y.astype(x.dtype) if options else y
                )  # the sum over edges is float32, and add is strict
                x = e3x.nn.Dense(16, **options)(e3x.nn.silu(e3x.nn.Dense(16, **options)(x)))
            x = e3x.nn.TensorDense(max_degree=0, include_pseudotensors=False, **options)(x)
            return e3x.nn.Dense(1, **options)(x)[..., 0]

    return Net(dtype=dtype)


def _atoms(generator: np.random.Generator) -> tuple[Any, ...]:
    first, second = np.nonzero(~np.eye(5, dtype=bool))
    positions = jnp.asarray(generator.normal(size=(5, 3)), jnp.float32)
    return (
        generator.integers(1, 9, 5, dtype=np.int32),
        positions,
        first.astype(np.int32),
        second.astype(np.int32),
    )
