"""`tabulate` shows the policy of each module and where it comes from."""

import warnings

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from mpmodules import set_policy, use_policy
from mpmodules.calls import summary as _summary

KEY = jax.random.key(0)
X = jnp.ones((2, 4))
CONSOLE = {"width": 240, "no_color": True, "force_terminal": False}
MIXED, SHORT = "mixed_bfloat16", "p=f32,c=bf16,o=f32"


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


def cells(table):
    """The two columns by path (and method, where it is not __call__)."""
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if "│" in line
    ]
    header = [
        cell.strip()
        for cell in next(line for line in table.splitlines() if "┃" in line).split("┃")[1:-1]
    ]
    assert header[2:4] == ["policy", "policy source"]
    rows = [line for line in lines if line[1]]
    return {line[0] + "".join(line[1].split(" ")[1:]): (line[2], line[3]) for line in rows}


def shown(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the explicit dtype is told of
        return cells(model.tabulate(KEY, X, console_kwargs=CONSOLE, **options))


def test_every_source_is_named():
    with use_policy(
        MIXED, {"inherits/LayerNorm_[0-9]": "f32", "remat": "bf16", nn.LayerNorm: "f32"}
    ):
        rows = shown(Net())
    scope, own, remat = (
        (SHORT, "scope"),
        "p=f16,c=f16,o=f16",
        ("p=bf16,c=bf16,o=bf16", "rule: 'remat'"),
    )
    full = "p=f32,c=f32,o=f32"
    assert rows == {
        "": scope,
        "inherits": scope,
        "inherits/Dense_0": scope,
        "inherits/LayerNorm_0": (full, "rule: 'inherits/LayerNorm_[0-9]'"),
        "own": (own, "argument: dtype_policy"),
        "own/Dense_0": (own, "enclosing module: own"),
        "own/LayerNorm_0": (full, "rule: LayerNorm"),
        "explicit": (full, "argument: dtype=float32; else scope"),
        "block": (full, "scope"),
        "theirs": ("", "none: Flax's own"),
        "remat": remat,
        "remat/Dense_0": remat,
        "remat/LayerNorm_0": (full, "rule: LayerNorm"),
        "scanned": scope,
        "scanned/Dense_0": scope,
        "scanned/LayerNorm_0": (full, "rule: LayerNorm"),
    }


def test_the_global_policy_and_none_are_told_apart():
    assert shown(Block(), policy_columns=True)["Dense_0"] == ("", "none")
    assert "policy" not in Block().tabulate(
        KEY, X, console_kwargs=CONSOLE
    )  # without a policy it is Flax's table
    set_policy("bf16")
    assert shown(Block())["Dense_0"] == ("p=bf16,c=bf16,o=bf16", "global")
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
        "attn/query": ("p=f32,c=f32,o=f32", "rule: 'attn/query'"),
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
    rows = [
        [cell.strip() for cell in line.split("│")[1:5]]
        for line in table.splitlines()
        if "│ dense" in line
    ]
    assert [row[2:] for row in rows] == [[SHORT, "scope"], ["p=f16,c=f16,o=f16", "scope"]]
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
    assert rows["block/LayerNorm_0"] == ("p=f32,c=f32,o=f32", "rule: 'block/LayerNorm_0'")
    assert rows["block/Dense_0"] == ("p=f16,c=f16,o=f16", "enclosing module: block")


def test_a_flax_that_draws_its_tables_otherwise_is_refused(monkeypatch):
    from flax.linen import summary

    monkeypatch.delattr(summary, "_render_table")
    with pytest.raises(
        RuntimeError, match=r"'?_render_table'? is missing.*Pass policy_columns=False"
    ):
        Block().tabulate(KEY, X)


def test_a_pattern_is_shown_as_it_was_written():
    table = _summary.with_columns(_table(), [("p=f32", "rule: '[bold]x[/bold] \\d+'")], {}, None)
    assert "[bold]x[/bold] \\d+" in next(iter(list(table.columns[3].cells))).plain


def _table():
    from rich.table import Table

    table = Table("path", "module", "params")
    table.add_row("a", "Dense", "1")
    return table
