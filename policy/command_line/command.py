"""Audits, suggestions, estimates, runs and ports from the shell: ``python -m policy``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from policy.command_line.arguments import (
    CommandError,
    by_name,
    call_of,
    mesh_sizes,
    parse_argument,
    policies_in,
    prefixed_errors,
    read_by,
    remats_in,
    require_arguments,
    row_in,
    running_users_code,
    sharding_in,
    target_of,
    targets_in,
    whole_numbers,
)
from policy.command_line.port import port_files
from policy.command_line.watch import show_run
from policy.core.rules import PolicyRules
from policy.inspect.audit.audit import audit
from policy.inspect.audit.findings import FINDING_KINDS
from policy.inspect.estimate.estimate import DEFAULT, estimate
from policy.inspect.estimate.search import MOST_COMPILES
from policy.inspect.estimate.targets import Target
from policy.inspect.runs.advice import ADVICE_KINDS
from policy.inspect.suggest.suggest import POINTS, suggest
from policy.inspect.traced.call import checked_policy

_SIGPIPE = 128 + 13  # the exit status of a program that a broken pipe ends


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit status: 0; 1 for findings with --fail-on-findings, a row that lacks memory with
      --fail-on-oom, or advice with --fail-on-advice; 2 for an error; 141 where the reader of the
      output has left.
    """
    try:
        options = _parser().parse_args(argv)
        status = options.run(options)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE


# --------------------------------------------------------------------------------------------------
# Options, as keyword arguments of `add_argument` by their flags
# --------------------------------------------------------------------------------------------------


def _option(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    """Returns an option that takes a value."""
    return {"metavar": metavar, "help": text, **more}


def _number(metavar: str, default: int, text: str) -> dict[str, Any]:
    """Returns an option that takes a whole number."""
    return _option(metavar, f"{text} (%(default)s)", type=int, default=default)


def _repeatable(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    """Returns an option that may be given several times."""
    return _option(metavar, text, action="append", default=[], **more)


def _switch(text: str) -> dict[str, Any]:
    """Returns an option without a value."""
    return {"help": text, "action": "store_true"}


_CALL = {
    "target": _option(
        "module:function",
        "the name of a module or a .py file, and the name of a function in it",
    ),
    "--arg": _repeatable(
        "ARG",
        "an argument: a shape (bf16[8,128], i32[4], f32[]), 'key', a Python number or string, or "
        "a list, tuple or dict of these; repeat it for each argument",
        type=read_by(
            parse_argument,
            "a shape such as bf16[8,128] or f32[], 'key', a Python number or string, or a list, "
            "tuple or dict of these",
        ),
    ),
    "--backward": _switch("include the gradients"),
    "--params": _repeatable(
        "ARGUMENT",
        "an argument to differentiate with --backward, by position or name; repeatable",
        type=lambda text: int(text) if text.isdecimal() else text,
    ),
}
_POLICY = {
    "--policy": _option(
        "TEXT", "the policy to run under, such as mixed_bfloat16", type=read_by(checked_policy)
    )
}
_RULES = {
    "--rule": _repeatable(
        "PATH=TEXT",
        "the policy of a module path, beside the call's own, such as head=f32; repeatable",
    )
}
_JSON = {"--json": _option("FILE", "write the report as JSON; - for standard output")}
_AUDIT = {
    **_POLICY,
    **_RULES,
    **_JSON,
    "--ignore": _repeatable(
        "KIND", "leave out findings of a kind; repeatable", choices=FINDING_KINDS
    ),
    "--fail-on-findings": _switch("exit with 1 if there are findings"),
}
_SUGGEST = {
    **_POLICY,
    "--error": _option("ERROR", "the relative error allowed; optional with --on", type=float),
    "--on": _option(
        "TARGET", "get cost from a target's compiler, such as v5e:1x1 or h100", type=read_by(Target)
    ),
    "--points": _number(
        "COUNT", POINTS, "the largest number of points of the front; each compiles a program"
    ),
}
_ESTIMATE = {
    "--on": _option(
        "DEVICES",
        "v5e:4x4, h100, h100:8, my.json:8, cpu or here (%(default)s); or several, separated by "
        "commas, with a table for each",
        default="here",
        type=read_by(targets_in),
    ),
    "--policies": _option(
        "TEXTS",
        "a row for each, separated by commas: f32,mixed_bfloat16,p=f32,c=bf16 "
        "(float32,mixed_bfloat16,bfloat16 if there is no --row)",
        type=read_by(policies_in),
    ),
    "--row": _repeatable(
        "NAME=TEXT",
        "a named row, with options for the example: \"low=bf16 moments='int8'\"; repeatable",
        type=read_by(
            row_in,
            "NAME=POLICY and the example's options, words or Python literals, as in "
            "\"low=bfloat16 moments='int8'\"",
        ),
    ),
    **_RULES,
    "--batch": _option(
        "COUNTS",
        "a row for each number of examples, the example's parameter batch: 256,512",
        type=read_by(whole_numbers, "numbers of examples, as in 256,512"),
    ),
    "--remat": _option(
        "NAMES",
        "a row for each checkpoint policy, the example's parameter remat: full, dots_saveable, "
        "dots_with_no_batch_dims_saveable, names:a,b, none; separated by commas",
        type=read_by(remats_in),
    ),
    "--mesh": _repeatable(
        "AXES",
        "the mesh axes and their sizes, such as data=16,model=16; repeat it for rows of each mesh",
        type=read_by(mesh_sizes, "axes and their sizes, as in data=16,model=16"),
    ),
    "--max-compiles": _number(
        "COUNT", MOST_COMPILES, "the largest number of programs that a search compiles"
    ),
    "--shard": _repeatable(
        "ARGUMENT=AXES",
        "the position of an argument and the mesh axes that its arrays are sharded over: 0=data, "
        "1=data,None or 2=data+fsdp,model; repeatable",
        type=read_by(
            sharding_in,
            "an argument's position and axes of the mesh, as in 0=data or 2=data,None",
        ),
    ),
    "--donate": _option(
        "ARGUMENTS",
        "positions of donated arguments, such as 0,1",
        type=read_by(whole_numbers, "positions of arguments, as in 0,1"),
    ),
    **_JSON,
    "--fail-on-oom": _switch("exit with 1 if a row does not fit in memory"),
    "--quiet": _switch("show no progress"),
}
_WATCH = {
    "file": _option("FILE", "the log that policy.inspect.RunLog writes"),
    "--follow": _switch("print it again when the file has grown, until an interrupt"),
    "--fail-on-advice": _switch("exit with 1 if there is advice"),
}
_PORT = {
    "files": _option("FILE", "Python files, or folders of them", nargs="+"),
    "--write": _switch("replace the files that change"),
}


def _kinds(title: str, kinds: Mapping[str, str]) -> str:
    return "\n".join([f"{title}:", *(f"  {kind:25}{text}" for kind, text in kinds.items())])


_EPILOGS = {
    "audit": _kinds("kinds of findings", FINDING_KINDS),
    "watch": _kinds("kinds of advice", ADVICE_KINDS),
}


_HELP = """
    Reports on the dtypes of JAX programs. For a function train_step in train.py:

        python -m policy audit train.py:train_step --arg f32[784,10] --arg f32[32,784]

    python -m policy COMMAND --help shows each command's options, with examples.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the commands."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message.removeprefix("argument "))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m policy",
        description=inspect.cleandoc(_HELP),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for run, options, text in (
        (_audit, _AUDIT, "the dtypes that a function runs in, found without running it"),
        (_suggest, _SUGGEST, "rules that keep a function within a given error of float32"),
        (_estimate, _ESTIMATE, "memory, traffic and time of a step on devices you need not have"),
        (_watch, _WATCH, "the numbers of a training run, and advice, from the log of its monitor"),
        (_port, _PORT, "Flax code with layers that obey a policy, as a diff"),
    ):
        name = run.__name__.removeprefix("_")
        command = commands.add_parser(
            name,
            help=text,
            description=inspect.getdoc(run),
            epilog=_EPILOGS.get(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for flag, given in (options if run in (_watch, _port) else _CALL | options).items():
            command.add_argument(flag, **given)
        command.set_defaults(run=run)
    return parser


def _params_of(options: argparse.Namespace) -> list[int | str] | None:
    if options.params and not options.backward:
        raise CommandError("--params selects the arguments to differentiate: give --backward too.")
    return options.params or None


def _rules_of(options: argparse.Namespace) -> PolicyRules | None:
    with prefixed_errors("--rule"):
        return PolicyRules.from_texts(options.rule) if options.rule else None


# --------------------------------------------------------------------------------------------------
# The commands; their docstrings are their help
# --------------------------------------------------------------------------------------------------


def _audit(options: argparse.Namespace) -> int:
    """Shows the dtypes of a function, and operations that lose accuracy or speed. Nothing runs.

        python -m policy audit train:loss_fn --arg "{'w': f32[784,10]}" --arg bf16[8,784] --backward
        python -m policy audit models/net.py:example --json net.json --fail-on-findings
        python -m policy audit models/net.py:example --policy mixed_bfloat16 --rule head=f32

    The target is a function (or an nnx module) by name, called with one argument for each --arg. A
    target that takes no arguments may return the call to audit: a function and the tuple of its
    arguments, and a dict of keyword arguments if there are any:

        def example():
            model = Net()
            x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
            return model.apply, (jax.eval_shape(model.init, jax.random.key(0), x), x)
    """
    _require_output(options.json)
    fn, args, kwargs = call_of(target_of(options.target), options.arg, options.target)
    asked = {"policy": options.policy, "rules": _rules_of(options), "params": _params_of(options)}
    with running_users_code(f"{options.target} can't be traced"):
        report = audit(fn, *args, backward=options.backward, **asked, **kwargs)
    findings = tuple(one for one in report.findings if one.kind not in options.ignore)
    report = dataclasses.replace(report, name=options.target, findings=findings)
    _write_report(report.show, options.json, report.to_json)
    return int(bool(options.fail_on_findings and report.findings))


def _suggest(options: argparse.Namespace) -> int:
    """Finds the modules to keep in float32, so that the error stays within a budget.

        python -m policy suggest net.py:example --error 0.02 --policy mixed_bfloat16
        python -m policy suggest net.py:example --policy mixed_bfloat16 --on v5e:1x1

    With --on, cost comes from the compiler of a TPU or GPU, which need not be present. The front of
    error against cost is printed, with the rules of each point.

    The function runs. Arguments that are shapes are filled with numbers from a normal distribution:
    give arrays of your own data for figures that hold for it.
    """
    fn, args, kwargs = call_of(target_of(options.target), options.arg, options.target)
    args, kwargs = jax.tree.map(_filled, (tuple(args), kwargs))
    chosen = ("policy", "error", "backward", "on", "points")
    asked = {name: getattr(options, name) for name in chosen} | {"params": _params_of(options)}
    with running_users_code(f"{options.target} can't be run"):
        found = suggest(fn, *args, **asked, **kwargs)
    print(found)
    return 0


def _filled(leaf: Any) -> Any:
    """Returns an array in the place of a shape: normal numbers, ones of integers, or a key."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    key = jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)


def _estimate(options: argparse.Namespace) -> int:
    """Estimates memory, traffic and time of a step under several policies.

        python -m policy estimate run.py:example --on v5e:4x4 --policies f32,mixed_bfloat16,bfloat16
        python -m policy estimate run.py:step --arg f32[4096,4096] --arg bf16[512,4096] --on h100
        python -m policy estimate run.py:example --on v5e:16x16 --mesh data=16,model=16 \\
            --row "full=bfloat16 master_weights=full" --row "remainder=bfloat16 moments='int8'"
        python -m policy estimate run.py:example --on v5e:16x16 --policies mixed_bfloat16 \\
            --batch 256,512 --remat full,dots_saveable --mesh fsdp=256 --mesh data=4,fsdp=64

    The target is compiled from shapes alone, for devices that need not be present: nothing runs. It
    is a function, called with one argument for each --arg, or an example: a function without
    required arguments that returns a function and the tuple of its arguments. The example is called
    under each policy, with a row's options as keyword arguments, and with the mesh if it has a
    parameter `mesh`. Several values of --batch, --remat and --mesh make a row for each combination;
    the rows that no other beats in both time and memory are marked.
    """
    targets = options.on
    given = _asked_of_estimate(options)
    searched = [name for name in ("batch", "remat") if given[name] is not None]
    _require_output(options.json, count=len(targets))
    # JAX traces here, and compiles for elsewhere: it need not look for accelerators.
    if not os.environ.get("JAX_PLATFORMS") and all(target.kind != "here" for target in targets):
        jax.config.update("jax_platforms", "cpu")
    fn = target_of(options.target)
    require_arguments(fn, options.arg, options.target, passed=("mesh", *searched))
    is_lacking = False
    for i, target in enumerate(targets):
        progress = None if options.quiet else functools.partial(_show_progress, target.name)
        with running_users_code(f"{options.target} can't be estimated on {target.name}"):
            found = estimate(fn, *options.arg, on=target, progress=progress, **given)
        if i:
            print()
        found = dataclasses.replace(found, name=options.target)
        of = "" if len(targets) == 1 else found.target
        _write_report(found.show, _named(options.json, of), found.to_json)
        is_lacking |= any(row.fits is False for row in found.rows)
    return int(bool(options.fail_on_oom and is_lacking))


def _show_progress(target: str, name: str, done: int, total: int) -> None:
    """Writes a line to the standard error before a row is compiled."""
    print(f"{target} {done + 1}/{total} {name}", file=sys.stderr, flush=True)


def _watch(options: argparse.Namespace) -> int:
    """Shows the statistics of a training run, with advice, from the run's log.

        python -m policy watch run.jsonl --follow
        python -m policy watch run.jsonl --fail-on-advice

    policy.inspect.RunLog writes the file from the snapshots of policy.monitor. It may still grow.
    """
    advice = show_run(options.file, follow=options.follow)
    return int(bool(options.fail_on_advice and advice))


def _port(options: argparse.Namespace) -> int:
    """Ports Flax code: imports from mpmodules, layers without the dtypes that a policy decides.

        python -m policy port models.py train.py
        python -m policy port models --write

    Edits imports of flax.linen and flax.nnx, and the arguments dtype= and param_dtype= in calls of
    Flax's own layers, and nothing else: each file by itself. Dtypes that stay, and lines that you
    may delete, are listed with their reasons.
    """
    return port_files(options.files, write=options.write)


def _asked_of_estimate(options: argparse.Namespace) -> dict[str, Any]:
    policies = options.policies
    if policies is None:
        policies = () if options.row else DEFAULT
    rows = [*((text, (text, {})) for text in policies), *options.row]
    if not rows:
        raise CommandError("--policies names no policy: give f32,mixed_bfloat16.")
    return {
        "policies": by_name(rows, "--policies or --row"),
        "rules": _rules_of(options),
        "mesh": options.mesh or None,
        "shardings": by_name(options.shard, "--shard") or None,
        "params": _params_of(options),
        **{name: getattr(options, name) for name in ("batch", "remat", "donate", "backward")},
        "max_compiles": options.max_compiles,
    }


# --------------------------------------------------------------------------------------------------
# Reports
# --------------------------------------------------------------------------------------------------


def _require_output(name: str | None, count: int = 1) -> None:
    """Rejects a file that could not be written, before there is anything to write.

    Args:
      name: of the file, or "-" for the standard output.
      count: of the targets that are estimated.

    Raises:
      CommandError: a folder is not there, or several reports share the standard output.
    """
    if name == "-" and count > 1:
        raise CommandError(
            f"--json - prints one report, but --on has {count} targets: give a file."
        )
    if name not in (None, "-") and not Path(name).parent.is_dir():
        raise CommandError(f"{name} can't be written: there is no folder {Path(name).parent}.")


def _write_report(show: Callable[[], None], name: str | None, json: Callable[[], str]) -> None:
    """Shows a report, or prints its JSON for "-", and writes the JSON to any other file.

    Args:
      show: prints the report as text.
      name: of the file; None for none.
      json: returns its contents.

    Raises:
      CommandError: the file can't be written.
    """
    if name == "-":
        print(json())
        return
    show()
    if name is not None:
        with prefixed_errors(f"{name!r} can't be written"):
            Path(name).write_text(json(), encoding="utf-8")


def _named(name: str | None, target: str) -> str | None:
    """Returns the name of a file about one of several targets: ``cost-v5e-4x4.json``."""
    if name is None or not target:
        return name
    words = "".join(c if c.isalnum() else "-" for c in target)
    return str(Path(name).with_stem(f"{Path(name).stem}-{words}"))
