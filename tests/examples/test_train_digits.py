"""The main job on a handful of images: it trains in both wings, reports and plots."""

import numpy as np
import pytest
import train_digits as job

from tests.examples.helpers import assert_refused, few_digits


@pytest.fixture
def few_images(monkeypatch):
    few = few_digits(job.load())
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "head"], "Rule 'head' should be PATH=TEXT, such as head=f32."),
        (["--policy", "f33"], "Unknown dtype 'f33'"),
        (["--rule", "head=f33"], "Rule 'head': Unknown dtype 'f33'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments, message):
    assert_refused(job, arguments, message)
