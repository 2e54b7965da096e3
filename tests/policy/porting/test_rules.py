"""Each rule of ``python -m policy port`` on a few lines: before, after, and what is left alone."""

import textwrap

import pytest

from policy.porting.port import port
from policy.porting.sources import PortError

HEAD = """
import dataclasses
import functools
from typing import Any
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.training import dynamic_scale as dynamic_scale_lib, train_state
"""


def ported(folder, *texts, head=HEAD):
    """Returns the texts without their head and blank lines, and what is left alone."""
    files = [folder / f"file_{i}.py" for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(head + "MARK = 0\n" + textwrap.dedent(text))
    found, notes = port([str(file) for file in files])
    again, _ = port([str(file) for file in files])
    assert found == again
    for file, one in zip(files, found, strict=True):
        compile(one.after, str(file), "exec")
        file.write_text(one.after)
    twice, _ = port([str(file) for file in files])
    assert [one.after for one in twice] == [one.after for one in found]
    bodies = [one.after.partition("MARK = 0\n")[2] for one in found]
    return [text_of(body) for body in bodies], "\n".join(n.partition(": ")[2] for n in notes)


def text_of(text):
    return "\n".join(line for line in textwrap.dedent(text).splitlines() if line.strip())


RULES = {
    "a cast whose result gets an axis": (
        """
        def grid(h, dtype=jnp.float32):
            return jnp.asarray(jnp.sin(h), dtype)[None, :]

        grid(3, dtype=jnp.float32)
        """,
        """
        def grid(h):
            return jnp.sin(h)[None, :]

        grid(3)
        """,
    ),
    "an initializer that is made and called": (
        """
        def make(key, dtype=jnp.float32):
            return jax.nn.initializers.normal(2)(key, (3,), dtype=dtype)

        make(0, dtype=jnp.float32)
        """,
        """
        def make(key):
            return jax.nn.initializers.normal(2)(key, (3,))

        make(0)
        """,
    ),
    "field": (
        """
        class Mlp(nn.Module):
            \"\"\"A layer.

            Attributes:
              width: of the output.
              dtype: of the computation,
                and of the output.
            \"\"\"

            width: int
            dtype: Any = jnp.float32  # of the computation

            @nn.compact
            def __call__(self, x):
                return nn.Dense(self.width, dtype=self.dtype, name="up")(x)  # grows
        """,
        """
        class Mlp(nn.Module):
            \"\"\"A layer.

            Attributes:
              width: of the output.
            \"\"\"

            width: int

            @nn.compact
            def __call__(self, x):
                return nn.Dense(self.width, name="up")(x)  # grows
        """,
    ),
    "casts of floats": (
        """
        class Head(nn.Module):
            dtype: Any = jnp.float32

            @nn.compact
            def __call__(self, x):
                x = nn.Dense(3, dtype=self.dtype)(x)
                x = x.astype(self.dtype)
                y = jnp.asarray(x + 1, self.dtype) * 2
                return jnp.tanh(y).astype(self.dtype)
        """,
        """
        class Head(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(3)(x)
                y = (x + 1) * 2
                return jnp.tanh(y)
        """,
    ),
    "casts back, and to float32 in norms and softmaxes": (
        """
        def rotated(x, sin, cos):
            first, second = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([first * cos, second * sin]).astype(x.dtype)


        def attend(q, k, softmax_dtype=jnp.float32):
            logits = jnp.einsum("td,sd->ts", q, k).astype(softmax_dtype)
            wide = logits.astype(jnp.float32)
            return jax.nn.softmax(wide, axis=-1).astype(q.dtype)


        class RMSNorm(nn.Module):
            @nn.compact
            def __call__(self, x):
                dtype = x.dtype
                x = x.astype(jnp.float32)
                scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
                return (x / jnp.sqrt(jnp.mean(x**2, axis=-1)) * scale).astype(dtype)


        class Net(nn.Module):
            norm: nn.Module

            @nn.compact
            def __call__(self, x, sin, cos, tokens):
                variance = jnp.var(x.astype(jnp.float32), axis=-1)
                share = jnp.mean(tokens.astype(jnp.float32))
                share = share + jnp.mean(jnp.asarray([1, 2], jnp.float32))
                kept = x.astype(jnp.float32) + share
                x = self.norm(rotated(x, sin, cos)).astype(x.dtype)
                return attend(x, x), (tokens * sin).astype(tokens.dtype), variance, kept


        def outside(x, sin):
            return (x * sin).astype(x.dtype)
        """,
        """
        def rotated(x, sin, cos):
            first, second = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([first * cos, second * sin])


        def attend(q, k):
            logits = jnp.einsum("td,sd->ts", q, k)
            return jax.nn.softmax(logits, axis=-1)


        class RMSNorm(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
                return x / jnp.sqrt(jnp.mean(x**2, axis=-1)) * scale


        class Net(nn.Module):
            norm: nn.Module

            @nn.compact
            def __call__(self, x, sin, cos, tokens):
                variance = jnp.var(x, axis=-1)
                share = jnp.mean(tokens.astype(jnp.float32))
                share = share + jnp.mean(jnp.asarray([1, 2], jnp.float32))
                kept = x.astype(jnp.float32) + share
                x = self.norm(rotated(x, sin, cos))
                return attend(x, x), (tokens * sin).astype(tokens.dtype), variance, kept


        def outside(x, sin):
            return (x * sin).astype(x.dtype)
        """,
    ),
    "casts of trees, of results and of factors": (
        """
        class Embedder(nn.Module):
            @nn.compact
            def encode(self, tokens):
                table = self.param("table", nn.initializers.normal(), (4, 4))
                return table[tokens]


        class Net(nn.Module):
            embedder: Embedder
            embed_dtype: str

            def __call__(self, tokens, embedded: Sequence[Float[Array, "b d"]], x, y):
                embedded = jax.tree.map(lambda e: e.astype(self.embed_dtype), embedded)
                factor = x.astype(self.embed_dtype)
                other = y.astype(self.embed_dtype)
                table = jnp.asarray([1, 2], self.embed_dtype) * jnp.ones(2)
                scale = jnp.asarray(1 / len(tokens), self.embed_dtype) * table
                scale = (tokens == 1).astype(self.embed_dtype) * jnp.ones(2)
                embedded.append(jnp.dot(factor, jnp.ones((4, 4))))
                return embedded, self.embedder.encode(tokens).astype(self.embed_dtype), other
        """,
        """
        class Embedder(nn.Module):
            @nn.compact
            def encode(self, tokens):
                table = self.param("table", nn.initializers.normal(), (4, 4))
                return table[tokens]


        class Net(nn.Module):
            embedder: Embedder

            def __call__(self, tokens, embedded: Sequence[Float[Array, "b d"]], x, y):
                factor = x
                other = y.astype(jnp.float32)
                table = jnp.asarray([1, 2], jnp.float32) * jnp.ones(2)
                scale = jnp.asarray(1 / len(tokens), jnp.float32) * table
                scale = (tokens == 1).astype(jnp.float32) * jnp.ones(2)
                embedded.append(jnp.dot(factor, jnp.ones((4, 4))))
                return embedded, self.embedder.encode(tokens), other
        """,
    ),
    "casts of what may be integers": (
        """
        class Stem(nn.Module):
            dtype: Any = jnp.float32

            @nn.compact
            def __call__(self, image, tokens):
                x = jnp.asarray(image, self.dtype)
                one_hot = jax.nn.one_hot(tokens, 4, dtype=self.dtype)
                mask = jnp.array(tokens > 0, dtype=self.dtype)
                steps = jnp.arange(4, dtype=self.dtype)
                return nn.Conv(4, (2, 2), dtype=self.dtype)(x), one_hot, mask, steps
        """,
        """
        class Stem(nn.Module):
            @nn.compact
            def __call__(self, image, tokens):
                x = jnp.asarray(image, jnp.float32)
                one_hot = jax.nn.one_hot(tokens, 4)
                mask = jnp.array(tokens > 0, dtype=jnp.float32)
                steps = jnp.arange(4, dtype=jnp.float32)
                return nn.Conv(4, (2, 2))(x), one_hot, mask, steps
        """,
    ),
    "positional arguments": (
        """
        def scaled(x, dtype, power=2):
            return jnp.exp(x).astype(dtype) ** power

        def table(size, dtype=jnp.float32):
            return scaled(jnp.zeros((size,), dtype), dtype, 3)

        def use(config):
            return table(4, config.dtype), scaled(jnp.ones(3, config.dtype), dtype=config.dtype)
        """,
        """
        def scaled(x, power=2):
            return jnp.exp(x) ** power

        def table(size):
            return scaled(jnp.zeros((size,)), 3)

        def use(config):
            return table(4), scaled(jnp.ones(3))
        """,
    ),
    "partial, nnx and parameters": (
        """
        class Norm(nnx.Module):
            def __init__(self, dim, *, rngs, dtype=jnp.float32, param_dtype=jnp.float32):
                self.dtype = dtype
                ones = nnx.initializers.ones_init()
                self.scale = nnx.Param(ones(rngs.params(), (dim,), param_dtype))

            def __call__(self, x):
                return x * jnp.asarray(self.scale, self.dtype)


        class Block(nnx.Module):
            def __init__(self, config, rngs):
                dtype = config.dtype
                linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
                param_dtype = config.param_dtype
                norm = functools.partial(Norm, 4, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
                self.up, self.norm = linear(4, 4), norm()
        """,
        """
        class Norm(nnx.Module):
            def __init__(self, dim, *, rngs):
                ones = nnx.initializers.ones_init()
                self.scale = nnx.Param(ones(rngs.params(), (dim,)))

            def __call__(self, x):
                return x * self.scale[...]


        class Block(nnx.Module):
            def __init__(self, config, rngs):
                linear = functools.partial(nnx.Linear, rngs=rngs)
                norm = functools.partial(Norm, 4, rngs=rngs)
                self.up, self.norm = linear(4, 4), norm()
        """,
    ),
    "classes by other names": (
        """
        class Block(nn.Module):
            norm: Any
            dtype_mm: str = "float32"

            @nn.compact
            def __call__(self, x):
                inits = dict(use_bias=False, dtype=self.dtype_mm)
                x = nn.Dense(3, **inits)(x)
                names = {"name": "last", "dtype": self.dtype_mm}
                return self.norm(dtype=x.dtype)(nn.Dense(3, **names)(x))


        class Stack(nn.Module):
            norm: Any = nn.LayerNorm
            dtype_mm: str = "float32"

            @nn.compact
            def __call__(self, x):
                block = nn.remat(Block, prevent_cse=False)
                cls = block if self.is_initializing() else Block
                return cls(norm=self.norm, dtype_mm=self.dtype_mm)(x)
        """,
        """
        class Block(nn.Module):
            norm: Any

            @nn.compact
            def __call__(self, x):
                inits = dict(use_bias=False)
                x = nn.Dense(3, **inits)(x)
                names = {"name": "last"}
                return self.norm()(nn.Dense(3, **names)(x))


        class Stack(nn.Module):
            norm: Any = nn.LayerNorm

            @nn.compact
            def __call__(self, x):
                block = nn.remat(Block, prevent_cse=False)
                cls = block if self.is_initializing() else Block
                return cls(norm=self.norm)(x)
        """,
    ),
    "a config by another name": (
        """
        class Config:
            width: int = 3
            dtype: Any = dataclasses.field(default=jnp.float32)


        class State:
            dtype: Any = jnp.int32


        class Net(nn.Module):
            config: Config

            @nn.compact
            def __call__(self, x):
                cfg = self.config
                return nn.Dense(cfg.width, dtype=cfg.dtype)(x)
        """,
        """
        class Config:
            width: int = 3


        class State:
            dtype: Any = jnp.int32


        class Net(nn.Module):
            config: Config

            @nn.compact
            def __call__(self, x):
                cfg = self.config
                return nn.Dense(cfg.width)(x)
        """,
    ),
    "a chosen dtype": (
        """
        class Net(nn.Module):
            dtype: Any = jnp.float32

            @nn.compact
            def __call__(self, x):
                return nn.Dense(3, dtype=self.dtype)(x)


        def model_of(half, width):
            platform = jax.local_devices()[0].platform
            # the dtype of the model
            if half:
                dtype = jnp.bfloat16 if platform == "tpu" else jnp.float16
            else:
                dtype = jnp.float32
            print(width)
            return Net(dtype=dtype)


        def main(config):
            return model_of(config.half, width=3)
        """,
        """
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(x)


        def model_of(half, width):
            print(width)
            return Net()


        def main(config):
            return model_of(config.half, width=3)
        """,
    ),
    "dynamic scale": (
        """
        class TrainState(train_state.TrainState):
            batch_stats: Any
            dynamic_scale: dynamic_scale_lib.DynamicScale


        def state_of(params):
            dynamic_scale, count = None, 0
            if jax.default_backend() == "gpu":
                dynamic_scale = dynamic_scale_lib.DynamicScale()
            return TrainState.create(params=params, step=count, dynamic_scale=dynamic_scale)


        def step(state, loss_fn):
            if state.dynamic_scale:
                dynamic_scale, finite, loss, grads = state.dynamic_scale.value_and_grad(loss_fn)()
                state = state.replace(dynamic_scale=dynamic_scale)
            else:
                # the plain way
                loss, grads = jax.value_and_grad(loss_fn)()
            if state.dynamic_scale:
                print(finite)
            return loss, grads
        """,
        """
        class TrainState(train_state.TrainState):
            batch_stats: Any


        def state_of(params):
            count = 0
            return TrainState.create(params=params, step=count)


        def step(state, loss_fn):
            # the plain way
            loss, grads = jax.value_and_grad(loss_fn)()
            return loss, grads
        """,
    ),
    "wrappers of layers, limits of dtypes, and comparisons": (
        """
        class Scale(nn.Module):
            dtype: Any = jnp.float32

            def __call__(self, x):
                return jnp.exp(x).astype(self.dtype)


        def norm_of(kind, *args, **kwargs):
            if kind == "layer":
                return nn.LayerNorm(*args, **kwargs)
            return Scale(*args, **kwargs)


        class Attention(nn.Module):
            dtype: Any = jnp.float32
            \"\"\"Of the computation.\"\"\"
            width: int = 4

            def setup(self):
                self.is_wide = self.dtype is not jnp.float32
                self.norm = norm_of("layer", dtype=self.dtype)

            def __call__(self, x, mask):
                low = jnp.finfo(self.dtype).min
                x = x * (2.0 + x if self.dtype != jnp.float16 else 1.0)
                weights = jax.nn.softmax(x + jnp.full(mask.shape, low).astype(self.dtype))
                if self.is_wide:
                    weights = weights.astype(self.dtype)
                return jax.tree.map(lambda w: self.norm(w), weights)
        """,
        """
        class Scale(nn.Module):
            def __call__(self, x):
                return jnp.exp(x)


        def norm_of(kind, *args, **kwargs):
            if kind == "layer":
                return nn.LayerNorm(*args, **kwargs)
            return Scale(*args, **kwargs)


        class Attention(nn.Module):
            width: int = 4

            def setup(self):
                self.norm = norm_of("layer")

            def __call__(self, x, mask):
                low = jnp.finfo(jnp.float32).min
                x = x * (2.0 + x)
                weights = jax.nn.softmax(x + jnp.full(mask.shape, low))
                return jax.tree.map(lambda w: self.norm(w), weights)
        """,
    ),
    "casts back to the dtype of a module's input": (
        """
        class Norm(nn.Module):
            @nn.compact
            def __call__(self, x, tokens):
                dtype = next(y.dtype for y in (x, x))
                scale = self.param("scale", nn.initializers.zeros, (4,), x.dtype)
                y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x))) * scale.astype(dtype)
                one_hot = jax.nn.one_hot(tokens, 4).astype(tokens.dtype)
                assert y.dtype == dtype
                return y.astype(dtype), one_hot


        def rope(x):
            return jnp.sin(x).astype(x.dtype)


        def use(config):
            dtype_str = config.dtype_str
            if dtype_str != "float32":
                raise ValueError(dtype_str)
            return nn.Dense(3, dtype=getattr(jnp, dtype_str))
        """,
        """
        class Norm(nn.Module):
            @nn.compact
            def __call__(self, x, tokens):
                scale = self.param("scale", nn.initializers.zeros, (4,))
                y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x))) * scale
                one_hot = jax.nn.one_hot(tokens, 4).astype(tokens.dtype)
                return y, one_hot


        def rope(x):
            return jnp.sin(x).astype(x.dtype)


        def use(config):
            return nn.Dense(3)
        """,
    ),
    "assertions and tests of none": (
        """
        class Net(nn.Module):
            dtype: Any = None

            @nn.compact
            def __call__(self, x):
                y = nn.Dense(3, dtype=self.dtype)(x)
                assert y.dtype == jnp.dtype(self.dtype)
                return y
        """,
        """
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(x)
        """,
    ),
    "a docstring in NumPy's style": (
        """
        def f(x, dtype=None):
            \"\"\"Returns an array.

            Parameters
            ----------
            x : Array
                of any shape.
            dtype : DTypeLike, optional
                of the result.
            \"\"\"
            return jnp.exp(x).astype(dtype)
        """,
        """
        def f(x):
            \"\"\"Returns an array.

            Parameters
            ----------
            x : Array
                of any shape.
            \"\"\"
            return jnp.exp(x)
        """,
    ),
    "a constant of a module, and what needs a dtype": (
        """
        DTYPE = jnp.float32


        def default_dtype():
            return jnp.float32


        class Net(nnx.Module):
            def __init__(self, use_bias, dtype=DTYPE):
                self.dtype = dtype
                self.w = nnx.Param(jnp.ones(3, dtype))
                if use_bias:
                    self.bias = nnx.Param(jnp.ones(3, dtype))
                else:
                    self.bias = None

            def __call__(self, x, cache):
                x = jnp.where(x > 0, x * self.w, jnp.finfo(self.dtype).min)
                x = x + jnp.asarray(self.bias, self.dtype)
                return jnp.tanh(x).astype(cache.dtype)
        """,
        """
        def default_dtype():
            return jnp.float32


        class Net(nnx.Module):
            def __init__(self, use_bias):
                self.w = nnx.Param(jnp.ones(3))
                if use_bias:
                    self.bias = nnx.Param(jnp.ones(3))
                else:
                    self.bias = None

            def __call__(self, x, cache):
                x = jnp.where(x > 0, x * self.w, jnp.finfo(jnp.float32).min)
                x = x + self.bias[...]
                return jnp.tanh(x).astype(cache.dtype)
        """,
    ),
    "arguments of a base": (
        """
        class Block(nnx.Module):
            def __init__(self, width, dtype=None):
                self.up = nnx.Linear(width, width, dtype=dtype)


        class Last(Block):
            def __init__(self, width, dtype=None):
                super().__init__(width, dtype=dtype)


        class Wide(nnx.Linear):
            def __init__(self, width, dtype=None):
                super().__init__(width, 2 * width, dtype=dtype)
        """,
        """
        class Block(nnx.Module):
            def __init__(self, width):
                self.up = nnx.Linear(width, width)


        class Last(Block):
            def __init__(self, width):
                super().__init__(width)


        class Wide(nnx.Linear):
            def __init__(self, width):
                super().__init__(width, 2 * width)
        """,
    ),
    "casts over several lines": (
        """
        def f(x, dtype=None):
            y = (
                jnp.exp(x)
                .astype(dtype)
            )
            z = jnp.asarray(
                jnp.exp(y) +
                jnp.exp(x), dtype)
            return y, (
                y * z
            ).astype(dtype)
        """,
        """
        def f(x):
            y = jnp.exp(x)
            z = jnp.exp(y) + jnp.exp(x)
            return y, (y * z)
        """,
    ),
    "calls that fit on a line": (
        """
        class Net(nn.Module):
            dtype: Any = jnp.float32

            @nn.compact
            def __call__(self, x, *, of_a_long_name, of_another_name, and_of_the_last_name):
                x = nn.Dense(
                    32, name="up", dtype=self.dtype
                )(x)
                y = nn.Dense(
                    32,
                    name="gate",
                    dtype=self.dtype,
                )(x)
                z = nn.Dense(
                    32, dtype=self.dtype  # of the width of x
                )(x)
                w = (
                    x * y
                    + z
                ).astype(self.dtype)
                x = nn.Dense(
                    w.shape[-1], name="a_layer_with_a_name_of_more_than", dtype=self.dtype
                )(w)
                return nn.Sequential([
                    nn.Dense(3), nn.Dense(4)
                ])(x)
        """,
        """
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x, *, of_a_long_name, of_another_name, and_of_the_last_name):
                x = nn.Dense(32, name="up")(x)
                y = nn.Dense(
                    32,
                    name="gate",
                )(x)
                z = nn.Dense(
                    32  # of the width of x
                )(x)
                w = x * y + z
                x = nn.Dense(
                    w.shape[-1], name="a_layer_with_a_name_of_more_than"
                )(w)
                return nn.Sequential([
                    nn.Dense(3), nn.Dense(4)
                ])(x)
        """,
    ),
    "values that are only returned": (
        """
        class Net(nn.Module):
            def last(self, x):
                out = jnp.exp(x)  # in float32
                # The scale overflows in bfloat16, so cast
                # here.
                return out.astype(x.dtype)

            def pair(self, x):
                out = jnp.exp(x)
                return out.astype(x.dtype), None

            def second(self, x):
                out = jnp.exp(x)
                return None, out.astype(x.dtype)

            def as_before(self, x):
                out = jnp.exp(x).astype(x.dtype)
                return out

            def said(self, x):
                out = jnp.exp(x)  # positive
                return out.astype(x.dtype)

            def tried(self, x):
                try:
                    out = jnp.exp(x)
                    return out.astype(x.dtype)
                finally:
                    print(out)

            def read_by_another(self, x):
                shape = lambda: out.shape
                out = jnp.exp(x)
                return out.astype(x.dtype)
        """,
        """
        class Net(nn.Module):
            def last(self, x):
                return jnp.exp(x)

            def pair(self, x):
                return jnp.exp(x), None

            def second(self, x):
                out = jnp.exp(x)
                return None, out

            def as_before(self, x):
                out = jnp.exp(x)
                return out

            def said(self, x):
                out = jnp.exp(x)  # positive
                return out

            def tried(self, x):
                try:
                    out = jnp.exp(x)
                    return out
                finally:
                    print(out)

            def read_by_another(self, x):
                shape = lambda: out.shape
                out = jnp.exp(x)
                return out
        """,
    ),
    "copies of a name": (
        """
        class Norm(nn.Module):
            dtype: Any = jnp.float32

            def setup(self):
                self.w = self.param("w", nn.initializers.ones, (3,))

            def __call__(self, x):
                wide = x.astype(jnp.float32)
                return wide * jax.lax.rsqrt(jnp.square(wide).mean())

            def moved(self, x):
                wide = jnp.exp(x).astype(self.dtype)
                before = wide.astype(self.dtype)
                wide = wide + 1
                return wide * before

            def of_weights(self, x):
                w = self.w.astype(self.dtype)
                return jnp.dot(jnp.exp(x), w.T)

            def twice(self, x):
                w = self.w.astype(self.dtype)
                return jnp.exp(x) * w + w

            def of_copies(self, x):
                a = jnp.exp(x)
                b = a.astype(self.dtype)
                c = b.astype(self.dtype)
                return c * c

            def shadowed(self, x):
                a = jnp.exp(x)
                b = a.astype(self.dtype)
                return [b * a for a in range(3)]
        """,
        """
        class Norm(nn.Module):
            def setup(self):
                self.w = self.param("w", nn.initializers.ones, (3,))

            def __call__(self, x):
                return x * jax.lax.rsqrt(jnp.square(x).mean())

            def moved(self, x):
                wide = jnp.exp(x)
                before = wide
                wide = wide + 1
                return wide * before

            def of_weights(self, x):
                return jnp.dot(jnp.exp(x), self.w.T)

            def twice(self, x):
                w = self.w
                return jnp.exp(x) * w + w

            def of_copies(self, x):
                a = jnp.exp(x)
                c = a
                return c * c

            def shadowed(self, x):
                a = jnp.exp(x)
                b = a
                return [b * a for a in range(3)]
        """,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule(name, tmp_path):
    before, after = RULES[name]
    (body,), _ = ported(tmp_path, before)
    assert body == text_of(after)


STAYS = {
    "a copy of one turn of a loop": """
        for i in range(3):
            x = jnp.sin(x)
            if i == 0:
                first = x.CAST
        return first + x
    """,
    "a copy before its value is deleted": """
        y = x.CAST
        del x
        return y + y
    """,
    "a copy before a match binds its value": """
        y = x.CAST
        match self.mode:
            case (x, _):
                print(x)
        return y + y
    """,
    "a copy before a walrus binds its value": """
        y = x.CAST
        z = [x := x + i for i in range(3)]
        return y + y, z
    """,
    "a copy before a function changes its value": """
        def step():
            nonlocal x
            x = x + 1
        y = x.CAST
        step()
        return y * x
    """,
    "a copy whose name is printed": """
        y = x.CAST
        print(f"{y=}")
        return x
    """,
    "a copy that has a comment": """
        z = jnp.sin(x)
        # Keeps the residual.
        y = x.CAST
        return y * z
    """,
    "an attribute that the next line may set": """
        w = self.w.CAST
        return self.bump(x) * w
    """,
    "a value that a later line reads": """
        out = jnp.exp(x)
        return out.CAST
        print(out)
    """,
    "a value in a try": """
        try:
            out = jnp.exp(x)
            return out.CAST
        except* ValueError:
            print(out)
    """,
    "a value with comments in its parentheses": """
        out = jnp.exp(x)
        return (  # of the batch
            out.CAST
        )
    """,
    "a call with a line that goes on": """
        x = nn.Dense(
            32, \\
            name="up")(x.CAST)
        return x
    """,
    "a matrix in a call that loses something": """
        table = jnp.asarray([
            [1.0, 2.0],
            [3.0, 4.0]
        ]).CAST
        return x @ table
    """,
}


@pytest.mark.parametrize("name", STAYS)
def test_only_its_cast_goes(name, tmp_path):
    body = textwrap.indent(textwrap.dedent(STAYS[name]), " " * 8)
    text = "class Net(nn.Module):\n    dtype: Any = jnp.float32\n\n"
    text += "    def setup(self):\n        self.w = self.param('w', nn.initializers.ones, (3,))\n\n"
    text += "    def __call__(self, x):\n        x = jnp.exp(x)\n" + body
    (found,), _ = ported(tmp_path, text.replace("CAST", "astype(self.dtype)"))
    expected = text.replace(".CAST", "").replace("    dtype: Any = jnp.float32\n", "")
    assert found == text_of(expected)


def test_lines_that_python_breaks_elsewhere_are_not_tidied(tmp_path):
    text = "class Net(nn.Module):\n    dtype: Any = None\n    def __call__(self, x):\n\x0c\n"
    text += "        return nn.Dense(\n            3, dtype=self.dtype\n        )(x)\n"
    (found,), _ = ported(tmp_path, text)
    assert "nn.Dense(\n" in found and "dtype" not in found


def test_a_chain_of_methods_is_joined_at_its_dots(tmp_path):
    text = "class Net(nn.Module):\n    dtype: Any = None\n    def __call__(self, x):\n"
    text += "        x = (\n            nn.Dense(3, dtype=self.dtype)(x)\n            .sum()\n"
    (found,), _ = ported(tmp_path, text + "        )\n        return x\n")
    assert "x = nn.Dense(3)(x).sum()" in found


LEFT = {
    "a file that is not given": (
        "def f(x, dtype=jnp.float32):\n    return other.g(x, dtype)\n",
        "reaches `other.g`",
    ),
    "a function that nothing calls": (
        "def cast(tree, dtype):\n    return jax.tree.map(lambda a: a.astype(dtype), tree)\n",
        "nothing in the given files calls cast",
    ),
    "a stage of its own": (
        "def f(x, softmax_dtype=None):\n"
        "    return jax.nn.softmax(jnp.exp(x).astype(softmax_dtype))\n",
        "softmaxes run in float32 under a policy",
    ),
    "a router in float32": (
        """
        class Router(nn.Module):
            dtype: Any = jnp.float32

            @nn.compact
            def __call__(self, x):
                return nn.Dense(3, dtype=self.dtype)(x)


        class Experts(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Router(dtype=jnp.float32)(x)
        """,
        'dtype_policy="float32" on Router says the same',
    ),
    "a dict that a class gets": (
        "class Net(nn.Module):\n    dtype: Any = jnp.float32\n\n"
        "def make(dtype=jnp.float32, **options):\n    options['dtype'] = dtype\n"
        "    return Net(**options)\n",
        "`dtype` of Net stays: it is stored in `options['dtype']`",
    ),
    "float64": (
        "class Net(nn.Module):\n    param_dtype: Any = jnp.float64\n\n"
        "    def __call__(self, x):\n"
        "        return nn.Dense(3, param_dtype=self.param_dtype)(x)\n",
        "`param_dtype` of Net stays: float64 is passed to it",
    ),
    "a base that is not given": (
        "class Trained(train_state.TrainState):\n    def __init__(self, dtype=jnp.float32):\n"
        "        super().__init__(dtype=dtype)\n",
        "`dtype` of Trained stays: it reaches `super().__init__`, which is not in the given files",
    ),
    "a layer in float32": (
        "def f(x):\n    return nn.Dense(3, dtype=jnp.float32)(x)\n",
        'dtype_policy="float32" says the same',
    ),
    "an integer dtype": (
        "def f(x, dtype):\n    return jnp.zeros(x.shape, dtype)\n"
        "MASK = f(jnp.ones(3), jnp.int32)\n",
        "int32 is passed to it",
    ),
    "a function as a value": (
        "def init(key, shape, dtype=jnp.float32):\n    return jnp.zeros(shape, dtype)\n"
        "LAYER = nn.Dense(3, kernel_init=init)\n",
        "init is passed on as a function",
    ),
    "a test": (
        "def f(x, dtype=jnp.float32):\n    if dtype == jnp.float16:\n        print(x)\n"
        "    return jnp.exp(x).astype(x.dtype)\n",
        "`if dtype == jnp.float16` decides by it",
    ),
    "a returned dtype": (
        "class Config:\n    dtype: Any = jnp.float32\n"
        "    def half(self):\n        return self.dtype\n",
        "it is returned",
    ),
    "a call with another class": (
        "class Net(nn.Module):\n    dtype: Any = jnp.float32\n"
        "LAYERS = [Net]\n\ndef f(maker):\n    return maker(dtype=jnp.bfloat16)\n",
        "`maker` may pass it",
    ),
    "arguments in a dict": (
        "def f(x, options, dtype=None):\n    return jnp.exp(x).astype(dtype)\n"
        "def g(x, *args):\n    return f(x, *args)\n",
        "`*args` may hold it",
    ),
    "an argument of a base that is not given": (
        "class Net(other.Base):\n    def __init__(self, dtype=None):\n"
        "        super().__init__(dtype=dtype)\n",
        "it reaches `super().__init__`, which is not in the given files",
    ),
    "an argument of a function that only calls itself": (
        "class Outer(nnx.Module):\n    def init_cache(self, dtype):\n"
        "        return self.inner.init_cache(dtype=dtype)\n",
        "nothing in the given files calls init_cache",
    ),
    "an argument of a function whose name has init in it": (
        "class Net(nnx.Module):\n    dtype: Any = None\n    def cache(self):\n"
        "        return other.init_cache(dtype=self.dtype)\n",
        "it reaches `other.init_cache`",
    ),
    "a cast that is a branch": (
        "class RMSNorm(nnx.Module):\n    def __call__(self, x, wide):\n        if wide:\n"
        "            x = x.astype(jnp.float32)\n        return x\n",
        "a cast of floats to float32 has no effect in a module",
    ),
    "a buffer": (
        "def f(x):\n    return jnp.zeros((2, 3), x.dtype)\n",
        "policy.compute_dtype()",
    ),
    "a cast to half": (
        "def f(x):\n    return x.astype(jnp.bfloat16)\n",
        "an explicit cast to a half dtype is obeyed",
    ),
    "a softmax by hand": (
        "def f(x):\n    return jax.nn.softmax(x.astype(jnp.float32))\n",
        "softmax runs in float32 under a policy",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_has_its_reason(name, tmp_path):
    before, reason = LEFT[name]
    (body,), notes = ported(tmp_path, before)
    assert body == text_of(before)
    assert reason in notes


def test_a_router_stays_in_float32(tmp_path):
    text = "def f(x, dtype=None):\n    router = nn.Dense(3, dtype=dtype)\n    return router(x)\n"
    (body,), notes = ported(tmp_path, text)
    assert 'nn.Dense(3, dtype_policy="float32")' in body and "choice of experts" in notes


def test_a_cache_goes_with_a_note(tmp_path):
    text = (
        "def init_cache(shape, *, dtype=None):\n    return {'k': jnp.zeros(shape, dtype=dtype)}\n"
    )
    (body,), notes = ported(tmp_path, text)
    assert body == "def init_cache(shape):\n    return {'k': jnp.zeros(shape)}"
    assert "policy.compute_dtype()" in notes


def test_a_cache_that_stays_has_no_note(tmp_path):
    text = "def init_cache(shape, dtype):\n    return {'k': jnp.zeros(shape, dtype=dtype)}\n"
    (body,), notes = ported(tmp_path, text)
    assert body == text_of(text)
    assert "policy.compute_dtype()" not in notes


def test_a_cast_to_float32_in_the_place_of_another_has_a_note(tmp_path):
    (body,), notes = ported(tmp_path, "def f(x, dtype=None):\n    return g(x.astype(dtype))\n")
    assert body == "def f(x):\n    return g(x.astype(jnp.float32))"
    assert "a cast to float32 now" in notes


def test_a_field_that_another_file_reads_stays(tmp_path):
    text = "class Config:\n    param_dtype: Any = jnp.float32\n"
    (tmp_path / "net.py").write_text("import file_0\n\ndtype = file_0.PARAMS.param_dtype\n")
    (body,), notes = ported(tmp_path, text)
    assert body == text_of(text)
    assert "net.py:3 reads it: port that file too" in notes


def test_a_dtype_is_followed_over_files(tmp_path):
    config = "class Config:\n    dtype: Any = jnp.float32\n    width: int = 3\n"
    model = (
        "from file_0 import Config\n\n"
        "def layer(config: Config, x):\n    return nn.Dense(config.width, dtype=config.dtype)(x)\n"
    )
    bodies, _ = ported(tmp_path, config, model)
    assert bodies[0] == "class Config:\n    width: int = 3"
    assert "nn.Dense(config.width)(x)" in bodies[1]


def test_what_another_file_passes_stays_with_its_effect(tmp_path):
    text = (
        "class Net(nn.Module):\n    dtype: Any = jnp.float32\n    @nn.compact\n"
        "    def __call__(self, x):\n        return nn.Dense(3, dtype=self.dtype)(x)\n"
    )
    (tmp_path / "trainer.py").write_text("import file_0\n\nnet = file_0.Net(dtype='bfloat16')\n")
    (body,), notes = ported(tmp_path, text)
    assert body == text_of(text)
    assert "trainer.py:3 uses it: port that file too" in notes


IMPORTS = {
    "from flax import linen as nn": "from mpmodules import linen as nn",
    "from flax import nnx": "from mpmodules import nnx",
    "import flax.linen as nn": "import mpmodules.linen as nn",
    "from flax.linen import Dense, LayerNorm": "from mpmodules.linen import Dense, LayerNorm",
    "from flax import linen, struct": "from flax import struct\nfrom mpmodules import linen",
    "from flax import struct": "from flax import struct",
    "from flax.linen.initializers import zeros": "from flax.linen.initializers import zeros",
    "from flax.linen.linear import Dense, Shape": (
        "from flax.linen.linear import Shape\nfrom mpmodules.linen import Dense"
    ),
}


@pytest.mark.parametrize("before", IMPORTS)
def test_import_lines(before, tmp_path):
    (body,), _ = ported(tmp_path, before, head="")
    assert body == IMPORTS[before]


def test_files_that_import_no_given_one_are_not_asked(tmp_path):
    text = "def f(x, dtype=None):\n    return jnp.exp(x).astype(dtype)\n"
    (tmp_path / "other.py").write_text("from elsewhere import f\n\ny = f(3, dtype='bfloat16')\n")
    (body,), _ = ported(tmp_path, text)
    assert body == "def f(x):\n    return jnp.exp(x)"


def test_layers_of_flax_by_their_whole_names_are_named(tmp_path):
    _, notes = ported(tmp_path, "import flax.linen\n\nlayer = flax.linen.Dense(3)\n", head="")
    assert "`flax.linen` is Flax's" in notes


def test_classes_of_one_name_may_derive_from_each_other(tmp_path):
    text = "class Net(other.Net):\n    dtype: Any = jnp.float32\n"
    bodies, _ = ported(tmp_path, text, text)
    assert bodies == ["class Net(other.Net):\n    pass"] * 2


def test_a_function_that_nothing_reads_stays_and_is_listed(tmp_path):
    text = """
    def preferred_dtype(is_half):
        return jnp.bfloat16 if is_half else jnp.float32
    """
    (after,), notes = ported(tmp_path, text)
    assert after == text_of(text) and notes == "nothing here reads `preferred_dtype`: it may go"


def test_unread_imports_go_only_if_the_port_left_them(tmp_path):
    text = "import os\nfrom typing import Any, Callable\nimport jax.numpy as jnp\n"
    text += "class C:\n    dtype: Any = jnp.float32\n    f: Callable = print\n"
    (body,), _ = ported(tmp_path, text, head="")
    assert body == "import os\nfrom typing import Callable\nclass C:\n    f: Callable = print"


def test_of_two_imports_in_a_line_the_unread_one_goes(tmp_path):
    text = "import os, jax.numpy as jnp\nclass C:\n    dtype: object = jnp.float32\n    x = os\n"
    (body,), _ = ported(tmp_path, text, head="")
    assert body == "import os\nclass C:\n    x = os"


@pytest.mark.parametrize(
    "text",
    [
        "from flaxformer import layers\nlayers.Dense(3)\n",
        """
        class Net(nn.Module):
            dtype: Any = jnp.float32

            def __call__(self, x):
                if self.dtype == jnp.bfloat16:
                    for i in range(3):
                        x = x + i
                return x
        """,
    ],
)
def test_what_says_nothing_of_dtypes_is_read_as_well(text, tmp_path):
    (body,), _ = ported(tmp_path, text)
    assert body == text_of(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.py", None, "does not exist"),
        ("notes.txt", "x = 1", "is not a .py file"),
        ("wrong.py", "x = = 1\n", "wrong.py:1: not Python"),
        ("bytes.py", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_refused(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PortError, match=message):
        port([str(tmp_path / name)])
