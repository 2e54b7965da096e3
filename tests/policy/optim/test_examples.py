"""The public names of `policy.optim`, and the examples in their docstrings."""

import doctest

import jax
import pytest

import policy.optim


def test_dir_is_all():
    assert dir(policy.optim) == sorted(policy.optim.__all__)
    assert all(hasattr(policy.optim, name) for name in policy.optim.__all__)


@pytest.mark.parametrize("name", policy.optim.__all__)
def test_every_name_has_an_example_that_runs(name):
    documented = getattr(policy.optim, name)
    test = doctest.DocTestParser().get_doctest(documented.__doc__, {}, name, None, None)
    assert test.examples
    report: list[str] = []
    # user code runs under JAX's own settings: optax.apply_updates promotes
    with jax.numpy_dtype_promotion("standard"):
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
