"""``python -m policy audit`` and ``suggest``, for someone who has never seen them."""

import json
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.command_line.arguments import parse_argument
from policy.command_line.command import main
from tests.eight_devices import ROOT
from tests.policy.inspect.audit.corpus.planting import F16, F32, I32, shape

MODEL = """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from mpmodules import linen

    def loss(params, x, scale=1.0):
        return jax.nn.softmax(x @ params["w"]).astype(jnp.float32).sum() * scale

    def clean(x):
        return x @ x

    def example():
        w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4), (2, 8)))
        return loss, ({"w": w}, x)

    def with_keywords():
        return (*example(), {"scale": 2.0})

    def no_arguments():
        return jnp.ones((2, 2)) @ jnp.ones((2, 2))

    class Net(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.softmax(self.head(x).astype(jnp.bfloat16))

    net = Net()

    class LinenNet(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(8, name="head")(linen.Dense(32, name="up")(x))

    def linen_example():
        x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        return LinenNet().apply, (jax.eval_shape(LinenNet().init, jax.random.key(0), x), x)

    def without_matmuls(x, i):
        with jax.named_scope("up"):
            return jnp.tanh(x) * i.astype(x.dtype)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "audited_model.py").write_text(textwrap.dedent(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield str(folder / "audited_model.py")


def run(*arguments: str) -> int:
    return main(["audit", *arguments])


GIVEN = ("--arg", "{'w': bf16[8,4]}", "--arg", "bf16[2, 8]")


def read(capsys: Any, *arguments: str) -> Any:
    assert run(*arguments, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def dots(found: Any) -> list[Any]:
    return [op for op in found["operations"] if op["kind"] == "dot"]


def test_a_function_with_arguments_by_their_shapes(model, capsys):
    assert run(f"{model}:loss", *GIVEN) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"audit of {model}:loss: 1 finding\n") and "low-precision-function" in out


@pytest.mark.parametrize("name", ("example", "with_keywords"))
def test_a_function_that_returns_what_to_audit(model, capsys, name):
    assert run(f"{model}:{name}", "--backward") == 0
    assert "dot_general backward" in capsys.readouterr().out


def test_gradients_are_taken_by_the_arguments_that_are_named(model, capsys):
    both = ("--params", "params", "--params", "1")
    for params, count in ((), 1), (("--params", "x"), 1), (both, 2):
        found = read(capsys, f"{model}:loss", *GIVEN, "--backward", *params)
        assert sum(op["count"] for op in dots(found) if op["is_backward"]) == count


def test_a_policy_and_rules_are_taken_as_by_audit(model, capsys):
    for rules, dtype in ((), "bfloat16"), (("--rule", "head=p=f32,c=f32,o=f32"), "float32"):
        under = ("--arg", "f32[2,4]", "--policy", "mixed_bfloat16", *rules)
        found = read(capsys, f"{model}:net", *under)
        assert found["policy"] == "mixed_bfloat16"
        assert [op["operands"] for op in dots(found)] == [[dtype, dtype]]
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


def test_reports_on_the_standard_output_and_in_a_file(model, capsys, tmp_path):
    found = read(capsys, f"{model}:example")
    assert found["findings"][0]["kind"] == "low-precision-function"
    assert run(f"{model}:example", "--json", str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == found


ARGUMENTS: dict[str, Any] = {
    "bf16[8,128]": shape(8, 128),
    "f32[]": shape(dtype=F32),
    "float8_e4m3fn[2]": shape(2, dtype=jnp.float8_e4m3fn),
    "bool[2]": shape(2, dtype=np.bool_),
    "'mean'": "mean",
    "[1.5, None, True]": [1.5, None, True],
    "{'w': f16[2], 'deep': [(i32[],)]}": {"w": shape(2, dtype=F16), "deep": [(shape(dtype=I32),)]},
    "{'key': 1}": {"key": 1},
}


def test_arguments_are_shapes_keys_numbers_and_containers_of_these():
    assert {text: parse_argument(text) for text in ARGUMENTS} == ARGUMENTS
    assert jnp.issubdtype(parse_argument("key").dtype, jax.dtypes.prng_key)


@pytest.mark.slow
def test_from_the_shell(model):
    command = [sys.executable, "-m", "policy", "audit", f"{model}:example", "--fail-on-findings"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    options: Any = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    result = subprocess.run(command, check=False, **options)
    assert result.returncode == 1, result.stderr
    assert "\x1b[" not in result.stdout and "low-precision-function" in result.stdout


# --------------------------------------------------------------------------------------------------
# Hostile modules, examples and arguments
# --------------------------------------------------------------------------------------------------

HOSTILE = {
    "exits.py": "import sys\nsys.exit(0)\n",
    "needs_more.py": "import not_installed_anywhere\n",
    "package_that_exits/__init__.py": "raise SystemExit\n",
    "package_that_exits/inner.py": "",
    "raises_when_asked.py": "def __getattr__(name):\n    raise RuntimeError(name)\n",
    "examples.py": """
        import sys
        import jax
        import jax.numpy as jnp

        number = 3
        f = lambda x: (x @ x).sum()
        X = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
        net = lambda x: f(x)
        good_example = lambda: (f, (X,))
        one_example = lambda: (f,)
        swapped_example = lambda: ((X,), f)
        exits = lambda: sys.exit(0)
        exits_in_trace = lambda x: sys.exit(3)

        def broken():
            raise RuntimeError("no weights here")

        def interrupted():
            raise KeyboardInterrupt
    """,
}
NET = "examples.py:net --arg f32[4,4]"
SHOULD_RETURN = r"should return \(function, args\) or \(function, args, kwargs\), .* but returned "
REJECTED = {
    "no_such_module:f": "there is no module 'no_such_module', neither installed nor in this folder",
    "exits.py:f": r"'exits' can't be imported: it calls sys.exit\(0\)\.",
    "needs_more:f": r"'needs_more' can't be imported: ModuleNotFoundError, see above\.",
    "package_that_exits.inner:f": r"can't be imported: it calls sys.exit\(\)\.",
    "raises_when_asked.py:f": r"'raises_when_asked.py:f' can't be read: RuntimeError",
    "examples.py:number": r"examples.py:number' is 3, of type int: it can't be called\.",
    "examples.py:broken": r"examples.py:broken\(\) failed: RuntimeError, see above\.",
    "examples.py:exits": r"examples.py:exits\(\) failed: it calls sys.exit\(0\)\.",
    "examples.py:f --arg bf16[2,3]": r"examples.py:f can't be traced: TypeError, see above\.",
    "examples.py:exits_in_trace --arg f32[2]": r"can't be traced: it calls sys.exit\(3\)\.",
    "examples.py:one_example": SHOULD_RETURN + r"a tuple of function\.",
    "examples.py:swapped_example": SHOULD_RETURN + r"a tuple of tuple, function\.",
    "examples.py:f --arg " + "[" * 10**5: r"--arg: '\[+\.\.\.' should be a shape",
    "examples.py:f --arg f32[²]": r"--arg: 'f32\[²\]' should be a shape",
    "examples.py:f --arg f64[4,4]": "float32 instead of float64 here. Set JAX_ENABLE_X64=1",
    "examples.py:good_example --json /nowhere/x.json": r"there is no folder /nowhere\.",
    "examples.py:good_example --ignore mixed-matmuls": r"--ignore: invalid choice: 'mixed-matmuls'",
    "examples.py": "should be module:function or file.py:function, as in train:loss_fn",
    "examples.py:nett": r"has no 'nett'\. Did you mean 'net'\?",
    "trian.py:f": "there is no file 'trian.py' here",
    "examples.py:f --arg {w:": r"should be a shape such as bf16\[8,128\]",
    "examples.py:f": r"'examples.py:f' takes x: give each with --arg, as in --arg bf16",
    f"{NET} --params x": "--params selects the arguments to differentiate: give --backward too.",
    f"{NET} --rule head=f32": "rules= makes exceptions to a policy, but policy= is missing",
    f"{NET} --policy nonsense": "--policy: Unknown dtype 'nonsense'",
    f"{NET} --policy bf16 --rule head": "Rule 'head' should be PATH=TEXT, such as head=f32.",
    f"{NET} --policy bf16 --rule haed=f32": "error: Rule 'haed' matched no module.",
}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
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


@pytest.mark.cases(fast=14)
@pytest.mark.parametrize("line", REJECTED, ids=lambda line: line[:60])
def test_a_line_that_is_rejected_ends_in_one_line_that_says_why(hostile, capsys, line):
    assert run(*line.split(" ")) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert printed.out == "" and last.startswith("error: ") and re.search(REJECTED[line], last), (
        last
    )


def test_an_interrupt_stays_one(hostile):
    with pytest.raises(KeyboardInterrupt):
        run("examples.py:interrupted")


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["a.b.py", "with space.py", "jax.py"])
def test_a_file_is_found_by_its_path_whatever_its_name(hostile, capsys, name):
    (hostile / "inside").mkdir()
    (hostile / "inside" / name).write_text(textwrap.dedent(HOSTILE["examples.py"]))
    assert run(f"inside/{name}:good_example") == 0
    assert run(f"{hostile}/inside/{name}:f", "--arg", "f32[4,4]") == 0
    assert "no findings" in capsys.readouterr().out


# --- suggest --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.slow
def test_rules_are_suggested_for_shapes(model, capsys):
    options = ["--policy", "mixed_bfloat16", "--error", "0.06"]
    assert main(["suggest", f"{model}:linen_example", *options]) == 0
    assert 'use_policy("mixed_bfloat16", rules)' in capsys.readouterr().out


@pytest.mark.cases(fast=1)
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--error", "1e-9", "--policy", "bf16"], "No part of this call runs in half precision"),
        (["--error", "1", "--policy", "f9"], "--policy: Unknown dtype 'f9'"),
        (["--error", "1", "--params", "0"], "give --backward too"),
    ],
)
def test_what_can_not_be_suggested_is_told_in_a_line(model, capsys, options, text):
    target = [f"{model}:without_matmuls", "--arg", "f32[4]", "--arg", "i32[4]"]
    assert main(["suggest", *target, *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and text in told
