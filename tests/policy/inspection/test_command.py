"""``python -m policy audit``, for someone who has never seen it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.inspection.command import CommandError, main, parse_argument
from tests.eight_devices import ROOT

MODEL = """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    number = 3

    def loss(params, x, scale=1.0):
        return jax.nn.softmax(x @ params["w"]).astype(jnp.float32).sum() * scale

    def clean(x):
        return x @ x

    def example():
        return loss, ({"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}, jax.ShapeDtypeStruct((2, 8), jnp.bfloat16))

    def with_keywords():
        return (*example(), {"scale": 2.0})

    def wrong():
        return loss, 3

    def broken():
        raise RuntimeError("no weights here")

    def no_arguments():
        return jnp.ones((2, 2)) @ jnp.ones((2, 2))

    class Net(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.softmax(self.head(x).astype(jnp.bfloat16))

    net = Net()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The path of a file with functions in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "audited_model.py").write_text(textwrap.dedent(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield str(folder / "audited_model.py")
    sys.modules.pop("audited_model", None)


def run(*arguments: str) -> int:
    return main(["audit", *arguments])


GIVEN = ("--arg", "{'w': bf16[8,4]}", "--arg", "bf16[2, 8]")


def test_a_function_with_arguments_by_their_shapes(model, capsys):
    assert run(f"{model}:loss", *GIVEN) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"audit of {model}:loss: 1 finding\n") and "low-precision-function" in out


@pytest.mark.parametrize("name", ("example", "with_keywords"))
def test_a_function_that_returns_what_to_audit(model, capsys, name):
    assert run(f"{model}:{name}", "--backward") == 0
    assert "dot_general backward" in capsys.readouterr().out


def test_a_function_without_arguments_and_an_nnx_module(model, capsys):
    assert run(f"{model}:no_arguments") == 0
    assert run(f"{model}:net", "--arg", "f32[2,4]") == 0
    out = capsys.readouterr().out
    assert "low-precision-function  Net  exp bf16" in out and "\n    head  " in out


def test_a_module_by_its_name(model, capsys, monkeypatch):
    monkeypatch.chdir(os.path.dirname(model))
    assert run("audited_model:clean", "--arg", "f32[4,4]") == 0
    assert "no findings" in capsys.readouterr().out


def test_findings_fail_where_that_is_asked_for(model, capsys):
    assert run(f"{model}:example", "--fail-on-findings") == 1
    assert run(f"{model}:example", "--fail-on-findings", "--ignore", "low-precision-function") == 0
    assert "no findings" in capsys.readouterr().out


def test_json_on_the_standard_output_and_in_a_file(model, capsys, tmp_path):
    assert run(f"{model}:example", "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["findings"][0]["kind"] == "low-precision-function"
    assert run(f"{model}:example", "--json", str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == read


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["loss"], r"error: 'loss' should be module:function or file.py:function, as in train:loss_fn."),
        (["no_such_module:f"], r"error: there is no module 'no_such_module', neither installed nor in this folder."),
        (["no_such.module:f"], r"error: there is no module 'no_such', neither installed nor in this folder."),
        (["missing.py:f"], r"error: there is no file 'missing.py' here."),
        (["MODEL:los"], r"MODEL' has no 'los'. Did you mean 'loss'\?"),
        (["MODEL:number"], r"MODEL:number' is 3, of type int: it can't be called."),
        (
            ["MODEL:loss"],
            r"takes params, x: give each with --arg, as in --arg bf16\[8,128\]; or name a function without",
        ),
        (
            ["MODEL:wrong"],
            r"should return \(function, args\) or \(function, args, kwargs\), .* but returned function, int",
        ),
        (["MODEL:broken"], r"error: MODEL:broken\(\) failed: RuntimeError, see above."),
        (["MODEL:clean", "--arg", "bf16[2,3]"], r"error: MODEL:clean can't be traced: TypeError, see above."),
        (["MODEL:clean", "--arg", "bf17[2]"], r"'bf17' is no dtype. Known are bf16, f16, f32, f64, i8 to i64"),
        (["MODEL:clean", "--arg", "bf16[2,n]"], r"dimensions in 'bf16\[2,n\]' should be whole numbers"),
        (
            ["MODEL:clean", "--arg", "two words"],
            r"--arg 'two words' is no argument: give a shape such as bf16\[8,128\]",
        ),
        (["MODEL:example", "--ignore", "repeated-casts"], r"is no kind of finding. Did you mean 'repeated-cast'\?"),
        (["MODEL:example", "--json", "/nowhere/x.json"], r"error: /nowhere/x.json can't be written: No such file"),
    ),
)
def test_errors_name_the_value_and_the_way_out(model, capsys, arguments, message):
    assert run(*(text.replace("MODEL", model) for text in arguments)) == 2
    error = capsys.readouterr().err.replace(model, "MODEL")
    assert "error: " in error
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_a_module_that_does_not_import_says_so(tmp_path, capsys):
    (tmp_path / "does_not_import.py").write_text("1 / 0\n")
    assert run(f"{tmp_path / 'does_not_import.py'}:f") == 2
    assert "'does_not_import' can't be imported: ZeroDivisionError, see above." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("bf16[8,128]", jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)),
        ("f32[]", jax.ShapeDtypeStruct((), jnp.float32)),
        ("float8_e4m3fn[2]", jax.ShapeDtypeStruct((2,), jnp.float8_e4m3fn)),
        ("u8[3]", jax.ShapeDtypeStruct((3,), jnp.uint8)),
        ("bool[2]", jax.ShapeDtypeStruct((2,), np.bool_)),
        ("3", 3),
        ("'mean'", "mean"),
        ("[1.5, None, True]", [1.5, None, True]),
        ("{'w': f16[2], 'deep': [i32[1], (f32[2],)]}", None),
        ("key", None),
        ("{'key': 1}", {"key": 1}),
    ),
)
def test_arguments_are_shapes_keys_numbers_and_containers_of_these(text, expected):
    value = parse_argument(text)
    if text == "key":
        assert jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    elif expected is None:
        leaves = jax.tree.leaves(value)
        assert {(leaf.shape, leaf.dtype.name) for leaf in leaves} == {
            *(((2,), "float16"), ((1,), "int32"), ((2,), "float32"))
        }
        assert list(value) == ["w", "deep"] and isinstance(value["deep"][1], tuple)
    else:
        assert value == expected


def test_code_is_no_argument():
    with pytest.raises(CommandError, match=r"is no argument"):
        parse_argument("__import__('os')")


def test_from_the_shell(model):
    """The one test in a process of its own."""
    command = [sys.executable, "-m", "policy", "audit", f"{model}:example", "--fail-on-findings"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 1, result.stderr
    assert "\x1b[" not in result.stdout and "low-precision-function" in result.stdout
