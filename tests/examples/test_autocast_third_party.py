"""A model that knows nothing of dtypes: its maths is right, and so is each of the three ways."""

import functools

import autocast_third_party as job
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy as mp
from tests.examples.helpers import assert_rejected, assert_reported, few_digits

RNG = np.random.default_rng(0)
BATCH = np.zeros((8, 8, 8, 1), np.float32), np.zeros(8, np.int32)
HALF = mp.get_policy("mixed_bfloat16")
NO_RULES = mp.PolicyRules()


@pytest.fixture(autouse=True)
def as_everywhere_else():
    """Other people's code mixes dtypes and ranks: JAX's own defaults. And compiling takes half."""
    optimized = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", optimized)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    few = few_digits(job.load())
    monkeypatch.setattr(job, "load", lambda: few)
    monkeypatch.setattr(job, "ViT", functools.partial(job.ViT, width=8, depth=1, heads=2))
    monkeypatch.setattr(job, "NnxViT", functools.partial(job.NnxViT, width=8, depth=1, heads=2))


def model_of(api, way, policy=HALF, rules=NO_RULES):
    return {"linen": job.linen_model, "nnx": job.nnx_model}[api](way, policy, rules, 0)


@pytest.mark.slow
def test_the_maths_by_hand_is_flax_s():
    x = jnp.asarray(RNG.normal(3, 2, (2, 4, 8)), jnp.float32)
    scale, bias = jnp.asarray(RNG.normal(size=(2, 1, 1, 8)), jnp.float32)
    norm = flax.linen.LayerNorm(use_fast_variance=False)
    expected = norm.apply({"params": {"scale": scale[0, 0], "bias": bias[0, 0]}}, x)
    np.testing.assert_allclose(job.normalize(x, scale, bias), np.asarray(expected), atol=1e-5)
    np.testing.assert_allclose(job.gelu(x), flax.linen.gelu(x, approximate=False), atol=1e-6)
    heads = x.reshape(2, 4, 2, 4)
    attended = flax.linen.dot_product_attention(heads, 2 * heads, -heads)
    np.testing.assert_allclose(job.softmax_attention(heads, 2 * heads, -heads), attended, atol=1e-5)


@pytest.mark.slow
def test_both_apis_are_the_same_model():
    linen, nnx = model_of("linen", "float32"), model_of("nnx", "float32")
    theirs, params = linen.params, jax.tree.map(jnp.zeros_like, nnx.params)
    params |= {name: theirs[name] for name in ("patches", "positions", "norm", "head")}
    params["blocks"] = {0: theirs["block_0"]}
    assert jax.tree.structure(params) == jax.tree.structure(nnx.params)
    images = jnp.asarray(RNG.normal(size=(4, 8, 8, 1)), jnp.float32)
    both = jax.jit(lambda a, b: (nnx.apply(nnx.opened(a), images), linen.apply(b, images)))
    np.testing.assert_allclose(*both(params, theirs), atol=1e-6)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_both_ways_reach_flax_s_layers_and_the_maths_by_hand(api):
    audits, saved = {}, {}
    for way in job.WAYS:
        model = model_of(api, way)
        audits[way] = mp.audit(model.loss, model.opened(model.params), BATCH, backward=True)
        loss = lambda p, b, model=model: model.loss(model.opened(p), b)  # noqa: E731
        saved[way] = job.saved_bytes(loss, model.params, BATCH)
    assert audits["float32"].f32_matmul_share == 1 and not audits["float32"].findings
    for way in ("port", "autocast"):
        assert audits[way].f32_matmul_share == 0 and not audits[way].findings
    assert saved["port"] < 0.8 * saved["float32"] and saved["autocast"] < 0.8 * saved["float32"]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("way", ["port", "autocast"])
def test_a_rule_holds_in_both_ways(api, way):
    def dtypes(rules):
        model = model_of(api, way, rules=mp.PolicyRules(rules))
        audit = mp.audit(model.apply, model.opened(model.params), BATCH[0])
        dots = [op for op in audit.operations if op.kind == "dot"]
        return {dot.operands for dot in dots if dot.path.endswith("head")}

    assert dtypes({}) == {("bfloat16", "bfloat16")}
    assert dtypes({"head": "f32"}) == {("float32", "float32")}


@pytest.mark.slow
def test_the_example_trains_reports_and_plots(tmp_path, capsys):
    path = tmp_path / "curves" / "loss.png"
    arguments = f"--way port --policy mixed_float16 --epochs 2 --plot {path}"
    (port,) = job.main(arguments.split())
    assert port.name == "port" and port.skipped == 0
    assert len(port.losses) == 4 and np.isfinite(port.losses).all() and 0 <= port.accuracy <= 1
    columns = ("way", "test accuracy", "final loss", "saved activations KiB", "matmuls in half")
    texts = ("audit finds", "port: apply", "against float32", "block_0/attention/query")
    assert_reported(capsys, path, *columns, *texts)


@pytest.mark.slow
def test_the_nnx_model_trains_under_autocast_and_explains_itself(tmp_path, capsys):
    path = tmp_path / "p.png"
    arguments = ["--api", "nnx", "--way", "autocast", "--rule", "", "--epochs", "1", "--explain"]
    (result,) = job.main([*arguments, "--plot", str(path)])
    assert np.isfinite(result.losses).all() and result.audit.f32_matmul_share == 0
    texts = ("blocks/0/attention/query", "audit finds nothing", "autocast explains itself")
    assert_reported(capsys, path, *texts, "dot_general")


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("given", ["--way port", "--way autocast", "--api nnx --way port"])
def test_a_rule_of_no_module_is_one_line(given, monkeypatch):
    monkeypatch.setattr(job, "train", lambda *_: pytest.fail("something was trained"))
    assert_rejected(job, [*given.split(), "--rule", "haed=f32"], "Rule 'haed' matched no module.")
