"""Decoding through a cache in a policy's cache_dtype, beside NumPy in float64 and Flax's rules."""

import functools
import warnings
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import audit, get_policy, use_policy
from policy.quantized import quantize_cache

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (2, 6, 16))
HEADS, WIDTH = 2, 8
CACHES = ("int8", "float8", "bfloat16", "float16", "float32")


class Decoder:
    """An attention layer of an API, its cache, and its steps."""

    def __init__(self, api: str, policy: str, **options: Any):
        self.api, self.policy, self.options = api, get_policy(policy), options
        with use_policy(self.policy):
            if api == "linen":
                self.layer: Any = linen.MultiHeadDotProductAttention(
                    HEADS, qkv_features=HEADS * WIDTH, decode=True, **options
                )
                variables: Any = self.layer.init(KEY, X)
                self.params, self.cache = variables["params"], variables["cache"]
            else:
                make = functools.partial(nnx.MultiHeadAttention, HEADS, 16, decode=True)
                self.layer = make(qkv_features=HEADS * WIDTH, rngs=nnx.Rngs(0), **options)
                self.layer.init_cache(X.shape)
                parts: Any = flax_nnx.split(self.layer, flax_nnx.Param, flax_nnx.Cache)
                self.graph, self.params, self.cache = parts

    def step(self, cache: Any, token: jax.Array, **call: Any) -> tuple[Any, jax.Array]:
        with use_policy(self.policy):
            if self.api == "linen":
                variables = {"params": self.params, "cache": cache}
                y, after = self.layer.apply(variables, token, mutable=["cache"], **call)
                return after["cache"], y
            layer = flax_nnx.merge(self.graph, self.params, cache, copy=True)
            y = layer(token, **call)
            return flax_nnx.state(layer, flax_nnx.Cache), y

    def run(self, **call: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the cache after all steps, and the outputs (B, T, D)."""
        step = functools.partial(self.step, **call)
        after, y = jax.lax.scan(step, self.cache, X.swapaxes(0, 1)[:, :, None])
        return as_dict(after), np.asarray(y[:, :, 0].swapaxes(0, 1), np.float64)

    def weights(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        params: Any = flax_nnx.to_pure_dict(self.params) if self.api == "nnx" else self.params
        kernel, bias = (np.asarray(params[name][part], np.float64) for part in ("kernel", "bias"))
        return kernel, bias

    def projected(self, name: str) -> np.ndarray:
        kernel, bias = self.weights(name)
        return np.einsum("btd,dkh->btkh", np.asarray(X, np.float64), kernel) + bias

    def out(self, heads: np.ndarray) -> np.ndarray:
        kernel, bias = self.weights("out")
        return np.einsum("btkh,khd->btd", heads, kernel) + bias


def as_dict(cache: Any) -> dict[str, np.ndarray]:
    plain: Any = flax_nnx.to_pure_dict(cache) if isinstance(cache, flax_nnx.State) else cache
    return {name: np.asarray(x) for name, x in plain.items()}


def values(cache: dict[str, np.ndarray], name: str) -> np.ndarray:
    scale = cache.get(f"{name}_scale")
    wide = cache[name].astype(np.float64)
    return wide if scale is None else wide * scale.astype(np.float64)


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention in float64."""
    logits = np.einsum("bqkh,bskh->bkqs", query, key) / np.sqrt(WIDTH)
    logits = np.where(np.tri(X.shape[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bkqs,bskh->bqkh", weights / weights.sum(-1, keepdims=True), value)


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_decoding_is_attention_to_what_the_cache_holds(api, dtype):
    decoder = Decoder(api, f"p=f32,k={dtype}")
    cache, y = decoder.run()
    stored = get_policy(f"k={dtype}").cache_dtype
    assert stored is not None and cache["cache_index"] == X.shape[1]
    for name in ("key", "value"):
        codes = cache[f"cached_{name}"]
        assert codes.dtype == stored and codes.shape == (*X.shape[:2], HEADS, WIDTH)
        error = abs(values(cache, f"cached_{name}") - decoder.projected(name))
        if stored.itemsize == 1:
            scale = cache[f"cached_{name}_scale"]
            assert scale.dtype == jnp.bfloat16 and scale.shape == (*codes.shape[:-1], 1)
            step = 0.51 if dtype == "int8" else 17.0  # e4m3's codes beyond 256 are 32 apart
            assert (error <= step * scale.astype(np.float64)).all()
        else:
            assert f"cached_{name}_scale" not in cache
            assert (error <= float(jnp.finfo(stored).eps) * 16).all()
    held = (values(cache, "cached_key"), values(cache, "cached_value"))
    expected = decoder.out(attended(decoder.projected("query"), *held))
    np.testing.assert_allclose(y, expected, atol=2e-5)  # of float32


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["int8", "float8", "float32"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_in_half_precision_it_is_as_near_as_its_matmuls(api, dtype, compute):
    decoder = Decoder(api, f"p=f32,c={compute},o=f32,k={dtype}")
    cache, y = decoder.run()
    held = (values(cache, "cached_key"), values(cache, "cached_value"))
    expected = decoder.out(attended(decoder.projected("query"), *held))
    tolerance = 8 * float(jnp.finfo(compute).eps) * abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=tolerance)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_an_attention_function_of_the_users_gets_widened_arrays(api):
    seen = []

    def mine(query: Any, key: Any, value: Any, mask: Any = None, **_: Any) -> Any:
        seen.append((key.dtype.name, value.dtype.name))
        return flax_linen.dot_product_attention(query, key, value, mask=mask)

    _, y = Decoder(api, "p=f32,k=i8", attention_fn=mine).run()
    bound = functools.partial((linen if api == "linen" else nnx).dot_product_attention)
    _, ours = Decoder(api, "p=f32,k=i8", attention_fn=bound).run()
    assert set(seen) == {("float32", "float32")}
    np.testing.assert_allclose(y, ours, atol=2e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_masks_sown_weights_and_causality_are_those_of_a_cache_in_compute_dtype(api):
    mask = jnp.asarray([True, False, True, True, True, True])[None, None, None]
    plain, coded = (Decoder(api, f"p=f32{text}") for text in ("", ",k=i8"))
    for call in ({"mask": jnp.broadcast_to(mask, (2, 1, 1, 6))}, {}):
        np.testing.assert_allclose(coded.run(**call)[1], plain.run(**call)[1], atol=0.1)
    if api == "nnx":  # a query of one position stands at the end: Flax drops all keys but the first
        np.testing.assert_array_equal(coded.run(is_causal=True)[1], coded.run()[1])
        layer: Any = flax_nnx.merge(coded.graph, coded.params, coded.cache, copy=True)
        with warnings.catch_warnings():  # newer releases ask for nnx.capture
            warnings.simplefilter("ignore", DeprecationWarning)
            y = layer(X[:, :1], sow_weights=True)
        (weights,) = layer.attention_weights.get_value()
    else:
        with use_policy(coded.policy):
            y, sown = coded.layer.apply(
                {"params": coded.params, "cache": coded.cache},
                X[:, :1],
                sow_weights=True,
                mutable=["cache", "intermediates"],
            )
        (weights,) = sown["intermediates"]["attention_weights"]
    np.testing.assert_allclose(y, coded.step(coded.cache, X[:, :1])[1], atol=1e-6)
    expected = np.broadcast_to(np.arange(6) == 0, weights.shape)
    np.testing.assert_array_equal(weights, expected.astype(np.float32))


@pytest.mark.slow
def test_grouped_queries_share_codes_and_scales():
    plain, coded = (Decoder("nnx", f"p=f32{text}", num_kv_heads=1) for text in ("", ",k=i8"))
    cache, y = coded.run()
    assert cache["cached_key_scale"].shape == (2, 6, 1, 1)
    np.testing.assert_allclose(y, plain.run()[1], atol=0.05)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_scales_of_any_size_multiply_values_within_the_range_of_half_precision(compute):
    rng, heads = np.random.default_rng(0), 2
    query = rng.normal(size=(1, 1, 2 * heads, WIDTH))
    key, value = rng.normal(size=(2, 1, 6, heads, WIDTH))
    value *= np.array([1e-3, 1, 1, 1e4, 1, 1])[:, None, None]
    mask = np.array([True, True, True, False, True, True])  # the largest is left out
    coded: Any = [quantize_cache(jnp.asarray(x, jnp.float32), "int8") for x in (key, value)]
    held = [np.asarray(x.qvalue, np.float64) * np.asarray(x.scale, np.float64) for x in coded]
    query = np.asarray(jnp.asarray(query, compute), np.float64)
    wide = [np.repeat(x, 2, axis=2)[:, mask] for x in held]
    logits = np.einsum("bqkh,bskh->bkqs", query, wide[0]) / np.sqrt(WIDTH)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.einsum("bkqs,bskh->bqkh", weights, wide[1])
    call: Any = {"mask": jnp.asarray(mask)[None, None, None], "deterministic": True}
    with use_policy(f"c={compute},o=f32"):
        for attend in (linen.dot_product_attention, nnx.dot_product_attention):
            y = attend(jnp.asarray(query, compute), *coded, **call)
            tolerance = 4 * float(jnp.finfo(compute).eps) * abs(expected).max()
            np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance)


@pytest.mark.slow
def test_layers_scan_over_their_caches():
    class Block(linen.Module):
        @flax_linen.compact
        def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            layer = linen.MultiHeadDotProductAttention(HEADS, qkv_features=16, decode=True)
            return x + layer(x), None

    class Net(linen.Module):
        @flax_linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            axes: Any = {"params": 0, "cache": 0}
            scanned = flax_linen.scan(Block, axes, split_rngs={"params": True}, length=3)
            return scanned()(x, None)[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: Any, params: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        y, after = Net().apply({"params": params, "cache": cache}, token, mutable=["cache"])  # type: ignore[misc]
        return after["cache"], y

    results = {}
    for text in ("p=f32,c=bf16,o=f32", "p=f32,c=bf16,o=f32,k=i8"):
        with use_policy(text):
            variables: Any = Net().init(KEY, X)
            params, cache, outputs = variables["params"], variables["cache"], []
            for i in range(3):
                cache, y = step(cache, params, X[:, i : i + 1])
                outputs.append(y)
        results[text] = jnp.concatenate(outputs, 1)
    held = jax.tree.leaves(cache)
    assert sorted(str(x.dtype) for x in held) == ["bfloat16"] * 2 + ["int32"] + ["int8"] * 2
    assert all(len(x) == 3 for x in held)
    np.testing.assert_allclose(*results.values(), atol=0.2)


@pytest.mark.slow
def test_stacked_nnx_layers_scan_over_their_caches():
    @flax_nnx.vmap(in_axes=0, out_axes=0)
    def make(key: jax.Array) -> Any:
        with use_policy("p=f32,c=bf16,o=f32,k=i8"):
            layer = nnx.MultiHeadAttention(HEADS, 16, decode=True, rngs=nnx.Rngs(key))
        layer.init_cache(X.shape)
        return layer

    @flax_nnx.jit
    @flax_nnx.scan(in_axes=(flax_nnx.Carry, 0), out_axes=flax_nnx.Carry)
    def step(x: jax.Array, layer: Any) -> jax.Array:
        return x + layer(x)

    layers = make(jax.random.split(KEY, 3))
    for i in range(2):
        assert step(X[:, i : i + 1], layers).dtype == jnp.float32
    assert layers.cached_key_scale.shape == (3, 2, 6, HEADS, 1)
    codes = np.asarray(layers.cached_key[...], int)
    assert codes[:, :, :2].any((-1, -2)).all() and not codes[:, :, 2:].any()


@pytest.mark.slow
def test_ports_of_flaxs_layers_keep_codes():
    theirs: Any = flax_linen.MultiHeadDotProductAttention(HEADS, decode=True)
    ported: Any = linen.apply_policy(theirs, "p=f32,c=bf16,k=f8")
    variables = ported.init(KEY, X)
    _, after = ported.apply(variables, X[:, :1], mutable=["cache"])
    assert after["cache"]["cached_value"].dtype == jnp.float8_e4m3fn
    plain: Any = flax_nnx.MultiHeadAttention(HEADS, 16, decode=True, rngs=flax_nnx.Rngs(0))
    model = nnx.apply_policy(plain, "p=f32,c=bf16,k=f8")
    model.init_cache(X.shape)
    model(X[:, :1])
    assert model.cached_value.dtype == jnp.float8_e4m3fn and model.cached_value[:, 0].any()


@pytest.mark.slow
def test_a_vmapped_decode_has_an_index_for_each_row():
    decoder = Decoder("linen", "p=f32,k=i8")
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), decoder.cache)
    caches["cache_index"] = jnp.asarray([0, 2])
    after, _ = jax.vmap(decoder.step, (0, None))(caches, X[:, :1])
    assert after["cache_index"].tolist() == [1, 3]
    assert after["cached_key"][0, :, 0].any() and after["cached_key"][1, :, 2].any()
    assert not after["cached_key"][1, :, :2].any()


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_cache_of_another_policy_is_rejected_with_the_way_out(api):
    decoder = Decoder(api, "p=f32,k=i8")
    for other, found in (("p=f32", "float32"), ("p=f32,k=f8", "float8_e4m3fn")):
        made = Decoder(api, other)
        expected = f"its cache is in {found}, but under '.*cache=int8' it is in int8. Make the"
        with pytest.raises(ValueError, match=expected):
            decoder.step(made.cache if api == "linen" else renamed(made, decoder), X[:, :1])
    plain = Decoder(api, "p=f32")
    with pytest.raises(ValueError, match=r"its cache is in int8, but under .* it is in float32"):
        plain.step(decoder.cache if api == "linen" else renamed(decoder, plain), X[:, :1])


def renamed(made: Decoder, into: Decoder) -> Any:
    """The cache of one nnx decoder for the graph of another."""
    state: Any = flax_nnx.clone(into.cache)
    for name, x in made.cache.items():
        if name in state:
            state[name] = x
    return state


def test_a_query_of_two_positions_is_rejected():
    for api in ("linen", "nnx"):
        decoder = Decoder(api, "p=f32,k=i8")
        with pytest.raises(ValueError, match=r"expected key shape \(2, 1, 2, 8\) instead got"):
            decoder.step(decoder.cache, X[:, :2])


@pytest.mark.slow
def test_the_bytes_of_a_cache_are_its_codes_and_scales():
    decoder = Decoder("linen", "p=f32,c=bf16,k=i8")
    compiled = jax.jit(lambda cache: decoder.step(cache, X[:, :1])).lower(decoder.cache).compile()
    positions = X.shape[0] * X.shape[1] * HEADS
    analysis: Any = compiled.memory_analysis()
    assert analysis.argument_size_in_bytes == 2 * positions * (WIDTH + 2) + 4


def test_an_audit_of_a_decode_step_finds_nothing():
    decoder = Decoder("linen", "p=f32,c=bf16,o=bf16,k=i8")
    report = audit(decoder.step, decoder.cache, X[:, :1].astype(jnp.bfloat16))
    assert not report.findings, report.findings


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has an explicit dtype=complex64")
def test_a_complex_cache_stays_as_it_is():
    cache = as_dict(Decoder("nnx", "p=f32,k=i8", dtype=jnp.complex64).cache)
    assert cache["cached_key"].dtype == cache["cached_value"].dtype == jnp.complex64
