"""`tabulate` shows the policy of each module and where it comes from."""

import contextlib
import re
import warnings
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import set_policy, use_policy
from policy.quantized import quantize_params
from tests.mpmodules.apis import BOTH, KEY, MIXED, Part, Text, dense, layer_norm, under

CONSOLE = {"width": 240, "no_color": True, "force_terminal": False}
SHORT, FULL, HALF, F16 = (
    "p=f32,c=bf16,o=f32",
    "p=f32,c=f32,o=f32",
    "p=bf16,c=bf16,o=bf16",
    "p=f16,c=f16,o=f16",
)


def lines_of(table: str) -> list[list[str]]:
    """Returns the cells of each line of the body."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if "│" in line
    ]


def cells(table: str) -> dict[str, tuple[str, str]]:
    """Returns a policy and its source by path, with the method where it is not `__call__`."""
    header = next(line for line in table.splitlines() if "┃" in line).split("┃")[1:-1]
    assert [cell.strip() for cell in header[2:4]] == ["policy", "policy source"]
    rows = [line for line in lines_of(table) if line[1]]
    return {line[0] + "".join(line[1].split(" ")[1:]): (line[2], line[3]) for line in rows}


X = jnp.ones((2, 4))


def table(api: Any, instance: Any, **options: Any) -> str:
    options = {"console_kwargs": CONSOLE} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # explicit dtypes, and models built under no policy
        if api.name == "nnx":
            return nnx.tabulate(instance, X, **options)
        return linen.tabulate(instance, KEY, **options)(X)


def shown(api: Any, instance: Any, **options: Any) -> dict[str, tuple[str, str]]:
    return cells(table(api, instance, **options))


def made(api: Any, text: Text, modules: Any = None, policy: Any = None) -> Any:
    modules = api.module if modules is None else modules
    options = {} if policy is None else {"dtype_policy": policy}
    if api.name == "linen":
        return text.linen_class(modules)(**options)
    return text.nnx_class(modules)(rngs=nnx.Rngs(0), **options)


def theirs(*sizes: int) -> Part:
    return Part(
        lambda self, nn, name: flax.linen.Dense(sizes[-1]),
        lambda nnx, rngs: flax.nnx.Linear(*sizes, rngs=rngs),
    )


def chained(self, x: Any) -> Any:
    for name in ("linear", "norm", "explicit", "theirs", "inherits", "own"):
        x = getattr(self, name)(x) if hasattr(self, name) else x
    return x


chained.__name__ = "__call__"  # which tables leave out


BLOCK = Text(chained, "Block", linear=dense(4, 4), norm=layer_norm(4))
NET = Text(
    chained,
    "Net",
    inherits=BLOCK,
    own=under(BLOCK, "f16"),
    explicit=dense(4, 4, dtype=jnp.float32),
    theirs=theirs(4, 4),
)


@pytest.mark.slow
@BOTH
def test_every_source_is_named(api):
    rules: Any = {api.module.LayerNorm: "f32"}
    rule, scope = (FULL, "rule: LayerNorm"), (SHORT, "scope")
    with warnings.catch_warnings(), use_policy(MIXED, rules):
        warnings.simplefilter("ignore")  # the explicit dtype is told of
        assert shown(api, made(api, NET)) == {
            "": scope,
            "inherits": scope,
            "inherits/linear": scope,
            "inherits/norm": rule,
            "own": (F16, "argument: dtype_policy"),
            "own/linear": (F16, f"enclosing module: {'own' if api.name == 'linen' else 'Block'}"),
            "own/norm": rule,
            "explicit": (FULL, "argument: dtype=float32; else scope"),
            "theirs": ("", "none: Flax's own"),
        }


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("own_code", ["autocast", "keep"])
def test_the_sources_of_a_port_are_its_argument_and_its_rules(api, own_code):
    rules: Any = {"inherits/(linear|norm)": "f32"}
    text = Text(chained, "Net", inherits=BLOCK, linear=dense(4, 4), theirs=theirs(4, 4))
    plain = made(api, text, api.flax)
    inherits, rule = (SHORT, "enclosing module: Net"), (FULL, "rule: 'inherits/(linear|norm)'")
    port = api.module.apply_policy(plain, MIXED, rules, own_code=own_code)
    with jax.numpy_dtype_promotion("standard"):
        assert shown(api, port) == {
            "": (SHORT, "argument: apply_policy"),
            "inherits": inherits,
            "inherits/linear": rule,
            "inherits/norm": rule,
            "linear": inherits,
            "theirs": inherits,
        }
    found = shown(api, plain, policy_columns=True)
    assert set(found.values()) == {("", "none: Flax's own")}


@pytest.mark.cases(fast=1)
@BOTH
def test_the_global_policy_and_none_are_told_apart(api):
    block = made(api, BLOCK)
    assert shown(api, block, policy_columns=True)["linear"] == ("", "none")
    assert "policy" not in table(api, block)  # without a policy it is Flax's table
    set_policy("bf16")
    assert shown(api, made(api, BLOCK))["linear"] == (HALF, "global")
    with use_policy(None) if api.name == "linen" else contextlib.nullcontext():
        assert shown(api, block, policy_columns=True)["linear"] == ("", "none")
    assert shown(api, made(api, BLOCK, policy=MIXED))[""] == (SHORT, "argument: dtype_policy")


@pytest.mark.cases(slow=1)
@BOTH
def test_the_rest_of_the_table_is_flaxs(api):
    options: dict[str, Any] = {"depth": 1, "compute_flops": True, "compute_vjp_flops": True}
    options |= {"table_kwargs": {"expand": False}, "column_kwargs": {"justify": "right"}}
    set_policy(MIXED)
    model = made(api, BLOCK)
    plain = table(api, model, policy_columns=False, **options)
    if api.name == "linen":  # nnx has each class's methods twice, by this module's name or Flax's
        options_of_flax: dict[str, Any] = options | {"console_kwargs": CONSOLE}
        assert plain == flax.linen.Module.tabulate(model, KEY, X, **options_of_flax)
    assert "vjp_flops" in plain
    found = lines_of(table(api, model, **options))
    (linear,) = [row for row in found if row[0] == "linear"]
    assert linear.count("bfloat16[2,4]") == 2  # as it computes; Flax sees what the code sees
    seen = [[cell.replace("bfloat16", "float32") for cell in row] for row in found]
    assert [row[:2] + row[4:] for row in seen] == lines_of(plain)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.LayerNorm()(linen.Dense(4)(x))


class Lifted(linen.Module):
    @linen.compact
    def __call__(self, x):
        with use_policy("f32"):
            x = linen.Dense(4, name="block")(x)
        x = linen.remat(Block)(name="remat")(x)
        step = lambda block, x, _: (block(x).astype(x.dtype), None)  # noqa: E731
        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return linen.scan(step, length=2, **axes)(Block(name="scanned"), x, None)[0]


def test_lifted_linen_modules_and_paths_with_brackets_have_their_sources():
    rules: Any = {"scanned/LayerNorm_[b0]": "f32", "remat": "bf16"}  # [b0] would be a tag of rich
    with use_policy(MIXED, rules):
        rows = cells(Lifted().tabulate(KEY, X, console_kwargs=CONSOLE))
    assert rows["block"] == (FULL, "scope")
    assert {rows[path] for path in ("remat", "remat/Dense_0")} == {(HALF, "rule: 'remat'")}
    assert rows["scanned/Dense_0"] == (SHORT, "scope")
    assert rows["scanned/LayerNorm_0"] == (FULL, "rule: 'scanned/LayerNorm_[b0]'")


class Shared(linen.Module):
    def setup(self):
        self.dense = linen.Dense(4)

    def __call__(self, x):
        x = self.dense(x)
        with use_policy("f16"):
            return self.dense(x)

    def encode(self, x):
        return self(x)


def test_repeated_calls_of_a_shared_linen_layer_each_show_what_held_in_them():
    options: Any = {"show_repeated": True, "method": "encode", "depth": 1}
    with use_policy(MIXED):
        found = Shared().tabulate(KEY, X, console_kwargs=CONSOLE, **options)
    rows = [line for line in lines_of(found) if line[0] == "dense"]
    assert [row[2:4] for row in rows] == [[SHORT, "scope"], [F16, "scope"]]
    assert cells(found)["(encode)"] == (SHORT, "scope")


def test_a_flax_that_draws_its_tables_otherwise_is_rejected(monkeypatch):
    monkeypatch.delattr(flax.linen.summary, "_render_table")
    text = r"'?_render_table'? is missing.*Pass policy_columns=False"
    with pytest.raises(RuntimeError, match=text):
        Block().tabulate(KEY, X)


class Coded(linen.Module):
    """A parameter of its own, a boxed one, and one that a rule leaves as it is."""

    @linen.compact
    def __call__(self, x):
        boxed = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
        x = linen.Dense(64, kernel_init=boxed, name="up")(x)
        w: Any = self.param("w", boxed, (64, 64))
        return linen.Dense(4, name="head")(x @ w.astype(x.dtype))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["int8", "int4:32"])
@pytest.mark.parametrize("options", [{}, {"depth": 1, "compute_flops": True}])
def test_a_summary_shows_parameters_as_the_codes_that_would_be_stored(text, options):
    text, x = f"params={text},compute=bfloat16", jnp.ones((2, 64))
    fresh = Coded(dtype_policy="float32").init(KEY, x)
    expected = quantize_params(linen.unbox(fresh), text, {"head": "float32"})
    with use_policy(text, {"head": "float32"}):
        found = Coded().tabulate(KEY, x, console_kwargs=CONSOLE, **options)
        with pytest.raises(ValueError, match="would be created in int"):
            Coded().init(KEY, x)
    leaf = r"\b(?:codes|scales|bias|kernel|w|value): (\w+)\[([\d,]+)\]"
    shown = sorted((dtype, tuple(map(int, n.split(",")))) for dtype, n in re.findall(leaf, found))
    assert shown == sorted((x.dtype.name, x.shape) for x in jax.tree.leaves(expected["params"]))


def test_what_gave_a_policy_tells_no_two_models_apart():
    with use_policy(MIXED):
        scoped = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    set_policy(MIXED)
    assert nnx.graphdef(scoped) == nnx.graphdef(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


@pytest.mark.slow
def test_nnxs_tabulate_has_rows_of_methods_and_leaves_classes_as_they_were():
    def encode(self, x):
        return self(x[None])[0]  # Flax has one row for two calls with inputs that look alike

    text = Text(chained, "Encoder", {"encode": encode}, linear=dense(4, 4))
    model = text.nnx_class(nnx)(rngs=nnx.Rngs(0), dtype_policy=MIXED)
    classes = (type(model), nnx.Linear, flax.nnx.Linear)
    for cls in classes:
        _ = cls.__annotations__  # Python 3.11 sets them where they are first read
    before = {cls: dict(vars(cls)) for cls in classes}
    found = nnx.tabulate(model, X, console_kwargs=CONSOLE, method="encode")
    assert set(cells(found)) == {"", "encode", "linear"}
    kept = nnx.tabulate(model, X, console_kwargs=CONSOLE, row_filter=lambda row: row.path == ())
    assert set(cells(kept)) <= {"", "encode"}
    with pytest.raises(TypeError, match="dot_general"):
        nnx.tabulate(model, jnp.ones((2, 3)))
    assert all(dict(vars(cls)) == attributes for cls, attributes in before.items())
