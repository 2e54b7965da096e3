"""Every fault is found by its kind, its path and its operation, wherever it is planted. Nothing
runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mpmodules
from policy import audit
from policy.inspect.audit.finding_kinds import FINDING_KINDS, MATMUL, PRECISION, RESIDUAL
from tests.policy.inspect.audit import (
    discrete_faults,
    eight_bit_faults,
    flax_faults,
    range_faults,
    sum_faults,
)
from tests.policy.inspect.audit.faults import FAULTS, PLACES, Fault, scoped

assert mpmodules  # names the modules of nnx
assert discrete_faults and eight_bit_faults and range_faults and sum_faults  # add to FAULTS


def promoting(fault: Fault | flax_faults.Fault) -> contextlib.AbstractContextManager[Any]:
    return jax.numpy_dtype_promotion("standard") if fault.mixes else contextlib.nullcontext()


# a while loop has no reverse derivative
PLANTED = [
    (fault, place)
    for fault in FAULTS
    for place in PLACES
    if not (fault.backward and place == "while")
]


@pytest.mark.parametrize(
    ("fault", "place"), PLANTED, ids=[f"{fault}, in {place}" for fault, place in PLANTED]
)
def test_found_by_kind_path_and_operation(fault, place):
    planted = PLACES[place](scoped(fault.run))
    with promoting(fault):
        report = audit(planted, *fault.arguments, backward=fault.backward)
    found = {(f.kind, f.path, f.primitive) for f in report.findings}
    assert (fault.kind, "inner", fault.primitive) in found, str(report)


def test_the_kinds_that_are_planted_here_are_all_but_three():
    """The others depend on the rest of the program, or on a policy: test_matmuls.py,
    test_residuals.py and test_default_precision.py.
    """
    assert set(FINDING_KINDS) - {fault.kind for fault in FAULTS} == {MATMUL, PRECISION, RESIDUAL}


@pytest.mark.parametrize("place", ("the top level", "jit", "scan", "remat", "custom_vjp"))
@pytest.mark.parametrize("ring", sum_faults.RINGS)
def test_sums_along_a_ring_of_devices_are_found(ring, place):
    run, kind, primitive = sum_faults.RINGS[ring]
    mesh = AbstractMesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    mapped = jax.shard_map(scoped(run), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    report = audit(PLACES[place](mapped), jax.ShapeDtypeStruct((16, 4), jnp.bfloat16))
    assert {(f.kind, f.path, f.primitive) for f in report.findings} == {
        (kind, "inner", primitive)
    }, str(report)


IN_MODULES = [
    (fault, wing) for fault in flax_faults.FAULTS for wing in (*flax_faults.LINEN, *flax_faults.NNX)
]


@pytest.mark.parametrize(
    ("fault", "wing"), IN_MODULES, ids=[f"{fault}, in {wing}" for fault, wing in IN_MODULES]
)
def test_found_in_flax_modules_by_their_paths(fault, wing):
    x = jax.ShapeDtypeStruct((4, 4), fault.dtype)
    with promoting(fault):
        if wing in flax_faults.LINEN:
            model = flax_faults.LINEN[wing](fault.body, fault.dtype)
            variables = jax.eval_shape(model.init, jax.random.key(0), x)
            report = audit(model.apply, variables, x, backward=fault.backward)
        else:
            model = nnx.eval_shape(lambda: flax_faults.NNX[wing](fault.body, fault.dtype))
            report = audit(model, x, backward=fault.backward)
    path = "/".join(filter(None, ("inner", fault.path)))
    found = {(f.kind, f.path, f.primitive) for f in report.findings}
    assert (fault.kind, path, fault.primitive) in found, f"{path}\n{report}"
