"""autocast of nnx models: state goes in and out, and modules have names."""

import dataclasses
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import autocast
from tests.eight_devices import run_python
from tests.programs import named, operations

X = jax.random.normal(jax.random.key(0), (4, 8))


class Block(flax_nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs):
        self.up = flax_nnx.Linear(8, 16, rngs=rngs)
        self.norm = flax_nnx.LayerNorm(16, rngs=rngs)
        self.down = flax_nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(flax_nnx.gelu(self.norm(self.up(x))))


class Model(flax_nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs):
        self.layers = flax_nnx.List([Block(rngs) for _ in range(2)])
        self.norm = flax_nnx.BatchNorm(8, rngs=rngs)
        self.drop = flax_nnx.Dropout(0.5, rngs=rngs)
        self.head = flax_nnx.Linear(8, 4, rngs=rngs)

    def encode(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __call__(self, x: Any) -> Any:
        return self.head(self.drop(self.norm(self.encode(x))))


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(model(x)))


@pytest.fixture
def model() -> Any:
    return Model(flax_nnx.Rngs(0))


@pytest.mark.slow
def test_a_model_a_method_and_a_function_of_one_are_near_float32_and_change_its_state(model):
    plain, cast = flax_nnx.clone(model), autocast(model, "mixed_bfloat16")
    for _ in range(2):  # the second call draws another mask, and updates the statistics again
        expected, found = plain(X), cast(X)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, atol=0.05)
        np.testing.assert_array_equal(found == 0, expected == 0)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-2)
    assert model.norm.mean[...].dtype == jnp.float32
    assert model.drop.rngs.count[...] == plain.drop.rngs.count[...] > 0
    encoded, loss = (autocast(f, "mixed_bfloat16") for f in (model.encode, loss_fn))
    np.testing.assert_allclose(encoded(X), plain.encode(X), atol=0.1)
    np.testing.assert_allclose(loss(model, X), loss_fn(plain, X), rtol=0.05)


def test_new_weights_are_seen_without_another_trace(model):
    traces = []

    def forward(model: Any, x: Any) -> Any:
        traces.append(1)
        return model.head(x)

    cast = autocast(forward, "mixed_bfloat16")
    before, count = cast(model, X), len(traces)
    model.head.kernel[...] = 2 * model.head.kernel[...]
    np.testing.assert_allclose(cast(model, X), 2 * before, rtol=1e-2, atol=1e-2)
    assert len(traces) == count


@pytest.mark.slow
def test_gradients_are_float32s_to_a_few_bits_in_either_order(model):
    model.drop.deterministic = True
    truth = flax_nnx.grad(loss_fn)(flax_nnx.clone(model), X)
    inside = flax_nnx.grad(autocast(loss_fn, "mixed_bfloat16"))(flax_nnx.clone(model), X)
    outside = autocast(flax_nnx.grad(loss_fn), "mixed_bfloat16")(flax_nnx.clone(model), X)
    for found in (inside, outside):
        whole = [jax.flatten_util.ravel_pytree(tree)[0] for tree in (found, truth)]
        assert {g.dtype.name for g in jax.tree.leaves(found)} == {"float32"}
        assert np.linalg.norm(whole[0] - whole[1]) < 0.05 * np.linalg.norm(whole[1])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("differentiated", [False, True])
def test_rules_reach_the_modules_of_a_flax_model_by_their_path(model, differentiated):
    cast = autocast(loss_fn, "mixed_bfloat16", rules={"layers/1/up": "f32"})
    fn: Any = flax_nnx.grad(cast) if differentiated else cast
    graph, state = flax_nnx.split(model)
    run = lambda state: fn(flax_nnx.merge(graph, state, copy=True), X)  # noqa: E731
    found = named(operations(run, state), "dot_general")
    wide = [op for op in found if op.inputs == ("float32", "float32")]
    assert {op.inputs for op in found} == {("float32", "float32"), ("bfloat16", "bfloat16")}
    assert len(wide) == (3 if differentiated else 1)
    assert all("layers/1/up" in op.path for op in wide)
    text = r"Rule 'layers/1/upp' matched no module\. Modules seen: .*layers/1/up"
    with pytest.raises(ValueError, match=text):
        autocast(loss_fn, "mixed_bfloat16", rules={"layers/1/upp": "f32"})(model, X)


def test_a_report_names_modules_and_parameters(model):
    report = autocast(loss_fn, "mixed_bfloat16").explain(model, X)
    text = str(report)
    assert "layers/0/up" in text and "'head'" in text.splitlines()[0]
    assert not report.wide_matmuls and not report.opaque_matmuls


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("first", [(), ("mpmodules.nnx",)], ids=["policy alone", "mpmodules"])
def test_the_functional_idiom_is_that_of_jit_whatever_is_imported(first):
    assert "done" in run_python("-m", "tests.mpmodules.nnx.functional_idiom", *first)


def test_a_state_beside_a_module_stays_as_it_is_and_the_module_changes(model):
    graph, rest = flax_nnx.split(flax_nnx.BatchNorm(8, rngs=flax_nnx.Rngs(0)))

    def run(model: Any, rest: Any, x: Any) -> Any:
        return flax_nnx.merge(graph, rest)(model.norm(x))

    autocast(run, "mixed_bfloat16")(model, rest, X + 1)
    np.testing.assert_array_equal(rest["mean"][...], np.zeros(8))
    assert np.all(np.asarray(model.norm.mean[...]) != 0)


@dataclasses.dataclass
class Scale:
    by: float


class Scaled(flax_nnx.Module):
    """Multiplies by what stands in a list, or in whatever `static` is."""

    def __init__(self, static: Any):
        self.head = flax_nnx.Linear(8, 4, rngs=flax_nnx.Rngs(0))
        self.static = flax_nnx.static(static)

    def __call__(self, x: Any) -> Any:
        return self.head(x) * jnp.float32(self.scale())

    def scale(self) -> Any:
        if isinstance(self.static, Scale):
            return self.static.by
        return next(iter(self.static["scales"] if isinstance(self.static, dict) else self.static))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "static", [[2.0, 3], {"scales": [2.0], "of": {2}}, {2.0}, Scale(2.0)], ids=type
)
def test_a_model_with_static_data_that_has_no_hash_runs_as_it_does_plainly(static):
    model = Scaled(static)
    cast = autocast(model, "mixed_bfloat16")
    for _ in range(2):
        np.testing.assert_allclose(cast(X), model(X), atol=0.05)
    model.head.kernel[...] = 2 * model.head.kernel[...]
    np.testing.assert_allclose(cast(X), model(X), atol=0.05)
    gradient = flax_nnx.grad(autocast(loss_fn, "mixed_bfloat16"))(model, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
    assert not autocast(model, "mixed_bfloat16").explain(X).wide_matmuls


def test_lists_of_equal_contents_share_a_program_and_others_do_not():
    traces = []

    def forward(model: Any, x: Any) -> Any:
        traces.append(1)
        return model(x)

    cast = autocast(forward, "mixed_bfloat16")
    model = Scaled([2.0, 3])
    first, count = cast(model, X), len(traces)
    np.testing.assert_array_equal(cast(Scaled([2.0, 3]), X), first)
    assert len(traces) == count
    model.static[0] = 4.0
    np.testing.assert_allclose(cast(model, X), 2 * first, rtol=1e-2)
    for other in ([2, 3], [True, 3], [2.0, 3.0], (2.0, 3)):
        cast(Scaled(other), X)
    assert len(traces) == 6 * count


@pytest.mark.slow
def test_layers_that_are_static_in_a_set_are_read_at_each_call():
    class Holder(flax_nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.layers = {flax_nnx.Linear(8, 4, rngs=flax_nnx.Rngs(0))}

        def __call__(self, x: Any) -> Any:
            return next(iter(self.layers))(x)

    model = Holder()
    cast = autocast(model, "mixed_bfloat16")
    before = cast(X)
    kernel = next(iter(model.layers)).kernel
    kernel[...] = 2 * kernel[...]
    np.testing.assert_allclose(cast(X), 2 * before, rtol=1e-2, atol=1e-2)
