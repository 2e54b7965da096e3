"""Four models by ``python -m policy port``, compared with themselves as Flax's examples write them:
their dtypes passed by hand, on the same random weights.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import nnx, use_policy
from policy.testing import assert_dots_in, assert_same_program
from tests.eight_devices import ROOT
from tests.porting import models, sources

# wmt casts the input of its tied head to float32, which the layer casts back without a rule.
pytestmark = pytest.mark.filterwarnings(
    "ignore:A layer, called at after_wmt:policy.DtypePolicyWarning"
)

TREES = 4
HALVES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
# Upstream looks a token up, and adds its position, in float32, and rounds once; wmt multiplies the
# table by its last hidden values in float32 too. Under a policy that is three roundings, and half;
# two rules give float32 back.
AS_UPSTREAM = {"embed": "float32", ".*posembed": "p=f32,c=f32,o={half}"}
# What is differentiated too: compiling a gradient takes long.
DIFFERENTIATED = {"float32": ("imagenet", "lm1b", "gemma"), "bfloat16": ("gemma",), "float16": ()}


@functools.cache
def shapes(name: str) -> Any:
    return jax.eval_shape(models.by_hand(name).init)


class Result(NamedTuple):
    loss: Any
    logits: Any
    gradients: Any = None


@functools.cache
def results(name: str, made_by: str, dtype: str) -> list[Result]:
    """Returns results of each random tree; "rules" is the policy with the rules above."""
    if made_by == "hand":
        model = models.by_hand(name, jnp.dtype(dtype))
    else:
        rules = {path: text.format(half=dtype) for path, text in AS_UPSTREAM.items()}
        policy = HALVES.get(dtype, dtype)
        model = models.by_policy(name, policy, rules if made_by == "rules" else None)
    loss = models.loss_of(model)
    differentiates = name in DIFFERENTIATED[dtype] and made_by != "rules"
    seeds = range(TREES)
    trees = [(models.random_tree(shapes(name), i), models.batch(name, i)) for i in seeds]
    measured = jax.value_and_grad(loss, has_aux=True) if differentiates else loss
    program = models.compiled(measured, *trees[0])
    found = [jax.tree.map(np.asarray, program(*tree)) for tree in trees]
    if not differentiates:
        return [Result(loss, logits) for loss, logits in found]
    return [Result(loss, logits, gradients) for (loss, logits), gradients in found]


def error(name: str, made_by: str, dtype: str, what: str = "logits") -> float:
    kinds = ((made_by, dtype), ("policy", "float32"))
    got, right = ([getattr(x, what) for x in results(name, *kind)] for kind in kinds)
    return models.relative_error(got, right)


def gradients_error(name: str, made_by: str, dtype: str) -> float:
    """The median over the trees: where a rounding turns a relu off, a tree is off by far more."""
    got, right = (results(name, *kind) for kind in ((made_by, dtype), ("policy", "float32")))
    pairs = zip(got, right, strict=True)
    return float(np.median([models.relative_error(a.gradients, b.gradients) for a, b in pairs]))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", sources.NAMES)
def test_a_port_has_the_same_parameters(name):
    assert jax.eval_shape(models.by_policy(name, "mixed_bfloat16").init) == shapes(name)


def test_a_parameter_made_by_hand_is_stored_in_param_dtype():
    module = models.after("gemma")

    def params(apply: bool) -> Any:
        with policy.use_policy("bfloat16"):
            model = module.Transformer(module.TransformerConfig(num_layers=1), rngs=nnx.Rngs(0))
        model = nnx.apply_policy(model, "bfloat16") if apply else model
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    built = jax.eval_shape(lambda: params(apply=False))
    assert built["final_norm"]["scale"].dtype == jnp.bfloat16
    assert built["embedder"]["embedding"].dtype == jnp.bfloat16
    theirs = models.by_hand("gemma", jnp.bfloat16, jnp.bfloat16)
    assert jax.eval_shape(lambda: params(apply=True)) == jax.eval_shape(theirs.init)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["imagenet", "lm1b", "wmt"])
def test_without_a_policy_a_port_is_the_program_that_it_was(name):
    args = shapes(name), models.batch(name)
    assert_same_program(models.by_policy(name, None).logits, models.by_hand(name).logits, args)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", sources.NAMES)
def test_in_float32_a_port_agrees_with_the_model_that_it_was(name):
    both = (results(name, by, "float32") for by in ("policy", "hand"))
    for ours, theirs in zip(*both, strict=True):
        assert ours.logits.dtype == np.float32
        atol = 1e-6 * np.abs(theirs.logits).max()
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=atol)
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-6)
    if name in DIFFERENTIATED["float32"]:
        assert gradients_error(name, "hand", "float32") < 2e-6


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", sources.NAMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_in_half_a_port_is_as_right_as_the_model_that_it_was(name, dtype):
    ours, theirs = (error(name, by, dtype) for by in ("policy", "hand"))
    assert ours < 2.5 * float(jnp.finfo(dtype).eps)
    # The norms of imagenet read rounded results of convolutions; XLA:CPU drops that of Flax's.
    assert ours < {"gemma": 0.85, "imagenet": 1.2}.get(name, 1.12) * theirs
    ours, theirs = (error(name, by, dtype, "loss") for by in ("policy", "hand"))
    assert ours < 1.05 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm1b", "wmt"])
def test_two_rules_keep_the_float32_that_upstream_keeps(name):
    assert error(name, "rules", "float16") < error(name, "hand", "float16")


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENTIATED["bfloat16"])
def test_gradients_in_half_are_better_than_those_of_the_model_that_it_was(name):
    ours, theirs = (gradients_error(name, by, "bfloat16") for by in ("policy", "hand"))
    assert ours < 0.85 * theirs


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", sources.NAMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_loss_is_computed_from_float32_logits(name, dtype):
    args = shapes(name), models.batch(name)
    loss, logits = jax.eval_shape(models.loss_of(models.by_policy(name, HALVES[dtype])), *args)
    assert loss.dtype == logits.dtype == jnp.float32
    loss, logits = jax.eval_shape(models.loss_of(models.by_hand(name, jnp.dtype(dtype))), *args)
    assert loss.dtype == logits.dtype == dtype


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", sources.NAMES)
def test_every_matmul_of_a_port_multiplies_half_forward_and_backward(name):
    args = shapes(name), models.batch(name)
    assert_dots_in(models.by_policy(name, "mixed_bfloat16").logits, args, "bfloat16", backward=True)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", sources.NAMES)
def test_an_audit_finds_what_the_port_repairs_and_nothing_after_it(name):
    before, after = findings(name)
    kinds = {finding.kind for finding in before}
    assert "low-precision-function" in kinds  # the loss's exponentials, and those of attention
    assert not after, "\n".join(map(str, after))


def findings(name: str) -> list[Any]:
    args = shapes(name), models.batch(name)
    pair = models.by_hand(name, jnp.bfloat16), models.by_policy(name, "mixed_bfloat16")
    losses = (lambda *args, model=model: models.loss_of(model)(*args)[0] for model in pair)
    return [policy.audit(loss, *args, backward=True).findings for loss in losses]


@pytest.mark.slow
def test_the_page_s_table_says_what_is_measured():
    page = (ROOT / "docs/ports.md").read_text()
    row = r"^\| (\w+) \| (bfloat16|float16) \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(row, page, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        (name, dtype) for name in sources.NAMES for dtype in HALVES
    ]
    for name, dtype, *said in rows:
        errors = np.array([error(name, by, dtype) for by in ("hand", "policy")])
        ulps = errors / float(jnp.finfo(dtype).eps)
        # other releases of XLA round elsewhere: 15%
        np.testing.assert_allclose(ulps, np.array(said, float), rtol=0.15)


POLICY = "mixed_bfloat16"
ULP = float(jnp.finfo(jnp.bfloat16).eps)


def decoded(name: str, variables: Any, inputs: Any) -> tuple[Any, Any]:
    """The logits of each position from one call a token, and the cache after the last."""
    module = models.after(name)
    config = module.TransformerConfig(num_layers=1, decode=True)
    model = (module.TransformerLM if name == "lm1b" else module.Transformer)(config)
    tokens = jnp.pad(inputs["tokens"], ((0, 0), (1, 0)))[:, :-1]

    def step(cache: Any, token: Any) -> tuple[Any, Any]:
        collections = variables | {"cache": cache}
        if name == "lm1b":
            logits, changed = model.apply(collections, token[:, None], mutable=["cache"])
        else:
            method = type(model).decode
            args = encoded, inputs["sources"], token[:, None]
            logits, changed = model.apply(collections, *args, mutable=["cache"], method=method)
        return changed["cache"], logits[:, 0]

    with use_policy(POLICY):
        shapes = [tokens.shape] if name == "lm1b" else [inputs["sources"].shape, tokens.shape]
        cache = jax.eval_shape(lambda: module.initialize_cache(jax.random.key(0), config, *shapes))
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
        if name == "wmt":
            encode = type(model).encode
            encoded = jax.jit(lambda: model.apply(variables, inputs["sources"], method=encode))()
            assert encoded.dtype == jnp.float32  # a method called from outside returns output_dtype
        cache, logits = jax.jit(lambda cache: jax.lax.scan(step, cache, tokens.T))(cache)
    return jnp.swapaxes(logits, 0, 1), cache


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["lm1b", "wmt"])
def test_a_token_at_a_time_gives_what_the_whole_sequence_gives(name):
    ported, inputs = models.by_policy(name, POLICY), models.batch(name)
    variables = models.random_tree(jax.eval_shape(ported.init), 0)
    whole = np.asarray(models.compiled(ported.logits, variables, inputs)(variables, inputs))
    logits, cache = decoded(name, variables, inputs)
    assert logits.dtype == jnp.float32
    # without padding, which the cache knows nothing of
    rows, atol = np.asarray(inputs["tokens"]).all(axis=1), 4 * ULP * np.abs(whole).max()
    np.testing.assert_allclose(logits[rows], whole[rows], rtol=0, atol=atol)
    stored = {leaf.dtype for leaf in jax.tree.leaves(cache)}
    floating = {str(dtype) for dtype in stored if jnp.issubdtype(dtype, jnp.floating)}
    assert floating == {"bfloat16"}


@pytest.mark.slow
def test_a_cache_that_is_handed_through_comes_back_as_it_went_in_and_changes_no_logits():
    module, inputs = models.after("gemma"), models.batch("gemma")
    with use_policy(POLICY):
        config = module.TransformerConfig(num_layers=1)
        model = flax_nnx.eval_shape(lambda: module.Transformer(config, rngs=flax_nnx.Rngs(0)))
    graphdef, state = flax_nnx.split(model)

    def called(state: Any) -> Any:
        model = flax_nnx.merge(graphdef, state)
        cache = model.init_cache(models.LENGTH, models.BATCH)
        plain, _ = models.causal(model, inputs["tokens"])
        return cache, plain, *models.causal(model, inputs["tokens"], cache)

    given, _, logits, returned = jax.eval_shape(called, state)
    assert returned == given  # dtypes too: a loop can carry it
    assert logits.dtype == returned["layer_0"]["k"].dtype == jnp.float32
    state = models.random_tree(state, 0)
    _, plain, cached, _ = models.compiled(called, state)(state)
    np.testing.assert_array_equal(plain, cached)
