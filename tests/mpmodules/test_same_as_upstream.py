"""With no policy and in float32 our layers are Flax's: tree, initial values, outputs, gradients,
state, errors. Under a policy programs are those that a careful author threads by hand.

Each case is built with Flax's API and with ours from the same arguments: those of the table of
layers, and more options. One jitted program initializes the layer, calls it and differentiates it.
Where both lower to the same text, they are equal bit for bit; otherwise both are run and compared.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import abc
import typing
from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import flax.nnx as flax_nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_linen
from mpmodules import nnx as our_nnx
from policy import get_policy
from tests.mpmodules.apis import BOTH, MIXED, Model, Text, dense, dropout, layer
from tests.mpmodules.table.cases import CASES, IMAGE, QUERIES, ROWS, Case
from tests.mpmodules.table.options import OPTIONS
from tests.mpmodules.table.running import OURS, THEIRS, floating, program, with_floats
from tests.programs import MOVES, assert_same_operations


def _everything(api: str, case: Case, modules: Any) -> tuple[Callable[..., Any], Any]:
    """Returns a function of a key and floating inputs, and these: of all that a layer is."""
    run = program(api, case, modules)

    def plain(tree: Any) -> Any:
        return flax_nnx.to_pure_dict(tree) if isinstance(tree, flax_nnx.State) else tree

    def of(key: jax.Array, floats: Any) -> Any:
        params, rest = run.init(key)

        def loss(params: Any, floats: Any) -> Any:
            out, state = run.apply(params, rest, with_floats(run.inputs, floats))
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out)), (out, state)

        gradients, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, floats)
        return jax.tree.map(_data, (*map(plain, (params, rest, gradients[0])), gradients, results))

    return of, floating(run.inputs)


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _assert_same(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Any) -> None:
    ours, theirs = jax.jit(ours), jax.jit(theirs)
    lowered, expected = (program.lower(jax.random.key(3), *inputs) for program in (ours, theirs))
    types, wanted = (jax.tree.leaves(each.out_info) for each in (lowered, expected))
    assert [str(x) for x in types] == [str(x) for x in wanted]
    if lowered.as_text() != expected.as_text():
        results = (jax.tree.leaves(run(jax.random.key(3), *inputs)) for run in (ours, theirs))
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)


ALL = [*CASES, *OPTIONS]


@pytest.mark.cases(fast=1, slow=10)
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("api", "case"), ALL, ids=[f"{api}-{case}" for api, case in ALL])
def test_a_layer_has_flaxs_tree_values_outputs_gradients_and_state(api, case):
    theirs, floats = _everything(api, case, THEIRS[api])
    ours, _ = _everything(api, case, OURS[api])
    _assert_same(ours, theirs, floats)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_functions_are_flaxs(masked, dropout):
    def made(module: Any) -> Callable[..., Any]:
        def run(key: jax.Array, *inputs: jax.Array) -> Any:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                mask = (q[..., 0].swapaxes(-1, -2)[..., None] > 0) if masked else None
                bias = jnp.ones((1, 1, q.shape[-3], k.shape[-3]))
                return module.dot_product_attention(
                    q, k, v, bias=bias, mask=mask, dropout_rate=dropout, dropout_rng=key
                )

            loss = lambda *args: jnp.sum(jnp.sin(attend(*args)))  # noqa: E731
            return jax.vjp(attend, *inputs)[0], jax.grad(loss, (0, 1, 2))(*inputs)

        return run

    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(k, (2, n, 2, 4)) for k, n in zip(keys, (5, 3, 3), strict=True)]
    _assert_same(made(our_linen), made(flax_linen), *inputs)
    _assert_same(made(our_nnx), made(flax_nnx), *inputs)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # Flax multiplies float32 weights by bfloat16 values
def test_softmax_forced_to_float32_leaves_flaxs_dtypes_where_no_policy_holds():
    for force in (True, False):
        found = []
        options: dict[str, Any] = {"num_heads": 2, "dtype": jnp.bfloat16}
        for nn in (our_linen, flax_linen):
            layer = nn.MultiHeadDotProductAttention(**options, force_fp32_for_softmax=force)
            out, variables = layer.init_with_output(jax.random.key(0), QUERIES)
            _, state = layer.apply(variables, QUERIES, sow_weights=True, mutable="intermediates")
            q = jnp.ones((2, 3, 2, 4), jnp.bfloat16)
            attended = nn.dot_product_attention(q, q, q, force_fp32_for_softmax=force)
            (weights,) = state["intermediates"]["attention_weights"]
            found.append((out.dtype, weights.dtype, attended.dtype))
        assert found[0] == found[1]


def _begun(layer: Any, x: Any = IMAGE) -> Any:
    return layer.init(jax.random.key(0), x)


KEYS = flax_nnx.Rngs(0)
SHORT_PARAMS = {"params": {"kernel": jnp.ones((2, 3))}}
WRONG: dict[str, Callable[[Any], Any]] = {
    "linen, an embedding of floats": lambda nn: _begun(nn.Embed(3, 4), ROWS),
    "linen, groups that do not divide": lambda nn: _begun(
        nn.Conv(6, (3, 3), feature_group_count=3)
    ),
    "linen, a mask of another shape": lambda nn: _begun(nn.Conv(6, (3, 3), mask=jnp.ones((2, 2)))),
    "linen, group norm's groups that do not divide": lambda nn: _begun(nn.GroupNorm(num_groups=3)),
    "linen, groups said twice": lambda nn: _begun(nn.GroupNorm(num_groups=2, group_size=2)),
    "linen, batch norm that does not know its mode": lambda nn: _begun(nn.BatchNorm()),
    "linen, heads that do not divide": lambda nn: _begun(
        nn.MultiHeadDotProductAttention(3), QUERIES
    ),
    "linen, dropout without a key": lambda nn: nn.Dropout(0.5, deterministic=False).apply({}, ROWS),
    "linen, dropout that does not know its mode": lambda nn: nn.Dropout(0.5).apply({}, ROWS),
    "linen, a call of an unbound layer": lambda nn: nn.Dense(3)(ROWS),
    "linen, params of another shape": lambda nn: nn.Dense(3).apply(SHORT_PARAMS, ROWS),
    "linen, no params at all": lambda nn: nn.Dense(3).apply({}, ROWS),
    "linen, an argument that does not exist": lambda nn: nn.Dense(3, units=2),
    "linen, no features": lambda nn: nn.Dense(),
    "nnx, an embedding of floats": lambda nnx: nnx.Embed(3, 4, rngs=KEYS)(jnp.ones((2,))),
    "nnx, a layer without keys": lambda nnx: nnx.Linear(2, 3),
    "nnx, an input of another width": lambda nnx: nnx.Linear(2, 3, rngs=KEYS)(ROWS),
    "nnx, an argument that does not exist": lambda nnx: nnx.Linear(2, 3, units=2, rngs=KEYS),
    "nnx, groups that do not divide": lambda nnx: nnx.GroupNorm(4, num_groups=3, rngs=KEYS),
    "nnx, heads that do not divide": lambda nnx: nnx.MultiHeadAttention(3, 8, rngs=KEYS),
    "nnx, attention that does not know its mode": lambda nnx: nnx.MultiHeadAttention(
        2, 8, rngs=KEYS
    )(QUERIES),
    "nnx, decoding without a cache": lambda nnx: nnx.MultiHeadAttention(
        2, 8, decode=True, rngs=KEYS
    )(QUERIES),
    "nnx, dropout without a key": lambda nnx: nnx.Dropout(0.5, deterministic=False)(ROWS),
    "nnx, norms called without an input": lambda nnx: nnx.LayerNorm(4, rngs=KEYS)(),
}


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize("what", WRONG)
def test_what_flax_rejects_is_rejected_with_its_error(what):
    api, found = what.partition(",")[0], []
    for modules in (OURS[api], THEIRS[api]):
        with pytest.raises(Exception) as caught:
            WRONG[what](modules)
        found.append(caught.value)
    assert type(found[0]) is type(found[1]), found


def test_a_linen_module_mixes_with_abstract_classes_and_protocols():
    class Steps(abc.ABC):
        @abc.abstractmethod
        def step(self) -> int: ...

    class Runs(typing.Protocol):
        def run(self) -> int: ...

    class Model(our_linen.Module, Steps, Runs):
        def step(self) -> int:
            return 1

        def run(self) -> int:
            return 2

    class Unfinished(our_linen.Module, Steps):
        width: int = 1

    # As in Flax, nobody checks where no abstract class is among the bases.
    class Unchecked(our_linen.Module):
        @abc.abstractmethod
        def step(self) -> int: ...

    assert isinstance(Model(), Steps)
    assert isinstance(Model(), our_linen.Module)
    with pytest.raises(TypeError, match="abstract"):
        Unfinished()  # pyright: ignore[reportAbstractUsage]
    assert isinstance(Unchecked(), flax_linen.Module)  # pyright: ignore[reportAbstractUsage]


def test_no_position_reaches_a_linen_modules_policy_parent_or_name():
    class Model(our_linen.Module):
        width: int

    class Wider(Model):
        depth: int = 2

    assert Wider(1, 3).depth == 3
    assert "dtype_policy" in typing.get_type_hints(Wider)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        Model(1, None)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        Wider(1, 3, "bfloat16")  # pyright: ignore[reportCallIssue]
    assert repr(Wider(1)).index("depth") < repr(Wider(1)).index("dtype_policy")


@pytest.mark.slow
def test_submodules_that_flax_does_not_import_by_itself_import_from_our_apis():
    from flax.linen import partitioning as flax_partitioning
    from flax.nnx import traversals as flax_traversals

    from mpmodules.linen import partitioning
    from mpmodules.nnx import traversals

    assert partitioning is flax_partitioning
    assert traversals is flax_traversals


IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), jnp.float32)
POLICIES = ("mixed_bfloat16", "bfloat16", "p=f32,c=bf16,o=bf16", "p=bf16,c=bf16,o=f32", "float32")
# Casts may stand before a move or after it, and nobody reads how often nnx drew random numbers.
NOT_COMPARED = (*MOVES, "convert_element_type", "scatter")


def conv(width: int, features: int, strides: int = 1, **dtypes: Any) -> Any:
    return layer(
        lambda nn: nn.Conv(features, (3, 3), strides=strides, **dtypes),
        lambda nnx, rngs: nnx.Conv(width, features, (3, 3), strides=strides, rngs=rngs, **dtypes),
    )


def plain(**dtypes: Any) -> Text:
    """Layers that need no numerical repair; `dtypes` are what an author threads by hand."""

    def features(self, x):
        x = jax.nn.relu(self.stem(x))
        x = x + self.drop(jax.nn.gelu(self.block(self.conv(x))))
        # no tanh: where it is an output it runs in float32, other than by hand
        return jnp.abs(x[:, :2, :2]).reshape(x.shape[0], -1)

    return Text(
        lambda self, x: self.head(jax.nn.silu(self.hidden(self.features(x)))),
        "Net",
        {"features": features},
        stem=conv(1, 4, 2, **dtypes),
        conv=conv(4, 4, **dtypes),
        block=Text(
            lambda self, x: x + self.down(self.up(x)),
            "Block",
            up=dense(4, 8, **dtypes),
            down=dense(8, 4, use_bias=False, **dtypes),
        ),
        drop=dropout(0.25),
        hidden=dense(16, 6, use_bias=False, **dtypes),
        head=layer(
            lambda nn: nn.DenseGeneral((2, 3), **dtypes),
            lambda nnx, rngs: nnx.LinearGeneral((6,), (2, 3), rngs=rngs, **dtypes),
        ),
    )


def by_hand(api: Any, text: Callable[..., Text], policy: Any) -> Model:
    """Returns Flax's model with dtypes threaded by hand, and casts around it."""
    policy = get_policy(policy)
    dtypes = {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
    model = api.theirs(text(**dtypes), IMAGES)
    inner = model.pure

    def pure(params: Any, x: jax.Array, **kwargs: Any) -> Any:
        return inner(params, x.astype(policy.compute_dtype), **kwargs).astype(policy.output_dtype)

    model.pure = pure
    return model


def gradient(model: Model) -> Any:
    """Returns the value and gradients of a loss, by parameters but biases, whose sum is ours."""

    def frozen(path: Any, leaf: Any) -> Any:
        is_bias = any(getattr(key, "key", None) == "bias" for key in path)
        return jax.lax.stop_gradient(leaf) if is_bias else leaf

    def loss(params: Any, x: jax.Array) -> jax.Array:
        params = jax.tree_util.tree_map_with_path(frozen, params)
        return jnp.square(model.pure(params, x).astype(jnp.float32)).sum()

    return jax.value_and_grad(loss)


@pytest.mark.cases(slow=3)
@BOTH
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["scope", "argument"])
def test_with_a_policy_programs_are_those_threaded_by_hand(api, policy, way):
    made = api.scoped(plain(), policy, None, IMAGES) if way == "scope" else None
    ours, hand = made or api.ours(plain(), policy, IMAGES), by_hand(api, plain, policy)

    def features(model: Model) -> Any:
        return lambda params, x: model.pure(params, x, method="features")

    for of in (lambda model: model.pure, gradient, *([features] if policy == MIXED else [])):
        given, others = (ours.params, IMAGES), (hand.params, IMAGES)
        assert_same_operations(of(ours), of(hand), *given, others=others, besides=NOT_COMPARED)
