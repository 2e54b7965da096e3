"""`collectives_of`: what a program exchanges; and the step across devices, on eight of them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from policy.inspect.hlo.collectives import (
    _partitioned,  # the text of XLA versions that aren't installed
)
from policy.sharding import Collective, collectives_of
from tests.eight_devices import run_tests_on_eight_devices


class Mesh:
    axis_names, axis_sizes = ("data", "one", "model"), (4, 1, 2)


def parsed(attributes, result="bf16[4,8]{1,0}", operation="all-reduce", mesh: Any = Mesh):
    text = (
        f"  %x.1 = {result} {operation}(%y), {attributes}, "
        'metadata={op_name="jit(f)/dot" stack_frame_id=3}\n'
    )
    return list(_partitioned(f"HloModule m\nENTRY %main (a: f32[]) -> f32[] {{\n{text}}}\n", mesh))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model")),
        ("{{0,7},{1,2},{3,4},{5,6}}", ()),
        ("[4,2]<=[8]", ("model",)),
        ("[2,4]<=[4,2]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "model")),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ("data",)),
        ("mesh['a'=8] {'a'}", ("data", "model")),
        ("mesh['a'=8] {'a':(1)2}", ()),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",)),
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", ("model",)),
        ("mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", ("model",)),
        ("mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ()),
        ("something new", ()),
    ],
)
def test_the_axes_are_told_from_the_groups_of_devices(groups, axes):
    (found,) = parsed(f"channel_id=1, replica_groups={groups}, use_global_device_ids=true")
    assert found == Collective("all-reduce", "bfloat16", (4, 8), axes, "jit(f)/dot")


def test_a_permutation_is_over_the_axes_along_which_it_moves():
    pairs = "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}"
    (found,) = parsed(pairs, "f32[3]{0}", "collective-permute")
    assert (found.operation, found.axes) == ("collective-permute", ("data",))


def test_each_array_of_a_tuple_is_listed():
    found = parsed("replica_groups={{0,1}}", "(f32[2]{0}, bf16[3]{0})", "all-to-all", mesh=None)
    assert [(c.dtype, c.size, c.axes) for c in found] == [("float32", 2, ()), ("bfloat16", 3, ())]
    assert str(found[0]) == "all-to-all float32[2] over ?: jit(f)/dot"


@pytest.mark.slow
def test_the_traced_program_is_read_through_loops_and_branches():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loop(x):
        with jax.named_scope("outer"):
            total, _ = lax.scan(
                lambda c, _: (lax.psum(c, ("data", "model")), None), jnp.sum(x), None, length=3
            )
        return lax.cond(total > 0, lambda t: lax.pmax(t, "model"), lambda t: t, total)

    mapped = jax.shard_map(
        loop, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=False
    )
    found = collectives_of(jax.jit(mapped), jax.ShapeDtypeStruct((8,), jnp.float16), stage="traced")
    assert [(c.operation, c.dtype, c.shape, c.axes) for c in found] == [
        ("all-reduce", "float16", (), ("data", "model")),
        ("all-reduce", "float16", (), ("model",)),
    ]
    assert found[0].name == "outer/psum"


@pytest.mark.slow
def test_the_step_across_devices_on_eight_of_them():
    run_tests_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))
