"""Everything that the README shows runs, and its figures' commands exist."""

import re
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpmodules import linen as nn
from mpmodules import nnx
from policy import mixed_precision
from tests.eight_devices import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    "block", BLOCKS, ids=[f"line {README[: README.index(b)].count(chr(10))}" for b in BLOCKS]
)
def test_each_block_of_the_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


STEPS = [block for block in BLOCKS if "def train_step" in block]
TABLE = README.partition("| text | parameters |")[2].partition("\n\n")[0]
POLICIES = [
    text
    for row in TABLE.splitlines()[2:]
    if "frozen" not in row
    for text in re.findall(r"`(.*?)`", row.split("|")[1])
]


@pytest.mark.filterwarnings("ignore:cpu has no")  # matmuls in 8 bits
@pytest.mark.parametrize("step", STEPS, ids=["linen", "nnx"])
@pytest.mark.parametrize("text", POLICIES)
def test_each_step_takes_each_policy_that_trains_and_computes_its_loss_in_float32(text, step):
    assert len(STEPS) == 2 and {"mixed_float16", "bfloat16", "float16", "f32_inside"} <= {*POLICIES}
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(step.replace("mixed_float16", text), "README.md", "exec"), names)
    loss = names["loss"]
    assert loss.dtype == jnp.float32 and loss > 0
    assert loss != loss.astype(jnp.bfloat16).astype(jnp.float32)


def test_the_readme_gives_one_command_for_the_main_job_and_one_for_the_tests():
    commands = dict(re.findall(r"<!-- (main job|tests) -->\n```bash\n(.*)\n```", README))
    assert commands["main job"].endswith("python examples/train_digits.py")
    assert commands["tests"].endswith("python -m pytest -n 2")
    assert (ROOT / "examples/train_digits.py").exists()


def test_the_readme_is_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def pooled(api):
    return api.avg_pool(jnp.ones((1, 128, 128, 1), jnp.bfloat16), (128, 128)).squeeze()


def gradient_of_a_row(api):
    embed = api.Embed(2, 1, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    tokens = jnp.zeros(4096, int)
    variables = embed.init(jax.random.key(0), tokens)
    grads = jax.grad(lambda v: embed.apply(v, tokens).astype(jnp.float32).sum())(variables)
    return grads["params"]["embedding"][0, 0]


def error_of_layer_norm(api, **options):
    x = np.asarray(1000 + jax.random.normal(jax.random.key(0), (64, 256)))
    wide = x - x.astype(np.float64).mean(-1, keepdims=True)
    true = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    found = api.LayerNorm(256, rngs=api.Rngs(0), **options)(x)
    return np.abs(np.asarray(found, float) - true).max()


def update_of_adam(tx):
    params = {"w": jnp.zeros(())}
    return tx.update({"w": jnp.float16(0.005)}, tx.init(params), params)[0]["w"]


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # that of most users; upstream mixes dtypes
def test_the_four_numbers_of_the_readme_are_measured():
    adam = optax.adam(1e-3)
    wrapped = mixed_precision(adam, "mixed_float16", loss_scale=1.0)
    off = error_of_layer_norm(flax.nnx, dtype=jnp.bfloat16)
    figures = [
        (pooled(flax.linen), pooled(nn), 1),
        (gradient_of_a_row(flax.linen), gradient_of_a_row(nn), 4096),
        (off, error_of_layer_norm(nnx, dtype_policy="p=f32,c=bf16,o=bf16"), 0),
        (update_of_adam(adam), update_of_adam(wrapped), -0.001),
    ]
    table = README.partition("| exact |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ")[1:] for line in table.splitlines()]
    told = [[float(cell.replace("\N{MINUS SIGN}", "-")) for cell in row] for row in cells]
    for (theirs, ours, exact), measured in zip(told, figures, strict=True):
        assert exact == measured[2]
        np.testing.assert_allclose([theirs, ours], np.asarray(measured[:2], float), rtol=0.05)


@pytest.mark.slow
def test_one_import_is_enough_for_a_model_author():
    import mpmodules
    import policy

    for name in ("Policy", "PolicyRules", "use_policy", "set_policy", "current_policy"):
        assert getattr(mpmodules, name) is getattr(policy, name)
