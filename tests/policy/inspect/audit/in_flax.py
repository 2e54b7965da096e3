"""Modules of Flax's that run a function in a module `inner`, in both wings."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax import nnx


class LinenInner(nn.Module):
    run: Any

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class LinenNet(nn.Module):
    run: Any
    wrap: Any

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        return self.wrap(LinenInner)(self.run, name="inner")(*args)


class LinenScanned(nn.Module):
    """The inner module as one step of `nn.scan`."""

    run: Any

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        class Step(nn.Module):
            run: Any

            def __call__(self, n: Any, *args: Any) -> Any:
                return n + 1, self.run(*args)

        axes: Any = nn.broadcast
        scanned = nn.scan(Step, in_axes=axes, length=3)
        return scanned(self.run, name="inner")(0, *args)[1]


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


IN_FLAX: dict[str, Any] = {
    "linen": lambda run: _applied(LinenNet(run, lambda cls: cls)),
    "linen, in remat": lambda run: _applied(LinenNet(run, nn.remat)),
    "linen, in jit": lambda run: _applied(LinenNet(run, nn.jit)),
    "linen, in scan": lambda run: _applied(LinenScanned(run)),
    "nnx": lambda run: NnxNet(run, lambda call: call),
    "nnx, in remat": lambda run: NnxNet(run, nnx.remat),
    "nnx, in jit": lambda run: NnxNet(run, nnx.jit),
}
