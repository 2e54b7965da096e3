"""A user's code under a half-precision policy is written for float32, and is pure to its caller."""

import concurrent.futures
import dataclasses
import os
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback

import mpmodules
import policy
from mpmodules import linen as nn
from mpmodules import nnx
from policy import DtypePolicyWarning, audit, compute_dtype, get_policy
from tests.mpmodules.apis import (
    BOTH,
    KEY,
    MIXED,
    ONES,
    Model,
    Text,
    X,
    batch_norm,
    cache,
    dense,
    dropout,
    read,
    weight,
    write,
)
from tests.programs import named

SEEN: list[Any] = []  # dtypes of the arrays that callbacks are given


def note(x: Any) -> np.ndarray:
    SEEN.append(x.dtype.name)
    return np.asarray(x)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(g, -1, 1) * 2,))


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


def debug_print(x: jax.Array) -> jax.Array:
    jax.debug.print("mean {m} of {n}", m=x.mean(), n=x.size)
    return x


def debug_callback(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda x: SEEN.append(x.dtype.name), x)
    return x


def io(x: jax.Array) -> jax.Array:
    return io_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def checked(x: jax.Array) -> jax.Array:
    checkify.check(jnp.all(x < 1e9), "too large: {m}", m=x.max())
    return x


def checkpointed(x: jax.Array) -> jax.Array:
    names = jax.checkpoint_policies.save_only_these_names("kept")
    body = lambda x: checkpoint_name(x @ jnp.eye(4), "kept") @ jnp.eye(4) * 2  # noqa: E731
    return jax.checkpoint(body, policy=names)(x)


DIFFERENTIABLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "checkpointed": checkpointed,
    "scanned": lambda x: jax.lax.scan(lambda c, _: (c @ jnp.eye(4) * 0.5, None), x, None, length=2)[
        0
    ],
    "conditional": lambda x: jax.lax.cond(
        x.sum() > 0, lambda x: x * 2, lambda x: x @ jnp.eye(4), x
    ),
    "debug_print": debug_print,
    "debug_callback": debug_callback,
    "custom_vjp": clipped,
    "custom_jvp": straight_through,
}


def _nest(container: Any, x: jax.Array) -> None:
    del container["gone"]
    container["inner"]["found"].append(x)


CONTAINERS: dict[str, Any] = {
    "list": (list, lambda found, x: found.append(x), lambda found: found[0]),
    "dict": (dict, lambda table, x: table.update(x=x), lambda table: table["x"]),
    "nested": (
        lambda: {"inner": {"found": []}, "gone": 1},
        _nest,
        lambda table: table["inner"]["found"][len(table) - 1],
    ),
    "object": (
        types.SimpleNamespace,
        lambda notes, x: setattr(notes, "hidden", x),
        lambda notes: notes.hidden,
    ),
}
"""By name: makes a container, writes an array into it, and reads that."""


def ours_in(error: BaseException) -> int:
    """Returns how many frames of an error are of this library."""
    roots = tuple(
        os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
        for package in (mpmodules, policy)
    )
    frames = traceback.extract_tb(error.__traceback__)
    return sum(os.path.abspath(frame.filename).startswith(roots) for frame in frames)


HALF = ("bfloat16", "bfloat16")
POLICIES = (
    "mixed_bfloat16",
    "mixed_float16",
    "bfloat16",
    "float16",
    "float32",
    "p=f32,c=f32,o=bf16",
    "p=f32,c=bf16,o=f16",
)


def text(body: Any = lambda x: x) -> Text:
    """A layer, a matmul of its own, and what `body` does with the result."""
    return Text(lambda self, x: body(self.layer(x) @ self.w), layer=dense(4, 4), w=weight(4, 4))


def close(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05 * float(jnp.abs(b).max()))


@pytest.mark.cases(fast=1, slow=4)
@BOTH
@pytest.mark.parametrize("policy", POLICIES)
def test_the_code_sees_float32_and_the_caller_output_dtype(api, policy):
    seen, wanted = [], get_policy(policy)

    def body(x):
        seen.append((x.dtype.name, str(compute_dtype())))
        return x

    model = api.ours(text(body), policy)
    seen.clear()  # of the initialization without a policy
    assert model(X.astype(jnp.float16)).dtype == wanted.output_dtype
    assert set(model.made().values()) == {wanted.param_dtype.name}
    gradients = jax.eval_shape(jax.grad(model.total(X)), model.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {wanted.param_dtype}
    assert set(model.dots(X, gradient=True)) == {(wanted.compute_dtype.name,) * 2}
    assert set(seen) == {("float32", wanted.compute_dtype.name)}


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("body", [*DIFFERENTIABLE, "none"])
def test_without_a_policy_the_program_is_flaxs(api, body):
    function = DIFFERENTIABLE.get(body, lambda x: x)
    ours, theirs = api.ours(text(function), None), api.theirs(text(function))
    programs = [str(jax.make_jaxpr(each.pure)(each.params, X)) for each in (ours, theirs)]
    assert programs[0] == programs[1]


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("how", CONTAINERS)
def test_lists_dicts_and_objects_are_the_callers(api, how, wrap):
    make, write_to, read_from = CONTAINERS[how]

    def call(self, x, container):
        x = self.layer(x)
        write_to(container, x)
        return x

    model = api.ours(Text(call, layer=dense(4, 4)), MIXED, X, make())

    def run(x):
        container = make()
        return model(x, container), read_from(container)

    for _ in range(2):  # the second call is not traced again
        out, held = wrap(run)(X)
        assert isinstance(held, jax.Array)  # no tracer
        np.testing.assert_array_equal(held.astype(jnp.float32), out)


@pytest.mark.cases(fast=1)
@BOTH
def test_parameters_are_used_in_compute_dtype_and_as_stored_without_a_policy(api):
    seen: list[Any] = []

    def call(self, x):
        seen.append(jnp.asarray(self.w).dtype.name)
        return x @ self.w + jnp.asarray(self.b)[None]

    linear = Text(call, "Linear", w=weight(4, 4), b=weight(4))
    model = api.ours(linear, MIXED)
    forward = [op for op in named(model.operations(X, gradient=True), "add") if not op.is_backward]
    assert {op.outputs for op in forward} == {("bfloat16",)}
    assert audit(jax.grad(model.total(X)), model.params).findings == ()
    plain = api.ours(linear, None)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), plain.params)
    plain.pure(half, X.astype(jnp.float16))
    assert seen[-1] == "float16"


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_a_kept_parameter_and_one_asked_for_in_float32_hold_against_activations(api, policy):
    against = Text(
        lambda self, x: self.layer(x) * self.plain * self.kept * self.asked,
        attributes={"keep_params": ("kept",)},
        layer=dense(4, 4),
        plain=weight(1, 4, init=ONES),
        kept=weight(1, 4, init=ONES),
        asked=weight(1, 4, init=ONES, compute_dtype=jnp.float32),
    )
    model = api.ours(against, policy)
    products = named(model.operations(X), "mul")
    assert [op.outputs[0] for op in products] == ["bfloat16", "float32", "float32"]
    made = model.made()
    assert made["kept"] == "float32"
    assert made["plain"] == made["asked"] == get_policy(policy).param_dtype.name


@BOTH
def test_names_to_keep_are_a_tuple_of_names_that_parameters_have(api):
    for names in ("scale", 3, (1,)):
        with pytest.raises(
            TypeError, match=r"Wrong.keep_params should be a tuple of names, but got"
        ):
            type("Wrong", (api.module.Module,), {"keep_params": names, "__module__": __name__})
    misspelt = Text(lambda self, x: x, "Misspelt", {"keep_params": ("scael",)}, scale=weight(1, 4))
    with pytest.warns(DtypePolicyWarning, match="Misspelt.keep_params names scael.* It has: scale"):
        api.ours(misspelt, MIXED).made()


def test_a_parameter_to_keep_may_be_left_out_by_some_modules():
    class Linen(nn.Module):
        keep_params = ("lora",)
        has_adapter: bool

        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (4, 4))
            lora = self.param("lora", nn.initializers.ones, (4, 4)) if self.has_adapter else 0
            return x @ (w + lora)

    class Nnx(nnx.Module):
        keep_params = ("lora",)

        def __init__(self, has_adapter):
            self.w = nnx.Param(jnp.ones((4, 4)))
            self.lora = nnx.Param(jnp.ones((4, 4))) if has_adapter else None

    model = nn.Sequential([Linen(True), Linen(False)], dtype_policy="bfloat16")
    params = model.init(KEY, jnp.ones((1, 4)))["params"]
    dtypes = jax.tree.map(lambda x: x.dtype.name, params)
    assert dtypes == {
        "layers_0": {"w": "bfloat16", "lora": "float32"},
        "layers_1": {"w": "bfloat16"},
    }
    with mpmodules.use_policy("bfloat16"):
        built = jax.tree.map(lambda x: x.dtype.name, nnx.to_pure_dict(nnx.state(Nnx(True))))
        Nnx(False)
    assert built == dtypes["layers_0"]


@dataclasses.dataclass
class Holder:
    """No pytree."""

    x: Any


FALLBACKS: dict[str, Any] = {
    "branch": (lambda x: x * 2 if x.sum() > -1e9 else x, "needs the values of arrays"),
    "float": (lambda x: x * float(x.sum() > -1e9), "needs the values of arrays"),
    "numpy": (lambda x: x * np.asarray(x).ndim, "needs the values of arrays"),
    "object": (Holder, "returns a Holder"),
    "function": (lambda x: lambda: x, "returns a function"),
}
OPENED = {"object": lambda out: out.x, "function": lambda out: out()}


@pytest.mark.cases(fast=1, slow=13)
@BOTH
@pytest.mark.parametrize("how", FALLBACKS)
@pytest.mark.parametrize("derivative", [False, True])
def test_code_that_cannot_be_traced_runs_as_written_and_warns_once(api, how, derivative):
    if how == "numpy" and derivative:
        pytest.skip("NumPy takes no tracer of a derivative")
    body, reason = FALLBACKS[how]
    model, opened = api.ours(text(body), MIXED), OPENED.get(how, lambda out: out)
    line = "" if how in OPENED else r" at test_one_rule\.py:\d+ \(`"

    def call(params):
        return opened(model.pure(params, X)).astype(jnp.float32).sum()

    with pytest.warns(DtypePolicyWarning, match=f"^Model can't be traced{line}") as told:
        outs = [
            jax.value_and_grad(call)(model.params)[0] if derivative else opened(model(X)).sum()
            for _ in range(2)
        ]
    assert len(told) == 1 and reason in str(told[0].message)
    close(outs, [opened(api.theirs(text(body))(X)).sum()] * 2)


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("how", ["branch", "float", "numpy"])
def test_under_jit_code_that_needs_values_has_jaxs_error(api, how):
    model = api.ours(text(FALLBACKS[how][0]), MIXED)
    with pytest.raises((jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)):
        jax.jit(model.pure)(model.params, X)


@BOTH
def test_what_a_call_returns_may_be_no_array(api):
    def call(self, x):
        return {"x": x * jnp.asarray(self.w), "name": "x", "none": None, "n": 3}

    model, found = api.ours(Text(call, w=weight(1, 4)), MIXED), {}

    def loss(params):
        found.update(model.pure(params, X))
        return found.pop("x").sum()

    jax.grad(loss)(model.params)
    assert found == {"name": "x", "none": None, "n": 3}


@pytest.mark.cases(fast=1)
@BOTH
def test_a_class_that_keeps_its_code_is_silent_and_runs_in_the_dtypes_that_it_meets(api):
    seen: list[Any] = []

    def call(self, x):
        seen.append((x.dtype.name, self.layer(x).dtype.name, jnp.asarray(self.w).dtype.name))
        return x if float(x.astype(jnp.float32).sum()) > 1e9 else x * 2

    model = api.ours(
        Text(call, "Keeps", {"own_code": "keep"}, layer=dense(4, 4), w=weight(4)), MIXED
    )
    seen.clear()
    assert model(X).dtype == jnp.float32
    assert seen == [("bfloat16", "bfloat16", "float32")]


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("how", ["eager", "jit", "grad"])
def test_an_error_ends_on_the_users_line_with_few_frames_of_ours(api, how):
    wide = []
    model = api.ours(text(lambda x: x @ jnp.ones((7, 7)) if wide else x), MIXED)
    wide.append(True)
    wrap: Any = {"jit": jax.jit, "grad": jax.grad}.get(how)
    with pytest.raises(TypeError) as raised:
        wrap(model.total(X))(model.params) if wrap else model(X)
    names = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    own = [name for name in names if "/jax/" not in name]
    assert own[-1] == __file__ and ours_in(raised.value) <= 12


@pytest.mark.cases(fast=1, slow=5)
@BOTH
@pytest.mark.parametrize("body", DIFFERENTIABLE)
def test_bodies_of_jax_keep_their_meaning_and_derivatives(api, body):
    ours = api.ours(text(DIFFERENTIABLE[body]), MIXED)
    theirs = api.theirs(text(DIFFERENTIABLE[body]))
    for wrap in (lambda f: f, jax.jit):
        close(*(wrap(jax.grad(each.total(X)))(each.params) for each in (ours, theirs)))
    assert set(ours.dots(X, gradient=True)) == {HALF}


def recurrence(y: jax.Array) -> jax.Array:
    step = lambda h, y: (h * jax.nn.sigmoid(y + 4) + y, None)  # noqa: E731
    return jax.lax.scan(step, 0 * y, jnp.tile(y, (64, 1, 1)))[0]


CANCELING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a number": lambda y: y - 0.999 * y,
    "a quotient": lambda y: (lambda q: q / (1 + jnp.abs(q)))(16 * y * y),
    "a recurrence": recurrence,
}


@pytest.mark.cases(fast=2)
@BOTH
@pytest.mark.parametrize("body", CANCELING)
def test_roundings_that_would_not_cancel_are_left_out(api, body):
    ours = api.ours(text(CANCELING[body]), MIXED)
    theirs = api.theirs(text(CANCELING[body]))
    gradients = (jax.grad(each.total(X))(each.params) for each in (ours, theirs))
    for found, truth in ((ours(X), theirs(X)), gradients):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
            assert jnp.linalg.norm(a - b) < 0.02 * jnp.linalg.norm(b)


@pytest.mark.cases(fast=1)
@BOTH
def test_callbacks_run_once_for_each_call_and_get_float32(api):
    models = [api.ours(text(body), MIXED) for body in (io, DIFFERENTIABLE["debug_callback"])]
    jax.effects_barrier()
    SEEN.clear()
    for model in models:
        for _ in range(2):  # the second is not traced again
            model(X)
        jax.jit(model.pure)(model.params, X)
        jax.effects_barrier()
    assert SEEN == ["float32"] * 6


@pytest.mark.cases(fast=1)
@BOTH
def test_checks_are_functionalised(api):
    checks = []
    model = api.ours(text(lambda x: checked(x) if checks else x), MIXED)
    checks.append(True)
    for run in (lambda f: f, jax.jit):
        check = run(checkify.checkify(model.pure))
        assert check(model.params, X)[0].get() is None
        assert "too large" in str(check(model.params, X * 1e12)[0].get())


@BOTH
def test_a_saved_name_is_saved_in_half(api):
    model = api.ours(text(DIFFERENTIABLE["checkpointed"]), MIXED)
    names = named(model.operations(X, gradient=True), "name")
    assert names and {op.outputs for op in names} == {("bfloat16",)}


DERIVATIVES: dict[str, Any] = {
    "hessian": jax.hessian,
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (jnp.ones_like(w),))[1],
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](jnp.ones_like(w)),
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])),
}


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("derive", DERIVATIVES)
def test_second_derivatives_forward_mode_and_maps(api, derive):
    def derived(model: Model) -> Any:
        flat, unravel = jax.flatten_util.ravel_pytree(model.params)
        loss = lambda flat: jnp.square(model.pure(unravel(flat), X)).sum()  # noqa: E731
        return DERIVATIVES[derive](loss)(flat)

    close(derived(api.ours(text(), MIXED)), derived(api.theirs(text())))


@pytest.mark.slow
@BOTH
def test_statistics_and_dropout_are_those_of_flax(api):
    def call(self, x):
        return self.dropout(self.norm(self.dropout(x @ self.w))) * self.scale

    parts: dict[str, Any] = {"w": weight(4, 4), "scale": weight(1, 4)}
    busy = Text(call, norm=batch_norm(4), dropout=dropout(0.5), **parts)
    x = 1 + jax.random.normal(KEY, (64, 4))
    ours, theirs = api.ours(busy, MIXED, x), api.theirs(busy, x)
    for _ in range(2):
        np.testing.assert_array_equal(ours(x) == 0, theirs(x) == 0)
    assert jax.tree.structure(ours.state) == jax.tree.structure(theirs.state)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours.state)} == {jnp.dtype("float32")}
    close(ours.state, theirs.state)


@pytest.mark.cases(slow=3)
@BOTH
@pytest.mark.parametrize("how", ["slice", "at"])
def test_a_cache_in_half_stays_in_half(api, how):
    def call(self, x):
        """Writes attention's cache by hand."""
        key, index, keys = self.layer(x), read(self.index), read(self.keys)
        if how == "slice":
            keys = jax.lax.dynamic_update_slice(keys, key.astype(keys.dtype), (index, 0))
        else:
            keys = keys.at[index].set(key[0].astype(keys.dtype))
        write(self.keys, keys)
        write(self.index, index + 1)
        return keys @ key[0].astype(keys.dtype)

    parts: dict[str, Any] = {"keys": cache(jnp.zeros((8, 4), jnp.bfloat16))}
    model = api.ours(
        Text(call, layer=dense(4, 4), index=cache(jnp.array(0)), **parts), MIXED, X[:1]
    )

    def state():
        return sorted(jax.tree.leaves(model.state), key=jnp.ndim)

    before = int(state()[0])
    for _ in range(2):
        assert model(X[:1]).dtype == jnp.float32
    index, keys = state()
    assert keys.dtype == jnp.bfloat16 and int(index) == before + 2
    assert not (keys[:index] == 0).all(1).any() and (keys[index:] == 0).all()
    written = named(model.operations(X[:1]), "dynamic_update_slice", "scatter")
    assert written and {op.outputs for op in written} == {("bfloat16",)}


@pytest.mark.cases(fast=1)
@BOTH
def test_two_threads_with_two_policies_do_not_mix(api):
    barrier, models = threading.Barrier(2), {}

    def body(x):
        if len(models) == 2:
            barrier.wait(timeout=60)
        return x * (2 if str(compute_dtype()) == "bfloat16" else 3)

    for dtype in ("bfloat16", "float16"):
        models[dtype] = api.ours(text(body), f"mixed_{dtype}")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(models, pool.map(lambda m: m.operations(X), models.values()), strict=True))
    for dtype, ops in found.items():
        assert {op.outputs for op in named(ops, "dot_general", "mul")} == {(dtype,)}


linen_call = lambda layer, x: flax.linen.custom_vjp(  # noqa: E731
    lambda layer, x: layer(x),
    lambda layer, x: flax.linen.vjp(lambda layer, x: layer(x), layer, x),
    lambda pullback, ct: (pullback(ct)[0], 2 * pullback(ct)[1]),
)(layer, x)


@flax.nnx.custom_vjp
def nnx_call(layer: Any, x: Any) -> Any:
    return layer(x)


def backward(saved: Any, cotangents: Any) -> Any:
    graph, state = flax.nnx.split(saved[0])
    _, pullback = jax.vjp(lambda state, x: flax.nnx.merge(graph, state)(x), state, saved[1])
    of_layer, of_x = pullback(cotangents[1])
    return of_layer, 2 * of_x


nnx_call.defvjp(lambda layer, x: (layer(x), (layer, x)), backward)


def doubled(self: Any, x: jax.Array) -> jax.Array:
    """Its first layer has twice its input's gradient."""
    is_nnx = flax.nnx.Module in type(self).mro()
    call = nnx_call if is_nnx else linen_call
    return self.last(jnp.tanh(call(self.first, x)))


TEXT = Text(doubled, first=dense(4, 4), last=dense(4, 4))


@pytest.mark.cases(slow=2)
@BOTH
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("way", ["ours", "port"])
def test_a_layer_in_the_rules_of_a_custom_vjp_returns_float32_to_them(api, way, policy, jit):
    def gradients(model: Any) -> Any:
        run = jax.jit(model.pure) if jit else model.pure
        loss = lambda p, x: jnp.sum(run(p, x).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.tree.leaves(jax.grad(loss, (0, 1))(model.params, X))

    plain, model = api.theirs(TEXT), (api.port if way == "port" else api.ours)(TEXT, policy)
    leaves = zip(jax.tree.leaves(plain.params), jax.tree.leaves(model.params), strict=True)
    same = [a.astype(b.dtype) for a, b in leaves]  # nnx draws in half what it stores in half
    model.params = jax.tree.unflatten(jax.tree.structure(model.params), same)
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.linalg.norm(a - b) < 2**-5 * np.linalg.norm(b)
