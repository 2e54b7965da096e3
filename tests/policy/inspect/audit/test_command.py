"""``python -m policy audit``, for someone who has never seen it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.command_line.command import main, parse_argument
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
        w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4), (2, 8)))
        return loss, ({"w": w}, x)

    def with_keywords():
        return (*example(), {"scale": 2.0})

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


def dots(capsys) -> list[dict]:
    operations = json.loads(capsys.readouterr().out)["operations"]
    return [operation for operation in operations if operation["kind"] == "dot"]


def test_gradients_are_taken_by_the_arguments_that_are_named(model, capsys):
    counts = []
    for params in ((), ("--params", "x"), ("--params", "params", "--params", "1")):
        assert run(f"{model}:loss", *GIVEN, "--backward", *params, "--json", "-") == 0
        counts.append(sum(op["count"] for op in dots(capsys) if op["is_backward"]))
    assert counts == [1, 1, 2]


def test_a_policy_and_rules_are_taken_as_by_audit(model, capsys):
    given = ("--arg", "f32[2,4]", "--policy", "mixed_bfloat16", "--json", "-")
    assert run(f"{model}:net", *given) == 0
    assert [dot["operands"] for dot in dots(capsys)] == [["bfloat16", "bfloat16"]]
    assert run(f"{model}:net", *given, "--rule", "head=p=f32,c=f32,o=f32") == 0
    assert [dot["operands"] for dot in dots(capsys)] == [["float32", "float32"]]
    assert run(f"{model}:clean", "--arg", "f32[4,4]") == 0
    assert "no findings, and no policy was in force" in capsys.readouterr().out


def test_a_function_without_arguments_and_an_nnx_module_of_a_module(model, capsys, monkeypatch):
    assert run(f"{model}:no_arguments") == 0
    monkeypatch.chdir(os.path.dirname(model))
    assert run("audited_model:net", "--arg", "f32[2,4]") == 0
    out = capsys.readouterr().out
    assert "low-precision-function  Net:  exp bf16" in out and "\n  head  " in out


def test_findings_fail_where_that_is_asked_for(model, capsys):
    assert run(f"{model}:example", "--fail-on-findings") == 1
    assert run(f"{model}:example", "--fail-on-findings", "--ignore", "low-precision-function") == 0
    assert "no findings" in capsys.readouterr().out


def test_a_report_goes_to_the_standard_output_or_to_a_file(model, capsys, tmp_path):
    assert run(f"{model}:example", "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["findings"][0]["kind"] == "low-precision-function"
    assert run(f"{model}:example", "--json", str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == read


NET = ["MODEL:net", "--arg", "f32[2,4]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["no_such_module:f"], "there is no module 'no_such_module', neither installed nor in"),
        (["MODEL:number"], r"MODEL:number' is 3, of type int: it can't be called."),
        (["MODEL:broken"], r"error: MODEL:broken\(\) failed: RuntimeError, see above."),
        (["MODEL:clean", "--arg", "bf16[2,3]"], "clean can't be traced: TypeError, see above."),
        (["MODEL:example", "--ignore", "repeated-casts"], r"Did you mean 'repeated-cast'\?"),
        (["MODEL:loss", *GIVEN, "--params", "x"], "--params selects .*: give --backward too."),
        ([*NET, "--rule", "head=f32"], "--rule makes exceptions to a policy: give --policy too."),
        ([*NET, "--policy", "nonsense"], "--policy nonsense: "),
        ([*NET, "--policy", "bf16", "--rule", "head"], "--rule: Rule 'head' should be PATH=TEXT"),
        ([*NET, "--policy", "bf16", "--rule", "haed=f32"], "Rule 'haed' matched no module."),
    ),
)
def test_errors_name_the_value_and_the_way_out(model, capsys, arguments, message):
    assert run(*(text.replace("MODEL", model) for text in arguments)) == 2
    assert re.search(message, capsys.readouterr().err.replace(model, "MODEL"))


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("bf16[8,128]", jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)),
        ("f32[]", jax.ShapeDtypeStruct((), jnp.float32)),
        ("float8_e4m3fn[2]", jax.ShapeDtypeStruct((2,), jnp.float8_e4m3fn)),
        ("bool[2]", jax.ShapeDtypeStruct((2,), np.bool_)),
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


def test_from_the_shell(model):
    """The one test in a process of its own."""
    command = [sys.executable, "-m", "policy", "audit", f"{model}:example", "--fail-on-findings"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert result.returncode == 1, result.stderr
    assert "\x1b[" not in result.stdout and "low-precision-function" in result.stdout


# --------------------------------------------------------------------------------------------------
# Hostile modules, examples and arguments
# --------------------------------------------------------------------------------------------------

HOSTILE = {
    "exits.py": "import sys\nsys.exit(0)\n",
    "needs_more.py": "import not_installed_anywhere\n",
    "raises_when_asked.py": "def __getattr__(name):\n    raise RuntimeError(name)\n",
    "examples.py": """
        import sys
        import jax
        import jax.numpy as jnp

        def f(x):
            return (x @ x).sum()

        X = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
        good_example = lambda: (f, (X,))
        swapped_example = lambda: ((X,), f)

        def exits():
            sys.exit(0)

        def exits_in_trace(x):
            sys.exit(3)

        def interrupted():
            raise KeyboardInterrupt
    """,
}
SHOULD_RETURN = r"should return \(function, args\) or \(function, args, kwargs\), .* but returned "


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder of modules, the current one."""
    for name, text in HOSTILE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["exits.py:f"], r"'exits' can't be imported: it calls sys.exit\(0\)\."),
        (["needs_more:f"], r"'needs_more' can't be imported: ModuleNotFoundError, see above\."),
        (["raises_when_asked.py:f"], r"'raises_when_asked.py:f' can't be read: RuntimeError"),
        (["examples.py:X"], r"of type ShapeDtypeStruct: it can't be called\."),
        (["examples.py:exits"], r"examples.py:exits\(\) failed: it calls sys.exit\(0\)\."),
        (
            ["examples.py:exits_in_trace", "--arg", "f32[2]"],
            r"exits_in_trace can't be traced: it calls sys.exit\(3\)\.",
        ),
        (["examples.py:swapped_example"], SHOULD_RETURN + r"a tuple of tuple, function\."),
        (["examples.py:f", "--arg", "[" * 10**5], r"--arg '\[+\.\.\.' can't be read"),
        (["examples.py:f", "--arg", "f64[4]"], "JAX uses float32 .* here. Set JAX_ENABLE_X64=1"),
        (["examples.py:good_example", "--html", ""], r"'' can't be written"),
    ),
)
def test_hostile_lines_end_in_one_line_that_says_why(hostile, capsys, arguments, message):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert printed.out == "" or "--html" in arguments
    assert last.startswith("error: ") and re.search(message, last), last


def test_an_interrupt_stays_one(hostile):
    with pytest.raises(KeyboardInterrupt):
        run("examples.py:interrupted")


@pytest.mark.parametrize("name", ["a.b.py", "with space.py", "jax.py"])
def test_a_file_is_found_by_its_path_whatever_its_name(hostile, capsys, name):
    (hostile / "inside").mkdir()
    (hostile / "inside" / name).write_text(textwrap.dedent(HOSTILE["examples.py"]))
    assert run(f"inside/{name}:good_example") == 0
    assert run(f"{hostile}/inside/{name}:f", "--arg", "f32[4,4]") == 0
    assert "no findings" in capsys.readouterr().out
