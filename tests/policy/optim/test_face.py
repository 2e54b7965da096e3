"""The public names of `policy.optim`."""

import policy.optim


def test_dir_is_all():
    assert dir(policy.optim) == sorted(policy.optim.__all__)
    assert all(hasattr(policy.optim, name) for name in policy.optim.__all__)
