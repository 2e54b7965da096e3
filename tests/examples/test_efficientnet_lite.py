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
from tests.examples.helpers import assert_refused, shapes_of

TINY = job.Config(
    stem=8,
    stages=(job.Blocks(1, 3, 1, 1, 8), job.Blocks(2, 5, 2, 2, 12), job.Blocks(1, 3, 2, 2, 12)),
    head=16,
    classes=7,
    image_size=32,
)


def blocks_of(config):
    """(name, kernel, stride, expand, inputs, filters) of each block."""
    inputs, found = config.stem, []
    for stage in config.stages:
        for i in range(stage.repeats):
            stride = stage.stride if i == 0 else 1
            sizes = (stage.kernel, stride, stage.expand, inputs, stage.filters)
            found.append((f"_blocks.{len(found)}", *sizes))
            inputs = stage.filters
    return found


def random_weights(config):
    """The weights by torch's names, as (outputs, inputs, height, width)."""
    rng, last = np.random.default_rng(0), config.stem
    kernels: dict[str, tuple[int, ...]] = {}
    norms: dict[str, int] = {}
    kernels["_conv_stem"], norms["_bn0"] = (config.stem, 3, 3, 3), config.stem
    for name, kernel, _, expand, inputs, filters in blocks_of(config):
        wide = inputs * expand
        if expand > 1:
            kernels[f"{name}._expand_conv"], norms[f"{name}._bn0"] = (wide, inputs, 1, 1), wide
        kernels[f"{name}._depthwise_conv"], norms[f"{name}._bn1"] = (wide, 1, kernel, kernel), wide
        kernels[f"{name}._project_conv"], norms[f"{name}._bn2"] = (filters, wide, 1, 1), filters
        last = filters
    kernels["_conv_head"], norms["_bn1"] = (config.head, last, 1, 1), config.head
    weights = {f"{name}.weight": rng.normal(0, 0.5, shape) for name, shape in kernels.items()}
    for name, size in norms.items():
        for part in ("weight", "bias", "running_mean"):
            weights[f"{name}.{part}"] = rng.normal(0, 1, size)
        weights[f"{name}.running_var"] = rng.uniform(0.5, 2, size)
    weights["_fc.weight"] = rng.normal(0, 1, (config.classes, config.head))
    weights["_fc.bias"] = rng.normal(0, 1, config.classes)
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
def test_a_pickle_that_asks_for_code_and_a_damaged_one_are_refused(tmp_path, parts, message):
    path = tmp_path / "c.pth"
    path.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
    with pytest.raises(ValueError, match=message):
        job.read_checkpoint(path)
    assert not Malicious.called


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).normal(0, 1, (2, 32, 32, 3)).astype(np.float32)


def test_the_tree_is_the_one_that_init_creates(images):
    variables = job.flax_variables(random_weights(TINY), TINY)
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
    monkeypatch.setattr(job, "read_checkpoint", lambda path: random_weights(TINY))


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
    printed = capsys.readouterr()
    row = printed.out.splitlines()[2]
    best = result.logits.argmax()
    assert row.startswith("wide.png")
    assert f"{best} kind {best} {result.probabilities[0, best]:.1%}" in row
    assert "largest logit error" in printed.out and "100%" in printed.err
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "haed=f32"], "Rule 'haed' matched no module. Modules seen: "),
        (["--photo", __file__], "cannot identify image file"),
        (["--labels", __file__], f"{__file__} should have 7 lines, one a class, but has "),
    ],
)
def test_a_bad_argument_is_one_line(tiny_job, arguments, message):
    assert_refused(job, arguments, message)


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


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_palace_and_a_daisy_are_seen(results, policy):
    assert results[policy].logits.argmax(-1).tolist() == [698, 985]


def test_float32_gives_torch_s_logits(results, photos):
    if hashlib.sha256(photos[1].tobytes()).hexdigest() != CROPS:
        pytest.skip("Another Pillow decodes or resizes the photos otherwise.")
    for name, logits in zip(photos[0], results["float32"].logits, strict=True):
        for labels, values in zip((CLASSES[name], OTHERS), TORCH[name], strict=True):
            np.testing.assert_allclose(logits[list(labels)], values, rtol=0, atol=1e-4)


def test_half_precision_is_as_near_as_a_careful_hand_port(results):
    assert results["mixed_bfloat16"].error <= 0.15
    assert results["mixed_float16"].error <= 0.018
