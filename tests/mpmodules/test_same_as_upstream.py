"""With no policy and in float32 our layers are Flax's: tree, initial values, outputs, gradients,
state, errors.

Each row of the tables is built with Flax's wing and with ours from the same arguments. One jitted
program initialises the layer, calls it and differentiates it. Where both lower to the same text,
they are equal bit for bit; otherwise both are run and compared.
"""

from __future__ import annotations

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

_rng = np.random.default_rng(0)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(_rng.normal(size=shape), jnp.float32)


FLAT = (_normal(2, 6),)
IMAGE = (_normal(2, 5, 5, 4),)
SEQUENCE = (_normal(2, 7, 4),)
CROSS = (_normal(2, 5, 8), _normal(2, 3, 8), _normal(2, 3, 8))
SELF = (_normal(2, 5, 8),)
TOKENS = (jnp.asarray([[0, 3], [3, 9]]),)
QUERY = (_normal(2, 4),)
LENGTHS = jnp.asarray([7, 3])
MASK = jnp.asarray(np.tril(np.ones((2, 1, 5, 5), bool)))
ONES, ZEROS = jax.nn.initializers.ones, jax.nn.initializers.zeros
NORMAL = jax.nn.initializers.normal(0.3)


def _reference_dot_general(*args: Any, **kwargs: Any) -> jax.Array:
    return jax.lax.dot_general(*args, **kwargs)


def _reference_conv(*args: Any, **kwargs: Any) -> jax.Array:
    return jax.lax.conv_general_dilated(*args, **kwargs)


def _linen_promote(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    return [None if x is None else jnp.asarray(x, jnp.float32) for x in args]


def _nnx_promote(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
    return tuple(None if x is None else jnp.asarray(x, jnp.float32) for x in args)


# Options that the two wings name alike, as (class, arguments, inputs, keyword arguments of the
# call).
DENSE: list[dict[str, Any]] = [
    {},
    {"use_bias": False},
    {"dtype": jnp.float32, "param_dtype": jnp.float32},
    {"precision": "highest"},
    {"kernel_init": NORMAL, "bias_init": ONES},
    {"dot_general": _reference_dot_general},
]
CONV: list[dict[str, Any]] = [
    {},
    {"use_bias": False, "padding": "VALID"},
    {"strides": 2, "padding": "CIRCULAR"},
    {"strides": (2, 1), "padding": ((1, 0), (0, 2))},
    {"input_dilation": 2, "padding": 1},
    {"kernel_dilation": (1, 2), "padding": "REFLECT"},
    {"feature_group_count": 2},
    {"mask": jnp.ones((3, 3, 4, 6)).at[0].set(0.0)},
    {"conv_general_dilated": _reference_conv},
    {"kernel_init": NORMAL, "bias_init": ONES, "precision": "highest"},
]
TRANSPOSED: list[dict[str, Any]] = [
    {},
    {"use_bias": False, "padding": "VALID"},
    {"strides": (2, 2), "padding": "CIRCULAR"},
    {"strides": (2, 1), "kernel_dilation": (1, 2)},
    {"mask": jnp.ones((3, 3, 4, 6)).at[0].set(0.0)},
]
NORM: list[dict[str, Any]] = [
    {},
    {"epsilon": 1e-3},
    {"use_scale": False},
    {"scale_init": NORMAL},
    {"use_fast_variance": True},
    {"use_fast_variance": False},
    {"param_dtype": jnp.float32, "dtype": jnp.float32},
]
BIASED = [{"use_bias": False}, {"bias_init": NORMAL}]
LAYER_AXES: list[dict[str, Any]] = [
    {"reduction_axes": (1, 2, 3), "feature_axes": (2, 3)},
    {"reduction_axes": -1},
]
LAYER_AXES_LINEN = [*LAYER_AXES, {"force_float32_reductions": False}]
ATTENTION: list[dict[str, Any]] = [
    {},
    {"qkv_features": 16, "out_features": 6},
    {"use_bias": False},
    {"normalize_qk": True},
    {"dropout_rate": 0.5, "deterministic": False},
    {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False},
    {"dropout_rate": 0.5, "deterministic": True},
    {"precision": "highest", "kernel_init": NORMAL, "bias_init": ONES},
    {"out_kernel_init": NORMAL, "out_bias_init": ONES},
]

Row = tuple[str, dict[str, Any], tuple[jax.Array, ...], dict[str, Any]]


def _rows(
    cls: str, base: dict[str, Any], options: list[dict[str, Any]], inputs: Any, **call: Any
) -> list[Row]:
    return [(cls, base | option, inputs, call) for option in options]


def _attention_rows(options: list[dict[str, Any]], inputs: Any = SELF, **call: Any) -> list[Row]:
    return _rows("MultiHeadDotProductAttention", {"num_heads": 2}, options, inputs, **call)


def _nnx_attention_rows(options: list[dict[str, Any]], inputs: Any, **call: Any) -> list[Row]:
    base = {"num_heads": 2, "in_features": 8, "decode": False}
    return _rows("MultiHeadAttention", base, options, inputs, **call)


KERNEL = {"features": 6, "kernel_size": (3, 3)}
NNX_KERNEL = {"in_features": 4, "out_features": 6, "kernel_size": (3, 3)}
EMBED = {"num_embeddings": 10, "features": 4}
EINSUM = {"shape": (4, 3), "einsum_str": "bsi,io->bso"}
NNX_EINSUM = {"einsum_str": "bsi,io->bso", "kernel_shape": (4, 3)}
LINEAR = {"in_features": 6, "out_features": 3}
GENERAL = {"in_features": 4, "out_features": 3}
FOUR = {"num_features": 4}
TRAINING = {"use_running_average": False}
POSITIVE = IMAGE[0] > -0.5

LINEN: list[Row] = [
    *_rows("Dense", {"features": 3}, [*DENSE, {"promote_dtype": _linen_promote}], FLAT),
    *_rows("Dense", {"features": 3}, [{"dot_general_cls": lambda: _reference_dot_general}], FLAT),
    *_rows("DenseGeneral", {"features": (3, 2)}, [*DENSE, {"axis": (1, -1)}], IMAGE),
    *_rows("DenseGeneral", {"features": (3, 2)}, [{"batch_dims": (0,)}], IMAGE),
    *_rows("Einsum", EINSUM, [{}, {"use_bias": False}], SEQUENCE),
    *_rows("Conv", KERNEL, CONV, IMAGE),
    *_rows("Conv", {"features": 6, "kernel_size": 3}, [{"padding": "CAUSAL"}], SEQUENCE),
    *_rows("ConvLocal", KERNEL, [{}, {"padding": "VALID"}, {"strides": 2}], IMAGE),
    *_rows("ConvTranspose", KERNEL, TRANSPOSED, IMAGE),
    *_rows("ConvTranspose", KERNEL | {"features": 4}, [{"transpose_kernel": True}], IMAGE),
    *_rows("Embed", EMBED, [{}, {"dtype": jnp.float32}], TOKENS),
    *_rows("Embed", EMBED, [{"embedding_init": NORMAL}], QUERY, method="attend"),
    *_rows("Embed", {"num_embeddings": 1, "features": 4}, [{}], (jnp.zeros((2, 3), jnp.int32),)),
    *_rows("LayerNorm", {}, [*NORM, *BIASED, *LAYER_AXES_LINEN], IMAGE),
    *_rows("LayerNorm", {}, [{}], IMAGE, mask=POSITIVE),
    *_rows("RMSNorm", {}, [*NORM, *LAYER_AXES_LINEN], IMAGE),
    *_rows("GroupNorm", {"num_groups": 2}, [*NORM, *BIASED], IMAGE),
    *_rows("GroupNorm", {"num_groups": None, "group_size": 2}, [{}], IMAGE),
    *_rows("InstanceNorm", {}, [*NORM, *BIASED], IMAGE),
    *_rows("BatchNorm", TRAINING, [*NORM, *BIASED, {"momentum": 0.5}, {"axis": 1}], IMAGE),
    *_rows("BatchNorm", {"use_running_average": True}, NORM, IMAGE),
    *_rows("BatchNorm", TRAINING, [{}], IMAGE, mask=POSITIVE),
    *_attention_rows(ATTENTION, CROSS),
    *_attention_rows([{}], sow_weights=True, mask=MASK),
    *_attention_rows([{"force_fp32_for_softmax": True}]),
    *_attention_rows([{"qkv_dot_general": _reference_dot_general}]),
    *_rows("MultiHeadAttention", {"num_heads": 2}, [{}, {"normalize_qk": True}], SELF, mask=MASK),
    *_rows("Dropout", {"rate": 0.5, "deterministic": False}, [{}, {"broadcast_dims": (1,)}], FLAT),
    *_rows("Dropout", {"rate": 0.5, "deterministic": True}, [{}], FLAT),
    *_rows("Dropout", {"rate": 1.0, "deterministic": False}, [{}], FLAT),
]

NNX: list[Row] = [
    *_rows("Linear", LINEAR, [*DENSE, {"promote_dtype": _nnx_promote}], FLAT),
    *_rows("Linear", LINEAR, [{"preferred_element_type": jnp.float32}], FLAT),
    *_rows("LinearGeneral", {"in_features": 4, "out_features": (3, 2)}, DENSE, IMAGE),
    *_rows("LinearGeneral", GENERAL, [{"in_features": (5, 4), "axis": (1, -1)}], IMAGE),
    *_rows("LinearGeneral", GENERAL, [{"batch_axis": {0: 2}}], IMAGE),
    *_rows("Einsum", NNX_EINSUM, [{}, {"bias_shape": (3,)}], SEQUENCE),
    *_rows("Conv", NNX_KERNEL, CONV[:5] + CONV[6:], IMAGE),
    *_rows("Conv", NNX_KERNEL | {"kernel_size": (3,)}, [{"padding": "CAUSAL"}], SEQUENCE),
    *_rows("ConvTranspose", NNX_KERNEL, TRANSPOSED, IMAGE),
    *_rows("Embed", EMBED, [{}, {"dtype": jnp.float32}], TOKENS),
    *_rows("Embed", EMBED, [{"embedding_init": NORMAL}], QUERY, method="attend"),
    *_rows("LayerNorm", FOUR, [*NORM, *BIASED], IMAGE),
    *_rows("LayerNorm", FOUR, [{}], IMAGE, mask=POSITIVE),
    *_rows("LayerNorm", FOUR, [{"reduction_axes": (1, 2, 3)}, {"reduction_axes": (-1,)}], IMAGE),
    *_rows("RMSNorm", FOUR, NORM, IMAGE),
    *_rows("GroupNorm", FOUR | {"num_groups": 2}, [*NORM, *BIASED], IMAGE),
    *_rows("GroupNorm", FOUR | {"num_groups": None, "group_size": 2}, [{}], IMAGE),
    *_rows("InstanceNorm", FOUR, [*NORM, *BIASED], IMAGE),
    *_rows("BatchNorm", FOUR, [*NORM, *BIASED, {"momentum": 0.5}], IMAGE),
    *_rows("BatchNorm", FOUR | {"use_running_average": True}, NORM[:2], IMAGE),
    *_rows("BatchNorm", FOUR, [{}], IMAGE, mask=POSITIVE),
    *_rows("BatchNorm", FOUR, [{}], IMAGE, use_running_average=True),
    *_rows("BatchNorm", FOUR, [{}], IMAGE, use_running_average=False),
    *_nnx_attention_rows(ATTENTION, CROSS),
    *_nnx_attention_rows([{}], SELF, mask=MASK),
    *_nnx_attention_rows([{}], SELF, sow_weights=True),
    *_rows("Dropout", {"rate": 0.5}, [{}, {"broadcast_dims": (1,)}, {"deterministic": True}], FLAT),
    *_rows("LoRALinear", LINEAR | {"lora_rank": 2}, [{}], FLAT),
    *_rows("PReLU", {}, [{}], FLAT),
]


def _named(rows: list[Row]) -> Any:
    def text(value: Any) -> str:
        return (
            getattr(value, "__name__", None) or f"{type(value).__name__}"
            if hasattr(value, "shape")
            else str(value)
        )

    names = []
    for cls, arguments, _, call in rows:
        given = [
            f"{key}={text(getattr(value, '__name__', value))}"
            for key, value in (arguments | call).items()
        ]
        names.append(f"{cls}({','.join(given)})".replace(" ", ""))
    return pytest.mark.parametrize("row", rows, ids=names)


def _linen_program(nn: Any, row: Row) -> Callable[..., Any]:
    cls, arguments, _, call = row

    def program(key: jax.Array, *inputs: jax.Array) -> Any:
        layer = getattr(nn, cls)(**arguments)
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        variables = layer.init(
            rngs, *inputs, **{name: value for name, value in call.items() if name != "sow_weights"}
        )
        rest = {name: value for name, value in variables.items() if name != "params"}

        def loss(params: Any, floats: Any) -> Any:
            given = [floats.get(i, x) for i, x in enumerate(inputs)]
            out, state = layer.apply(
                {"params": params, **rest}, *given, rngs=rngs, mutable=True, **call
            )
            return jnp.sum(jnp.sin(out)), (out, state)

        gradients, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            variables.get("params", {}), _floats(inputs)
        )
        return variables, results, gradients

    return program


def _nnx_program(nnx: Any, row: Row) -> Callable[..., Any]:
    cls, arguments, _, call = row
    call = dict(call)
    method = call.pop("method", "__call__")

    def program(key: jax.Array, *inputs: jax.Array) -> Any:
        rngs = {} if cls == "PReLU" else {"rngs": nnx.Rngs(key)}
        layer = getattr(nnx, cls)(**arguments, **rngs)
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params: Any, floats: Any) -> Any:
            given = [floats.get(i, x) for i, x in enumerate(inputs)]
            model = nnx.merge(
                graphdef, params, jax.tree.map(lambda x: x, rest)
            )  # variables of this trace's own
            out = getattr(model, method)(*given, **call)
            return jnp.sum(jnp.sin(out)), (out, _plain(nnx.state(model, nnx.Not(nnx.Param))))

        gradients, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, _floats(inputs))
        return _plain(params), _plain(rest), results, (_plain(gradients[0]), gradients[1])

    return program


def _plain(state: Any) -> dict[str, Any]:
    def value(x: Any) -> Any:
        return x.get_value() if isinstance(x, flax_nnx.Variable) else x

    flat = flax_nnx.to_flat_state(state)
    return {
        "/".join(map(str, path)): jax.tree.map(_data, value(variable)) for path, variable in flat
    }


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _floats(inputs: tuple[jax.Array, ...]) -> dict[int, jax.Array]:
    return {i: x for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)}


def _assert_same(
    ours: Callable[..., Any], theirs: Callable[..., Any], inputs: tuple[jax.Array, ...]
) -> None:
    ours, theirs = jax.jit(ours), jax.jit(theirs)
    lowered, expected = (program.lower(jax.random.key(3), *inputs) for program in (ours, theirs))
    assert jax.tree.structure(lowered.out_info) == jax.tree.structure(expected.out_info)
    if lowered.as_text() != expected.as_text():
        jax.tree.map(
            np.testing.assert_array_equal,
            ours(jax.random.key(3), *inputs),
            theirs(jax.random.key(3), *inputs),
        )


@_named(LINEN)
def test_a_linen_layer_has_flaxs_tree_values_outputs_gradients_and_state(row):
    _assert_same(_linen_program(our_linen, row), _linen_program(flax_linen, row), row[2])


@pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning")
@_named(NNX)
def test_an_nnx_layer_has_flaxs_tree_values_outputs_gradients_and_state(row):
    _assert_same(_nnx_program(our_nnx, row), _nnx_program(flax_nnx, row), row[2])


DECODE_STEPS = 4


def test_a_linen_attention_decodes_as_flaxs():
    def program(nn: Any) -> Callable[..., Any]:
        def run(key: jax.Array, x: jax.Array) -> Any:
            layer = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
            variables, outputs = layer.init(key, x), []
            params, cache = variables["params"], {"cache": variables["cache"]}
            for step in range(DECODE_STEPS):
                out, cache = layer.apply(
                    {"params": params, **cache}, x[:, step : step + 1], mutable=["cache"]
                )
                outputs.append(out)
            return variables, outputs, cache

        return run

    _assert_same(program(our_linen), program(flax_linen), SELF)


def test_an_nnx_attention_decodes_as_flaxs():
    def program(nnx: Any) -> Callable[..., Any]:
        def run(key: jax.Array, x: jax.Array) -> Any:
            layer = nnx.MultiHeadAttention(
                num_heads=2, in_features=8, decode=True, rngs=nnx.Rngs(key)
            )
            layer.init_cache(x.shape)
            outputs = [layer(x[:, step : step + 1]) for step in range(DECODE_STEPS)]
            return outputs, _plain(nnx.state(layer))

        return run

    _assert_same(program(our_nnx), program(flax_nnx), SELF)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_functions_are_flaxs(masked, dropout):
    def program(module: Any) -> Callable[..., Any]:
        def run(key: jax.Array, *inputs: jax.Array) -> Any:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                mask = (q[..., 0].swapaxes(-1, -2)[..., None] > 0) if masked else None
                bias = jnp.ones((1, 1, q.shape[-3], k.shape[-3]))
                return module.dot_product_attention(
                    q, k, v, bias=bias, mask=mask, dropout_rate=dropout, dropout_rng=key
                )

            return jax.vjp(attend, *inputs)[0], jax.grad(
                lambda *args: jnp.sum(jnp.sin(attend(*args))), (0, 1, 2)
            )(*inputs)

        return run

    inputs = (_normal(2, 5, 2, 4), _normal(2, 3, 2, 4), _normal(2, 3, 2, 4))
    _assert_same(program(our_linen), program(flax_linen), inputs)
    _assert_same(program(our_nnx), program(flax_nnx), inputs)


@jax.numpy_dtype_promotion("standard")  # Flax multiplies float32 weights by bfloat16 values
def test_softmax_forced_to_float32_leaves_flaxs_dtypes_where_no_policy_holds():
    for force in (True, False):
        found = []
        for nn in (our_linen, flax_linen):
            layer = nn.MultiHeadDotProductAttention(
                num_heads=2, dtype=jnp.bfloat16, force_fp32_for_softmax=force
            )
            out, variables = layer.init_with_output(jax.random.key(0), *SELF)
            _, state = layer.apply(variables, *SELF, sow_weights=True, mutable="intermediates")
            q = jnp.ones((2, 3, 2, 4), jnp.bfloat16)
            found.append(
                (
                    out.dtype,
                    state["intermediates"]["attention_weights"][0].dtype,
                    nn.dot_product_attention(q, q, q, force_fp32_for_softmax=force).dtype,
                )
            )
        assert found[0] == found[1]


def _begun(layer: Any, inputs: Any = IMAGE) -> Any:
    return layer.init(jax.random.key(0), *inputs)


def _keys(nnx: Any) -> Any:
    return nnx.Rngs(0)


SHORT_PARAMS = {"params": {"kernel": jnp.ones((2, 3))}}
WRONG_LINEN: dict[str, Callable[[Any], Any]] = {
    "an embedding of floats": lambda nn: _begun(nn.Embed(3, 4), FLAT),
    "groups that do not divide": lambda nn: _begun(nn.Conv(6, (3, 3), feature_group_count=3)),
    "a mask of another shape": lambda nn: _begun(nn.Conv(6, (3, 3), mask=jnp.ones((2, 2)))),
    "group norm's groups that do not divide": lambda nn: _begun(nn.GroupNorm(num_groups=3)),
    "groups said twice": lambda nn: _begun(nn.GroupNorm(num_groups=2, group_size=2)),
    "batch norm that does not know its mode": lambda nn: _begun(nn.BatchNorm()),
    "heads that do not divide": lambda nn: _begun(nn.MultiHeadDotProductAttention(3), SELF),
    "dropout without a key": lambda nn: nn.Dropout(0.5, deterministic=False).apply({}, *FLAT),
    "dropout that does not know its mode": lambda nn: nn.Dropout(0.5).apply({}, *FLAT),
    "a call of an unbound layer": lambda nn: nn.Dense(3)(*FLAT),
    "params of another shape": lambda nn: nn.Dense(3).apply(SHORT_PARAMS, *FLAT),
    "no params at all": lambda nn: nn.Dense(3).apply({}, *FLAT),
    "an argument that does not exist": lambda nn: nn.Dense(3, units=2),
    "no features": lambda nn: nn.Dense(),
}
WRONG_NNX: dict[str, Callable[[Any], Any]] = {
    "an embedding of floats": lambda nnx: nnx.Embed(3, 4, rngs=_keys(nnx))(jnp.ones((2,))),
    "a layer without keys": lambda nnx: nnx.Linear(2, 3),
    "an input of another width": lambda nnx: nnx.Linear(2, 3, rngs=_keys(nnx))(*FLAT),
    "an argument that does not exist": lambda nnx: nnx.Linear(2, 3, units=2, rngs=_keys(nnx)),
    "groups that do not divide": lambda nnx: nnx.GroupNorm(4, num_groups=3, rngs=_keys(nnx)),
    "heads that do not divide": lambda nnx: nnx.MultiHeadAttention(3, 8, rngs=_keys(nnx)),
    "attention that does not know its mode": lambda nnx: nnx.MultiHeadAttention(
        2, 8, rngs=_keys(nnx)
    )(*SELF),
    "decoding without a cache": lambda nnx: nnx.MultiHeadAttention(
        2, 8, decode=True, rngs=_keys(nnx)
    )(*SELF),
    "dropout without a key": lambda nnx: nnx.Dropout(0.5, deterministic=False)(*FLAT),
    "norms called without an input": lambda nnx: nnx.LayerNorm(4, rngs=_keys(nnx))(),
}


def _assert_same_error(call: Callable[[Any], Any], ours: Any, theirs: Any) -> None:
    found = []
    for wing in (ours, theirs):
        with pytest.raises(Exception) as caught:
            call(wing)
        found.append(caught.value)
    assert type(found[0]) is type(found[1]), found


@pytest.mark.parametrize("call", WRONG_LINEN.values(), ids=WRONG_LINEN)
def test_what_flax_linen_refuses_is_refused_with_its_error(call):
    _assert_same_error(call, our_linen, flax_linen)


@pytest.mark.parametrize("call", WRONG_NNX.values(), ids=WRONG_NNX)
def test_what_flax_nnx_refuses_is_refused_with_its_error(call):
    _assert_same_error(call, our_nnx, flax_nnx)


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

    class Unchecked(
        our_linen.Module
    ):  # as in Flax, nobody checks where no abstract class is among the bases
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


def test_submodules_that_flax_does_not_import_by_itself_import_from_our_wings():
    from flax.linen import partitioning as flax_partitioning
    from flax.nnx import traversals as flax_traversals

    from mpmodules.linen import partitioning
    from mpmodules.nnx import traversals

    assert partitioning is flax_partitioning
    assert traversals is flax_traversals
    for wing in (our_linen, our_nnx):
        assert not hasattr(wing, "no_such_name")
