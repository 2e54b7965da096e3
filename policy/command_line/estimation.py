"""The command ``estimate``: memory, traffic and time under policies, from the shell.

    python -m policy estimate train.py:example --on v5e:4x4 --policies f32,mixed_bfloat16,bfloat16
    python -m policy estimate train.py:step --arg f32[4096,4096] --arg bf16[512,4096] --on h100
    python -m policy estimate train.py:example --on v5e:16x16 --mesh data=16,model=16 \\
        --row "full=bfloat16 master_weights=full" --row "remainder=bfloat16 moments='int8'"

The target is compiled from shapes alone, for devices that need not be present: nothing runs. It is
a function, called with one argument for each --arg, or an example: a function without required
arguments that returns a function and the tuple of its arguments. The example is called under each
policy, with a row's options as keyword arguments, and with the mesh if it has a parameter `mesh`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from typing import Any

import jax

from policy.command_line.arguments import (
    REPORTS,
    RULES,
    add_command,
    option,
    params_of,
    parse_argument,
    repeatable,
    rules_of,
    switch,
)
from policy.command_line.layout import mesh_sizes, positions_of, shardings_of
from policy.command_line.output import require_outputs, write_estimate
from policy.command_line.progress import row_progress
from policy.command_line.rows import rows_to_estimate
from policy.command_line.target import (
    CommandError,
    prefixed_errors,
    require_arguments,
    running_users_code,
    target_of,
)
from policy.inspect.estimate.estimate import estimate
from policy.inspect.estimate.targets import Target

_OPTIONS = {
    "--on": option(
        "DEVICES",
        "v5e:4x4, h100, h100:8, my.json:8, cpu or here (%(default)s); or several, separated by "
        "commas, with a table for each",
        default="here",
    ),
    "--policies": option(
        "TEXTS",
        "a row for each, separated by commas: f32,mixed_bfloat16,p=f32,c=bf16 "
        "(float32,mixed_bfloat16,bfloat16 if there is no --row)",
    ),
    "--row": repeatable(
        "NAME=TEXT",
        "a named row, with options for the example: \"low=bf16 moments='int8'\"; repeatable",
    ),
    **RULES,
    "--mesh": option("AXES", "the mesh axes and their sizes, such as data=16,model=16"),
    "--shard": repeatable(
        "ARGUMENT=AXES",
        "the position of an argument and the mesh axes that its arrays are sharded over: 0=data, "
        "1=data,None or 2=data+fsdp,model; repeatable",
    ),
    "--donate": option("ARGUMENTS", "positions of donated arguments, such as 0,1"),
    **REPORTS,
    "--plot": option("FILE", "draw a .png or .svg with matplotlib"),
    "--fail-on-oom": switch("exit with 1 if a row does not fit in memory"),
    "--quiet": switch("show no progress"),
}


def add_estimate(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    text = "the memory, traffic and time of a step under policies, on devices you need not have"
    add_command(commands, "estimate", text, __doc__, _OPTIONS, run_estimate)


def run_estimate(options: argparse.Namespace) -> int:
    """Runs the command, and prints a table for each target.

    Returns:
      The exit status: 0, or 1 for a row that lacks memory with --fail-on-oom.

    Raises:
      CommandError: an option is malformed, or the target can't be estimated.
    """
    targets = _targets(options.on)
    given = {
        "policies": rows_to_estimate(options.policies, options.row),
        "rules": rules_of(options),
        "mesh": mesh_sizes(options.mesh),
        "shardings": shardings_of(options.shard),
        "donate": positions_of(options.donate),
        "backward": options.backward,
        "params": params_of(options),
    }
    files = {"html": options.html, "json": options.json, "plot": options.plot}
    require_outputs(**files, count=len(targets))
    # JAX traces here, and compiles for elsewhere: it need not look for accelerators.
    if not os.environ.get("JAX_PLATFORMS") and all(target.kind != "here" for target in targets):
        jax.config.update("jax_platforms", "cpu")
    args = tuple(parse_argument(text) for text in options.arg)
    fn = target_of(options.target)
    require_arguments(fn, args, options.target, passed=("mesh",))
    is_lacking = False
    for i, target in enumerate(targets):
        failure = f"{options.target} can't be estimated on {target.name}"
        shown = contextlib.nullcontext() if options.quiet else row_progress(target.name)
        with running_users_code(failure), shown as progress:
            found = estimate(fn, *args, on=target, progress=progress, **given)
        if i:
            print()
        found = dataclasses.replace(found, name=options.target)
        write_estimate(found, **files, is_one=len(targets) == 1)
        is_lacking |= any(row.fits is False for row in found.rows)
    return int(bool(options.fail_on_oom and is_lacking))


def _targets(text: str) -> list[Target]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise CommandError("--on names no devices: give v5e:4x4, h100, cpu or here.")
    with prefixed_errors("--on"):
        return [Target(name) for name in names]
