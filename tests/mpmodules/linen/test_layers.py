"""One table of layers drives the contracts that every layer of the linen wing keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from policy import get_policy, use_policy
from tests.programs import frozen_biases

IMAGE, ROWS, TOKENS = "image", "rows", "tokens"


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer of both `flax.linen` and ours.

    Attributes:
      make: makes the layer from a module of layers and keyword arguments.
      takes: what input it is called with.
      method: the method under test.
      call: further keyword arguments of the call.
      dtypes: whether the layer takes `dtype` and `param_dtype`.
      repaired: whether the arithmetic in half precision differs from upstream's.
    """

    make: Callable[..., Any]
    takes: str = ROWS
    method: str = "__call__"
    call: tuple[tuple[str, Any], ...] = ()
    dtypes: bool = True
    repaired: bool = False


CASES = {
    "Dense": Case(lambda nn, **kw: nn.Dense(6, **kw)),
    "DenseGeneral": Case(lambda nn, **kw: nn.DenseGeneral((2, 3), axis=-1, **kw)),
    "Einsum": Case(lambda nn, **kw: nn.Einsum((4, 6), "abc,cd->abd", **kw)),
    "Conv": Case(lambda nn, **kw: nn.Conv(6, (3, 3), **kw), IMAGE),
    "ConvLocal": Case(lambda nn, **kw: nn.ConvLocal(2, (3, 3), **kw), IMAGE),
    "ConvTranspose": Case(
        lambda nn, **kw: nn.ConvTranspose(6, (3, 3), strides=(2, 2), **kw), IMAGE
    ),
    "Embed": Case(lambda nn, **kw: nn.Embed(5, 4, **kw), TOKENS, repaired=True),
    "Embed.attend": Case(lambda nn, **kw: nn.Embed(5, 4, **kw), ROWS, method="attend"),
    "LayerNorm": Case(lambda nn, **kw: nn.LayerNorm(**kw), repaired=True),
    "RMSNorm": Case(lambda nn, **kw: nn.RMSNorm(**kw), repaired=True),
    "GroupNorm": Case(lambda nn, **kw: nn.GroupNorm(2, **kw), repaired=True),
    "BatchNorm train": Case(
        lambda nn, **kw: nn.BatchNorm(use_running_average=False, **kw), repaired=True
    ),
    "BatchNorm eval": Case(
        lambda nn, **kw: nn.BatchNorm(use_running_average=True, **kw), repaired=True
    ),
    "MultiHeadDotProductAttention": Case(
        lambda nn, **kw: nn.MultiHeadDotProductAttention(2, **kw), repaired=True
    ),
    "MultiHeadAttention": Case(
        lambda nn, **kw: nn.MultiHeadAttention(2, normalize_qk=True, **kw), repaired=True
    ),
    "SelfAttention": Case(lambda nn, **kw: nn.SelfAttention(2, **kw), repaired=True),
    "Dropout": Case(lambda nn: nn.Dropout(0.5, deterministic=False), dtypes=False),
    "Sequential": Case(
        lambda nn, **kw: nn.Sequential([nn.Dense(6, **kw), nn.relu, nn.Dense(4, **kw)])
    ),
}
WITH_DTYPES = [name for name, case in CASES.items() if case.dtypes]
pytestmark = pytest.mark.filterwarnings(
    "ignore:SelfAttention will be deprecated:DeprecationWarning"
)

HALVES = ("bfloat16", "float16")


def input_of(case: Case, dtype: Any = jnp.float32) -> jax.Array:
    rng = np.random.default_rng(0)
    if case.takes == TOKENS:
        return jnp.asarray(rng.integers(0, 5, (2, 3)))
    return jnp.asarray(rng.normal(size=(2, 5, 5, 4) if case.takes == IMAGE else (2, 3, 4)), dtype)


def init(case: Case, layer: Any, dtype: Any = jnp.float32) -> Any:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return layer.init(keys, input_of(case, dtype), method=case.method)


def apply(case: Case, layer: Any, variables: Any, x: Any) -> Any:
    rngs = {"dropout": jax.random.key(2)}
    return layer.apply(variables, x, method=case.method, rngs=rngs, mutable=["batch_stats"])


def gradient_program(
    case: Case, layer: Any, variables: Any, x: jax.Array, *, biases: bool = False
) -> str:
    """The lowered text of the output and of the gradients by parameters and input; by biases on
    demand.
    """

    def run(variables, x):
        def loss(variables, x):
            out, updated = apply(case, layer, variables if biases else frozen_biases(variables), x)
            return jnp.square(out.astype(jnp.float32)).sum(), (out, updated)

        argnums = (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return jax.value_and_grad(loss, argnums, has_aux=True)(variables, x)

    return jax.jit(run).lower(variables, x).as_text()


def leaf_dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_upstreams_tree_and_initial_values(name):
    case = CASES[name]
    assert_same_bits(*(init(case, case.make(nn)) for nn in (our_nn, flax_nn)))


@pytest.mark.parametrize("name", CASES)
def test_without_a_policy_a_float32_layer_is_upstreams_bit_for_bit(name):
    case = CASES[name]
    variables, x = init(case, case.make(flax_nn)), input_of(case)
    ours, theirs = case.make(our_nn), case.make(flax_nn)
    assert_same_bits(apply(case, ours, variables, x), apply(case, theirs, variables, x))
    programs = (
        gradient_program(case, layer, variables, x, biases=True) for layer in (ours, theirs)
    )
    assert len(set(programs)) == 1


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", WITH_DTYPES)
def test_without_a_policy_explicit_dtypes_give_upstreams_dtypes(name, half):
    """Ported code that still threads `dtype=` by hand keeps working as it was, repaired reductions
    aside.
    """
    case = CASES[name]
    x = input_of(case, half)

    def shapes_and_dtypes(nn):
        layer = case.make(nn, dtype=jnp.dtype(half))
        variables = jax.eval_shape(lambda: init(case, layer, half))
        out = jax.eval_shape(lambda v: apply(case, layer, v, x), variables)
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (variables, out))

    with jax.numpy_dtype_promotion("standard"):
        theirs = shapes_and_dtypes(flax_nn)
    # the norms inside Flax's attention are its own where no policy holds
    with jax.numpy_dtype_promotion("standard" if name == "MultiHeadAttention" else "strict"):
        assert shapes_and_dtypes(our_nn) == theirs


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", [name for name in WITH_DTYPES if not CASES[name].repaired])
def test_without_a_policy_explicit_dtypes_lower_to_upstreams_program(name, half):
    case = CASES[name]
    x = input_of(case, half)
    variables = jax.eval_shape(lambda: init(case, case.make(flax_nn)))
    layers = [case.make(nn, dtype=jnp.dtype(half)) for nn in (our_nn, flax_nn)]
    ours, theirs = (gradient_program(case, layer, variables, x) for layer in layers)
    assert ours == theirs


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "p=bf16,c=f16,o=f32"])
@pytest.mark.parametrize(
    "name", [name for name in CASES if name != "Sequential"]
)  # a container is a module
def test_under_a_scope_parameters_are_in_param_dtype_and_a_bare_root_returns_compute_dtype(
    name, policy
):
    case, policy = CASES[name], get_policy(policy)
    layer = case.make(our_nn)
    with use_policy(policy):
        variables = jax.eval_shape(lambda: init(case, layer))
        out, updated = jax.eval_shape(lambda v: apply(case, layer, v, input_of(case)), variables)
    assert leaf_dtypes(variables.get("params", {})) <= {policy.param_dtype.name}
    assert leaf_dtypes([variables.get("batch_stats", {}), updated]) <= {"float32"}
    # attention hands on compute_dtype from inside, but counts as a module: a boundary
    boundary = "Attention" in name
    assert out.dtype == (policy.output_dtype if boundary else policy.compute_dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_with_a_policy_of_its_own_returns_output_dtype(name):
    case = CASES[name]
    layer = case.make(our_nn).clone(dtype_policy="p=bf16,c=f16,o=f32")
    variables = jax.eval_shape(lambda: init(case, layer))
    out, _ = jax.eval_shape(lambda v: apply(case, layer, v, input_of(case)), variables)
    assert leaf_dtypes(variables.get("params", {})) <= {"bfloat16"}
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("name", CASES)
def test_gradients_come_back_in_the_dtypes_of_parameters_and_inputs(name):
    case = CASES[name]
    layer, x = case.make(our_nn), input_of(case, jnp.float16)
    with use_policy("p=f32,c=bf16,o=f32"):
        variables = jax.eval_shape(lambda: init(case, layer))

        def loss(variables, x):
            return apply(case, layer, variables, x)[0].astype(jnp.float32).sum()

        argnums = (0,) if case.takes == TOKENS else (0, 1)
        gradients = jax.eval_shape(jax.grad(loss, argnums), variables, x)
    assert leaf_dtypes(gradients[0]) <= {"float32"}
    assert leaf_dtypes(gradients[1:]) <= {"float16"}


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if not c.repaired and c.dtypes and n != "Sequential"]
)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_an_unrepaired_layer_under_a_scope_lowers_to_the_hand_threaded_program(name, policy):
    case, policy = CASES[name], get_policy(policy)
    theirs = case.make(flax_nn, dtype=policy.compute_dtype, param_dtype=policy.param_dtype)
    variables, x = jax.eval_shape(lambda: init(case, theirs)), input_of(case)
    with use_policy(policy):
        ours = gradient_program(case, case.make(our_nn), variables, x)
    assert ours == gradient_program(case, theirs, variables, x)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_close_to_our_own_float32(name, policy):
    case, policy = CASES[name], get_policy(policy)
    layer, x = case.make(our_nn), input_of(case)
    variables = init(case, layer)
    exact, _ = apply(case, layer, variables, x)
    with use_policy(policy):
        half, _ = apply(case, layer, variables, x)
    # each layer rounds its operands and its result: a few ulps of the largest output, attention's
    # three matmuls more
    ulps = 12 if "Attention" in name else 4
    atol = ulps * float(jnp.finfo(policy.compute_dtype).eps) * max(1.0, float(jnp.abs(exact).max()))
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=atol, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_jit_changes_nothing_under_a_policy(name):
    case = CASES[name]
    layer, x = case.make(our_nn), input_of(case)
    variables = init(case, layer)
    with use_policy("float32"):
        plain, _ = apply(case, layer, variables, x)
        jitted, _ = jax.jit(lambda v, x: apply(case, layer, v, x))(variables, x)
    np.testing.assert_allclose(jitted, plain, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_runs_on_an_empty_batch_and_under_eval_shape(name):
    case = CASES[name]
    layer, x = case.make(our_nn), input_of(case)
    variables = init(case, layer)
    with use_policy("mixed_bfloat16"):
        shaped, _ = jax.eval_shape(lambda v, x: apply(case, layer, v, x), variables, x[:0])
        out, _ = apply(case, layer, variables, x[:0])
    assert (out.shape, out.dtype) == (shaped.shape, shaped.dtype)
    assert out.shape[0] == 0
