"""Audits, suggestions and estimates from the shell.

    python -m policy audit train:loss_fn --arg "{'w': f32[784,10]}" --arg bf16[32,784] --backward
    python -m policy audit models/net.py:example --html net.html --fail-on-findings
    python -m policy audit models/net.py:example --policy mixed_bfloat16 --rule head=f32

The target is a function (or an nnx module) by name, called with one argument for each --arg. A
target that takes no arguments may return the call to audit: a function and the tuple of its
arguments, and a dict of keyword arguments if there are any:

    def example():
        model = Net()
        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
        return model.apply, (jax.eval_shape(model.init, jax.random.key(0), x), x)
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from policy.command_line.arguments import (
    POLICY,
    REPORTS,
    RULES,
    add_command,
    params_of,
    parse_argument,
    policy_of,
    repeatable,
    rules_of,
    switch,
)
from policy.command_line.estimation import add_estimate
from policy.command_line.output import require_outputs, write_report
from policy.command_line.suggestion import add_suggest
from policy.command_line.target import (
    CommandError,
    call_of,
    did_you_mean,
    running_users_code,
    target_of,
)
from policy.inspect.audit.audit import audit
from policy.inspect.audit.finding_kinds import FINDING_KINDS
from policy.inspect.audit.render.text import show
from policy.inspect.audit.report import named

_SIGPIPE = 128 + 13  # the exit status of a program that a broken pipe ends


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit status: 0; 1 for findings with --fail-on-findings, or a row that lacks memory with
      --fail-on-oom; 2 for an error; 141 where the reader of the output has left.
    """
    options = _parser().parse_args(argv)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m policy", description="Dtype policies for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    kinds = "\n".join(f"  {kind:25}{text}" for kind, text in FINDING_KINDS.items())
    add_command(
        commands,
        "audit",
        "the dtypes that a function runs in, found without running it",
        __doc__,
        {**POLICY, **RULES, **REPORTS, **_FINDINGS},
        _audit,
        f"kinds of findings:\n{kinds}",
    )
    add_suggest(commands)
    add_estimate(commands)
    return parser


_FINDINGS = {
    "--ignore": repeatable("KIND", "leave out findings of a kind; repeatable"),
    "--fail-on-findings": switch("exit with 1 if there are findings"),
}


def _audit(options: argparse.Namespace) -> int:
    for kind in options.ignore:
        if kind not in FINDING_KINDS:
            near = difflib.get_close_matches(kind, FINDING_KINDS, 1)
            raise CommandError(
                f"--ignore {kind!r} is not a kind of finding.{did_you_mean(near)} --help lists "
                "them all."
            )
    require_outputs(options.html, options.json)
    fn, args, kwargs = call_of(
        target_of(options.target), [parse_argument(text) for text in options.arg], options.target
    )
    policy, rules = policy_of(options), rules_of(options)
    if rules is not None and policy is None:
        raise CommandError("--rule makes exceptions to a policy: give --policy too.")
    with running_users_code(f"{options.target} can't be traced"):
        report = audit(
            fn,
            *args,
            policy=policy,
            rules=rules,
            backward=options.backward,
            params=params_of(options),
            **kwargs,
        )
    report = named(report, options.target, without=options.ignore)
    files = {options.html: report.to_html, options.json: report.to_json}
    write_report(lambda: show(report), files)
    return int(bool(options.fail_on_findings and report.findings))
