"""Where a call's inputs are cast to compute_dtype and its outputs to output_dtype, and where they
are not; and layers that are a boundary to float32, whose matmuls return their accumulator.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import contextlib
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import current_policy, get_policy, use_policy
from tests.mpmodules.apis import BOTH, MIXED, Model, Text, X, dense, layer, layer_norm, under
from tests.mpmodules.table import options as table_options
from tests.mpmodules.table.cases import CASES
from tests.mpmodules.table.running import program
from tests.programs import Operation, boundary_casts, named, operations

OWN_CODE = pytest.mark.parametrize("own_code", ["autocast", "keep"])
ONE_BOUNDARY = [("bfloat16",), ("float32",)]


def sequential(*functions: Any, **options: Any) -> Text:
    """A Sequential of a layer and functions."""
    layers = layer(
        lambda nn: nn.Sequential([nn.Dense(4, **options), *functions]),
        lambda nnx, rngs: nnx.Sequential(nnx.Linear(4, 4, rngs=rngs, **options), *functions),
    )
    return Text(lambda self, x: self.layers(x), layers=layers)


def ops_of(model: Model, *args: Any, **kwargs: Any) -> list[Operation]:
    return operations(lambda params: model.pure(params, *(args or (X,)), **kwargs), model.params)


def casts_of(model: Model, *args: Any, **kwargs: Any) -> list[tuple[str, ...]]:
    return [op.outputs for op in boundary_casts(ops_of(model, *args, **kwargs))]


def net(inner: Any = None, note: Any = lambda x: x) -> Text:
    """Three blocks, each a layer and a product, of which the second may have its own policy."""
    block = Text(lambda self, x: note(self.layer(note(x))) * 2, "Block", layer=dense(4, 4))
    return Text(
        lambda self, x: note(self.third(note(self.second(note(self.first(x)))))),
        "Net",
        first=block,
        second=under(block, inner),
        third=block,
    )


def computed(model: Model) -> list[str]:
    """Returns the dtypes of the layers and the products of the three blocks."""
    return [op.inputs[0] for op in named(ops_of(model), "dot_general", "mul")]


@pytest.mark.cases(slow=3)
@BOTH
@pytest.mark.parametrize("given", ["argument", "scope"])
def test_a_policy_gives_half_between_layers_and_float32_logits(api, given):
    is_own = given == "argument"
    with contextlib.nullcontext() if is_own else use_policy(MIXED):
        model = api.ours(net(), MIXED if is_own else None)
        assert model(X).dtype == jnp.float32
        assert computed(model) == ["bfloat16"] * 6
        assert casts_of(model) == ONE_BOUNDARY


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("inner", [None, "mixed_bfloat16", "f32", "bf16", "p=f32,c=f32,o=bf16"])
def test_a_users_code_sees_float32_everywhere(api, inner):
    seen: list[str] = []

    def note(x):
        seen.append(x.dtype.name)
        return x

    model = api.ours(net(inner, note), MIXED)
    seen.clear()  # of the initialization
    for x in (X, X.astype(jnp.bfloat16)):
        assert model(x).dtype == jnp.float32
    assert len(seen) >= 18 and set(seen) == {"float32"}


@BOTH
@pytest.mark.parametrize("inner", ["f32", "p=f32,c=f32,o=bf16"])
def test_a_submodule_with_its_own_policy_runs_in_it_and_the_code_around_in_its_own(api, inner):
    model = api.ours(net(inner), MIXED)
    assert jax.eval_shape(model.pure, model.params, X).dtype == jnp.float32
    half, wide = ["bfloat16"] * 2, ["float32"] * 2
    assert computed(model) == [*half, *wide, *half]


@BOTH
def test_a_submodule_given_the_same_policy_is_no_boundary(api):
    model = api.ours(net(MIXED), MIXED)
    assert computed(model) == ["bfloat16"] * 6 and casts_of(model) == ONE_BOUNDARY
    alike = api.ours(sequential(jax.nn.relu, dtype_policy=MIXED), MIXED)
    assert casts_of(alike) == ONE_BOUNDARY
    found = named(ops_of(alike), "dot_general", "max")
    assert [op.outputs for op in found] == [("bfloat16",)] * 2


@BOTH
def test_the_policy_in_force_in_a_module_is_the_one_that_it_obeys_whatever_is_raised(api):
    seen: list[Any] = []

    def asks(self, x):
        seen.append(current_policy())
        if len(seen) > 100:
            raise RuntimeError("on purpose")
        return x

    part = Text(asks, "Asks")
    three = Text(
        lambda self, x: self.third(self.second(self.first(x))),
        first=part,
        second=under(part, "f16"),
        third=part,
    )
    model = api.ours(three, MIXED)
    seen.clear()
    model(X)
    assert seen[-3:] == [get_policy(text) for text in (MIXED, "f16", MIXED)]
    seen.extend([None] * 100)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(X[:1])
    assert current_policy() is None


def encode(self, x):
    return self.layer(x) * 2


def _private(self, x):
    return self.layer(x) * 2


METHODS = {
    "encode": encode,
    "twice": lambda self, x: self.encode(self.encode(x)),
    "_private": _private,
    "double": staticmethod(lambda x: 2 * x),
    "of_class": classmethod(lambda cls, x: x),
    "width": property(lambda self: 4),
}
ENCODER = Text(lambda self, x: self.encode(x), "Encoder", METHODS, layer=dense(4, 4))


@BOTH
@pytest.mark.parametrize("method", ["__call__", "encode", "twice"])
def test_a_public_method_is_a_boundary_and_one_that_it_calls_is_none(api, method):
    model = api.ours(ENCODER, MIXED)
    assert model(X, method=method).dtype == jnp.float32
    assert casts_of(model, method=method) == ONE_BOUNDARY
    half = named(ops_of(model, method=method), "dot_general", "mul")
    assert {op.outputs for op in half} == {("bfloat16",)}


@BOTH
@pytest.mark.parametrize("way", ["ours", "port"])
def test_private_static_and_class_methods_are_no_boundary_but_layers_obey(api, way):
    model = getattr(api, way)(ENCODER, MIXED)
    assert casts_of(model, method="_private") == []
    (dot,) = named(ops_of(model, method="_private"), "dot_general")
    assert dot.outputs == ("bfloat16",)
    cls = type(model.instance)
    assert cls.double(X).dtype == cls.of_class(X).dtype == jnp.float32
    assert model.instance.width == 4


@BOTH
@pytest.mark.parametrize("way", ["ours", "port"])
def test_a_super_call_crosses_once(api, way):
    def derived(base):
        return type("Derived", (base,), {"__call__": lambda self, x: base.__call__(self, x) * 2})

    class Derived(Text):
        def linen_class(self, nn):
            return derived(super().linen_class(nn))

        def nnx_class(self, nnx):
            return derived(super().nnx_class(nnx))

    text = Derived(lambda self, x: self.layer(x) * 3, "Base", layer=dense(4, 4))
    model = getattr(api, way)(text, MIXED)
    assert casts_of(model) == ONE_BOUNDARY
    assert [op.outputs for op in named(ops_of(model), "mul")] == [("bfloat16",)] * 2


@pytest.mark.cases(fast=1)
@BOTH
@OWN_CODE
@pytest.mark.parametrize("how", ["position", "name", "variadic"])
def test_named_inputs_come_as_they_are(api, how, own_code):
    notes: list[Any] = []

    def call(self, x, t, *rest, scale=None):
        notes.append([y.dtype.name for y in (x, t, *rest, scale) if y is not None])
        return self.layer(x), t

    attributes = {"keep_inputs": ("t", "rest"), "own_code": own_code}
    diffusion = Text(call, "Diffusion", attributes, layer=dense(4, 4))
    t = jnp.float32([999.0, 1001.0])
    with jax.numpy_dtype_promotion("standard"):
        model = api.ours(diffusion, MIXED, X, t)
    x = X.astype(jnp.bfloat16)
    given = {"position": (x, t), "name": (x,), "variadic": (x, t, t, t)}[how]
    out, kept = model(*given, **({"t": t} if how == "name" else {}), scale=X)
    assert out.dtype == jnp.float32 and np.array_equal(kept, t)
    others, floats = "bfloat16" if own_code == "keep" else "float32", len(given[1:]) or 1
    assert notes[-1] == [others, *["float32"] * floats, others]


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("derives", [False, True])
@pytest.mark.parametrize(
    ("own_code", "policy", "apart"),
    [
        ("autocast", "bf16", -2),
        ("autocast", "c=bf16,inputs=keep", -2),
        ("keep", "bf16", 0),
        ("keep", "c=bf16,inputs=keep", -2),
    ],
)
def test_timesteps_stay_apart_unless_a_class_keeps_its_code_and_casts_inputs(
    api, own_code, policy, apart, derives
):
    embedding = Text(
        lambda self, t: (t[0] - t[1]).astype(jnp.float32),
        attributes={"own_code": own_code} | ({"keep_inputs": ("t",)} if derives else {}),
    )
    t = jnp.float32([999.0, 1001.0])
    model = api.ours(embedding, policy, t)
    for run in (model.pure, jax.jit(model.pure)):
        assert run(model.params, t) == (-2 if derives else apart)


@pytest.mark.cases(fast=1)
@BOTH
@OWN_CODE
def test_trees_of_arguments_and_results_are_cast_and_everything_else_passes(api, own_code):
    seen: dict[str, Any] = {}

    def call(self, x, *more, key, flag, **options):
        arrays = x["a"], more[0], options["extra"][0]
        seen.update(dtypes={array.dtype.name for array in arrays}, more=more[1:], flag=flag)
        return {**x, "a": x["a"] * 2, "text": "out", "none": None, "key": key}

    key = jax.random.key(0)
    tree = {"a": X, "n": jnp.arange(3), "c": jnp.ones(2, jnp.complex64), "b": jnp.ones(3, bool)}
    text = Text(call, attributes={"own_code": own_code})
    if api.name == "linen":
        instance = text.linen_class(api.module)(dtype_policy="bf16").bind({})
    else:
        instance = text.nnx_class(api.module)(dtype_policy="bf16", rngs=api.module.Rngs(0))
    out: Any = instance(tree, X, 1.5, None, key=key, flag=True, extra=[X])
    dtypes = {"bfloat16" if own_code == "keep" else "float32"}
    assert seen == {"dtypes": dtypes, "more": (1.5, None), "flag": True}
    assert out["a"].dtype == jnp.bfloat16 and (out["text"], out["none"]) == ("out", None)
    for name in ("n", "c", "b"):
        assert out[name].dtype == tree[name].dtype
        np.testing.assert_array_equal(out[name], tree[name])
    assert jnp.array_equal(jax.random.key_data(out["key"]), jax.random.key_data(key))


@BOTH
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_inputs_are_arrays_of_float32(api, dtype):
    seen: list[str] = []
    model = api.ours(Text(lambda self, x: (seen.append(x.dtype.name), x)[1]), "bf16")
    assert model(np.ones((2, 2), dtype)).dtype == jnp.bfloat16 and seen[-1] == "float32"


@pytest.mark.cases(fast=1)
@BOTH
def test_nan_stays_in_its_own_row(api):
    text = Text(lambda self, x: self.layer(self.norm(x)), layer=dense(4, 4), norm=layer_norm(4))
    out = api.ours(text, MIXED)(X.at[0, 1].set(jnp.nan))
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all()


@BOTH
@pytest.mark.parametrize("policy", [MIXED, "mixed_float16"])
def test_infinity_passes_through_a_boundary(api, policy):
    x = jnp.float32([[jnp.nan, jnp.inf, -jnp.inf, 0]])
    np.testing.assert_array_equal(api.ours(Text(lambda self, x: x), policy)(x), x)


def bare(api: Any, name: str, policy: Any, **options: Any) -> Any:
    """Returns a root layer, built and called under a policy, as a function of its input."""
    with use_policy(policy):
        if api.name == "nnx":
            sizes = {"Linear": (4, 4), "LayerNorm": (4,)}[name]
            return getattr(api.module, name)(*sizes, rngs=api.module.Rngs(0), **options)
        sizes = {"Linear": (4,), "LayerNorm": ()}[name]
        made = getattr(api.module, name.replace("Linear", "Dense"))(*sizes, **options)
        variables = made.init(jax.random.key(0), X)

    def call(*args: Any, **kwargs: Any) -> Any:
        with use_policy(policy):
            return made.apply(variables, *args, **kwargs)

    return call


@pytest.mark.cases(slow=3)
@BOTH
@pytest.mark.parametrize("name", ["Linear", "LayerNorm"])
def test_a_bare_layer_returns_compute_dtype_casts_nothing_back_and_takes_integers(api, name):
    run = bare(api, name, MIXED)
    assert boundary_casts(operations(run, X)) == []
    argument = "x" if name == "LayerNorm" else "inputs"
    for out in (run(X), run(X[0]), run(**{argument: X}), run(jnp.ones((2, 4), int))):
        assert out.dtype == jnp.bfloat16
    assert bare(api, name, None, dtype_policy=MIXED)(X).dtype == jnp.float32
    with pytest.raises(TypeError, match=rf"missing (1|a) required .*argument: '{argument}'"):
        run()


@pytest.mark.slow
@BOTH
def test_with_x64_float64_is_a_policy_like_any_other_and_reductions_follow_theirs(api):
    with jax.enable_x64(True):
        x = np.asarray(1e5 + np.random.default_rng(0).normal(size=(8, 4)), np.float64)
        assert bare(api, "Linear", None, dtype_policy="float64")(x).dtype == jnp.float64
        assert bare(api, "Linear", None, dtype_policy=MIXED)(x).dtype == jnp.float32
        ported = api.port(sequential(jax.nn.relu), "float64")
        assert ported(x).dtype == jnp.float64
        x = x.astype(np.float32)
        out = bare(api, "LayerNorm", "p=f32,c=f32,o=f32,reduction=f64")(x)
        wide = np.asarray(x, np.float64)
        truth = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, truth, rtol=3e-7, atol=1e-7)


MATMULS = ("Dense", "DenseGeneral", "Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose")
OPTIONS = ("", "without bias", "in groups", "circular", "transpose_kernel=True", "mask=array")
LAYERS = {
    f"{api} {case}": (api, case)
    for api, case in (*CASES, *table_options.OPTIONS)
    if (case.layer in MATMULS and case.setting in OPTIONS) or str(case) == "Embed attend"
}
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)
EACH_DENSE = pytest.mark.parametrize("name", ["linen Dense", "nnx Linear"])


def function_of(name: str, modules: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Returns a layer as a function of its params and its input, its params, and an input."""
    run = program(*LAYERS[name], modules, **options)
    params, rest = run.init(jax.random.key(0))
    return lambda params, x: run.apply(params, rest, (x,))[0], params, run.inputs[0]


def dots(function: Any, *args: Any) -> list[tuple[str, ...]]:
    """The dtypes of the operands and the result of every matmul and convolution of a program."""
    found = named(operations(function, *args), "dot_general", "conv_general_dilated")
    return sorted((*op.inputs, *op.outputs) for op in found)


def rounded(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), tree)


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("half", ("bfloat16", "float16"))
@EACH_LAYER
def test_a_matmul_layer_returns_its_accumulator_and_goes_back_in_compute_dtype(name, half):
    run, params, x = function_of(name, dtype_policy=f"p=f32,c={half},o=f32")
    assert jax.eval_shape(run, params, x).dtype == jnp.float32
    wide, narrow = (half, half, "float32"), (half, half, half)
    assert dots(run, params, x) == [wide]
    gradient = jax.grad(lambda params, x: jnp.square(run(params, x)).sum(), argnums=(0, 1))
    assert dots(gradient, params, x) == sorted([narrow, narrow, wide])
    found = jax.tree.leaves(jax.eval_shape(gradient, params, x))
    assert {leaf.dtype.name for leaf in found} == {"float32"}
    # an input that needs no gradient costs no matmul
    alone = jax.grad(lambda params: jnp.square(run(params, x)).sum())
    assert len(dots(alone, params)) == 2


@pytest.mark.cases(slow=3)
@EACH_LAYER
def test_an_accumulator_is_no_rounded_copy_and_its_gradients_are_those_of_float32(name):
    results = []
    for policy in ("mixed_bfloat16", "f32"):
        run, params, x = function_of(name, dtype_policy=policy)
        params, x = rounded(params), rounded(x)
        weights = jax.random.normal(jax.random.key(4), jax.eval_shape(run, params, x).shape)

        def loss(params: Any, x: Any, run: Any = run, weights: Any = weights) -> Any:
            return jnp.sum(run(params, x) * weights)

        results.append((run(params, x), jax.grad(loss, argnums=(0, 1))(params, x)))
    (out, gradients), (exact, truth) = results
    assert not np.array_equal(out, rounded(out))
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-7 * float(jnp.abs(b).max()))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "layer", [flax.linen.Einsum((4, 3), "ab,bc->ac"), flax.linen.ConvTranspose(3, (3,))]
)
def test_a_port_of_a_layer_returns_its_accumulator_too(layer):
    ported, x = linen.apply_policy(layer, "mixed_bfloat16"), jnp.ones((2, 4))
    params = ported.init(jax.random.key(0), x)
    wide, narrow = ("bfloat16", "bfloat16", "float32"), ("bfloat16",) * 3
    gradient = jax.grad(lambda params, x: ported.apply(params, x).sum(), (0, 1))
    assert dots(gradient, params, x) == sorted([narrow, narrow, wide])


def test_a_forward_mode_derivative_of_an_accumulator_works():
    run, params, x = function_of("linen Dense", dtype_policy="mixed_bfloat16")
    out, tangent = jax.jvp(lambda x: run(params, x), (x,), (x,))
    assert (out.dtype, tangent.dtype) == (jnp.float32, jnp.float32)
    # The layer is linear, but for its bias of zeros; the tangent is rounded to bfloat16.
    np.testing.assert_allclose(out, tangent, rtol=2**-7, atol=2**-7)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("policy", ["c=bf16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose"])
def test_a_preferred_element_type_accumulates_and_the_policy_says_what_is_returned(name, policy):
    options = {"dtype_policy": policy, "preferred_element_type": jnp.float32}
    run, params, x = function_of(f"nnx {name}", **options)
    returned = jnp.float32 if policy == "mixed_bfloat16" else jnp.bfloat16
    assert jax.eval_shape(run, params, x).dtype == returned
    assert dots(run, params, x) == [("bfloat16", "bfloat16", "float32")]
    gradient = jax.grad(lambda x: run(params, x).sum().astype(jnp.float32))
    assert jax.eval_shape(gradient, x).dtype == jnp.float32


@EACH_DENSE
def test_a_dot_general_of_the_users_own_is_obeyed_and_its_result_widened(name):
    calls = []

    def dot_general(*args, **kwargs):
        calls.append(kwargs.get("preferred_element_type"))
        return jax.lax.dot_general(*args, **kwargs)

    run, params, x = function_of(name, dot_general=dot_general, dtype_policy="mixed_bfloat16")
    calls.clear()
    assert jax.eval_shape(run, params, x).dtype == jnp.float32
    assert calls == [None]


def test_an_embedding_as_a_boundary_looks_up_unrounded():
    tokens = np.array([2, 0])
    layer = nnx.Embed(3, 4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(tokens), layer.embedding[...][tokens])
    inner = nnx.Embed(3, 4, dtype_policy="c=bf16", rngs=nnx.Rngs(0))
    assert inner(tokens).dtype == inner.attend(jnp.ones((2, 4))).dtype == jnp.bfloat16
    theirs = linen.Embed(3, 4, dtype_policy="mixed_bfloat16")
    found, variables = theirs.init_with_output(jax.random.key(0), tokens)
    np.testing.assert_array_equal(found, variables["params"]["embedding"][tokens])
