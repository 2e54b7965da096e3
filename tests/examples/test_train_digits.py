"""The main job, on a handful of images: it trains in both wings, reports and plots; bad arguments
are one line.
"""

from typing import Any

import numpy as np
import pytest
import train_digits as job


@pytest.fixture
def few_images(monkeypatch):
    data = job.load()
    few = job.Digits(
        data.train_images[:128],
        data.train_labels[:128],
        data.test_images[:32],
        data.test_labels[:32],
    )
    monkeypatch.setattr(job, "load", lambda: few)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_the_main_job_trains_reports_and_plots(few_images, wing, tmp_path, capsys):
    path = tmp_path / "curves" / "loss.png"
    arguments = ["--wing", wing, "--policy", "mixed_float16", "--rule", "head=f32"]
    arguments += ["--epochs", "2", "--plot", str(path)]
    (result,) = job.main(arguments)
    assert len(result.losses) == 4 and np.isfinite(result.losses).all()
    assert 0 <= result.accuracy <= 1 and result.skipped == 0
    assert 2 * result.parameter_bytes <= result.optimizer_bytes  # adam's two moments
    printed = capsys.readouterr()
    header = printed.out.splitlines()[0]
    for column in ("test accuracy", "final loss", "saved activations", "skipped steps"):
        assert column in header
    assert "mixed_float16" in printed.out and "100%" in printed.err  # the table, and the bar
    assert path.read_bytes().startswith(b"\x89PNG")


def test_half_precision_halves_the_activations_that_backward_keeps():
    import jax
    import jax.numpy as jnp

    from mpmodules import linen as nn
    from policy import use_policy

    model, x = (
        nn.Sequential([nn.Dense(24), nn.tanh, nn.Dense(24), nn.tanh, nn.Dense(3)]),
        jnp.zeros((64, 8)),
    )
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    apply: Any = model.apply
    saved = {}
    for policy in ("float32", "mixed_bfloat16"):
        with use_policy(policy):
            saved[policy] = job.saved_bytes(lambda p, batch: jnp.sum(apply(p, batch)), params, x)
    kernels = 2 * (
        24 * 24 + 24 * 3
    )  # backward reads the half copies of the kernels; the float32 ones are parameters
    assert saved["float32"] >= 4 * 2 * 64 * 24  # both tanh outputs
    assert saved["mixed_bfloat16"] - kernels - 2 * 64 * 8 <= saved["float32"] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "head"], "train_digits: Rule 'head' should be PATH=TEXT, such as head=f32."),
        (["--policy", "f33"], "train_digits: Unknown dtype 'f33'"),
        (["--rule", "head=f33"], "train_digits: Rule 'head': Unknown dtype 'f33'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments, message):
    with pytest.raises(SystemExit) as stopped:
        job.main(arguments)
    assert str(stopped.value).startswith(message)
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_a_rule_that_matches_nothing_lists_the_layers(few_images, wing, tmp_path):
    with pytest.raises(ValueError, match=r"Rule 'haed' matched no module. Modules seen: .*head"):
        job.main(["--wing", wing, "--rule", "haed=f32", "--plot", str(tmp_path / "p.png")])
