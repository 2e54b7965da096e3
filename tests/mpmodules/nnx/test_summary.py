"""`nnx.tabulate` shows the policy that each module captured and where it came from."""

import warnings

import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, set_policy, use_policy
from mpmodules.nnx import _summary
from tests.mpmodules.summaries import CONSOLE, F16, FULL, HALF, MIXED, SHORT, cells, lines_of

X = jnp.ones((2, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.explicit = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)
        self.theirs = flax_nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.theirs(self.explicit(self.linear(x)))

    def encode(self, x):
        return self(x[None])[0]  # Flax has one row for two calls with inputs that look alike


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs)])
        self.own = Block(rngs, dtype_policy="f16")
        self.attn = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False)

    def __call__(self, x):
        return self.attn(self.own.encode(self.blocks[0](x))[None])[0]


@pytest.fixture
def net():
    with warnings.catch_warnings(), use_policy(MIXED, {nnx.MultiHeadAttention: "bf16"}):
        warnings.simplefilter("ignore")  # the explicit dtypes are told of
        return Net(nnx.Rngs(0))


def shown(obj, *args, **options):
    return cells(nnx.tabulate(obj, *args or (X,), console_kwargs=CONSOLE, **options))


def test_every_source_is_named(net):
    rule = (HALF, "rule: MultiHeadAttention")
    assert shown(net) == {
        "": (SHORT, "scope"),
        "blocks/0": (SHORT, "scope"),
        "blocks/0/linear": (SHORT, "scope"),
        "blocks/0/explicit": (FULL, "argument: dtype=float32; else scope"),
        "blocks/0/theirs": ("", "none: Flax's own"),
        "own": (F16, "argument: dtype_policy"),
        "own/encode": (F16, "argument: dtype_policy"),
        "own/linear": (F16, "enclosing module: Block"),
        "own/explicit": (
            "p=f16,c=f32,o=f32",
            "argument: dtype=float32; else enclosing module: Block",
        ),
        "own/theirs": ("", "none: Flax's own"),
        "attn": rule,
        "attn/query": rule,
        "attn/key": rule,
        "attn/value": rule,
        "attn/out": rule,
    }


def test_apply_policy_names_paths(net):
    net = nnx.apply_policy(
        net, MIXED, {"blocks/0/(linear|theirs)": "f32", nnx.MultiHeadAttention: "bf16"}
    )
    rows = shown(net)
    assert rows[""] == (SHORT, "argument: apply_policy")
    assert rows["blocks/0"] == (SHORT, "enclosing module: Net")
    assert (
        rows["blocks/0/linear"]
        == rows["blocks/0/theirs"]
        == (FULL, "rule: 'blocks/0/(linear|theirs)'")
    )
    assert rows["own/theirs"] == (F16, "enclosing module: own")
    assert rows["attn/query"] == (HALF, "rule: MultiHeadAttention")


def test_the_global_policy_and_none_are_told_apart():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert shown(linear, policy_columns=True) == {"": ("", "none")}
    assert "policy" not in nnx.tabulate(
        linear, X, console_kwargs=CONSOLE
    )  # without a policy it is Flax's table
    set_policy("bf16")
    assert shown(nnx.Linear(4, 4, rngs=nnx.Rngs(0))) == {"": (HALF, "global")}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # built under no policy: the scope around the call changes nothing
        assert shown(linear, policy_columns=True) == {"": ("", "none")}


def test_what_gave_a_policy_tells_no_two_models_apart():
    with use_policy(MIXED):
        scoped = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    set_policy(MIXED)
    assert nnx.graphdef(scoped) == nnx.graphdef(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def test_the_rest_of_the_table_is_flaxs(net):
    options = {
        "console_kwargs": CONSOLE,
        "depth": 1,
        "compute_flops": True,
        "compute_vjp_flops": True,
    }
    options |= {
        "table_kwargs": {"expand": False},
        "column_kwargs": {"justify": "right"},
        "method": "encode",
    }
    options |= {"row_filter": lambda row: "theirs" not in row.path}
    block = net.blocks[0]
    plain = nnx.tabulate(block, X, policy_columns=False, **options)
    with _summary._classes_as_they_were(block):
        assert plain == flax_nnx.tabulate(block, X, **options)
    table = nnx.tabulate(block, X, **options)
    linear = next(row for row in lines_of(table) if row[0] == "linear")
    assert linear[4:6] == ["bfloat16[1,2,4]"] * 2  # as it computes; Flax sees what the code sees
    seen = [[cell.replace("bfloat16", "float32") for cell in row] for row in lines_of(table)]
    assert [row[:2] + row[4:] for row in seen] == lines_of(plain)
    assert set(cells(table)) == {"", "encode", "linear", "explicit"}


def test_tabulate_leaves_classes_as_they_were(net):
    classes = (Net, Block, nnx.Linear, flax_nnx.Linear)
    for cls in classes:
        _ = cls.__annotations__  # Python 3.11 sets them where they are first read
    before = {cls: dict(vars(cls)) for cls in classes}
    nnx.tabulate(net, X, depth=0)
    with pytest.raises(TypeError, match="dot_general"):
        nnx.tabulate(net, jnp.ones((2, 3)))
    assert all(dict(vars(cls)) == attributes for cls, attributes in before.items())
