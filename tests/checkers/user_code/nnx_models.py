"""User code with nnx: what type checkers are to accept, to reject (``# error: mypy's; pyright's``) and to reveal."""

import abc
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import optax

from mpmodules import nnx, use_policy
from policy import Policy

rngs, x = nnx.Rngs(0), jnp.ones((2, 4))

# Layers of ours: the argument that they add is known, and a typo in it is not.
reveal_type(nnx.Linear(2, 3, rngs=rngs))  # reveal: mpmodules.nnx.Linear; Linear
reveal_type(nnx.Linear(2, 3, rngs=rngs, dtype_policy="bf16"))  # reveal: mpmodules.nnx.Linear; Linear
nnx.Linear(2, 3, rngs=rngs, dtype_policy=Policy("f32", "bf16", "f32"))
nnx.Linear(2, 3, rngs=rngs, dtype_policyy="bf16")  # error: call-arg; reportCallIssue
nnx.Linear(2, 3, rngs=rngs, dtype_policy="bf16", use_bais=False)  # error: call-arg; reportCallIssue
nnx.Linear(2, 3, rngs=rngs, dtype_policy=16)  # error: arg-type; reportArgumentType
nnx.Linear("a", 3, rngs=rngs)  # error: arg-type; reportArgumentType
nnx.Linear(2, 3)  # error: call-arg; reportCallIssue
nnx.Linaer(2, 3, rngs=rngs)  # error: attr-defined; reportAttributeAccessIssue
nnx.Linear(2, 3, rngs=rngs).kernle  # error: attr-defined; reportAttributeAccessIssue
reveal_type(nnx.Linear(2, 3, rngs=rngs).out_features)  # reveal: int; int
reveal_type(nnx.Linear(2, 3, rngs=rngs)(x))  # reveal: jax._src.basearray.Array; Array
reveal_type(nnx.Sequential(nnx.relu, dtype_policy="f32"))  # reveal: mpmodules.nnx.Sequential; Sequential
reveal_type(nnx.softmax(x))  # reveal: jax._src.basearray.Array; Array
reveal_type(nnx.Param(x))  # reveal: flax.nnx.variablelib.Param[jax._src.basearray.Array]; Param[Array]


class MLP(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, width, rngs=rngs)
        self.head = nnx.Linear(width, 3, rngs=rngs, dtype_policy="f32")
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.haed(x)  # error: attr-defined; reportAttributeAccessIssue
        return self.head(nnx.relu(self.norm(self.up(x))) * self.scale)


model = MLP(8, rngs=rngs)
reveal_type(model)  # reveal: nnx_models.MLP; MLP
reveal_type(model.head)  # reveal: mpmodules.nnx.Linear; Linear
reveal_type(model(x))  # reveal: jax._src.basearray.Array; Array
model.haed  # error: attr-defined; reportAttributeAccessIssue
MLP("a", rngs=rngs)  # error: arg-type; reportArgumentType
MLP(8)  # error: call-arg; reportCallIssue
MLP(8, rngs=rngs, widht=3)  # error: call-arg; reportCallIssue
MLP(8, rngs=rngs, dtype_polciy="bf16")  # error: call-arg; reportCallIssue
with use_policy("mixed_bfloat16"):
    reveal_type(MLP(8, rngs=rngs))  # reveal: nnx_models.MLP; MLP

# `__init__` doesn't declare dtype_policy. pyright, which obeys metaclasses, checks no other argument beside it.
ours = MLP(8, rngs=rngs, dtype_policy="mixed_bfloat16")
reveal_type(ours)  # reveal: nnx_models.MLP; MLP | Any
reveal_type(ours.dtype_policy)  # reveal: policy.core.policy.Policy | None; Policy | Any | None
ours.haed  # error: attr-defined; reportAttributeAccessIssue
MLP(8, rngs=rngs, widht=3, dtype_policy="bf16")  # error: call-arg; -
MLP(8, rngs=rngs, dtype_policy=16)  # error: arg-type; reportCallIssue
declared: MLP = MLP(8, rngs=rngs, dtype_policy="bf16")
reveal_type(declared)  # reveal: nnx_models.MLP; MLP


def made(width: int) -> MLP:
    class Local(MLP):
        def __init__(self, width: int):
            super().__init__(width, rngs=nnx.Rngs(0))

    Local(3, widht=3)  # error: call-arg; reportCallIssue
    return Local(width, dtype_policy="bf16")


class Declares(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, dtype_policy: Policy | str | None = None):
        self.linear = nnx.Linear(4, 4, rngs=rngs)


class Low(nnx.Linear):
    def __init__(self, width: int, *, rngs: nnx.Rngs, dtype_policy: Any = None, **options: Any):
        super().__init__(width, width, rngs=rngs, **options)


class Contract(nnx.Module, abc.ABC):
    @abc.abstractmethod
    def encode(self, x: jax.Array) -> jax.Array: ...


class Bare(nnx.Module):
    width = 3


@nnx.dataclass
class Fields(nnx.Module):
    scale: nnx.Param[jax.Array]
    width: int = 3


Bare(dtype_policy="bf16")
Bare(width=3)  # error: call-arg; reportCallIssue
Fields(nnx.Param(x), width=4, dtype_policy="bf16")
Fields(nnx.Param(x), widht=4)  # error: call-arg; reportCallIssue
Declares(rngs, dtype_policy="bf16")
Low(4, rngs=rngs, use_bias=False, dtype_policy="bf16")
reveal_type(Low(4, rngs=rngs).kernel)  # reveal: flax.nnx.variablelib.Param[Any]; Param[Array]
reveal_type(nnx.apply_policy(model, "bf16", {nnx.LayerNorm: "f32"}))  # reveal: nnx_models.MLP; MLP
nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def takes_flaxs(layer: flax.nnx.Linear, model: flax.nnx.Module) -> None: ...


takes_flaxs(nnx.Linear(2, 3, rngs=rngs), model)
takes_flaxs(nnx.LayerNorm(2, rngs=rngs), model)  # error: arg-type; reportArgumentType
