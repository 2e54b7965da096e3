"""``python -m policy estimate``, with an estimate that is written by hand unless said otherwise."""

import json
import sys
import textwrap
import types
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from policy.command_line import command
from policy.command_line.arguments import policies_in
from policy.command_line.command import main
from policy.core.rules import PolicyRules
from policy.inspect.estimate.report import Estimate
from tests.policy.inspect.estimate.estimates import cost, estimate_of, half, lacking

TRAIN = """
    import jax
    import jax.numpy as jnp

    import policy

    def step(w, x):
        return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    def example(width=8, kind="plain"):
        param_dtype = policy.current_policy().param_dtype
        return step, (
            jax.ShapeDtypeStruct((width, width), param_dtype),
            jax.ShapeDtypeStruct((4, width), param_dtype),
        )

    def searched(batch, remat):
        _, (w, x) = example()
        loss = lambda w, x: jnp.tanh(x @ w).sum()
        grad = jax.grad(jax.checkpoint(loss, policy=remat))
        return grad, (w, jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype))

    def broken():
        raise ValueError("no weights here")
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """The path of a file with a step and an example of it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "estimated_train.py").write_text(textwrap.dedent(TRAIN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield str(folder / "estimated_train.py")


class Asked:
    """What the command asks `policy.estimate` for, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.answer: Estimate | Exception = estimate_of(cost(), half())
        monkeypatch.setattr(command, "estimate", self._estimate)

    def _estimate(self, fn: Any, *args: Any, on: Any, **options: Any) -> Estimate:
        self.calls.append((fn, args, {"on": on.name, **options}))
        if isinstance(self.answer, Exception):
            raise self.answer
        return estimate_of(*self.answer.rows, target=on.name)

    @property
    def options(self) -> dict[str, Any]:
        return self.calls[-1][2]


@pytest.fixture
def asked(monkeypatch):
    return Asked(monkeypatch)


def run(*arguments: str) -> int:
    return main(["estimate", *arguments])


def test_the_example_itself_is_estimated_under_three_policies_where_none_is_named(train, asked):
    assert run(f"{train}:example", "--on", "v5e:4x4") == 0
    fn, args, options = asked.calls[-1]
    assert fn.__name__ == "example" and args == ()
    assert options.pop("progress") is not None and options.pop("on") == "v5e:4x4"
    texts = ("float32", "mixed_bfloat16", "bfloat16")
    assert options.pop("policies") == {text: (text, {}) for text in texts}
    assert options.pop("max_compiles") == 24
    assert not any(options.values())


def test_options_become_arguments_of_estimate(train, asked):
    given = "--arg f32[8,8] --arg bf16[4,8] --backward --params w"
    layout = "--mesh data=2,model=8 --shard 1=data+model,None --shard 0=None,model"
    rules = "--rule head=f32 --donate 0,1 --policies bf16"
    line = f"{given} {layout} {rules} --on v5e:4x4"
    assert run(f"{train}:step", *line.split()) == 0
    _, args, options = asked.calls[-1]
    assert [f"{arg.dtype}{list(arg.shape)}" for arg in args] == ["float32[8, 8]", "bfloat16[4, 8]"]
    assert options["mesh"] == [{"data": 2, "model": 8}]
    assert options["shardings"] == {1: P(("data", "model"), None), 0: P(None, ("model",))}
    assert (options["donate"], options["backward"], options["params"]) == ([0, 1], True, ["w"])
    assert options["rules"] == PolicyRules.from_texts(["head=f32"])


def test_rows_have_names_and_options_of_the_example(train, asked):
    low = "low=bfloat16 master_weights=remainder moments='int8' shape=(1, 2) rate=1e-3 path=a/b.npz"
    options = {"master_weights": "remainder", "moments": "int8", "shape": (1, 2), "rate": 1e-3}
    plain = "plain = p=f32,c=bf16"
    assert run(f"{train}:example", "--on", "cpu", "--row", low, "--row", plain) == 0
    assert asked.options["policies"] == {
        "low": ("bfloat16", options | {"path": "a/b.npz"}),
        "plain": ("p=f32,c=bf16", {}),
    }
    assert run(f"{train}:example", "--on", "cpu", "--row", low, "--policies", "f32") == 0
    assert list(asked.options["policies"]) == ["f32", "low"]


def test_a_search_has_several_batches_checkpoint_policies_and_meshes(train, asked):
    layout = "--mesh data=16 --mesh data=4,fsdp=4 --max-compiles 99"
    line = f"--batch 256,512 --remat full,names:a,b,none {layout} --on v5e:4x4"
    assert run(f"{train}:searched", *line.split()) == 0
    options = asked.options
    assert (options["batch"], options["max_compiles"]) == ([256, 512], 99)
    assert options["remat"] == ["full", "names:a,b", "none"]
    assert options["mesh"] == [{"data": 16}, {"data": 4, "fsdp": 4}]


def test_a_search_on_the_processor_at_hand_has_a_row_for_each(train, capsys):
    line = "--on cpu --policies f32,bf16 --batch 4,8 --remat full --json - --quiet"
    assert run(f"{train}:searched", *line.split()) == 0
    read = json.loads(capsys.readouterr().out)
    names = [f"{text}, batch={batch}" for text in ("f32", "bf16") for batch in (4, 8)]
    assert [row["name"] for row in read["rows"]] == names
    assert [row["batch"] for row in read["rows"]] == [4, 8, 4, 8]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32, mixed_bfloat16,,bfloat16", ["f32", "mixed_bfloat16", "bfloat16"]),
        ("f32,p=f32,c=bf16,bf16", ["f32", "p=f32,c=bf16", "bf16"]),
        ("p=f32,c=bf16,params=bf16,c=bf16", ["p=f32,c=bf16", "params=bf16,c=bf16"]),
        ("", []),
    ],
)
def test_the_fields_of_a_policy_stay_together(text, expected):
    assert policies_in(text) == expected


def test_each_target_has_a_table_and_files_of_its_own(train, asked, capsys, tmp_path):
    files = ("--json", str(tmp_path / "cost.json"))
    assert run(f"{train}:example", "--on", "v5e:4x4, h100:8,v5e:4x4", *files) == 0
    assert [options["on"] for _, _, options in asked.calls] == ["v5e:4x4", "h100:8"]
    assert capsys.readouterr().out.count(f"estimate of {train}:example") == 2
    names = [f"cost-{target}.json" for target in ("h100-8", "v5e-4x4")]
    assert sorted(file.name for file in tmp_path.iterdir()) == names


def test_reports_go_to_files_or_the_standard_output(train, asked, capsys, tmp_path):
    assert run(f"{train}:example", "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["name"], read["target"]) == (f"{train}:example", "here")
    assert run(f"{train}:example", "--json", str(tmp_path / "x.json")) == 0
    assert json.loads((tmp_path / "x.json").read_text()) == read
    assert capsys.readouterr().out.startswith("estimate of ")


def test_a_row_that_lacks_memory_fails_where_that_is_asked_for(train, asked):
    assert run(f"{train}:example", "--fail-on-oom") == 0
    asked.answer = estimate_of(cost(), lacking())
    assert run(f"{train}:example") == 0
    assert run(f"{train}:example", "--fail-on-oom") == 1


def test_accelerators_are_looked_for_only_where_they_are_the_target(train, asked, monkeypatch):
    changed: list[tuple[str, str]] = []
    update = lambda name, value: changed.append((name, value))  # noqa: E731
    monkeypatch.setattr(command.jax, "config", types.SimpleNamespace(update=update))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert run(f"{train}:example", "--on", "v5e") == 0 and changed == []
    monkeypatch.delenv("JAX_PLATFORMS")
    assert run(f"{train}:example", "--on", "v5e,here") == 0 and changed == []
    assert run(f"{train}:example", "--on", "v5e,cpu") == 0
    assert changed == [("jax_platforms", "cpu")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "v5f"], "error: --on: There is no target 'v5f'. Did you mean 'v5p'?"),
        (["--on", " ,"], "error: --on: It names no devices: give v5e:4x4, h100, cpu or here."),
        (["--policies", "nonsense"], "error: --policies: Unknown dtype 'nonsense'"),
        (["--policies", "f32,f32"], "error: --policies or --row has 'f32' twice: drop one."),
        (["--row", "f32"], "error: --row: 'f32' should be NAME=POLICY and the example's options"),
        (
            ["--row", "a=f32 n=f(1)"],
            "error: --row: 'a=f32 n=f(1)' should be NAME=POLICY",
        ),
        (["--batch", "8,x"], "error: --batch: '8,x' should be numbers of examples, as in 256,512."),
        (["--remat", "ful"], "error: --remat: remat has no value 'ful'. Did you mean 'full'"),
        (["--remat", ","], "error: --remat: remat has no value ','."),
        (
            ["--mesh", "data"],
            "error: --mesh: 'data' should be axes and their sizes, as in data",
        ),
        (["--shard", "data"], "error: --shard: 'data' should be an argument's position and axes"),
        (["--donate", "w"], "error: --donate: 'w' should be positions of arguments, as in 0,1."),
        (["--params", "w"], "error: --params selects the arguments to differentiate: give"),
        (["--json", "-", "--on", "cpu,v5e"], "error: --json - prints one report, but --on has 2"),
        (["--json", "/nowhere/x"], "error: /nowhere/x can't be written: there is no folder"),
    ],
)
def test_errors_are_one_line_and_come_before_anything_is_compiled(
    train, asked, capsys, arguments, message
):
    assert run(f"{train}:example", *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(message)
    assert not asked.calls


def test_an_error_of_the_users_code_is_shown_with_its_traceback(train, capsys):
    assert run(f"{train}:broken", "--on", "cpu") == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and "ValueError: no weights here" in error
    assert error.endswith(f"{train}:broken can't be estimated on cpu: ValueError, see above.\n")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("example", ["--row", "a=f32 depth=3"], "got an unexpected keyword argument 'depth'"),
        ("step", [], "takes w, x: give each with --arg, as in --arg bf16[8,128];"),
    ],
)
def test_an_error_of_estimate_is_one_line(train, capsys, name, options, message):
    assert run(f"{train}:{name}", "--on", "cpu", "--quiet", *options) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told and told.count("\n") == 1


def test_what_the_users_code_prints_is_no_part_of_the_report(tmp_path, capsys):
    talking = """
    print("an import")

    def talking():
        print("a call")
        return example()
    """
    file = tmp_path / "estimated_talking.py"
    file.write_text(textwrap.dedent(TRAIN + talking))
    assert run(f"{file}:talking", "--on", "cpu", "--policies", "f32", "--json", "-") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["name"] == f"{file}:talking"
    assert "an import" in said.err and "a call" in said.err


def test_a_step_is_estimated_on_the_processor_at_hand(train, capsys):
    rows = ("--row", "small=f32 width=8", "--row", "half=bf16 width=8 kind=plain")
    assert run(f"{train}:example", "--on", "cpu", *rows, "--donate", "0", "--json", "-") == 0
    said = capsys.readouterr()
    read = json.loads(said.out)
    assert [(row["name"], row["arguments"]) for row in read["rows"]] == [
        ("small", 4 * (8 * 8 + 4 * 8)),
        ("half", 2 * (8 * 8 + 4 * 8)),
    ]
    assert said.err.splitlines() == ["cpu 1/2 small", "cpu 2/2 half"]
