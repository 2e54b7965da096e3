"""Shardings of a call's arrays over a target's mesh, without devices."""

import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import policy
from policy.inspect.estimate import placement as placing
from policy.inspect.estimate.placement import Placement, mesh_of, on_targets_mesh, placement_of
from policy.inspect.estimate.targets import Target
from tests.benchmarks import accelerators

P = PartitionSpec
MESH: Any = AbstractMesh((4, 2), ("data", "fsdp"))
X = ShapeDtypeStruct((8, 6), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def target_of(count: int) -> Any:
    """A target of so many devices, which are this one."""
    device = jax.devices()[0]
    target = types.SimpleNamespace(
        name=f"v5e:{count}x1",
        platform="tpu",
        chip=types.SimpleNamespace(memory=100.0),
        devices=np.array([device] * count),
    )
    target.mesh = lambda sizes=None: Target.mesh(cast(Any, target), sizes)
    return target


PLACEMENT = Placement(target_of(8), MESH, True)


def placed(shardings, *args, origins=None):
    """Returns the arrays of a call with their shardings."""
    leaves = [[leaf for leaf in jax.tree.leaves(arg) if hasattr(leaf, "shape")] for arg in args]
    arrays = [leaf for own in leaves for leaf in own]
    names = [f"leaf{i}" for i in range(len(arrays))]
    found = [i for i, own in enumerate(leaves) for _ in own] if origins is None else origins
    return placing.placed_arrays(PLACEMENT, shardings, args, arrays, names, found)


def specs(shardings, *args, **options):
    return [array.sharding.spec for array in placed(shardings, *args, **options)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("dta"), "w can't be sharded by .* over data=4, fsdp=2: .* dta .* is not found in mesh"),
        (P(None, "data"), "w can't be sharded by .* over data=4, fsdp=2: .* size is 6"),
        (P(None, None, "data"), "w can't be sharded by .*rank at least 3, but .* rank 2"),
        (P("data", "data"), "w can't be sharded by .* duplicate"),
    ],
)
def test_a_sharding_that_does_not_fit_is_rejected_with_the_arrays_name(spec, message):
    with pytest.raises(ValueError, match=message):
        PLACEMENT.sharding(spec, X, "w")


def test_arrays_are_placed_by_their_specs_and_keys_stay_keys():
    split, whole, key = placed((P(("data", "fsdp")), None, None), X, X, KEY)
    assert split.sharding.shard_shape((8, 6)) == (1, 6)
    assert whole.sharding.is_fully_replicated and key.dtype == KEY.dtype


def test_a_step_without_shardings_runs_on_the_first_device():
    target = target_of(4)
    alone = placement_of(target, None, None, [X])
    assert alone.devices == 1 and "Nothing is sharded: one of the 4 devices" in alone.notes[0]
    assert alone.sharding(P("data"), X, "w").device_set == {target.devices[0]}
    for mesh, shardings in (({"data": 1}, None), (None, (P("data"),))):
        spread = placement_of(target_of(1), mesh, shardings, [X])
        assert spread.devices == 1 and not spread.notes


def test_processors_share_their_memory_and_accelerators_do_not():
    assert PLACEMENT.capacity == 100
    target = target_of(8)
    target.platform = "cpu"
    assert Placement(target, MESH, True).capacity == 12
    assert Placement(target, MESH, False).capacity == 100


def test_a_prefix_spreads_over_the_arrays_of_an_argument():
    tree = {"a": X, "b": {"c": X, "n": 3, "d": None}, "e": KEY}
    given = {"a": P("fsdp"), "b": P("data"), "e": None}
    assert specs((given, P("data")), tree, X) == [P("fsdp"), P("data"), P(), P("data")]
    del tree["e"]
    assert specs((P("data"), None), tree, X) == [P("data"), P("data"), P()]
    assert specs(None, tree, X) == [P()] * 3
    # Arrays of keyword arguments, and of a module that is called, have no entry.
    assert specs((P("data"),), X, origins=[None]) == [P()]
    assert specs({1: P("data")}, X, X) == [P(), P("data")] and specs({}, X) == [P()]


def test_a_function_gives_specs_by_path_and_shape():
    seen = []

    def spec_of(path, array):
        seen.append((path, array.shape))
        return P("data") if array.ndim else None

    assert specs((spec_of,), [X, KEY]) == [P("data"), P()]
    assert seen == [("leaf0", (8, 6)), ("leaf1", ())]
    with pytest.raises(TypeError, match="a function that returns one, but leaf0 is given 3"):
        specs((lambda *_: 3,), X)


def test_an_arrays_own_sharding_holds_unless_another_is_given():
    own = ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(MESH, P("fsdp")))
    assert specs(None, own, X) == [P("fsdp"), P()]
    assert specs((P("data"), None), own, X) == [P("data"), P()]
    assert specs((NamedSharding(MESH, P("data")),), own) == [P("data")]
    assert specs((P(),), own) == [P()]  # on each device


@pytest.mark.parametrize(
    ("shardings", "error", "message"),
    [
        (P("data"), TypeError, "shardings should be a tuple with an entry for each positional"),
        ({2: P("data")}, ValueError, "shardings has an entry for the argument 2, but the function"),
        ((None,), ValueError, "shardings has 1 entries, but the function is called with 2"),
        (("data", None), TypeError, "An entry of shardings should be .* leaf0 is given 'data'"),
        (({"b": P()}, None), ValueError, r"shardings\[0\] is not a prefix of the argument's tree"),
    ],
)
def test_shardings_of_another_form_are_rejected(shardings, error, message):
    with pytest.raises(error, match=message):
        specs(shardings, {"a": X}, X)


def of_mesh(sizes, axes, kind) -> Any:
    """An array that is sharded over the first axis of a mesh."""
    mesh: Any = AbstractMesh(sizes, tuple(axes), axis_types=(kind,) * len(sizes))
    return ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, P(axes[0])))


def test_the_mesh_is_the_given_one_or_that_of_the_arguments():
    target = target_of(8)
    assert dict(mesh_of(target, None, [X]).shape) == {"data": 8}
    assert dict(mesh_of(target, {"a": 2, "b": 4}, [X]).shape) == {"a": 2, "b": 4}
    own = of_mesh((4, 2), "xy", AxisType.Explicit)
    found = mesh_of(target, None, [X, own])
    assert dict(found.shape) == {"x": 4, "y": 2} and set(found.axis_types) == {AxisType.Explicit}
    assert dict(mesh_of(target, {"data": 8}, [own]).shape) == {"data": 8}
    with pytest.raises(ValueError, match="are sharded over x=4, y=2, 8 devices, but v5e:4x1 has 4"):
        mesh_of(target_of(4), None, [own])


def test_arrays_of_explicit_axes_are_moved_to_the_targets_mesh():
    target = target_of(8)
    own = of_mesh((4, 2), "xy", AxisType.Explicit)
    automatic = of_mesh((8,), ["data"], AxisType.Auto)
    placement = placement_of(target, None, None, [own])
    found = on_targets_mesh(placement, args=({"w": own}, X, automatic, 3), kwargs={"x": own})
    args, kwargs = found["args"], found["kwargs"]
    for moved in (args[0]["w"], kwargs["x"]):
        assert (moved.shape, moved.dtype) == (own.shape, own.dtype)
        assert moved.sharding == NamedSharding(placement.mesh, P("x"))
    assert args[1:] == (X, automatic, 3)
    alone = of_mesh((1,), "x", AxisType.Explicit)
    found = on_targets_mesh(placement_of(target, None, None, [alone]), args=(alone,))
    assert found["args"][0].sharding is None
    given = placement_of(target, {"data": 8}, None, [own])
    with pytest.raises(ValueError, match=r"args\[0\]\['w'\] can't be sharded by .* over data=8"):
        on_targets_mesh(given, args=({"w": own},))


def test_more_gpus_than_a_machine_has_are_a_note():
    target = target_of(16)
    target.platform, target.name = "cuda", "h100:16"
    (note,) = placement_of(target, {"data": 16}, None, [X]).notes
    assert note.startswith("h100:16 is estimated as one machine: exchanges have the bandwidth of")
    (note,) = placement_of(target, None, None, [X]).notes
    assert note.startswith("Nothing is sharded")
    target = target_of(8)
    target.platform = "cuda"
    assert not placement_of(target, {"data": 8}, None, [X]).notes


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("mesh", [4, {"data": 0}, {}])
def test_a_mesh_is_a_mapping_of_sizes(mesh):
    with pytest.raises(TypeError, match="mesh should be a dict of axes and their sizes, such as"):
        mesh_of(target_of(8), mesh, [X])


@pytest.mark.slow
def test_an_example_makes_arrays_on_this_machine_where_a_mesh_is_of_others():
    absent = accelerators.target("v5e:2x2")

    def example(mesh: Any = None):
        key = jax.random.key(0)
        rows = NamedSharding(mesh, P("data"))
        x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=rows)
        assert dict(jax.sharding.get_abstract_mesh().shape) == {"data": 2, "fsdp": 2}
        return lambda x: jax.random.bernoulli(key, x), (x,)

    sizes = {"data": 2, "fsdp": 2}
    found = policy.estimate(example, policies=["float32"], on=absent, mesh=sizes)
    assert found["float32"].arguments == 8 * 128 * 4 / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_arrays_of_any_mesh_are_those_of_the_target(kind):
    absent = accelerators.target("v5e:2x2")
    theirs: Any = AbstractMesh((4,), ("data",), axis_types=(kind,))
    w = ShapeDtypeStruct((128, 128), jnp.float32)
    x = ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(theirs, P("data")))

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    row = policy.estimate(step, w, x, policies=["float32"], on=absent)["float32"]
    assert row.arguments == (128 * 128 + 64 * 128 / 4) * 4
    assert [(one.operation, one.dtype) for one in row.collectives] == [("all-reduce", "f32")]


@pytest.mark.slow
def test_a_step_of_several_devices_with_arrays_of_one_says_what_spreads_it():
    absent = accelerators.target("v5e:2x2")

    def example(mesh):
        sums = lambda x: jax.lax.psum(x, "data")  # noqa: E731
        total = jax.shard_map(sums, mesh=mesh, in_specs=P("data"), out_specs=P())
        return total, (ShapeDtypeStruct((8, 128), jnp.float32),)

    with pytest.raises(ValueError, match=r"incompatible devices.*: give mesh= or shardings= to"):
        policy.estimate(example, policies=["float32"], on=absent)
    found = policy.estimate(example, policies=["float32"], on=absent, mesh={"data": 4})
    assert found["float32"].collectives
