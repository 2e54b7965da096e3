"""Losses of half-precision logits, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from policy import losses
from policy.losses import softmax_cross_entropy_with_integer_labels as sparse

HALVES = [jnp.bfloat16, jnp.float16]
LABELS = np.array([0, 5, 7, 31])


def _logits(dtype, offset=0.0):
    return jnp.asarray(
        3 * np.random.default_rng(0).normal(size=(4, 32)) + offset, jnp.float32
    ).astype(dtype)


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize(("dtype", "offset"), [*((dtype, 0) for dtype in HALVES), (HALVES[0], 1e3)])
def test_cross_entropy_is_float64_s_to_float32_precision(dtype, offset, z_loss, smoothing):
    logits = _logits(dtype, offset)
    targets = (1 - smoothing) * np.eye(32)[LABELS] + smoothing / 32
    wide = np.asarray(logits, np.float64)
    normalizer = np.asarray(scipy.special.logsumexp(wide, -1))
    truth = -(targets * (wide - normalizer[:, None])).sum(-1) + z_loss * normalizer**2
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    ours = sparse(logits, jnp.asarray(LABELS), **options)
    dense = losses.softmax_cross_entropy(logits, jax.nn.one_hot(LABELS, 32, dtype=dtype), **options)
    for loss in (ours, dense):
        assert loss.dtype == jnp.float32 and abs(truth).min() > 0.1
        # lse - logit, both near 1000, would be off by 2e-5.
        np.testing.assert_allclose(loss, truth, rtol=2e-6)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_is_softmax_minus_target_rounded_once(dtype, offset):
    logits = _logits(dtype, offset)
    gradient = jax.grad(lambda x: sparse(x, jnp.asarray(LABELS)).sum())(logits)
    truth = scipy.special.softmax(np.asarray(logits, np.float64), -1) - np.eye(32)[LABELS]
    assert gradient.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64), truth, rtol=float(jnp.finfo(dtype).eps), atol=1e-7
    )


def test_backward_keeps_the_half_logits_and_no_wider_copy():
    logits = jax.ShapeDtypeStruct((4, 1000), jnp.bfloat16)

    def saved(logits):
        return jax.vjp(lambda x: sparse(x, jnp.zeros(4, int)), logits)[1]

    kept = [leaf for leaf in jax.tree.leaves(jax.eval_shape(saved, logits)) if leaf.size >= 4000]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]


@pytest.mark.slow
def test_the_compiled_step_holds_and_moves_no_more_than_optax_s_in_half():
    logits, labels = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16), jnp.zeros(64, int)

    def cost(loss):
        step = jax.value_and_grad(lambda x: loss(x, labels).astype(jnp.float32).mean())
        with jax.numpy_dtype_promotion("standard"):
            compiled = jax.jit(step).lower(logits).compile()
        memory, bytes_accessed = compiled.memory_analysis(), compiled.cost_analysis()
        assert memory is not None and bytes_accessed is not None
        return memory.temp_size_in_bytes, bytes_accessed["bytes accessed"]

    ours = cost(sparse)
    optax_s = cost(optax.softmax_cross_entropy_with_integer_labels)
    few = 64 * 64  # a few numbers a row
    assert ours[0] <= optax_s[0] + few
    assert ours[1] <= optax_s[1] + few


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "extreme"), [(jnp.bfloat16, 1e4), (jnp.float16, 6e4)])
def test_extreme_logits_cost_their_distance(dtype, extreme):
    logits = jnp.array([[extreme, -extreme]], dtype)
    loss, largest = sparse(logits, jnp.array([1])), float(logits[0, 0])
    np.testing.assert_allclose(loss, 2 * largest, rtol=1e-6)
    binary = losses.sigmoid_binary_cross_entropy(logits, jnp.array([[0, 1]], dtype))
    np.testing.assert_allclose(binary, [[largest] * 2], rtol=1e-6)


@pytest.mark.slow
def test_other_axes_and_masked_classes():
    logits = _logits(jnp.bfloat16)
    rows = sparse(logits, jnp.asarray(LABELS))
    columns = sparse(logits.T, jnp.asarray(LABELS), axis=0)
    np.testing.assert_allclose(rows, columns, rtol=1e-6)
    where = (jnp.arange(32) < 8)[None]
    first = sparse(logits[:3, :8], jnp.asarray(LABELS[:3]), label_smoothing=0.2)
    masked = sparse(logits[:3], jnp.asarray(LABELS[:3]), where=where, label_smoothing=0.2)
    np.testing.assert_allclose(masked, first, rtol=1e-6)
    targets = jax.nn.one_hot(LABELS[:3], 32)
    wide, where = logits[:3].astype(jnp.float32), jnp.broadcast_to(where, (3, 32))
    dense = losses.softmax_cross_entropy(wide, targets, where=where, label_smoothing=0.2)
    np.testing.assert_allclose(dense, first, rtol=1e-5)


def test_a_label_is_the_flat_index_into_a_tuple_of_axes():
    logits = _logits(jnp.float32).reshape(4, 4, 8)
    for axis in ((1, 2), (-2, -1), (2, 1)):
        given = logits, jnp.asarray(LABELS), axis
        theirs = optax.softmax_cross_entropy_with_integer_labels(*given)
        np.testing.assert_allclose(sparse(*given), theirs, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels", [np.array([5], np.uint8), np.array([5], np.int8), np.array([-379])]
)
def test_labels_narrower_than_the_vocabulary_and_counted_from_its_end_have_one_target(labels):
    gradient = jax.grad(lambda x: sparse(x, labels).sum())
    assert np.flatnonzero(gradient(jnp.zeros((1, 384)))[0] < 0).tolist() == [5]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mask_of_examples_leaves_them_out_of_the_loss_and_its_gradient(smoothing, z_loss):
    logits = _logits(jnp.float32)[:, :4]  # as many examples as classes
    labels, where = jnp.array([0, 1, 2, 3]), jnp.array([True, False, True, True])

    options = {"label_smoothing": smoothing, "z_loss": z_loss}

    def by_index(logits, where=None):
        return sparse(logits, labels, where=where, **options)

    def dense(logits, where=None):
        targets = jax.nn.one_hot(labels, 4)
        return losses.softmax_cross_entropy(logits, targets, where=where, **options)

    for loss in (by_index, dense):
        np.testing.assert_allclose(
            loss(logits, where), jnp.where(where, loss(logits), 0), rtol=1e-6
        )
        masked, whole = (
            jax.grad(lambda x, w=w, loss=loss: loss(x, w).sum())(logits) for w in (where, None)
        )
        np.testing.assert_allclose(
            masked, jnp.where(where[:, None], whole, 0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_a_target_of_zero_adds_nothing_where_the_logit_is_minus_infinity():
    logits = jnp.array([[-jnp.inf, 0.0, 1.0]], jnp.bfloat16)
    targets = jnp.array([[0.0, 0.25, 0.75]], jnp.bfloat16)
    p, logs = np.array([0.25, 0.75]), np.array([0.0, 1.0]) - np.logaddexp(0, 1)
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_targets = jnp.log(targets.astype(jnp.float32))
    divergence = (p * (np.log(p) - logs)).sum()
    for loss, inputs, truth in (
        (lambda x: losses.softmax_cross_entropy(x, targets), logits, -(p * logs).sum()),
        (lambda x: losses.kl_divergence(x, targets), wide, divergence),
        (lambda x: losses.kl_divergence_with_log_targets(x, log_targets), wide, divergence),
    ):
        np.testing.assert_allclose(loss(inputs), [truth], rtol=1e-6, atol=1e-6)
        gradient = jax.grad(lambda x, loss=loss: loss(x).sum())(inputs)
        assert np.isfinite(gradient.astype(jnp.float32)).all()


def test_backward_of_a_divergence_keeps_the_targets_alone():
    x, y = _logits(jnp.bfloat16), _logits(jnp.bfloat16, offset=0.5)
    for name in ("kl_divergence", "kl_divergence_with_log_targets"):
        _, vjp = jax.vjp(lambda x, name=name: getattr(losses, name)(x, y), x)
        saved = [leaf.dtype for leaf in jax.tree.leaves(vjp) if leaf.size == x.size]
        assert saved == [jnp.bfloat16]


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(
    "name",
    [
        *("kl_divergence", "kl_divergence_with_log_targets"),
        *("cosine_similarity", "cosine_distance"),
    ],
)
def test_masked_values_and_gradients_of_divergences_and_cosines_are_optax_s(name):
    x, y = _logits(jnp.float32), _logits(jnp.float32, offset=0.5)
    given = x, jax.nn.softmax(y) if name == "kl_divergence" else y
    where = jnp.broadcast_to(jnp.arange(32) < 8, x.shape)
    ours, theirs = getattr(losses, name), getattr(optax.losses, name)
    masked = (loss(*given, axis=-1, where=where) for loss in (ours, theirs))
    np.testing.assert_allclose(*masked, rtol=1e-6)
    for argument in (0, 1):
        gradients = (
            jax.grad(lambda *given, loss=loss: loss(*given).sum(), argument)(*given)
            for loss in (ours, theirs)
        )
        np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_other_losses_are_float64_s(dtype):
    x, y = _logits(dtype), _logits(dtype, offset=0.5)
    x64, y64 = np.asarray(x, np.float64), np.asarray(y, np.float64)
    p = jnp.asarray(scipy.special.softmax(y64, -1), jnp.float32).astype(dtype)
    p64 = np.asarray(p, np.float64)
    log_p64 = np.where(p64 > 0, np.log(np.where(p64 > 0, p64, 1)), 0)
    cosine = (x64 * y64).sum(-1) / np.linalg.norm(x64, axis=-1) / np.linalg.norm(y64, axis=-1)
    for loss, truth in (
        (losses.squared_error(x, y), (x64 - y64) ** 2),
        (losses.squared_error(x), x64**2),
        (losses.kl_divergence(x, p), (p64 * (log_p64 - x64)).sum(-1)),
        (losses.kl_divergence_with_log_targets(x, y), (np.exp(y64) * (y64 - x64)).sum(-1)),
        (losses.cosine_similarity(x, y), cosine),
        (losses.cosine_distance(x, y), 1 - cosine),
        (losses.sigmoid_binary_cross_entropy(x, p), np.logaddexp(0, x64) - p64 * x64),
    ):
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss, truth, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_ctc_of_half_logits_is_float32_s():
    logits = _logits(jnp.bfloat16)[None, :, :6]
    targets = jnp.zeros((1, 4)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
    ours = losses.ctc_loss(logits, *targets)
    assert ours.dtype == jnp.float32
    wide = losses.ctc_loss(logits.astype(jnp.float32), *targets)
    np.testing.assert_allclose(ours, wide, rtol=1e-6)
    gradient = jax.grad(lambda x: losses.ctc_loss(x, *targets).sum())(logits)
    assert gradient.dtype == jnp.bfloat16


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": jnp.zeros((4, 32), jnp.complex64)}, "logits should be real, but got complex64"),
        ({"label_smoothing": 1.0}, r"label_smoothing should be in \[0, 1\), but got 1.0"),
        ({"z_loss": -1.0}, "z_loss should be at least 0, but got -1.0"),
    ],
)
def test_bad_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparse(**({"logits": _logits(jnp.bfloat16), "labels": LABELS} | arguments))
