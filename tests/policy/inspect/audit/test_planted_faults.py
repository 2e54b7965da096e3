"""Every fault is found by its kind, its path and its operation, wherever it is planted. Nothing
runs.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mpmodules
from policy import audit
from policy.inspect.audit.finding_kinds import FINDING_KINDS, MATMUL, PRECISION, RESIDUAL
from tests.policy.inspect.audit import discrete_faults, eight_bit_faults, range_faults, sum_faults
from tests.policy.inspect.audit.faults import FAULTS, PLACES, scoped
from tests.policy.inspect.audit.in_flax import IN_FLAX

assert mpmodules  # names the modules of nnx
assert discrete_faults and eight_bit_faults and range_faults  # add to FAULTS

BY_KIND = {(fault.kind, fault.primitive, fault.backward): fault for fault in FAULTS}.values()
PLANTED = [
    *(
        pytest.param(
            fault, lambda run, place=place: PLACES[place](scoped(run)), id=f"{fault}, in {place}"
        )
        for fault in FAULTS
        for place in PLACES
        if not (fault.backward and place == "while")  # it has no reverse derivative
    ),
    *(
        pytest.param(fault, place, id=f"{fault}, in {wing}")
        for fault in BY_KIND
        for wing, place in IN_FLAX.items()
    ),
]


@pytest.mark.parametrize(("fault", "place"), PLANTED)
def test_found_by_kind_path_and_operation(fault, place):
    promoting = jax.numpy_dtype_promotion("standard") if fault.mixes else contextlib.nullcontext()
    with promoting:
        report = audit(place(fault.run), *fault.arguments, backward=fault.backward)
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
    found = {(f.kind, f.path, f.primitive) for f in report.findings}
    assert found == {(kind, "inner", primitive)}, str(report)
