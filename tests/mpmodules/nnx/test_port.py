"""A port changes one import line: same tree, same values, and the program a careful author threads
by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, use_policy
from tests.programs import MOVES, assert_same_operations

# One text, run once with Flax's nnx and once with ours; `dtypes` is what an author threads through
# it by hand.
MODEL = """
class Block(nnx.Module):
    def __init__(self, features, *, rngs):
        self.conv = nnx.Conv(features, features, (3, 3), **dtypes, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.gelu(self.conv(x)))

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.stem = nnx.Conv(1, 4, (3, 3), strides=2, **dtypes, rngs=rngs)
        self.blocks = nnx.List([Block(4, rngs=rngs), Block(4, rngs=rngs)])
        self.hidden = nnx.Linear(4, 6, use_bias=False, **dtypes, rngs=rngs)
        self.head = nnx.LinearGeneral((6,), (3,), **dtypes, rngs=rngs)

    def features(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x.mean((1, 2))

    def __call__(self, x):
        return self.head(nnx.tanh(self.hidden(self.features(x))))
"""
IMAGES = np.linspace(-1, 1, 2 * 8 * 8, dtype=np.float32).reshape(2, 8, 8, 1)


def net(module, **dtypes):
    namespace = {"nnx": module, "dtypes": dtypes, "__name__": "ported"}
    exec(MODEL, namespace)
    return namespace["Net"](rngs=module.Rngs(0, dropout=1))


def abstract(build, *args, **kwargs):
    """What `build` builds, shapes and dtypes only: programs can be lowered from it, and no
    initialiser is compiled.
    """
    return flax_nnx.eval_shape(lambda: build(*args, **kwargs))


def leaves(model):
    return {
        "/".join(map(str, path)): leaf
        for path, leaf in flax_nnx.to_flat_state(flax_nnx.state(model))
    }


def assert_same_initializer(ours, theirs):
    """The same state tree, and the same program that fills it: the values are the same without
    compiling it.
    """

    def initial_state(build):
        return jax.jit(lambda: flax_nnx.state(build())).lower()

    ours, theirs = initial_state(ours), initial_state(theirs)
    assert jax.tree.structure(ours.out_info) == jax.tree.structure(theirs.out_info)
    assert ours.as_text() == theirs.as_text()


def assert_same_tree_and_values(ours, theirs):
    ours, theirs = leaves(ours), leaves(theirs)
    assert list(ours) == list(theirs)
    for path in theirs:
        assert type(ours[path]) is type(theirs[path]), path
        a, b = ours[path].get_value(), theirs[path].get_value()
        assert a.dtype == b.dtype, path
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b, err_msg=path)


def lowered(model, *args, **options):
    """The StableHLO text of `called`."""
    function, arguments = called(model, *args, **options)
    return jax.jit(function).lower(*arguments).as_text()


def called(
    model, *args, before=lambda x: x, after=lambda x: x, method="__call__", grad=True, biases=False
):
    """A call of `model`, or its sum's gradient by the parameters and the first argument, as a
    function and its arguments.

    Biases are frozen but on demand: the sum of their gradient is ours, the rest is the program
    threaded by hand.
    """
    graphdef, params, rest = flax_nnx.split(model, flax_nnx.Param, ...)

    def frozen(path, leaf):
        return (
            jax.lax.stop_gradient(leaf)
            if any(getattr(key, "key", None) == "bias" for key in path)
            else leaf
        )

    def program(params, first, rest):
        params = params if biases else jax.tree_util.tree_map_with_path(frozen, params)
        module = flax_nnx.merge(graphdef, params, rest, copy=True)
        return after(getattr(module, method)(before(first)))

    def total(params, first, rest):
        return program(params, first, rest).astype(jnp.float32).sum()

    first = jnp.asarray(*args)
    if not grad:
        return program, (params, first, rest)
    by = (0, 1) if jnp.issubdtype(first.dtype, jnp.floating) else 0
    return jax.grad(total, by), (params, first, rest)


def assert_same(ours, theirs):
    """Asserts that calls have the same operations; casts may stand before a move or after it."""
    (f, arguments), (g, others) = ours, theirs
    besides = (*MOVES, "convert_element_type")
    assert_same_operations(f, g, *arguments, others=others, besides=besides)


def test_the_port_has_the_same_tree_and_initial_values():
    with use_policy("mixed_bfloat16"):
        ported = net(nnx)
    assert_same_tree_and_values(ported, net(flax_nnx))


@pytest.mark.parametrize("policy", [None, "mixed_float16", "float32"])
def test_the_port_is_initialised_by_the_same_program_under_every_policy(policy):
    with use_policy(policy):
        assert_same_initializer(lambda: net(nnx), lambda: net(flax_nnx))


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
def test_without_a_policy_the_port_is_the_same_program(grad):
    ours, theirs = abstract(net, nnx), abstract(net, flax_nnx)
    programs = [lowered(model, IMAGES, grad=grad, biases=True) for model in (ours, theirs)]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize(
    "text", ["mixed_bfloat16", "float32", "p=bf16,c=bf16,o=f32", "p=f32,c=bf16"]
)
def test_with_a_policy_the_port_is_the_program_threaded_by_hand(text, grad):
    with use_policy(text):
        ported = abstract(net, nnx)
    policy = ported.dtype_policy
    theirs = abstract(net, flax_nnx, dtype=policy.compute_dtype, param_dtype=policy.param_dtype)
    by_hand = called(
        theirs,
        IMAGES,
        before=lambda x: x.astype(policy.compute_dtype),
        after=lambda x: x.astype(policy.output_dtype),
        grad=grad,
    )
    assert_same(called(ported, IMAGES, grad=grad), by_hand)


def test_a_policy_on_the_model_itself_is_the_same_program_as_one_in_scope():
    namespace = {"nnx": nnx, "dtypes": {}, "__name__": "ported"}
    exec(MODEL, namespace)
    with use_policy("mixed_bfloat16"):
        scoped = abstract(lambda: namespace["Net"](rngs=nnx.Rngs(0, dropout=1)))
    given = abstract(
        lambda: namespace["Net"](rngs=nnx.Rngs(0, dropout=1), dtype_policy="mixed_bfloat16")
    )
    assert lowered(scoped, IMAGES) == lowered(given, IMAGES)


def test_another_public_method_called_from_outside_is_the_program_threaded_by_hand():
    with use_policy("mixed_bfloat16"):
        ported = abstract(net, nnx)
    by_hand = called(
        abstract(net, flax_nnx, dtype=jnp.bfloat16),
        IMAGES,
        before=lambda x: x.astype(jnp.bfloat16),
        after=lambda x: x.astype(jnp.float32),
        method="features",
    )
    assert_same(called(ported, IMAGES, method="features"), by_hand)


X = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
IDS = np.array([[0, 2, 6], [6, 6, 1]])

# Every layer of ours: how it is built, and what it is called with.
LAYERS = {
    "Linear": (lambda m, r, **k: m.Linear(4, 3, rngs=r, **k), (X,)),
    "LinearGeneral": (
        lambda m, r, **k: m.LinearGeneral((5, 4), (2, 3), axis=(-2, -1), rngs=r, **k),
        (X,),
    ),
    "Einsum": (lambda m, r, **k: m.Einsum("btc,cd->btd", (4, 3), (3,), rngs=r, **k), (X,)),
    "Conv": (lambda m, r, **k: m.Conv(4, 3, (3,), rngs=r, **k), (X,)),
    "ConvTranspose": (lambda m, r, **k: m.ConvTranspose(4, 3, (3,), rngs=r, **k), (X,)),
    "Embed": (lambda m, r, **k: m.Embed(7, 4, rngs=r, **k), (IDS,)),
    "LayerNorm": (lambda m, r, **k: m.LayerNorm(4, rngs=r, **k), (X,)),
    "RMSNorm": (lambda m, r, **k: m.RMSNorm(4, rngs=r, **k), (X,)),
    "GroupNorm": (lambda m, r, **k: m.GroupNorm(4, num_groups=2, rngs=r, **k), (X,)),
    "BatchNorm": (lambda m, r, **k: m.BatchNorm(4, rngs=r, **k), (X,)),
    "BatchNormEval": (
        lambda m, r, **k: m.BatchNorm(4, use_running_average=True, rngs=r, **k),
        (X,),
    ),
    "MultiHeadAttention": (
        lambda m, r, **k: m.MultiHeadAttention(2, 4, rngs=r, decode=False, **k),
        (X,),
    ),
    "MultiHeadAttentionAllOptions": (
        lambda m, r, **k: m.MultiHeadAttention(
            4,
            4,
            num_kv_heads=2,
            normalize_qk=True,
            dropout_rate=0.5,
            deterministic=False,
            rngs=r,
            decode=False,
            **k,
        ),
        (X,),
    ),
    "Dropout": (lambda m, r: m.Dropout(0.5, rngs=r), (X,)),
    "Sequential": (
        lambda m, r: m.Sequential(m.Linear(4, 3, rngs=r), m.relu, m.LayerNorm(3, rngs=r)),
        (X,),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_has_flax_s_tree_and_initial_values_under_every_policy(name):
    build, _ = LAYERS[name]
    for policy in (None, "mixed_bfloat16", "float32"):
        with use_policy(policy):
            assert_same_initializer(
                lambda: build(nnx, nnx.Rngs(3)), lambda: build(flax_nnx, flax_nnx.Rngs(3))
            )


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("Dropout", "Sequential")])
def test_each_layer_stores_half_parameters_as_flax_does(name):
    build, _ = LAYERS[name]
    with use_policy("bfloat16"):
        assert_same_initializer(
            lambda: build(nnx, nnx.Rngs(3)),
            lambda: build(flax_nnx, flax_nnx.Rngs(3), param_dtype=jnp.bfloat16),
        )


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_policy_each_layer_is_flax_s_own_program(name):
    build, args = LAYERS[name]
    ours, theirs = (abstract(lambda m=m: build(m, m.Rngs(3))) for m in (nnx, flax_nnx))
    for grad in (False, True):
        assert lowered(ours, *args, grad=grad) == lowered(theirs, *args, grad=grad)


def test_embed_attend_without_a_policy_is_flax_s_own_program():
    ours, theirs = (abstract(lambda m=m: m.Embed(7, 4, rngs=m.Rngs(0))) for m in (nnx, flax_nnx))
    assert lowered(ours, X, method="attend") == lowered(theirs, X, method="attend")


@pytest.mark.parametrize(
    "options",
    [
        {"mask": True},
        {"is_causal": True},
        {"sow_weights": True},
        {"deterministic": True},
        {"deterministic": False},
    ],
    ids=str,
)
def test_attention_in_float32_gives_flax_s_values_with_every_option(options):
    def run(module):
        layer = module.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=module.Rngs(0), decode=False)
        call = {"deterministic": True} | options
        if call.pop("mask", False):
            call["mask"] = np.tril(np.ones((1, 1, 5, 5), bool))
        if call.pop("sow_weights", False):
            out, sown = flax_nnx.capture(layer, flax_nnx.Intermediate)(X, sow_weights=True, **call)
            return out, sown["attention_weights"].get_value()[0]
        return layer(X, **call), None

    for ours, theirs in zip(run(nnx), run(flax_nnx), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_decoding_in_float32_gives_flax_s_values():
    def run(module):
        layer = module.MultiHeadAttention(2, 4, rngs=module.Rngs(0), decode=True)
        layer.init_cache((2, 3, 4))
        step = flax_nnx.jit(lambda layer, x: layer(x))
        return [step(layer, X[:, i : i + 1]) for i in range(3)]

    for ours, theirs in zip(run(nnx), run(flax_nnx), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_checkpoint_of_flax_s_model_loads_into_ours():
    theirs, ours = flax_nnx.BatchNorm(4, rngs=flax_nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    theirs(X)
    flax_nnx.update(ours, flax_nnx.state(theirs))
    assert_same_tree_and_values(ours, theirs)
    flax_nnx.update(theirs, flax_nnx.state(ours))
