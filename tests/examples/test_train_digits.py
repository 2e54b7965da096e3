"""The main job on a handful of images: it trains in both APIs, reports and plots."""

import numpy as np
import pytest
import train_digits as job

from tests.examples.helpers import assert_rejected, assert_reported, few_digits


@pytest.fixture
def few_images(monkeypatch):
    few = few_digits(job.load())
    monkeypatch.setattr(job, "load", lambda: few)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_the_main_job_trains_reports_and_plots(few_images, api, tmp_path, capsys):
    path = tmp_path / "curves" / "loss.png"
    arguments = f"--api {api} --policy mixed_float16 --rule head=f32 --epochs 2 --plot {path}"
    (result,) = job.main(arguments.split())
    assert len(result.losses) == 4 and np.isfinite(result.losses).all()
    assert 0 <= result.accuracy <= 1 and result.skipped == 0
    assert 2 * result.parameter_bytes <= result.optimizer_bytes  # adam's two moments
    columns = ("test accuracy", "final loss", "saved activations", "skipped steps")
    assert_reported(capsys, path, "mixed_float16", *columns)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "f33"], "Unknown dtype 'f33'"),
        (["--rule", "head=f33"], "Rule 'head': Unknown dtype 'f33'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments, message):
    assert_rejected(job, arguments, message)
