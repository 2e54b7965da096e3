"""`policy.estimate` on the processor at hand: steps, examples, builders, donation and errors."""

import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import ShapeDtypeStruct

import policy
from mpmodules import linen, nnx
from policy.core import scope
from policy.core.scope import traced_for
from policy.inspect.estimate.costing import matmul_flops
from policy.inspect.estimate.steps import rows_of

F32 = jnp.float32
W, X = ShapeDtypeStruct((64, 64), F32), ShapeDtypeStruct((16, 64), F32)
WIDE_OUTPUT = "params=bfloat16,compute=bfloat16,output=float32"
estimate: Any = functools.partial(policy.estimate, on="cpu")


def loss(w, x):
    return jnp.sum(jnp.tanh(jnp.dot(x, w)).astype(F32))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.LayerNorm()(linen.Dense(64)(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def train_example(master_weights: Any = "auto", moment_dtype: Any = None):
    """A whole train step under the policy in force, from shapes alone."""
    current, net = policy.current_policy(), Net()
    assert current is not None
    params = jax.eval_shape(net.init, jax.random.key(0), X)["params"]
    options = {"master_weights": master_weights, "moment_dtype": moment_dtype}
    tx = policy.mixed_precision(optax.sgd(1e-3, momentum=0.9), current, **options)
    apply: Any = net.apply

    def step(params, state, x):
        value, gradients = policy.value_and_grad(
            lambda params: jnp.mean(jnp.square(apply({"params": params}, x).astype(F32))),
            policy=current,
        )(params)
        params, state, _ = policy.apply_gradients(tx, params, state, gradients)
        return params, state, value

    return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(tx.init, params), X)


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_a_row_has_the_compilers_own_memory():
    found = estimate(loss, W, X, policies=["float32"])["float32"]
    memory: Any = jax.jit(loss).lower(W, X).compile().memory_analysis()
    assert found.arguments == memory.argument_size_in_bytes == size((W, X))
    assert found.outputs == memory.output_size_in_bytes == 4
    assert found.temporaries == memory.temp_size_in_bytes
    assert found.memory == found.arguments + found.outputs + found.temporaries + found.code
    assert found.fits and found.spare == found.capacity - found.memory > 0
    assert found.seconds is None and found.cycles is None and found.kernels and found.bytes


def test_flops_are_those_of_the_audit():
    rows = estimate(loss, W, X, policies=["float32", "mixed_bfloat16"])
    assert rows["float32"].matmul_flops == {"float32": 2 * 16 * 64 * 64}
    assert rows["mixed_bfloat16"].matmul_flops == {"bfloat16": 2 * 16 * 64 * 64}
    written = policy.audit(loss, W, X, policy="mixed_bfloat16")
    assert dict(rows["mixed_bfloat16"].flops) == written.flops_by_dtype


def test_code_that_knows_of_no_policy_runs_under_autocast():
    rows = estimate(loss, W, X, policies=["float32", "mixed_bfloat16", None]).rows
    assert [row.name for row in rows] == ["float32", "mixed_bfloat16", "as written"]
    assert [row.route for row in rows] == ["scope", "autocast", "as written"]


def test_layers_obey_the_scope_and_the_rules():
    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    flops = 2 * 16 * 64 * 64, 2 * 16 * 64 * 8
    rows = estimate(net.apply, params, X, policies=["mixed_bfloat16"], rules={"Dense_0": "f32"})
    assert rows.rows[0].route == "scope"
    # Dense_0 is the last
    assert rows.rows[0].matmul_flops == {"float32": flops[1], "bfloat16": flops[0]}
    with pytest.raises(ValueError, match="Rule 'Dense_7' matched no module"):
        estimate(net.apply, params, X, policies=["mixed_bfloat16"], rules={"Dense_7": "f32"})


def test_gradients_are_estimated_too():
    forward = estimate(loss, W, X, policies=["float32"]).rows[0]
    both = estimate(loss, W, X, policies=["float32"], backward=True, params=0).rows[0]
    assert both.matmul_flops["float32"] == 2 * forward.matmul_flops["float32"]
    assert both.outputs >= forward.outputs + size(W)


@pytest.mark.slow
def test_an_example_is_made_anew_under_each_policy_with_the_rows_options():
    kept = {"master_weights": "remainder"}
    cases: dict[str, tuple[str, Any]] = {
        "mixed": ("mixed_bfloat16", {}),
        "kept": ("bfloat16", kept),
        "narrow": ("bfloat16", kept | {"moment_dtype": "bfloat16"}),
    }
    rows = estimate(train_example, policies={**cases, "mixed": "mixed_bfloat16"})
    expected = {}
    for name, (text, options) in cases.items():
        with policy.use_policy(text):
            expected[name] = size(train_example(**options)[1])
    assert {row.name: row.arguments for row in rows.rows} == expected
    assert expected["narrow"] < expected["kept"]
    assert rows.name == "train_example" and rows["kept"].policy == "bfloat16"


def test_an_example_may_require_a_mesh_and_needs_no_other_default():
    def example(mesh, size=64):
        return loss, (ShapeDtypeStruct((size, size), F32), ShapeDtypeStruct((mesh.size, size), F32))

    assert estimate(example, policies=["float32"])["float32"].fits
    with pytest.raises(TypeError, match="2 required positional arguments: 'w' and 'x'"):
        estimate(lambda mesh, w, x: w @ x, policies=["float32"])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["float32", "mixed_bfloat16"])  # by the scope, and by autocast
def test_arguments_are_donated_by_the_jitted_function_or_by_position(text):
    step = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), x.sum())  # noqa: E731
    outputs = lambda fn, **how: estimate(fn, W, X, policies=[text], **how).rows[0].outputs  # noqa: E731
    kept = outputs(jax.jit(step))
    assert kept - outputs(jax.jit(step, donate_argnums=0)) == size(W)
    assert kept - outputs(step, donate=0) == kept - outputs(step, donate=(-2,)) == size(W)


def test_a_donation_that_nothing_overwrites_is_a_note():
    found = estimate(loss, W, X, policies=["float32"], donate=(0, 1))
    assert any("donated buffers were not usable" in note for note in found.notes)


def test_texts_that_depend_on_the_backend_mean_the_targets(monkeypatch):
    asked = []

    def traced_for_v5e(device):
        asked.append(device.platform)
        return traced_for(types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"))

    module = sys.modules["policy.inspect.estimate.estimate"]  # `policy.estimate` is the function
    monkeypatch.setattr(module, "traced_for", traced_for_v5e)
    net, x = linen.Dense(64), ShapeDtypeStruct((16, 64), F32)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    texts = ["half", "p=f32,c=bf16,m=8bit"]
    found = estimate(net.apply, variables, x, policies=texts, rules={".*": "half"})
    assert asked == ["cpu"]
    in_8_bits = "params=float32,compute=bfloat16,output=bfloat16,matmul=i8"
    assert [row.policy for row in found.rows] == ["bfloat16", in_8_bits]
    assert all(set(row.matmul_flops) == {"bfloat16"} for row in found.rows)


def test_an_exception_of_the_step_has_a_note_with_its_row():
    def step(w):
        if policy.current_policy() == policy.get_policy("bfloat16"):
            raise KeyError("no such layer")
        return w + 1.0

    with pytest.raises(KeyError, match="no such layer") as raised:
        estimate(step, W, policies=["float32", "bfloat16"])
    assert raised.value.__notes__[-1] == ("This is the row 'bfloat16' of an estimate on cpu.")


def test_an_nnx_model_is_built_under_each_policy():
    build = lambda: NnxNet(nnx.Rngs(0))  # noqa: E731
    loss = nnx.jit(lambda model, x: jnp.sum(jnp.square(model(x).astype(F32))))
    rows = estimate(loss, build, X, policies=["mixed_bfloat16", "bfloat16"])
    params = 64 * 64 + 64 + 64 * 8 + 8
    assert [row.arguments for row in rows.rows] == [4 * params + size(X), 2 * params + size(X)]
    assert all(row.matmul_flops == {"bfloat16": 2 * 16 * 64 * 72} for row in rows.rows)
    named = {(buffer.kind, buffer.path) for buffer in rows.rows[0].buffers}
    assert {("argument", "hidden/kernel"), ("temporary", "hidden")} <= named
    # The state that it returns as it is takes no memory.
    assert all(row.outputs < 100 for row in rows.rows)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("text", "width"), [("bfloat16", 2), ("mixed_bfloat16", 4)])
def test_the_result_of_an_identity_is_an_output(text, width):
    # The last operation of a layer with a bias is an identity, for the bias's gradient.
    build = lambda: NnxNet(nnx.Rngs(0))  # noqa: E731
    row = estimate(lambda model, x: model(x), build, X, policies=[text]).rows[0]
    assert row.outputs >= 16 * 8 * width and row.bytes > row.arguments


def test_an_nnx_train_step_updates_its_model_in_place():
    def train(model, optimizer, x):
        loss = lambda model: jnp.mean(jnp.square(model(x).astype(F32)))  # noqa: E731
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    def example():
        model = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))
        tx = optax.sgd(1e-3, 0.9)
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, tx, wrt=nnx.Param))
        return train, (model, optimizer, X)

    kept = estimate(example, policies=["float32"]).rows[0]
    donated = estimate(example, policies=["float32"], donate=(0, 1)).rows[0]
    model = 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert kept.arguments == donated.arguments >= 2 * model + size(X)
    assert kept.outputs - donated.outputs == pytest.approx(2 * model, abs=64)


def test_a_bound_method_and_a_module_are_functions():
    with policy.use_policy("float32"):
        model = NnxNet(nnx.Rngs(0))
    by_module = estimate(model, X, policies=[None]).rows[0]
    by_method = estimate(model.hidden.__call__, X, policies=[None]).rows[0]
    assert by_module.matmul_flops == {"float32": 2 * 16 * 64 * 72}
    assert by_method.matmul_flops == {"float32": 2 * 16 * 64 * 64}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("fn", "args", "arguments", "outputs"),
    [
        (lambda tree, x: (tree, x + 1.0), ({}, X), 4096, 4096),
        (lambda tree: tree, ({},), 0, 0),
        (lambda x: None, (X,), 4096, 0),
        (lambda: jnp.ones(3) + 1.0, (), 0, 12),
        (lambda x, n: x * n, (X, 3), 4096, 4096),
        (lambda tree: tree["n"] + 1, ({"n": np.arange(4, dtype=np.int32), "m": None},), 16, 16),
        (lambda k, x: x + jax.random.normal(k, x.shape), (jax.random.key(0), X), 4104, 4096),
        (lambda x: x * 2.0, (np.full(8, np.nan, np.float32),), 32, 32),
    ],
    ids=["empty tree", "nothing", "no result", "constants", "static", "integers", "key", "NaN"],
)
def test_any_tree_is_a_call(fn, args, arguments, outputs):
    found = estimate(fn, *args, policies=["float32"]).rows[0]
    tuples = 16 if outputs and len(args) > 0 and isinstance(args[0], dict) and args[0] == {} else 0
    assert found.arguments == arguments and outputs <= found.outputs <= outputs + tuples + 16


@pytest.mark.parametrize(("reads", "traces"), [(False, 1), (True, 2)])
def test_a_function_that_reads_no_policy_is_traced_once(monkeypatch, reads, traces):
    monkeypatch.setattr(scope, "_read", set())
    monkeypatch.setattr(scope, "_unread", {})
    seen = []

    def step(w, x):
        seen.append(policy.current_policy() if reads else None)
        return jnp.sum(x) if seen[-1] else jnp.sum(jnp.tanh(jnp.dot(x, w)))

    row = estimate(step, W, X, policies=["mixed_bfloat16"]).rows[0]
    assert len(seen) == traces
    assert row.route == "autocast"
    assert dict(row.matmul_flops) == {"bfloat16": 2 * 16 * 64 * 64}


def test_an_array_that_is_given_twice_counts_once_and_is_not_donated():
    array = jnp.ones((64, 64))
    step = lambda a, b: (a + 1.0, b + 1.0)  # noqa: E731
    assert estimate(step, array, array, policies=["float32"]).rows[0].arguments == size(W)
    with pytest.raises(ValueError, match=r"args\[0\] and args\[1\] are the same array, and it is"):
        estimate(step, array, array, policies=["float32"], donate=0)


def test_time_on_the_host_is_not_counted():
    def fn(x):
        jax.debug.callback(lambda _: None, x[0])
        return x + 1.0

    row = estimate(fn, X, policies=[None]).rows[0]
    assert "time on the host of debug_callback" in row.uncounted


def test_x64_is_estimated_as_it_is():
    with jax.enable_x64(True):
        wide = [ShapeDtypeStruct(x.shape, jnp.float64) for x in (W, X)]
        assert estimate(loss, *wide, policies=["float64"]).rows[0].arguments == 2 * size((W, X))
    with pytest.raises(ValueError, match="asks for float64, but JAX runs with x64 disabled"):
        estimate(loss, W, X, policies=["float64"])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((3, W), {}, "estimate takes a function or a module, but got 3"),
        ((loss,), {}, "missing 2 required positional arguments: 'w' and 'x'"),
        ((lambda: "x",), {}, r"should return .* but returned a str"),
        ((lambda: (1, 2),), {}, "but returned a tuple of int, int"),
        ((train_example,), {"master_weights": "auto"}, "train_example .* returned a value of type"),
        ((train_example,), {"policies": [("f32", {"masters": 1})]}, "unexpected keyword argument"),
        ((loss, W, X), {"policies": [("f32", {"n": 1})]}, "The row 'float32, n=1' has options"),
        ((loss, W, X), {"donate": 2}, r"positions of the 2 arguments, such as \(0, 1\), but got 2"),
        ((loss, W, X), {"donate": "w"}, "but got 'w'"),
        ((loss, W, X), {"params": 0}, "params=0 selects the arguments to differentiate"),
        ((loss, W, X), {"policies": []}, "policies should be a sequence of policies, or a mapping"),
        ((loss, W, X), {"policies": ["f32", "float32"]}, "Two rows are named 'float32': drop one"),
        ((loss, W, X), {"policies": [("f32", 3)]}, r"or a pair of a policy and .*'f32', 3"),
        ((loss, W, X), {"policies": [4]}, "A policy should be a Policy or its text form"),
    ],
)
def test_a_call_that_makes_no_sense_is_rejected(args, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        estimate(*args, **({"policies": ["float32"]} | options))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("policies", "rows"),
    [
        ("mixed_bfloat16", [("mixed_bfloat16", "mixed_bfloat16")]),
        ([("p=bf16,c=bf16,o=f32", {"rate": 8})], [(f"{WIDE_OUTPUT}, rate=8", WIDE_OUTPUT)]),
        ([None], [("as written", "")]),
        ({"a": None, "b": "bf16"}, [("a", ""), ("b", "bfloat16")]),
    ],
)
def test_rows_have_the_names_of_policies_and_options(policies, rows):
    assert [(row.name, row.policy_text) for row in rows_of(policies)] == rows


def matmuls(x):
    half = x.astype(jnp.bfloat16)
    mixed = (("high", "default"), ("default", "highest"), ("highest", "high"))
    levels = (None, "default", "high", "highest", *mixed)
    return half @ half, [jnp.dot(x, x, precision=level) for level in levels]


PASSES = {"float32 x6": 1, "float32 x2": 1, "float32 x5": 1}


@pytest.mark.parametrize(
    ("platform", "shares"),
    [
        ("cpu", {"bfloat16": 1, "float32": 7}),
        ("cuda", {"bfloat16": 1, "tf32": 4, "float32": 3}),
        ("tpu", {"bfloat16": 1, "float32": 2, "float32 x3": 2} | PASSES),
    ],
)
def test_float32_counts_by_its_passes_on_a_tpu_and_as_tf32_on_a_gpu(platform, shares):
    operations = policy.audit(matmuls, jnp.ones((4, 4))).operations
    found = matmul_flops(operations, platform)
    assert found == {dtype: 2 * 4**3 * count for dtype, count in shares.items()}
    assert list(found.values()) == sorted(found.values(), reverse=True)
