"""Float32 inside of half-precision models: islands, layers that hand on what the code around them
computes in, and the precision of their matmuls.
"""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policy
from mpmodules import full_precision, linen, nnx
from policy import Policy, autocast, get_policy, use_policy
from tests.mpmodules.apis import (
    APIS,
    BOTH,
    MIXED,
    ONES,
    NnxModel,
    Part,
    Text,
    dense,
    layer_norm,
    weight,
)
from tests.mpmodules.apis import layer as part_of
from tests.programs import named, operations, precisions

X = jnp.ones((2, 4))
SEEN: dict[str, str] = {}


def note(name: str, value: Any) -> None:
    SEEN[name] = str(jnp.dtype(getattr(value, "dtype", value)))


@full_precision
def doubled(x: jax.Array, layer: Any) -> jax.Array:
    note("argument", x)
    return layer(x) + layer(x)


def call(self: Any, x: jax.Array) -> jax.Array:
    with full_precision():
        note("block", jnp.asarray(self.w))
        note("layer", self.a(x))
        note("half layer", self.half(x))
        note("accessor", policy.compute_dtype())
        note("norm", self.norm(x))
    y = doubled(x, self.b)
    note("function", y)
    return self.c(y)


ISLAND = Text(
    call,
    w=weight(4, 4, init=ONES),
    norm=layer_norm(4),
    half=dense(4, 4, dtype_policy="bfloat16"),
    **{name: dense(4, 4) for name in "abc"},  # pyright: ignore[reportArgumentType]
)


@pytest.mark.slow
@BOTH
def test_layers_parameters_and_accessors_are_float32_inside_and_half_outside(api):
    model = api.ours(ISLAND, MIXED, X)
    SEEN.clear()
    assert model.dots(X) == [("float32",) * 2] * 4 + [("bfloat16",) * 2]
    inside = ("block", "layer", "half layer", "accessor", "norm", "argument", "function")
    assert dict.fromkeys(inside, "float32") == SEEN  # of a function's result: as own code is
    assert model.audit(X, backward=True).findings == ()  # the island was asked for


def test_without_a_policy_nothing_is_cast():
    half = jnp.ones((2, 4), jnp.bfloat16)
    assert full_precision(lambda x: x * 2)(half).dtype == jnp.bfloat16
    with full_precision():
        assert policy.compute_dtype() is None
    with use_policy(MIXED):  # no module's call is open: functions are no boundaries
        assert full_precision(lambda x: x * 2)(half).dtype == jnp.bfloat16
        with full_precision():
            assert policy.compute_dtype() == policy.output_dtype() == jnp.float32
        assert policy.compute_dtype() == jnp.bfloat16


@pytest.mark.parametrize("scope", [None, MIXED])
def test_autocast_keeps_blocks_and_functions_in_float32(scope):
    def model(x: jax.Array) -> jax.Array:
        y = full_precision(lambda x: x @ x)(x)
        with full_precision():
            z = x @ x
        return y @ z

    with use_policy(scope):
        ops = operations(autocast(model, MIXED), jnp.ones((4, 4)))
    found = [op.inputs for op in named(ops, "dot_general")]
    assert found == [("float32",) * 2] * 2 + [("bfloat16",) * 2]


def test_a_block_is_a_decorator_too_and_may_be_entered_again():
    block = full_precision()

    @block
    def inside() -> Any:
        with block:
            return policy.compute_dtype()

    with use_policy(MIXED):
        assert inside() == jnp.float32
        assert policy.compute_dtype() == jnp.bfloat16


@pytest.mark.slow
def test_a_jitted_function_is_traced_for_each_side_of_an_island():
    jitted = jax.jit(lambda x: x.astype(policy.compute_dtype()))
    with use_policy(MIXED):
        assert jitted(X).dtype == jnp.bfloat16
        with full_precision():
            assert jitted(X).dtype == jnp.float32


@pytest.mark.slow
def test_what_is_no_function_is_rejected():
    with pytest.raises(TypeError, match="full_precision takes a function, but got 3 of type int"):
        full_precision(3)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_the_policy_is_a_value_with_a_text_form():
    policy = get_policy("f32_inside")
    assert policy == Policy("f32", "f32", "caller") != get_policy("f32")
    assert str(policy) == "params=float32,compute=float32,output=caller"
    assert policy.short == "p=f32,c=f32,o=caller"
    for same in (get_policy(str(policy)), get_policy(policy.short)):
        assert same == policy == pickle.loads(pickle.dumps(policy))
    assert policy.output_dtype == jnp.float32 and policy.follows_caller
    assert policy.replace(compute_dtype="bf16").follows_caller
    assert not policy.with_output_dtype("f32").follows_caller
    with pytest.raises(ValueError, match=r"'caller'.*or a floating dtype"):
        get_policy("p=caller")


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("text", ["f32", "f32_inside", "float32_inside"])
def test_a_layer_multiplies_in_float32_and_hands_on_half(api, text):
    seen: list[str] = []

    def call(self: Any, x: jax.Array) -> jax.Array:
        y = self.inner(x)
        seen.append(y.dtype.name)
        return self.head(x + y.astype(x.dtype))

    net = Text(call, inner=dense(4, 4), head=dense(4, 3))
    model = api.port(net, MIXED, {"inner": text}, X)
    seen.clear()
    assert model.dots(X) == [("float32",) * 2, ("bfloat16",) * 2]
    assert set(seen) == {"float32"} and model(X).dtype == jnp.float32  # as own code is


def test_a_root_returns_its_accumulator():
    half = X.astype(jnp.bfloat16)
    layer = linen.Dense(3, dtype_policy="f32_inside")
    assert layer.init_with_output(jax.random.key(0), half)[0].dtype == jnp.float32
    assert nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="f32_inside")(half).dtype == jnp.float32


def test_a_scan_whose_body_changes_its_carrys_dtype_is_explained_where_code_is_kept():
    class Block(nnx.Module):
        own_code = "keep"

        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    class Model(nnx.Module):
        own_code = "keep"

        def __init__(self, rngs: nnx.Rngs) -> None:
            self.block = Block(rngs, dtype_policy=MIXED)  # pyright: ignore[reportCallIssue]

        def __call__(self, x: jax.Array) -> jax.Array:
            body = lambda block, x, _: (block(x), None)  # noqa: E731
            scan = nnx.scan(body, in_axes=(None, nnx.Carry, 0))
            return scan(self.block, x, jnp.arange(2))[0]

    model = Model(nnx.Rngs(0), dtype_policy="bfloat16")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="carry") as caught:
        model(X)
    (note,) = (note for note in caught.value.__notes__ if "casts its outputs" in note)
    assert "cast the carry to its output_dtype" in note


ROWS = jnp.ones((2, 4, 8))
HALF, FLOAT32 = ("bfloat16", None), ("float32", None)
HIGHEST, HIGH = ("float32", "highest"), ("float32", "high")
explicit = pytest.mark.filterwarnings("ignore:.* has an explicit dtype:policy.DtypePolicyWarning")


def island(self: Any, x: jax.Array) -> jax.Array:
    with full_precision():
        return self.dense(x @ self.w)


PARTS: dict[str, Any] = {"w": weight(8, 8, init=ONES), "dense": dense(8, 8)}
INNER = Text(lambda self, x: self.dense(x @ self.w), "Inner", **PARTS)
KEPT = Text(INNER.call, "Kept", {"own_code": "keep"}, **PARTS)
LinenInner, NnxInner = INNER.linen_class(linen), INNER.nnx_class(nnx)


def inner(**options: Any) -> Part:
    """A module of own code with a layer in it that inherits; its class is ours, and one."""
    return part_of(
        lambda nn: LinenInner(**options), lambda nnx, rngs: NnxInner(rngs=rngs, **options)
    )


LAYERS: dict[str, Any] = {
    "Dense": dense(8, 8),
    "Conv": part_of(lambda nn: nn.Conv(8, (3,)), lambda nnx, rngs: nnx.Conv(8, 8, (3,), rngs=rngs)),
    "Einsum": part_of(
        lambda nn: nn.Einsum((8, 8), "...a,ab->...b"),
        lambda nnx, rngs: nnx.Einsum("...a,ab->...b", (8, 8), rngs=rngs),
    ),
    "LoRALinear": part_of(
        lambda nn: nn.DenseGeneral(8),  # linen has no LoRALinear
        lambda nnx, rngs: nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs),
    ),
    "attention": part_of(
        lambda nn: nn.MultiHeadDotProductAttention(2),
        lambda nnx, rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
    ),
    "RNN": part_of(
        lambda nn: nn.RNN(nn.GRUCell(8)),
        lambda nnx, rngs: nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs), rngs=rngs),
    ),
    "own code": INNER,
    "kept code": KEPT,
}


def net(router: Any) -> Text:
    return Text(lambda self, x: self.head(self.router(x)), "Net", router=router, head=dense(8, 8))


def gradients(model: Any) -> set[Any]:
    """Returns the dtypes and precisions of the matmuls of a model's gradient."""
    return precisions(jax.grad(model.total(ROWS)), model.params)


def ruled(api: Any, router: Any, rule: str, policy: str = MIXED) -> set[Any]:
    """Returns those of a model of ours of which a rule decides for the router, by its path."""
    if api.name == "linen":
        return gradients(api.scoped(net(router), policy, {"router": rule}, ROWS))
    instance = net(router).nnx_class(nnx)(rngs=nnx.Rngs(0))
    return gradients(NnxModel(nnx.apply_policy(instance, policy, {"router": rule})))


ARGUMENTS = {
    "dtype_policy": dense(8, 8, dtype_policy="float32"),
    "dtype": dense(8, 8, dtype=jnp.float32),
    "own code's dtype_policy": inner(dtype_policy="float32"),
    "island": Text(island, "Island", **PARTS),
}


@pytest.mark.cases(fast=1)
@explicit
@BOTH
@pytest.mark.parametrize("how", ARGUMENTS)
def test_an_argument_and_an_island(api, how):
    assert gradients(api.ours(net(ARGUMENTS[how]), MIXED, ROWS)) == {HALF, HIGHEST}


class Step(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = linen.Dense(4, name="inner")(x)
        return x.astype(jnp.float32) + y.astype(jnp.float32), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        step = linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return step(name="steps")(x, None)[0]


class NnxStep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) + self.inner(x).astype(jnp.float32)


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.steps = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: NnxStep(rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = nnx.scan(lambda step, x: step(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return step(self.steps, x)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["f32_inside", "f32"])  # own code reads either in its own dtype
def test_a_scans_carry_keeps_its_dtype(text):
    rules = {"steps/inner": text}
    with use_policy(MIXED, rules):
        out, _ = jax.eval_shape(lambda: Scanned().init_with_output(jax.random.key(0), X))
    model = nnx.apply_policy(NnxScanned(nnx.Rngs(0)), MIXED, rules)
    assert out.dtype == model(X).dtype == jnp.float32


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("rule", ["float32", "f32_inside"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rule_by_path(api, layer, rule):
    assert ruled(api, LAYERS[layer], rule) == {HALF, HIGHEST}


@pytest.mark.cases(fast=1)
@BOTH
def test_a_rule_by_class(api):
    rules = {LinenInner if api.name == "linen" else NnxInner: "float32"}
    assert gradients(api.scoped(net(inner()), MIXED, rules, ROWS)) == {HALF, HIGHEST}


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("own_code", [None, "keep"])
@pytest.mark.parametrize("layer", ["Dense", "own code"])
def test_a_rule_of_a_port(api, layer, own_code):
    text = net(LAYERS[layer])
    ported = api.port(text, MIXED, {"router": "float32"}, ROWS, own_code=own_code)
    assert gradients(ported) == {HALF, HIGHEST}


@pytest.mark.cases(fast=1)
@BOTH
def test_a_precision_given_to_a_layer_or_a_policy_wins(api):
    assert ruled(api, dense(8, 8, precision="high"), "float32") == {HALF, HIGH}
    assert ruled(api, INNER, "c=f32,o=f32,x=high") == {HALF, HIGH}
    whole = ruled(api, INNER, "float32", "c=bf16,o=f32,x=BF16_BF16_F32")
    assert whole == {("bfloat16", "BF16_BF16_F32"), HIGHEST}


@pytest.mark.cases(fast=1)
@BOTH
def test_whole_float32_models_keep_jaxs_default(api):
    for text in (None, "float32"):
        model = api.ours(net(INNER), text, ROWS)
        assert gradients(model) == {FLOAT32}
        with jax.default_matmul_precision("high"):
            assert gradients(model) == {HIGH}
    assert ruled(api, INNER, MIXED, "float32") == {FLOAT32, HALF}
    assert gradients(api.ours(net(INNER), "c=f32,x=high", ROWS)) == {HIGH}


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, ct: (ct @ saved[1].T, jnp.einsum("abi,abj->ij", saved[0], ct)),
)


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


@with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("function", [with_vjp, with_jvp])
def test_derivative_rules_of_own_code_multiply_at_the_highest_precision(api, function):
    router = Text(lambda self, x: function(x, jnp.asarray(self.w)), "Router", w=weight(8, 8))
    assert ruled(api, router, "float32") == {HALF, HIGHEST}


def test_a_root_in_float32_by_a_rule_multiplies_at_the_highest_around_half_modules():
    model = APIS["linen"].scoped(net(INNER), MIXED, {"Net:": "float32", "router": MIXED}, ROWS)
    found = gradients(model)
    assert HIGHEST in found and FLOAT32 not in found


class Router(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x @ self.param("w", linen.initializers.lecun_normal(), (4, 3))


@pytest.mark.parametrize("name", ["float32", "f32_inside"])
def test_a_module_with_a_float32_policy_of_its_own_keeps_it_under_autocast(name):
    modules = Router(dtype_policy=name), linen.Dense(3, dtype_policy=name)
    calls: list[Any] = [(module.apply, module.init(jax.random.key(0), X), X) for module in modules]
    calls.append((nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy=name), X))
    for call, *args in calls:
        assert precisions(autocast(call, MIXED), *args) == {("float32", "highest")}
