"""EfficientNet-Lite0 in our layers: the two photos' classes, and torch's logits."""

import hashlib
import importlib.util
import pickle

import efficientnet_lite as job
import jax
import numpy as np
import pytest
from PIL import Image

import policy as mp
from tests.examples.helpers import assert_rejected, assert_reported, shapes_of

TINY = job.Config(
    stem=8,
    stages=(job.Blocks(1, 3, 1, 1, 8), job.Blocks(2, 5, 2, 2, 12), job.Blocks(1, 3, 2, 2, 12)),
    head=16,
    classes=7,
    image_size=32,
)


KERNELS = {
    "_conv_stem": ("_bn0", (8, 3, 3, 3)),
    "_blocks.0._depthwise_conv": ("_bn1", (8, 1, 3, 3)),
    "_blocks.0._project_conv": ("_bn2", (8, 8, 1, 1)),
    "_blocks.1._expand_conv": ("_bn0", (16, 8, 1, 1)),
    "_blocks.1._depthwise_conv": ("_bn1", (16, 1, 5, 5)),
    "_blocks.1._project_conv": ("_bn2", (12, 16, 1, 1)),
    "_blocks.2._expand_conv": ("_bn0", (24, 12, 1, 1)),
    "_blocks.2._depthwise_conv": ("_bn1", (24, 1, 5, 5)),
    "_blocks.2._project_conv": ("_bn2", (12, 24, 1, 1)),
    "_blocks.3._expand_conv": ("_bn0", (24, 12, 1, 1)),
    "_blocks.3._depthwise_conv": ("_bn1", (24, 1, 3, 3)),
    "_blocks.3._project_conv": ("_bn2", (12, 24, 1, 1)),
    "_conv_head": ("_bn1", (16, 12, 1, 1)),
}  # its norm, and (outputs, inputs, height, width)


def random_weights():
    """The tiny model's weights by torch's names."""
    rng = np.random.default_rng(0)
    weights = {"_fc.weight": rng.normal(0, 1, (7, 16)), "_fc.bias": rng.normal(0, 1, 7)}
    for name, (norm, shape) in KERNELS.items():
        weights[f"{name}.weight"] = rng.normal(0, 0.5, shape)
        norm = "".join(name.rpartition(".")[:2]) + norm
        for part in ("weight", "bias", "running_mean"):
            weights[f"{norm}.{part}"] = rng.normal(0, 1, shape[0])
        weights[f"{norm}.running_var"] = rng.uniform(0.5, 2, shape[0])
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


class Malicious:
    called = False

    def __reduce__(self):
        return setattr, (Malicious, "called", True)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((job.MAGIC, job.PROTOCOL, {}, {"w": Malicious()}, []), r"this one asks for .*\.setattr\."),
        ((1, job.PROTOCOL, {}, {}, []), r"begin with 0x1950\w+, 1001, but begins with 1, 1001\."),
        ((job.MAGIC,), "is no checkpoint that this"),
    ],
)
def test_a_pickle_that_asks_for_code_and_a_damaged_one_are_rejected(tmp_path, parts, message):
    path = tmp_path / "c.pth"
    path.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
    with pytest.raises(ValueError, match=message):
        job.read_checkpoint(path)
    assert not Malicious.called


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).normal(0, 1, (2, 32, 32, 3)).astype(np.float32)


def test_the_tree_is_the_one_that_init_creates(images):
    variables = job.flax_variables(random_weights(), TINY)
    created = jax.eval_shape(job.EfficientNetLite(TINY).init, jax.random.key(0), images)
    held = job.stored(variables, created)
    assert shapes_of(held) == shapes_of(created)
    variables["params"]["classifier"]["bias"] = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=r"'classifier'.*'bias'.*should be \(7,\), but is \(8,\)"):
        job.stored(variables, created)


def test_depthwise_convolutions_stay_in_float32_unless_a_rule_says_otherwise(images):
    model = job.EfficientNetLite(TINY)
    with mp.use_policy("bfloat16", job.rules_of(mp.PolicyRules(), plain=False)):
        variables = jax.eval_shape(model.init, jax.random.key(0), images)
        jaxpr = jax.make_jaxpr(model.apply)(variables, images)
    for name, block in variables["params"].items():
        if name.startswith("block_"):
            dtypes = {part: str(leaf["conv"]["kernel"].dtype) for part, leaf in block.items()}
            assert dtypes.pop("depthwise") == "float32" and set(dtypes.values()) == {"bfloat16"}
    convolutions = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    grouped = [e.params["feature_group_count"] > 1 for e in convolutions]
    assert sum(grouped) == 4
    for equation, depthwise in zip(convolutions, grouped, strict=True):
        dtype = "float32" if depthwise else "bfloat16"
        assert {str(x.aval.dtype) for x in equation.invars} == {dtype}
    own = mp.PolicyRules([(job.KEPT, "bfloat16")])
    assert job.rules_of(own, plain=False) == own
    assert job.rules_of(mp.PolicyRules(), plain=True) == mp.PolicyRules()


@pytest.fixture
def tiny_job(monkeypatch):
    """The example with the tiny model in place of the published one."""
    monkeypatch.setattr(job, "Config", lambda: TINY)
    monkeypatch.setattr(job, "checkpoint_path", lambda: None)
    monkeypatch.setattr(job, "read_checkpoint", lambda path: random_weights())


@pytest.mark.slow
def test_own_photos_are_classified_reported_and_plotted(tiny_job, tmp_path, capsys):
    photo, labels = tmp_path / "wide.png", tmp_path / "labels.txt"
    path = tmp_path / "plots" / "p.png"
    pixels = (np.arange(60 * 80 * 3) % 256).astype(np.uint8)
    Image.fromarray(pixels.reshape(60, 80, 3)).save(photo)
    labels.write_text("\n".join(f"kind {i}" for i in range(7)))
    arguments = ["--photo", str(photo), "--labels", str(labels), "--plot", str(path)]
    (result,) = job.main([*arguments, "--rule", "head=f32", "--policy", "mixed_float16"])
    assert result.logits.shape == (1, 7) and 0 < result.error < 0.1
    np.testing.assert_allclose(result.probabilities.sum(-1), 1)
    best = result.logits.argmax()
    seen = f"{best} kind {best} {result.probabilities[0, best]:.1%}"
    assert_reported(capsys, path, "wide.png", seen, "largest logit error")


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "haed=f32"], "Rule 'haed' matched no module. Modules seen: "),
        (["--photo", __file__], "cannot identify image file"),
        (["--labels", __file__], f"{__file__} should have 7 lines, one a class, but has "),
    ],
)
def test_a_bad_argument_is_one_line(tiny_job, arguments, message):
    assert_rejected(job, arguments, message)


# Made once with torch 2.15 in float64: `EfficientNet.from_name("efficientnet-lite0")` of the
# package efficientnet_lite_pytorch 0.1.0, its checkpoint by load_state_dict, eval(), on
# `normalized(crops)` of the two photos as Pillow 13.0 decodes and resizes them: the five largest
# logits, and five others.
CLASSES = {"china.jpg": (698, 442, 663, 483, 975), "flower.jpg": (985, 947, 309, 108, 310)}
OTHERS = (0, 250, 500, 750, 999)
TORCH = {
    "china.jpg": (
        (7.543011, 6.729805, 6.175554, 5.764462, 5.66277),
        (1.504348, -0.165011, 0.081837, -0.043009, -0.526546),
    ),
    "flower.jpg": (
        (7.547802, 5.523723, 5.497458, 5.4835, 4.791523),
        (-1.590944, -1.200401, -1.026308, -1.623952, -0.467721),
    ),
}
CROPS = "a7dcc83966bf10d8fe1294ad0de424f633e351d37d03d1c7a3b9d09b944dfb4a"  # of these crops


@pytest.fixture(scope="module")
def photos():
    """Names, and crops uint8."""
    return job.load_photos([], job.Config())


@pytest.fixture(scope="module")
def results(photos):
    """float32, mixed_bfloat16 and mixed_float16 on scikit-learn's photos."""
    if importlib.util.find_spec(job.PACKAGE) is None:
        pytest.skip(job.INSTALL)
    names = ("float32", "mixed_bfloat16", "mixed_float16")
    policies = {name: mp.get_policy(name) for name in names}
    variables = job.flax_variables(job.read_checkpoint(job.checkpoint_path()), job.Config())
    found = job.run(policies, mp.PolicyRules(), variables, job.normalized(photos[1]), job.Config())
    return {result.name: result for result in found}


@pytest.mark.slow
def test_a_palace_and_a_daisy_are_seen_and_half_precision_is_near(
    results,
):
    for result in results.values():
        assert result.logits.argmax(-1).tolist() == [698, 985]
    assert results["mixed_bfloat16"].error <= 0.15
    assert results["mixed_float16"].error <= 0.018


@pytest.mark.slow
def test_float32_gives_torch_s_logits(results, photos):
    if hashlib.sha256(photos[1].tobytes()).hexdigest() != CROPS:
        pytest.skip("Another Pillow decodes or resizes the photos otherwise.")
    for name, logits in zip(photos[0], results["float32"].logits, strict=True):
        for labels, values in zip((CLASSES[name], OTHERS), TORCH[name], strict=True):
            np.testing.assert_allclose(logits[list(labels)], values, rtol=0, atol=1e-4)
