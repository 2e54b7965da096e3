"""Mistakes by which a policy would be lost in silence: each with what is told, and the same done
right, of which nothing is told.
"""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import optax

from mpmodules import linen as nn
from mpmodules import nnx, set_policy, use_policy
from policy import (
    autocast,
    compute_dtype,
    full_precision,
    losses,
    reductions,
    value_and_grad,
)
from tests.mistakes.layers import KEY, X, XNet, rngs

TEXT = "mixed_bfloat16"
LABELS = jnp.zeros(2, int)

# --------------------------------------------------------------------------------------------------
# Blocks whose policy nothing obeys
# --------------------------------------------------------------------------------------------------


def linen_step(layers: Any, *, around: str = "call") -> Callable[[], None]:
    """Returns an init and a call of a linen model, with the block around a part of them."""

    def run() -> None:
        if around == "construction":
            with use_policy(TEXT):
                model = layers.Dense(3)
            model.init_with_output(KEY, X)
            return
        model = layers.Dense(3)
        call = jax.jit(model.init_with_output)
        if around == "jit":
            with use_policy(TEXT):
                call = jax.jit(model.init_with_output)
            call(KEY, X)
            return
        for _ in range(2):  # the second time nothing is traced
            with use_policy(TEXT):
                call(KEY, X)

    return run


def nnx_step(layers: Any) -> None:
    for _ in range(2):
        with use_policy(TEXT):
            layers.Linear(4, 6, rngs=rngs())(X)


def decorated(function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: use_policy(TEXT)(function)()


def with_policy(layers: Any) -> Callable[[], Any]:
    model = layers.Dense(3)
    return lambda: value_and_grad(
        lambda p: model.apply(p, X).astype(jnp.float32).sum(), policy=TEXT
    )(flax.linen.Dense(3).init(KEY, X))


def in_two_blocks() -> None:
    with use_policy("mixed_float16"), use_policy(TEXT, {}):
        nn.Dense(3).init(KEY, X)


def after_the_process_had_it() -> None:
    cast = jax.jit(lambda x: x.astype(compute_dtype()))
    set_policy(TEXT)
    cast(X)
    set_policy(None)
    with use_policy(TEXT):  # the program is kept: nothing is read
        cast(X)


def raising() -> None:
    try:
        with use_policy(TEXT):
            raise KeyError
    except KeyError:
        pass


def steps() -> None:
    @use_policy(TEXT)
    def batches() -> Any:
        yield X
        yield nn.Dense(3).init(KEY, X)

    list(batches())


def in_block(function: Callable[[], Any], text: str = TEXT) -> Callable[[], Any]:
    def run() -> Any:
        with use_policy(text):
            return function()

    return run


NOTHING = "Nothing obeyed use_policy('params=float32,compute=bfloat16,output=float32') … import"
SCOPES = {
    f"{NOTHING} linen or nnx from mpmodules … apply_policy": in_block(lambda: X @ X.T),
    "flax.nnx.Linear ran where … import nnx … apply_policy … use_policy(None)": (
        lambda: nnx_step(flax.nnx)
    ),
    "flax.linen.Dense ran where … import linen … autocast … use_policy(None)": [
        linen_step(flax.linen),
        decorated(lambda: flax.linen.Dense(5).init(KEY, X)),
        with_policy(flax.linen),
    ],
    "Nothing obeyed … around the calls of a linen model": linen_step(nn, around="construction"),
    "around jax.jit alone … around its calls": linen_step(nn, around="jit"),
}
SCOPES_RIGHT = {
    "linen": linen_step(nn),
    "nnx": lambda: nnx_step(nnx),
    "a decorator": decorated(lambda: nn.Dense(3).init(KEY, X)),
    "value_and_grad": with_policy(nn),
    "apply_policy": in_block(lambda: nn.apply_policy(flax.linen.Dense(3), TEXT).init(KEY, X)),
    "autocast": in_block(lambda: autocast(lambda x: x @ x.T)(X)),
    "autocast with its own": in_block(lambda: autocast(lambda x: x @ x.T, TEXT)(X)),
    "a cast": in_block(lambda: X.astype(compute_dtype())),
    "a reduction": in_block(lambda: reductions.softmax(X)),
    "a loss": in_block(lambda: losses.softmax_cross_entropy_with_integer_labels(X, LABELS)),
    "an island": in_block(full_precision(lambda: nn.Dense(3).init(KEY, X))),
    "float32": in_block(lambda: flax.linen.Dense(3).init(KEY, X), "float32"),
    "no policy": in_block(lambda: flax.linen.Dense(3).init(KEY, X), None),
    "a block in a block": in_two_blocks,
    "a kept program": after_the_process_had_it,
    "an error": raising,
    "a generator": steps,
}

# --------------------------------------------------------------------------------------------------
# Models of which a part obeys
# --------------------------------------------------------------------------------------------------


def holder(base: Any, layers: Any) -> Any:
    class Holder(base.Module):
        @flax.linen.compact
        def __call__(self, x: Any) -> Any:
            return flax.linen.Dense(3)(layers.Dense(4)(x))

    return Holder()


def xholder(base: Any, layers: Any) -> Any:
    class XHolder(base.Module):
        def __init__(self) -> None:
            self.layers = flax.nnx.List([layers.Linear(4, 4, rngs=rngs()) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x))

    return XHolder


def changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Returns a call of an nnx model that was built under a policy, and changed."""

    def run() -> Any:
        model = xholder(nnx, nnx)(dtype_policy=TEXT)
        return (change(model) or model)(X)

    return run


def linear(**options: Any) -> Any:
    return nnx.Linear(4, 4, rngs=rngs(), **options)


def under(policy: Any, function: Callable[[], Any] = linear) -> Any:
    with use_policy(policy):
        return function()


def put(layer: Callable[[Any], Any]) -> Callable[[], Any]:
    return changed(lambda model: setattr(model, "head", layer(model)))


def set_under(policy: str) -> Callable[[], Any]:
    def change(model: Any) -> None:
        with use_policy(policy):
            model.head = linear()

    return changed(change)


def set_inside() -> Any:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.up = linear()
            with use_policy(None):
                self.head = linear()

        def __call__(self, x: Any) -> Any:
            return self.head(self.up(x))

    return Net(dtype_policy=TEXT)(X)


class Flaxs(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(x)


class Ours(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Flaxs()(x)


def called(model: Callable[[], Any]) -> Callable[[], Any]:
    return in_block(lambda: jax.eval_shape(model().init_with_output, KEY, X))


STRANGER = "Linear had been built under another policy … none … use_policy(model.dtype_policy)"
PARTS = {
    "Holder of flax.linen obeys no policy: import linen … such as Dense": called(
        lambda: holder(flax.linen, nn)
    ),
    "flax.linen.Sequential obeys no policy … apply_policy": called(
        lambda: flax.linen.Sequential([nn.Dense(4), flax.linen.Dense(3)])
    ),
    "XHolder of flax.nnx obeys no policy: import nnx … such as Linear": in_block(
        lambda: xholder(flax.nnx, nnx)()
    ),
    f"{STRANGER} … dtype_policy … apply_policy": [
        put(lambda model: linear()),
        put(lambda model: under("mixed_float16")),
        put(lambda model: xholder(nnx, nnx)()),
        changed(lambda model: model.layers.append(linear())),
        changed(lambda model: model.layers.__setitem__(0, linear())),
    ],
    "Sequential was built under no policy, but Linear in it … use_policy(None)": changed(
        lambda model: nnx.Sequential(model.layers[0], linear())
    ),
    "apply_policy returns another model … Write `model = apply_policy(": [
        lambda: exec("nn.apply_policy(model, 'bf16')", {"nn": nn, "model": flax.linen.Dense(3)}),
        lambda: exec("nnx.apply_policy(model, 'bf16')", {"nnx": nnx, "model": XNet(rngs())}),
    ],
}
PARTS_RIGHT = {
    "linen": called(lambda: holder(nn, nn)),
    "Flax's layers in a module of ours": called(Ours),
    "a port": lambda: nn.apply_policy(Flaxs(), TEXT).init(KEY, X),
    "a port of ours": lambda: nn.apply_policy(Ours(), TEXT, own_code="keep").init(KEY, X),
    "no policy": lambda: holder(flax.linen, nn).init(KEY, X),
    "float32": in_block(lambda: holder(flax.linen, nn).init(KEY, X), "float32"),
    "a layer with its own": lambda: flax.linen.Sequential([nn.Dense(4, dtype_policy=TEXT)]).init(
        KEY, X
    ),
    "nnx": in_block(lambda: xholder(nnx, nnx)()(X)),
    "no policy in nnx": lambda: xholder(flax.nnx, nnx)()(X),
    "nnx layers of Flax": in_block(lambda: xholder(nnx, flax.nnx)()(X)),
    "put under the model's": put(lambda model: under(model.dtype_policy)),
    "put with its own": put(lambda model: linear(dtype_policy="float32")),
    "put with another of its own": put(lambda model: linear(dtype_policy="mixed_float16")),
    "put in a block": set_under("float32"),
    "put on purpose": put(lambda model: under(None)),
    "put in the constructor": set_inside,
    "dropout": put(lambda model: nnx.Dropout(0.5, rngs=rngs())),
    "a layer of Flax": put(lambda model: flax.nnx.Linear(4, 4, rngs=rngs())),
    "appended under the model's": changed(
        lambda model: model.layers.append(under(model.dtype_policy))
    ),
    "appended on purpose": changed(lambda model: model.layers.append(under(None))),
    "into a model of no policy": lambda: setattr(xholder(nnx, nnx)(), "head", linear()),
    "ported": lambda: nnx.apply_policy(nnx.Sequential(linear(), linear()), TEXT)(X),
    "rebuilt under the model's": changed(
        lambda model: under(TEXT, lambda: nnx.Sequential(model.layers[0], linear()))
    ),
    "rebuilt on purpose": changed(
        lambda model: under(None, lambda: nnx.Sequential(model.layers[0], linear()))
    ),
    "around one with its own": lambda: nnx.Sequential(linear(dtype_policy=TEXT), linear())(X),
    "of the apply_policy's result": lambda: (
        nn.apply_policy(flax.linen.Dense(3), TEXT),
        nnx.apply_policy(XNet(rngs()), TEXT),
    ),
}

# --------------------------------------------------------------------------------------------------
# Two policies, losses, blocks that are none, and places where no policy is looked for
# --------------------------------------------------------------------------------------------------


def cast_model(text: str, held: Any, *, api: Any = nn, rules: Any = None) -> Callable[[], Any]:
    """Returns a call under an autocast of a model that carries another policy."""
    if api is nnx:
        return lambda: autocast(lambda m, x: m(x).sum(), text)(XNet(rngs(), dtype_policy=held), X)

    def run() -> Any:
        model = nn.Sequential([nn.Dense(4), nn.Dense(4)], dtype_policy=held)
        with use_policy(None, rules):
            params = model.init(KEY, X)
            return autocast(lambda p, x: model.apply(p, x).sum(), text)(params, X)

    return run


def cast_in_block() -> Any:
    model, params = nn.Dense(4), flax.linen.Dense(4).init(KEY, X)
    with use_policy(TEXT):
        return autocast(model.apply, "mixed_float16")(params, X)


def loss_of(loss: Callable[[Any], Any], text: str = "bfloat16") -> list[Callable[[], Any]]:
    """Returns the gradients of a loss of the logits of a model, in both apis."""
    model = nn.Dense(4, dtype_policy=text)

    def in_linen() -> Any:
        return value_and_grad(lambda p: loss(model.apply(p, X)))(model.init(KEY, X))

    def in_nnx() -> Any:
        return nnx.grad(lambda m: loss(m(X)))(linear(dtype_policy=text))

    return [in_linen, in_nnx]


def of_optax(logits: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def of_ours(logits: Any) -> Any:
    return losses.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def block_of(manager: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with manager():
            pass

    return run


def with_set_policy() -> None:
    with set_policy(TEXT):  # pyright: ignore[reportOptionalMemberAccess]
        pass


def set_in(transform: Callable[..., Any]) -> Callable[[], Any]:
    def run() -> None:
        try:
            transform(lambda x: (set_policy(TEXT), x)[1])(1.0)
        finally:
            set_policy(None)

    return run


def class_of(base: Any, value: Any) -> Callable[[], Any]:
    return lambda: type(base)("Net", (base,), {"dtype_policy": value, "__module__": __name__})


def linen_field() -> Any:
    class Net(nn.Module):
        dtype_policy: Any = TEXT

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3)(x)

    assert Net().init_with_output(KEY, X)[0].dtype == jnp.float32
    assert str(Net().dtype_policy) == str(nn.Dense(3, dtype_policy=TEXT).dtype_policy)


WINS = "wins over the autocast around it, 'params=float32,compute=float16,output=float32'"
OTHERS = {
    f"Sequential obeys 'params=float32,compute=bfloat16 … {WINS} … Leave out": cast_model(
        "mixed_float16", TEXT
    ),
    f"XNet obeys 'params=float32,compute=bfloat16 … {WINS}": cast_model(
        "mixed_float16", TEXT, api=nnx
    ),
    f"Dense obeys 'params=float32,compute=bfloat16 … in force … {WINS}": cast_in_block,
    "bfloat16 loss … logits.astype(jnp.float32) … policy.losses": loss_of(of_optax),
    "float16 loss … output=float32": loss_of(lambda logits: logits.sum(), "float16"),
    "set_policy('mixed_bfloat16') in a traced function … use_policy block": set_in(jax.jit),
}
OTHERS_RIGHT = {
    **{
        f"the same compute dtype, {api.__name__}": cast_model("bfloat16", TEXT, api=api)
        for api in (nn, nnx)
    },
    **{
        f"float32 in half, {api.__name__}": cast_model(TEXT, "float32", api=api)
        for api in (nn, nnx)
    },
    "float32 by a rule": cast_model(TEXT, TEXT, rules={"layers_1": "float32"}),
    "another by a rule": cast_model(TEXT, TEXT, rules={"layers_1": "mixed_float16"}),
    "no policy of its own": cast_model(TEXT, None),
    "no policy of its own in nnx": cast_model(TEXT, None, api=nnx),
    "set_policy in a gradient": set_in(jax.grad),
    "a field": linen_field,
    **{
        f"a loss of {name}, {api}": run
        for name, make in {
            "policy.losses": loss_of(of_ours),
            "float32 logits": loss_of(lambda logits: of_optax(logits.astype(jnp.float32))),
            "mixed_bfloat16": loss_of(of_optax, TEXT),
        }.items()
        for api, run in zip(("linen", "nnx"), make, strict=True)
    },
}
ERRORS = {
    f"set_policy('{TEXT}') opens no block … `with use_policy('{TEXT}'):`": with_set_policy,
    "autocast(fn, policy) opens no block … `with use_policy(": block_of(lambda: autocast(TEXT)),
    "Nothing obeys Net.dtype_policy … Net(..., dtype_policy='mixed_bfloat16')": [
        class_of(nn.Module, TEXT),
        class_of(nnx.Module, TEXT),
    ],
}
DROPPED = {"full_precision( … `with full_precision … decorate": lambda: full_precision() and None}
