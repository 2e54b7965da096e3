"""The chunked loss of a last linear layer: transforms, reports, and inputs at the edges."""

import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from mpmodules import linen, nnx
from policy import accumulate_gradients, split_batch, use_policy
from policy.functions.linear_cross_entropy import _counts
from policy.losses import linear_softmax_cross_entropy as chunked
from policy.programs.reading.walk import walk
from tests.policy.functions.linear_operands import BIAS, KERNEL, LABELS, OPTIONS, X, of_logits
from tests.programs import named, operations

near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-6)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("is_float64", [False, True])
def test_errors_are_those_of_the_logits_formula_beside_float64(is_float64):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(256, 64)), rng.normal(size=(64, 1000)) / 8
    x, kernel = x.astype(np.float32), kernel.astype(np.float32)
    labels = rng.integers(0, 1000, 256)

    def error(loss, dtype):
        given = x.astype(dtype), kernel.astype(dtype)
        found = leaves(jax.value_and_grad(loss, (0, 1))(*given))
        assert {leaf.dtype for leaf in found} == {jnp.dtype(dtype)}
        return [
            np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, truth, strict=True)
        ]

    def leaves(tree):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

    with jax.enable_x64(True):
        formula = lambda x, w: of_logits(x, w, None, labels).mean()  # noqa: E731
        ours = lambda x, w: chunked(x, w, labels, chunk_size=100)  # noqa: E731
        wide = x.astype(np.float64), kernel.astype(np.float64)
        truth = leaves(jax.value_and_grad(formula, (0, 1))(*wide))
        if is_float64:
            assert max(error(ours, np.float64)) < 1e-14
            return
        near_enough = [max(1.5 * a, 2**-22) for a in error(formula, np.float32)]
        assert all(a <= b for a, b in zip(error(ours, np.float32), near_enough, strict=True))


def test_no_array_of_the_program_holds_all_logits():
    x, kernel = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 16), (16, 384)))
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)

    def largest(loss):
        sites = walk(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel, labels))
        arrays = [v.aval for site in sites for v in site.equation.outvars]
        return max(a.size for a in arrays if hasattr(a, "shape") and 384 in a.shape)

    formula = lambda x, w, y: of_logits(x, w, None, y).mean()  # noqa: E731
    assert largest(formula) == 8192 * 384
    assert largest(chunked) <= 8192 * 384 / 4


@pytest.mark.parametrize(
    ("examples", "devices", "chunk_size", "found"),
    [
        (8192, 1, None, (5, 4, 416)),
        (16384, 1, None, (8, 4, 512)),
        (1 << 20, 1, None, (512, 4, 512)),
        (4096 * 256, 256, None, (2, 4, 131072)),
        (8184 * 8, 8, None, (6, 4, 2728)),
        (100, 1, None, (1, 1, 100)),
        (1, 1, None, (1, 1, 1)),
        (0, 1, None, (1, 1, 0)),
        (36, 1, 8, (5, 1, 8)),
        (8192, 1, 1024, (8, 4, 256)),
    ],
)
def test_chunks_are_chosen_by_the_examples_of_a_device(examples, devices, chunk_size, found):
    assert _counts(examples, devices, chunk_size) == found


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_labels_are_integers_of_any_width(dtype):
    labels = jnp.asarray(LABELS).at[1, 0].set(7)
    found = chunked(X, KERNEL, labels.astype(dtype), ignore_index=-100)
    assert found == chunked(X, KERNEL, labels)


@pytest.mark.slow
def test_a_label_out_of_range_makes_the_loss_and_the_gradients_nan():
    for label in (50, -51, 2**31 - 1, -(2**31)):
        labels = jnp.asarray(LABELS).at[0, 0].set(label)
        loss, gradient = jax.value_and_grad(lambda w, y=labels: chunked(X, w, y))(KERNEL)
        assert np.isnan(loss) and np.isnan(gradient).all()
        assert np.isfinite(chunked(X, KERNEL, labels, ignore_index=label))
    assert np.isnan(chunked(X, KERNEL, jnp.full(LABELS.shape, 2**32 - 1, jnp.uint32)))


@pytest.mark.slow
def test_nan_stays_nan_and_small_shapes_have_a_loss():
    gradient = jax.grad(lambda x: chunked(x, KERNEL, LABELS))(
        jnp.asarray(X).at[0, 0, 0].set(np.nan)
    )
    assert np.isnan(gradient[0, 0]).all() and np.isfinite(gradient[1]).all()
    near(chunked(X[0, 0], KERNEL, jnp.int32(3)), of_logits(X[0, 0], KERNEL, None, jnp.int32(3)))
    assert not np.any(jax.grad(chunked)(X, KERNEL[:, :1], 0 * LABELS))
    near(chunked(X[..., :0], KERNEL[:0], LABELS), np.log(50))
    near(chunked(1e4 * X, KERNEL, LABELS), of_logits(1e4 * X, KERNEL, None).mean())


@pytest.mark.slow
def test_none_is_the_loss_of_each_example_and_weights_may_be_a_mask():
    each = chunked(X, KERNEL, LABELS, reduction="none")
    near(each, of_logits(X, KERNEL, None))
    mask = LABELS > 20
    near(chunked(X, KERNEL, LABELS, weights=mask), each[mask].mean())


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("options", OPTIONS)
def test_under_vmap_scan_remat_and_microbatches_it_is_the_same_loss(options):
    def loss(kernel, x, labels, bias=None):
        return chunked(x, kernel, labels, bias, chunk_size=4, **options)

    def scanned(kernel):
        step = lambda total, rows: (total + loss(kernel, *rows) / 4, None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), 0.0, (X, LABELS))[0]

    truth = jax.grad(lambda w: of_logits(X, w, None, **options).mean())(KERNEL)
    near(jax.vmap(jax.grad(loss), (None, 0, 0))(KERNEL, X, LABELS).mean(0), truth)
    near(jax.grad(scanned)(KERNEL), truth)
    gradients_of = policy.value_and_grad(lambda p, batch: loss(p["w"], *batch))
    batches = split_batch((jnp.asarray(X), jnp.asarray(LABELS)), 2)
    near(accumulate_gradients(gradients_of, {"w": KERNEL}, batches)[1]["w"], truth)


@pytest.mark.slow
def test_hessians_in_reverse_mode_are_those_of_the_logits():
    x, labels = X[0, :2], LABELS[0, :2]
    ours = lambda x: chunked(x, KERNEL, labels, BIAS, chunk_size=1)  # noqa: E731
    theirs = lambda x: of_logits(x, KERNEL, BIAS, labels).mean()  # noqa: E731
    near(jax.jacrev(jax.jacrev(ours))(x), jax.hessian(theirs)(x))


# --------------------------------------------------------------------------------------------------
# Models of both APIs
# --------------------------------------------------------------------------------------------------


class Tied(linen.Module):
    """Its head is its table, or a Dense's kernel."""

    dense: bool = False

    @linen.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array) -> Any:
        embed = linen.Embed(50, 16, name="embed")
        x = linen.LayerNorm(name="norm")(embed(tokens))
        if not self.dense:
            return embed.attend_cross_entropy(x, labels)
        head = linen.Dense(50, use_bias=False, name="head")
        if self.is_initializing():
            head(x)
        params: Any = head.variables["params"]
        return chunked(x, params["kernel"], labels)


class NnxTied(nnx.Module):
    def __init__(self, dense: bool, rngs: nnx.Rngs):
        self.embed, self.norm = nnx.Embed(50, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.head: Any = nnx.Linear(16, 50, rngs=rngs) if dense else None

    def __call__(self, tokens: Any, labels: Any) -> jax.Array:
        x = self.norm(self.embed(tokens))
        if self.head is None:
            return self.embed.attend_cross_entropy(x, labels)
        return chunked(x, self.head.kernel[...], labels, self.head.bias[...])


class FlaxHead(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = flax.linen.LayerNorm()(flax.linen.Embed(50, 16)(tokens))
        return chunked(x, self.param("w", flax.linen.initializers.normal(), (16, 50)), labels)


def _linen(model: Any, text: str | None, rules: Any = None) -> Any:
    with use_policy(text, rules):
        variables = model.init(jax.random.key(0), LABELS, LABELS)

    def loss(variables):
        with use_policy(text, rules):
            return model.apply(variables, LABELS, LABELS)

    return loss, variables


def _nnx(dense: bool, text: str) -> Any:
    graph, state = nnx.split(NnxTied(dense, rngs=nnx.Rngs(0), dtype_policy=text))
    return lambda state: nnx.merge(graph, state)(LABELS, LABELS), state


MODELS = {
    "linen table": lambda text: _linen(Tied(), text),
    "linen Dense": lambda text: _linen(Tied(dense=True), text),
    "port": lambda text: _linen(linen.apply_policy(FlaxHead(), text), None),
    "nnx table": lambda text: _nnx(False, text),
    "nnx Linear": lambda text: _nnx(True, text),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        *((model, "mixed_bfloat16") for model in MODELS),
        ("port", "float16"),
        ("nnx table", "float32"),
    ],
)
def test_in_models_it_multiplies_in_compute_dtype_and_audit_finds_nothing(model, text):
    loss, params = MODELS[model](text)
    found = policy.get_policy(text)
    gradient = jax.grad(lambda params: loss(params).astype("float32"))
    dots = {op.inputs for op in named(operations(gradient, params), "dot_general")}
    assert dots == {(found.compute_dtype.name,) * 2}
    assert loss(params).dtype == found.output_dtype
    assert not policy.audit(loss, params, backward=True).findings


@pytest.mark.slow
def test_a_rule_for_the_table_holds_for_its_loss_and_a_table_is_not_in_8_bits():
    for rules, text, half in (
        ({"embed": "float32"}, "mixed_bfloat16", "float32"),
        (None, "mixed_int8", "bfloat16"),
    ):
        loss, params = _linen(Tied(), text, rules)
        dots = {op.inputs for op in named(operations(jax.grad(loss), params), "dot_general")}
        assert dots == {(half, half)}


@pytest.mark.slow
def test_compare_and_estimate_read_it():
    compared = policy.compare(
        lambda w: chunked(X, w, LABELS), jnp.asarray(KERNEL), policy="mixed_bfloat16"
    )
    assert compared.first_jump is None
    x, kernel = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2048, 32), (32, 256)))
    loss = lambda w, x: chunked(x, w, jnp.zeros(2048, int))  # noqa: E731
    options: dict[str, Any] = {"policies": ["mixed_bfloat16"], "on": "cpu", "backward": True}
    costs = policy.estimate(loss, kernel, x, **options)["mixed_bfloat16"]
    assert costs.matmul_flops == {"bfloat16": 3 * 2 * 2048 * 32 * 256}
