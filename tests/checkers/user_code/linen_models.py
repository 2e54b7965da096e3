"""User code with linen: what type checkers are to accept, to reject (``# error: mypy's; pyright's``) and to reveal."""

import abc
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp

from mpmodules import full_precision, use_policy
from mpmodules import linen as nn
from policy import Policy

key, x = jax.random.key(0), jnp.ones((2, 4))

# Layers of ours: the argument that they add is known, and a typo in it is not.
nn.Dense(4, dtype_policy="bf16")
nn.Dense(4, dtype_policy=Policy("f32", "bf16", "f32"))
nn.Dense(4, dtype_policyy="bf16")  # error: call-arg; reportCallIssue
nn.Dense(4, dtype_policy=16)  # error: arg-type; reportArgumentType
nn.Dense("a")  # error: arg-type; reportArgumentType
nn.Dense()  # error: call-arg; reportCallIssue
nn.Dens(4)  # error: attr-defined; reportAttributeAccessIssue
reveal_type(nn.Dense(4))  # reveal: mpmodules.linen._layers.linear.Dense; Dense
reveal_type(nn.Dense(4)(x))  # reveal: jax._src.basearray.Array; Array
reveal_type(nn.LayerNorm(dtype_policy="f32"))  # reveal: mpmodules.linen._layers.normalization.LayerNorm; LayerNorm
reveal_type(nn.RNN(nn.LSTMCell(3), dtype_policy="f32").cell)  # reveal: flax.linen.recurrent.RNNCellBase; RNNCellBase
reveal_type(nn.relu(x))  # reveal: jax._src.basearray.Array; Array
reveal_type(nn.softmax(x))  # reveal: jax._src.basearray.Array; Array
nn.initializers.lecun_normal()
nn.linear.Dense(4)


class Block(nn.Module):
    features: int
    rate: float = 0.1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        y = nn.Dense(self.features, name="up", dtype_policy="f32")(x)
        reveal_type(self.features)  # reveal: int; int
        scale = self.param("scale", nn.initializers.ones, (4,), compute_dtype=jnp.float32)
        reveal_type(scale)  # reveal: jax._src.basearray.Array; Array
        with full_precision():
            y = y * scale
        return x + nn.Dropout(self.rate, deterministic=not train)(y)


class Net(nn.Module):
    depth: int = 2
    keep_inputs = ("positions",)
    keep_params = ("table",)

    def setup(self) -> None:
        self.blocks = [Block(4) for _ in range(self.depth)]
        self.head = nn.Dense(3)

    def encode(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, x: jax.Array, positions: Any = None) -> jax.Array:
        reveal_type(self.head)  # reveal: mpmodules.linen._layers.linear.Dense; Dense
        return self.head(self.encode(x))


Block(3, 0.2, dtype_policy="mixed_bfloat16", name="block")
Block(features="a")  # error: arg-type; reportArgumentType
Block(3, dtype_polcy="bf16")  # error: call-arg; reportCallIssue
Block(3, rate=0.1, ratio=2)  # error: call-arg; reportCallIssue
Block(rate=0.1)  # error: call-arg; reportCallIssue
reveal_type(Block(3))  # reveal: linen_models.Block; Block
reveal_type(Block(3)(x))  # reveal: jax._src.basearray.Array; Array
reveal_type(Block(3, dtype_policy="bf16").features)  # reveal: int; int
reveal_type(Block(3).dtype_policy)  # reveal: policy.core.policy.Policy | str | None; Policy | str | None

net = Net(dtype_policy="mixed_bfloat16")
variables = net.init(key, x)
with use_policy("mixed_bfloat16", {"head": "f32"}):
    net.apply(variables, x, method="encode")
reveal_type(net.encode(x))  # reveal: jax._src.basearray.Array; Array
reveal_type(net.bind(variables))  # reveal: linen_models.Net; Net
reveal_type(net.clone(dtype_policy="f32"))  # reveal: linen_models.Net; Net
reveal_type(nn.remat(Block)(3, dtype_policy="bf16"))  # reveal: linen_models.Block; Block
reveal_type(nn.apply_policy(net, "bf16"))  # reveal: linen_models.Net; Net


class Wide(nn.Dense):
    gain: float = 1.0


class Abstract(nn.RNNCellBase):
    width: int = 3


class Contract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def encode(self, x: jax.Array) -> jax.Array: ...


class Keywords(nn.Module, kw_only=True):
    first: int = 1
    second: str


Keywords(second="a", dtype_policy="f32")
Keywords(first=1)  # error: call-arg; reportCallIssue
Wide(4, False, gain=2.0, dtype_policy="f32")
Wide(4, gian=2.0)  # error: call-arg; reportCallIssue
Abstract(width=2, dtype_policy="f32")
reveal_type(Wide(4).gain)  # reveal: float; float


def takes_flaxs(layer: flax.linen.Dense, model: flax.linen.Module) -> None: ...


takes_flaxs(nn.Dense(4), net)
takes_flaxs(nn.LayerNorm(), net)  # error: arg-type; reportArgumentType
