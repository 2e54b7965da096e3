"""The ResNet example: its data, its model beside Flax's own, its step, its report."""

import functools
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resnet_fashion_mnist as job

import policy as mp
from tests.eight_devices import run_tests_on_eight_devices
from tests.examples.helpers import assert_rejected, assert_reported, in_plain_flax

RNG = np.random.default_rng(0)
TINY = functools.partial(job.ResNet, (1,), job.ResNetBlock, num_filters=4, small_images=True)


def idx(array: np.ndarray) -> bytes:
    """What a gzipped idx file of a uint8 array holds."""
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(bytes((0, 0, 8, array.ndim)) + shape + array.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path):
    """The four files, of 64 and 24 images of 8x8 pixels."""
    for part, count in (("train", 64), ("t10k", 24)):
        labels = np.arange(count) % 10
        images = RNG.integers(0, 200, (count, 8, 8)) + 5 * labels[:, None, None]
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    return tmp_path


def test_the_files_are_read_as_they_are(folder):
    data = job.load(folder)
    content = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    assert data.train_images.shape == (64, 8, 8, 1) and data.test_images.shape == (24, 8, 8, 1)
    assert data.train_images[3, 2, 1, 0] == content[16 + 3 * 64 + 2 * 8 + 1]
    assert data.train_labels.dtype == np.int32
    assert data.test_labels.tolist() == [i % 10 for i in range(24)]
    pixels = data.normalized(data.train_images)
    assert pixels.dtype == np.float32 and abs(pixels.mean()) < 1e-6 and abs(pixels.std() - 1) < 1e-6


SHORT = gzip.compress(b"\0\0\x08\3" + struct.pack(">3I", 2, 8, 8) + bytes(100))
MALFORMED = {
    "no gzip": (b"no gzip", "should be a gzipped file, but: Not a gzipped file"),
    "labels": (idx(np.zeros(64)), "an idx file of uint8 with 3 axes, but starts with 00000801"),
    "too few bytes": (SHORT, "should hold 128 bytes for shape (2, 8, 8), but holds 100"),
    "too few images": (
        idx(np.zeros((63, 8, 8))),
        "one label below 10 for each image, but has 63 images and 64 labels up to 9",
    ),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_rejected_by_name_in_one_line(folder, content, message):
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(SystemExit, match=re.escape(message)) as stopped:
        job.main(["--data", str(folder)])
    assert str(stopped.value).startswith("resnet_fashion_mnist: ")
    assert "\n" not in str(stopped.value)


MODELS = {
    "ResNetBlock": {"stage_sizes": (1, 2), "small_images": True},
    "BottleneckResNetBlock": {"stage_sizes": (1, 1)},
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("block", MODELS)
def test_one_tree_of_weights_gives_what_plain_flax_gives_in_training_and_evaluation(block):
    ours, twin = (
        module.ResNet(block_cls=getattr(module, block), num_filters=4, **MODELS[block])
        for module in (job, in_plain_flax("resnet_fashion_mnist"))
    )
    x = jnp.asarray(RNG.normal(size=(8, 16, 16, 1)), jnp.float32)
    shapes = jax.eval_shape(twin.init, jax.random.key(0), x)
    assert jax.eval_shape(ours.init, jax.random.key(0), x) == shapes
    draw = lambda leaf: RNG.normal(size=leaf.shape).astype(np.float32) / 2  # noqa: E731
    weights: Any = jax.tree.map(draw, shapes)
    # Variances are positive.
    weights["batch_stats"] = jax.tree.map(lambda leaf: 0.5 + leaf**2, weights["batch_stats"])

    @functools.partial(jax.jit, static_argnums=0)
    def outputs(model: Any, weights: Any, x: jax.Array) -> Any:
        trained = model.apply(weights, x, mutable=["batch_stats"])
        return trained, model.apply(weights, x, train=False)

    expected = jax.device_get(outputs(twin, weights, x))
    # Under a policy, the variance takes no difference of squares.
    for policy, bound in ((None, 0), ("float32", 1e-6)):
        with mp.use_policy(policy):
            found = jax.device_get(outputs(ours, weights, x))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype == np.float32
            assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.slow
def test_a_step_that_overflows_leaves_weights_and_batch_statistics_as_they_were():
    images = RNG.normal(size=(16, 8, 8, 1)).astype(np.float32)
    init: Any = jax.jit(functools.partial(TINY().init, train=False))
    variables = init(jax.random.key(0), images[:1])
    config = job.Config(epochs=1, warmup_epochs=0.0, loss_scale=2.0**40)
    tx = job.optimizer(mp.get_policy("mixed_float16"), config, 1000)
    opt_state = tx.init(variables["params"])
    state = job.TrainState(variables["params"], variables["batch_stats"], opt_state)
    before = jax.device_get(state)  # a step donates it
    step = job.make_step(job.make_loss(TINY(), 1e-4), tx, job.make_mesh())
    with mp.use_policy("mixed_float16"):
        state, loss, scale = step(state, images, np.arange(16) % 10)
    assert np.isfinite(loss) and scale == 2.0**39  # the loss is fine, its gradients aren't
    assert state.opt_state.skipped == 1
    kept = lambda state: (state.params, state.batch_stats, state.opt_state.inner)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, kept(jax.device_get(state)), kept(before))


@pytest.mark.slow
def test_eight_devices_train_the_model_that_one_trains():
    run_tests_on_eight_devices(Path(__file__).with_name("resnet_on_eight_devices.py"))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(job.MODELS, "ResNet8", TINY)


@pytest.mark.slow
def test_it_trains_reports_plots_and_writes_what_it_measured(folder, tiny, tmp_path, capsys):
    texts = "--policy mixed_float16 --rule Dense_0=f32 --epochs 2 --batch-size 16"
    texts = f"{texts} --loss-scale {2**20} --growth-period 2"
    arguments = [*texts.split(), "--data", str(folder)]
    plot, measured = tmp_path / "new" / "curves.png", tmp_path / "new" / "measured.json"
    results = job.main([*arguments, "--plot", str(plot), "--json", str(measured)])
    ((text, (run,)),) = results.items()
    assert text == run.policy == "mixed_float16"
    assert len(run.losses) == 8 and np.isfinite(run.losses).all()
    assert [step for step, _ in run.accuracies] == [2, 4, 6, 8] and 0 <= run.accuracy <= 1
    assert 1 <= run.skipped < 8 and run.loss_scales[0] == 2**19  # the first step overflows
    # The momentum, and the loss scale.
    assert run.parameter_bytes <= run.optimizer_bytes < run.parameter_bytes + 100
    assert_reported(capsys, plot, *job.HEADER.split("|"), f"{run.accuracy:.2%}")
    record = json.loads(measured.read_text())
    assert record["versions"]["jax"] == jax.__version__
    assert record["results"][0]["losses"] == run.losses and record["config"]["batch_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rule haed=f32", "Rule 'haed' matched no module. Modules seen: "),
        ("--policy mixed_float16 --loss-scale 0", "loss_scale should be positive and finite, but"),
        ("--batch-size 65", "--batch-size should be a multiple of the 1 devices and at most the"),
    ],
)
def test_a_bad_argument_is_one_line(folder, tiny, monkeypatch, arguments, message):
    monkeypatch.delattr(job, "train")  # nothing is run
    given = ["--data", str(folder), "--batch-size", "16", *arguments.split()]
    assert_rejected(job, given, message)
