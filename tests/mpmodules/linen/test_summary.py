"""`tabulate` shows the policy of each module and where it comes from."""

import warnings

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from mpmodules import set_policy, use_policy
from tests.mpmodules.summaries import CONSOLE, F16, FULL, HALF, MIXED, SHORT, cells, lines_of

KEY = jax.random.key(0)
X = jnp.ones((2, 4))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(nn.Dense(4)(x))


class Net(nn.Module):
    """One module for each source that there is."""

    @nn.compact
    def __call__(self, x):
        x = Block(name="inherits")(x)
        x = Block(name="own", dtype_policy="f16")(x)
        x = nn.Dense(4, name="explicit", dtype=jnp.float32)(x)
        with use_policy("f32"):
            x = nn.Dense(4, name="block")(x)
        x = flax_nn.Dense(4, name="theirs", dtype=x.dtype)(x)
        x = nn.remat(Block)(name="remat")(x)
        x, _ = nn.scan(
            lambda block, x, _: (block(x).astype(x.dtype), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )(Block(name="scanned"), x, None)
        return x


def shown(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the explicit dtype is told of
        return cells(model.tabulate(KEY, X, console_kwargs=CONSOLE, **options))


def test_every_source_is_named():
    with use_policy(  # [b0] would be a tag of rich
        MIXED, {"inherits/LayerNorm_[b0]": "f32", "remat": "bf16", nn.LayerNorm: "f32"}
    ):
        rows = shown(Net())
    scope, remat = (SHORT, "scope"), (HALF, "rule: 'remat'")
    assert rows == {
        "": scope,
        "inherits": scope,
        "inherits/Dense_0": scope,
        "inherits/LayerNorm_0": (FULL, "rule: 'inherits/LayerNorm_[b0]'"),
        "own": (F16, "argument: dtype_policy"),
        "own/Dense_0": (F16, "enclosing module: own"),
        "own/LayerNorm_0": (FULL, "rule: LayerNorm"),
        "explicit": (FULL, "argument: dtype=float32; else scope"),
        "block": (FULL, "scope"),
        "theirs": ("", "none: Flax's own"),
        "remat": remat,
        "remat/Dense_0": remat,
        "remat/LayerNorm_0": (FULL, "rule: LayerNorm"),
        "scanned": scope,
        "scanned/Dense_0": scope,
        "scanned/LayerNorm_0": (FULL, "rule: LayerNorm"),
    }


def test_the_global_policy_and_none_are_told_apart():
    assert shown(Block(), policy_columns=True)["Dense_0"] == ("", "none")
    assert "policy" not in Block().tabulate(
        KEY, X, console_kwargs=CONSOLE
    )  # without a policy it is Flax's table
    set_policy("bf16")
    assert shown(Block())["Dense_0"] == (HALF, "global")
    with use_policy(None):
        assert shown(Block(), policy_columns=True)["Dense_0"] == ("", "none")
    assert shown(Block(dtype_policy=MIXED))[""] == (SHORT, "argument: dtype_policy")


class Multiplies(flax_nn.Module):
    """Has a matmul of its own, so that a port runs it under autocast."""

    @flax_nn.compact
    def __call__(self, x):
        x = x @ self.param("w", flax_nn.initializers.ones, (4, 4))
        return flax_nn.Dense(4, name="layer")(x)


class Around(flax_nn.Module):
    @flax_nn.compact
    def __call__(self, x):
        return flax_nn.Dense(4, name="head")(Multiplies(name="inner")(x))


@pytest.mark.parametrize("own_code", ["autocast", "keep"])
def test_sources_are_the_same_where_own_code_runs_under_autocast(own_code):
    ported = nn.apply_policy(Around(), MIXED, {"inner": "p=f32,c=f16,o=f16"}, own_code=own_code)
    with jax.numpy_dtype_promotion("standard"):
        rows = shown(ported)
    assert rows["inner"] == rows["inner/layer"] == ("p=f32,c=f16,o=f16", "rule: 'inner'")
    assert rows["head"] == (SHORT, "enclosing module: Around")


class Theirs(flax_nn.Module):
    @flax_nn.compact
    def __call__(self, x):
        x = flax_nn.MultiHeadDotProductAttention(2, name="attn")(x[None])[0]
        return nn.Dense(3, name="ours")(flax_nn.Dense(4)(x))


def test_models_of_flaxs_own_under_apply_policy_and_without():
    plain = cells(nn.tabulate(Theirs(), KEY, console_kwargs=CONSOLE, policy_columns=True)(X))
    assert plain["attn/query"] == plain[""] == ("", "none: Flax's own")
    assert plain["ours"] == ("", "none")
    inherits = (SHORT, "enclosing module: Theirs")
    rows = shown(nn.apply_policy(Theirs(), MIXED, {"attn/query": "f32"}))
    assert rows == {
        "": (SHORT, "argument: apply_policy"),
        "attn": inherits,
        "attn/query": (FULL, "rule: 'attn/query'"),
        "attn/key": inherits,
        "attn/value": inherits,
        "attn/out": inherits,
        "Dense_0": inherits,
        "ours": inherits,
    }
    assert shown(nn.apply_policy(Block(), MIXED))[""] == (SHORT, "argument: apply_policy")


class Shared(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        x = self.dense(x)
        with use_policy("f16"):
            return self.dense(x)

    def encode(self, x):
        return self(x)


def test_repeated_calls_of_a_shared_layer_each_show_what_held_in_them():
    with use_policy(MIXED):
        table = Shared().tabulate(
            KEY, X, console_kwargs=CONSOLE, show_repeated=True, method="encode", depth=1
        )
    rows = [line for line in lines_of(table) if line[0] == "dense"]
    assert [row[2:4] for row in rows] == [[SHORT, "scope"], [F16, "scope"]]
    assert cells(table)["(encode)"] == (SHORT, "scope")


def test_the_rest_of_the_table_is_flaxs():
    options = {"console_kwargs": CONSOLE, "depth": 1, "show_repeated": True, "compute_flops": True}
    options |= {
        "compute_vjp_flops": True,
        "table_kwargs": {"expand": False},
        "column_kwargs": {"justify": "right"},
    }
    model = Block()
    set_policy(MIXED)
    plain = model.tabulate(KEY, X, policy_columns=False, **options)
    assert plain == flax_nn.Module.tabulate(model, KEY, X, **options)
    assert plain == nn.tabulate(model, KEY, policy_columns=False, **options)(X)

    def without(table):
        rows = [
            [c.strip() for c in line.replace("┃", "│").split("│")[1:-1]]
            for line in table.splitlines()
        ]
        return [row[:2] + row[-5:] for row in rows if row]

    assert "vjp_flops" in plain
    table = model.tabulate(KEY, X, **options)
    # The layer as it computes; Flax sees what the code sees.
    (dense,) = [row for row in without(table) if row[0] == "Dense_0"]
    assert dense[2:4] == ["bfloat16[2,4]"] * 2
    assert without(table.replace("bfloat16", "float32")) == without(plain)
    assert nn.tabulate(model, KEY, **options)(X) == model.tabulate(KEY, X, **options)


def test_flops_are_counted_under_what_held_in_the_call():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block(name="block", dtype_policy="f16")(nn.Dense(4)(x))

    with use_policy(
        MIXED, {"block/LayerNorm_0": "f32"}
    ):  # Flax counts each module as a root, where no such path is
        rows = shown(Outer(), compute_flops=True)
    assert rows["block/LayerNorm_0"] == (FULL, "rule: 'block/LayerNorm_0'")
    assert rows["block/Dense_0"] == (F16, "enclosing module: block")


def test_a_flax_that_draws_its_tables_otherwise_is_refused(monkeypatch):
    from flax.linen import summary

    monkeypatch.delattr(summary, "_render_table")
    with pytest.raises(
        RuntimeError, match=r"'?_render_table'? is missing.*Pass policy_columns=False"
    ):
        Block().tabulate(KEY, X)
