"""autocast together with everything that JAX does with functions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from policy import DtypePolicyWarning, use_policy
from policy.autocasting.transform import autocast
from tests.policy.autocasting.models import BF16, HALVES, KEY, dots, layer
from tests.policy.autocasting.models import SQUARE as W
from tests.programs import named, operations

X, SHIFT = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 8)), jnp.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(layer(w, x) * x)


def near(found: Any, truth: Any, tolerance: float = 3e-2) -> None:
    """The trees are of one structure and of one set of dtypes and shapes, and near each other."""
    assert jax.tree.structure(found) == jax.tree.structure(truth)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        largest = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        np.testing.assert_allclose(a, b, atol=tolerance * largest)


CAST = autocast(layer, BF16, params=0)
CAST_LOSS = autocast(loss, BF16, params=0)

# Transformations around it

ZERO = jnp.float32(0.0)
TRANSFORMED: dict[str, Any] = {
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(f, (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(f),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "hessian": lambda f: lambda w, x: jax.hessian(lambda v: f(w, x * v[None]))(jnp.ones(8)),
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, row: (c + f(w, row[None]), c), ZERO, x),
    "has_aux": lambda f: jax.grad(lambda w, x: (f(w, x), {"x": x}), has_aux=True),
}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_it_is_transformed_as_any_function_and_transforms_what_was_transformed(name):
    args = (W, X[:, None, :]) if "vmap" in name else (W, X)
    truth = TRANSFORMED[name](loss)(*args)
    outside = TRANSFORMED[name](CAST_LOSS)
    inside = autocast(TRANSFORMED[name](loss), BF16, params=0)
    for fn in (outside, inside):
        assert set(dots(fn, *args)) == {HALVES}
        near(jax.jit(fn)(*args), truth, 5e-2)


def mesh(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((1,), ("i",), axis_types=(kind,))


def test_it_nests_with_shard_map_either_way():
    rows = PartitionSpec("i")
    specs: Any = {"mesh": mesh(), "in_specs": (PartitionSpec(), rows), "out_specs": rows}
    outside = autocast(jax.shard_map(layer, **specs), BF16, params=0)
    inside = jax.shard_map(CAST, **specs)
    both = autocast(jax.shard_map(CAST, **specs), BF16, params=0)
    for fn in (outside, inside, both):
        assert dots(fn, W, X) == [HALVES]
        near(fn(W, X), layer(W, X))
        assert set(dots(jax.grad(lambda w, fn=fn: fn(w, X).sum()), W)) == {HALVES}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_keep_their_shardings(kind):
    the_mesh = mesh(kind)
    rows = NamedSharding(the_mesh, PartitionSpec("i"))
    whole = NamedSharding(the_mesh, PartitionSpec())
    with jax.set_mesh(the_mesh):
        w, bias = (jax.device_put(array, whole) for array in (W, jnp.ones(8)))
        x = jax.device_put(X, rows)
        fn = autocast(lambda w, b, x: jax.nn.relu(layer(w, x) + b[None]), BF16, params=(0, 1))
        found = jax.jit(fn)(w, bias, x)
        assert found.sharding.is_equivalent_to(rows, 2)
        gradient = jax.jit(jax.grad(lambda b: fn(w, b, x).sum()))(bias)
    assert gradient.dtype == jnp.float32


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("batch", ["4", "b"])
def test_it_is_exported_with_a_batch_of_any_size(batch):
    shape = jax.export.symbolic_shape(f"{batch}, 8")
    specs = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32))
    biased = autocast(lambda w, x: layer(w, x) + w[:1], BF16, params=0)
    exported = jax.export.export(jax.jit(biased), platforms=["cpu"])(*specs)
    assert "bf16" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(W, X), biased(W, X))


def test_float64_is_left_alone():
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(X), jnp.float64)
        assert dots(autocast(layer, BF16), x.T, x) == [("float64", "float64")]
        np.testing.assert_array_equal(autocast(layer, BF16)(x.T, x), layer(x.T, x))
        mixed = autocast(lambda w, x: (x @ w).astype(jnp.float64) * 2.0, BF16)
        assert mixed(W, X).dtype == jnp.float64
        assert dots(mixed, W, X) == [HALVES]


FLOAT64: dict[str, Any] = {
    "a number": lambda w, x: (x @ w - np.float64(1)) @ w,
    "zeros": lambda w, x: (jnp.zeros(x.shape) + x) @ w,
    "linspace": lambda w, x: (x * jnp.linspace(0, 1, 8)[None]) @ w,
    "random numbers": lambda w, x: (x + jax.random.normal(jax.random.key(0), x.shape)) @ w,
}


@pytest.mark.parametrize("name", FLOAT64)
def test_in_float64_mode_code_runs_that_makes_arrays_of_the_default_dtype(name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        y = autocast(FLOAT64[name], BF16, params=0)(W, X)
        truth = FLOAT64[name](W, X)
        assert y.dtype == truth.dtype
        np.testing.assert_allclose(y, truth, atol=3e-2)


_DIMS = (((1,), (0,)), ((), ()))
_INTEGERS, _COMPLEX, _FP8 = jnp.ones((4, 4), jnp.int8), lax.complex(X, X), W.astype("float8_e4m3fn")
OF_OTHER_DTYPES: dict[str, tuple[Any, Any]] = {
    "complex64": (lambda z: z @ z.T, _COMPLEX),
    "int8": (lambda i: lax.dot(i, i, preferred_element_type=jnp.int32), _INTEGERS),
    "float8_e4m3fn": (lambda w: lax.dot_general(w, w, _DIMS, preferred_element_type="f4"), _FP8),
}


@pytest.mark.parametrize("dtype", OF_OTHER_DTYPES)
def test_matmuls_of_other_dtypes_are_left_alone(dtype):
    fn, x = OF_OTHER_DTYPES[dtype]
    assert dots(autocast(fn, BF16), x) == [(dtype, dtype)]
    assert autocast(fn, BF16)(x).dtype == fn(x).dtype


def test_a_model_in_bfloat16_already_is_left_as_it_is():
    def model(w, x):
        h = jax.nn.gelu(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jax.nn.softmax(h.astype(jnp.float32))

    before, after = (
        sorted((op.name, op.inputs, op.outputs) for op in operations(fn, W, X) if op.name != "jit")
        for fn in (model, autocast(model, BF16))
    )
    assert before == after


@pytest.mark.slow
def test_without_jit_it_computes_the_same():
    with jax.disable_jit():
        near(CAST(W, X), layer(W, X))
        near(jax.grad(CAST_LOSS)(W, X), jax.grad(loss)(W, X))


def test_what_is_printed_comes_in_order(capfd):
    def printing(w, x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        turn = lambda i, h: (jax.debug.print("turn {}", i, ordered=True), layer(w, h))[1]  # noqa: E731
        h = lax.fori_loop(0, 2, turn, x)
        jax.debug.print("last", ordered=True)
        return h

    jax.block_until_ready(autocast(printing, BF16)(W, jnp.ones((4, 8))))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "1.0", "turn", "0", "turn", "1", "last"]


def test_an_integers_cotangent_is_float0():
    def picked(w, i):
        return jnp.sum(layer(w, X)[i])

    gradient = jax.grad(autocast(picked, BF16), 1, allow_int=True)(W, jnp.int32(1))
    assert gradient.dtype == jax.dtypes.float0
    inside = autocast(jax.grad(picked, 1, allow_int=True), BF16)(W, jnp.int32(1))
    assert inside.dtype == jax.dtypes.float0
    assert autocast(lambda w, g: w * 2.0, BF16)(W, gradient).shape == W.shape


def test_trees_keywords_and_static_arguments_are_passed_on():
    @autocast(policy=BF16)
    def fn(params, batch, scale=1.0, *, train, act="tanh"):
        """Returns a tree."""
        assert isinstance(train, bool)
        h = getattr(jnp, act)(batch["x"] @ params["w"]) * scale
        return {"h": h, "train": train, "none": None}, (batch["i"], h if train else h.sum())

    found = fn({"w": W}, {"x": X, "i": jnp.arange(3)}, train=True, act="sin")
    assert set(found[0]) == {"h", "train", "none"} and found[0]["none"] is None
    near(found[1][1], jnp.sin(X @ W))
    assert fn({"w": W}, {"x": X, "i": 2}, 2.0, train=False)[1][1].shape == ()
    assert fn.__name__ == "fn" and fn.__doc__ == "Returns a tree."


@dataclasses.dataclass
class Linear:
    w: Any

    def __call__(self, x):
        return layer(self.w, x)

    @autocast(BF16)
    def method(self, x):
        return layer(self.w, x)


def test_methods_objects_and_partial_functions_are_functions_too():
    linear = Linear(W)
    given = linear.__call__, linear, functools.partial(layer, W)
    for fn in (linear.method, *(autocast(one, BF16) for one in given)):
        near(fn(X), layer(W, X))
        assert dots(fn, X) == [HALVES]


def test_it_is_traced_once_for_its_shapes_and_again_under_another_policy():
    count = 0

    def fn(w, x, flag=True):
        nonlocal count
        count += 1
        return layer(w, x)

    cast = autocast(fn)
    told = r"autocast\(fn\) has no policy of its own, and none is in force here"
    with pytest.warns(DtypePolicyWarning, match=told):
        cast(W, X)
    assert count == 1  # no policy in force: called as it is
    for policy, traces in ((BF16, 2), (BF16, 2), ("mixed_float16", 3), (BF16, 3), ("float32", 4)):
        with use_policy(policy):
            cast(W, X)
            cast(W + 1.0, X)
            assert count == traces, policy
    with use_policy(BF16):
        cast(W, X[:2])
        cast(W, X[:2], flag=False)
        assert count == 6


def test_numbers_of_python_are_told_apart():
    fn = autocast(lambda x, number: (x / (x * float(number)), type(number) is bool), BF16)
    found = [fn(jnp.ones(()), number) for number in (0.0, -0.0, 1, 1.0, True)]
    infinite = [(jnp.inf, False), (-jnp.inf, False)]
    assert found == [*infinite, (1.0, False), (1.0, False), (1.0, True)]
    assert np.isnan(fn(jnp.ones(()), float("nan"))[0])


def test_weak_types_of_results_are_kept():
    fn = lambda x: (1.0, x.sum() * 2.0)  # noqa: E731
    plain, cast = (jax.eval_shape(one, X) for one in (jax.jit(fn), autocast(fn, BF16)))
    assert [a.weak_type for a in cast] == [a.weak_type for a in plain]


def raises(x: Any) -> Any:
    raise ZeroDivisionError("the user's own")


def test_an_exception_shows_where_the_user_raised_it():
    with pytest.raises(ZeroDivisionError, match="the user's own") as caught:
        autocast(lambda w, x: raises(layer(w, x)), BF16)(W, X)
    assert caught.traceback[-1].name == "raises"


def test_a_nested_jit_keeps_its_shardings_and_donation():
    sharding = NamedSharding(mesh(), PartitionSpec("i"))
    placed = autocast(jax.jit(layer, out_shardings=sharding), BF16, params=0)
    assert placed(W, X).sharding.is_equivalent_to(sharding, 2)
    donating = autocast(lambda w, x: jax.jit(layer, donate_argnums=1)(w, x * 2.0), BF16, params=0)
    jaxpr = jax.make_jaxpr(donating)(W, X)
    assert "donated_invars" in str(jaxpr)
    for fn in (placed, donating):
        assert dots(fn, W, X) == [HALVES]


@pytest.mark.slow
def test_what_depends_on_the_platform_keeps_its_choice():
    table = jnp.arange(8.0)

    def fn(w, x):
        double, triple = lambda h: h @ w * 2.0 + table[None], lambda h: h @ w * 3.0
        return lax.platform_dependent(layer(w, x), cpu=double, default=triple)

    cast = autocast(fn, BF16)
    near(cast(W, X), fn(W, X))
    near(jax.grad(lambda w: cast(w, X).sum())(W), jax.grad(lambda w: fn(w, X).sum())(W))
    assert set(dots(cast, W, X)) == {HALVES}
    assert "branches_platforms" in str(jax.make_jaxpr(cast)(W, X))


def test_a_while_loop_reads_constants_in_its_condition():
    def fn(w, limit, x):
        step = lambda s: (s[0] + 1, s[1] + layer(w, s[1]) ** 2)  # noqa: E731
        return lax.while_loop(lambda s: s[1].sum() < limit.sum(), step, (0, x))

    limit = jnp.full((2,), 40.0)
    found, truth = autocast(fn, BF16, params=0)(W, limit, X), fn(W, limit, X)
    assert found[0] == truth[0]
    near(found[1], truth[1], 5e-2)
    assert dots(autocast(fn, BF16, params=0), W, limit, X) == [HALVES]


def test_a_while_loop_of_a_vmap_ends_in_each_row_by_itself():
    def fn(w, x):
        def row(x):
            step = lambda s: (s[0] + 1, s[1] + layer(w, s[1][None])[0] ** 2 + 1)  # noqa: E731
            return lax.while_loop(lambda s: s[1].sum() < 10 * x[0], step, (0, x))

        return jax.vmap(row)(x)

    x = X * jnp.arange(1.0, X.shape[0] + 1)[:, None]
    found, truth = autocast(fn, BF16)(W, x), fn(W, x)
    steps, true_steps = np.asarray(found[0]).tolist(), np.asarray(truth[0]).tolist()
    assert len(set(true_steps)) > 1 and steps == true_steps
    near(found[1], truth[1], 5e-2)
    assert dots(autocast(fn, BF16), W, x) == [HALVES]


def with_a_key(w: Any) -> Any:
    return lambda c, row: (
        (c[0] + 1, jax.random.split(c[1])[0], layer(w, c[2])),
        row + jax.random.uniform(c[1], (8,)),
    )


def recurrence(w: Any) -> Any:
    return lambda c, row: (layer(w, c) + row[None], c[0])


SCANS: dict[str, Any] = {
    "integers and keys are carried": lambda w, x: lax.scan(with_a_key(w), (0, KEY, x), x),
    "nothing is scanned over": lambda w, x: lax.scan(
        lambda c, _: (layer(w, c), c.sum()), x, None, length=3
    ),
    "unrolled": lambda w, x: lax.scan(recurrence(w), x, x, unroll=2),
    "of no steps": lambda w, x: lax.scan(recurrence(w), x, x[:0]),
    "nothing is carried": lambda w, x: lax.scan(lambda c, row: (c, layer(w, row[None])), None, x),
    "mapped": lambda w, x: lax.map(lambda row: layer(w, row[None]), x, batch_size=2),
    "associative": lambda w, x: lax.associative_scan(lambda a, b: a * b, layer(w, x)),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_in_which(name):
    fn = SCANS[name]
    cast = autocast(fn, BF16, params=0)
    found, truth = cast(W, X), jax.jit(fn)(W, X)
    numbers = lambda a: jax.random.key_data(a) if a.dtype == KEY.dtype else a  # noqa: E731
    near(jax.tree.map(numbers, found), jax.tree.map(numbers, truth), 5e-2)
    assert set(dots(cast, W, X)) == {HALVES}

    def loss(w):
        return sum(jnp.sum(a) for a in jax.tree.leaves(cast(w, X)) if a.dtype == jnp.float32)

    assert set(dots(jax.grad(loss), W)) == {HALVES}


def with_jvp(fn: Any, rule: Any, static: tuple[int, ...] = (), **options: Any) -> Any:
    ruled = jax.custom_jvp(fn, nondiff_argnums=static)
    ruled.defjvp(rule, **options)
    return ruled


def with_vjp(fn: Any, fwd: Any, bwd: Any, static: tuple[int, ...] = (), **options: Any) -> Any:
    ruled = jax.custom_vjp(fn, nondiff_argnums=static)
    ruled.defvjp(fwd, bwd, **options)
    return ruled


def _product(x, y):
    return x * y.astype(jnp.float32)


def _static(n, f, x):
    return f(x) * n


def _symbolic_rule(primals, tangents):
    x, y = primals
    moved = 7.0 * tangents[0] if type(tangents[0]).__name__ != "SymbolicZero" else jnp.zeros_like(x)
    return x * y, moved


# The rules are told from the derivatives: they return seven times the cotangent or tangent.
FLOAT0 = np.zeros((), jax.dtypes.float0)
powered = with_jvp(lambda x, n: x * _product(x, n), lambda x, t: (powered(*x), 7.0 * t[0]))
symbolic = with_jvp(_product, _symbolic_rule, symbolic_zeros=True)
scaled = with_vjp(_product, lambda x, n: (scaled(x, n), n), lambda n, ct: (7.0 * ct, FLOAT0))
static_jvp = with_jvp(_static, lambda n, f, x, t: (_static(n, f, *x), 7.0 * t[0]), (0, 1))
static_vjp = with_vjp(
    _static, lambda *args: (_static(*args), None), lambda n, f, _, ct: (7.0 * ct,), (0, 1)
)
zeros_known = with_vjp(
    _product,
    lambda x, y: (x.value * y.value, (x.perturbed, y.perturbed)),
    lambda saved, ct: (7.0 * ct, ct),
    symbolic_zeros=True,
)


def closing_over(x, shift):
    ruled = with_vjp(lambda x: x + shift, lambda x: (ruled(x), None), lambda _, ct: (7.0 * ct,))
    return ruled(x)


RULED: dict[str, Any] = {
    "custom_jvp with an integer": lambda h: powered(h, jnp.int32(3)),
    "custom_jvp with symbolic zeros": lambda h: symbolic(h, jnp.ones((4, 8))),
    "custom_vjp with an integer": lambda h: scaled(h, jnp.int32(3)),
    "custom_vjp with static arguments": lambda h: static_vjp(2.0, jnp.tanh, h),
    "custom_jvp with static arguments": lambda h: static_jvp(2.0, jnp.tanh, h),
    "custom_vjp with symbolic zeros": lambda h: zeros_known(h, jnp.ones((4, 8))),
    "custom_vjp over a constant": lambda h: closing_over(h, SHIFT),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", RULED)
def test_the_authors_rule_is_kept(name):
    def fn(w, x):
        return jnp.sum(RULED[name](x @ w))

    truth = jax.jit(jax.grad(fn))(W, X)
    near(truth, 7.0 * jax.grad(lambda w: jnp.sum(X @ w))(W), 1e-5)
    inside = jax.grad(autocast(fn, BF16, params=0))
    for cast in (inside, *(autocast(each, BF16, params=0) for each in (jax.grad(fn), inside))):
        near(jax.jit(cast)(W, X), truth, 1e-2)
        assert set(dots(cast, W, X)) == {HALVES}


def test_a_gradient_that_a_rule_knows_nothing_of_is_rejected():
    fn = autocast(lambda w, x: closing_over(x @ w, jnp.sin(x)).sum(), BF16, params=0)
    with pytest.raises(TypeError, match="pass that value as an argument"):
        jax.grad(fn, 1)(W, X)


def test_a_rule_that_calls_its_function_is_differentiated_twice():
    bwd = lambda x, ct: (5.0 * ct * jax.lax.square(x),)  # noqa: E731
    cubed = with_vjp(lambda x: x**3, lambda x: (cubed(x), x), bwd)
    fn = lambda v: jnp.sum(cubed(v * jnp.abs(X @ W)))  # noqa: E731
    for cast in (jax.grad(jax.grad(autocast(fn, BF16))), autocast(jax.grad(jax.grad(fn)), BF16)):
        near(jax.jit(cast)(1.0), jax.jit(jax.grad(jax.grad(fn)))(1.0), 2e-2)


def block(w, x):
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "kept") @ w)


POLICIES = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "a name": jax.checkpoint_policies.save_only_these_names("kept"),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", POLICIES)
def test_a_checkpoint_recomputes_what_its_policy_says(name):
    fn = lambda w, x: jax.checkpoint(block, policy=POLICIES[name])(w, x).sum()  # noqa: E731
    plain = operations(jax.grad(fn), W, X)
    for cast in (jax.grad(autocast(fn, BF16)), autocast(jax.grad(fn), BF16)):
        ops = operations(cast, W, X)
        for primitive in ("remat2", "checkpoint", "dot_general", "tanh", "sin"):
            assert len(named(ops, primitive)) == len(named(plain, primitive)), primitive
        assert {op.inputs for op in named(ops, "dot_general")} == {HALVES}
        near(cast(W, X), jax.grad(fn)(W, X), 5e-2)


def checked(w: Any, x: Any) -> Any:
    h = layer(w, x)
    checkify.check(jnp.all(h < -2.0), "too large")
    return h


def referred(w: Any, x: Any) -> Any:
    total = jax.new_ref(jnp.zeros((4, 8)))
    total[...] = x @ w
    total[...] += x @ w
    return total[...]


def scattered(w: Any, x: Any) -> Any:
    h = (x @ w).at[0].apply(jnp.sin).at[1].multiply(2.0).at[2].min(0.1)
    return h.at[3].set(jnp.ones(8))


def collected(w: Any, x: Any) -> Any:
    def row(x: Any) -> Any:
        h = x @ w
        return lax.pmean(h, "i") + lax.all_gather(h, "i").sum(0) + lax.pmax(h, "i")

    return jax.vmap(row, axis_name="i")(x)


def reduced(w: Any, x: Any) -> Any:
    return lax.reduce(x @ w, np.float32(0), lambda a, b: a + b, (0,))[None] + lax.reduce_window(
        x @ w, np.float32(0), lax.add, (4, 1), (1, 1), "VALID"
    )


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("fn", [referred, scattered, collected, reduced])
def test_what_moves_and_joins_numbers_takes_half_ones(fn):
    cast = autocast(fn, BF16, params=0)
    assert set(dots(cast, W, X)) == {HALVES}
    near(cast(W, X), fn(W, X))


def test_checks_are_made_inside_and_outside():
    inside = checkify.checkify(autocast(checked, BF16, params=0))
    for fn in (inside, autocast(checkify.checkify(checked), BF16, params=0)):
        error, out = fn(W, X)
        assert "too large" in str(error.get())
        near(out, layer(W, X))
        assert dots(fn, W, X) == [HALVES]


def solved(w: Any, x: Any) -> Any:
    matrix = w @ w.T + jnp.eye(8)
    return lax.custom_linear_solve(
        lambda v: matrix @ v, x[0], lambda mv, b: jnp.linalg.solve(matrix, b), symmetric=True
    )


def rooted(w: Any, x: Any) -> Any:
    return lax.custom_root(
        lambda y: y**3 - x[0, 0],
        jnp.float32(1.0),
        lambda f, y: jnp.cbrt(x[0, 0]),
        lambda g, y: y / g(jnp.float32(1.0)),
    )


def linear(w: Any, x: Any) -> Any:
    return jax.custom_derivatives.linear_call(lambda r, v: v @ r, lambda r, ct: ct @ r.T, w, x)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [solved, rooted, linear])
def test_solvers_and_linear_calls_run_in_float32(fn):
    x = jnp.abs(X) + 1.0
    cast = autocast(fn, BF16, params=0)
    near(cast(W, x), fn(W, x), 2e-2)
    near(jax.grad(lambda x: cast(W, x).sum())(x), jax.grad(lambda x: fn(W, x).sum())(x), 2e-2)


def test_an_unrounded_ragged_matmul_is_differentiated_in_a_checkpoint_and_a_branch():
    def experts(w: Any, x: Any) -> Any:
        sizes = jnp.array([len(x), 0])
        kernels = jnp.stack([w, w])
        return lax.ragged_dot(x, kernels, sizes, preferred_element_type=jnp.float32).sum()

    truth = jax.grad(experts)(W, X)
    branch = lambda w, x: lax.cond(x[0, 0] < 99, experts, lambda w, x: x.sum(), w, x)  # noqa: E731
    near(jax.grad(autocast(jax.checkpoint(experts), BF16))(W, X), truth)
    with pytest.warns(DtypePolicyWarning, match="names float32, and can't be traced in bfloat16"):
        near(jax.grad(autocast(branch, BF16))(W, X), truth)
