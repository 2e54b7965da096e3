"""The command ``suggest``: rules within an error budget, from the shell.

    python -m policy suggest models/net.py:example --error 0.02 --policy mixed_bfloat16
    python -m policy suggest models/net.py:example --error 0.05 --policy mixed_bfloat16 --matmul f8
    python -m policy suggest models/net.py:example --policy mixed_bfloat16 --on v5e:1x1

With --on, cost comes from the compiler of a TPU or GPU, which need not be present. The front of
error against cost is printed, with the rules of each point.

The function runs. Arguments that are shapes are filled with numbers from a normal distribution:
give arrays of your own data for figures that hold for it.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from policy.command_line.arguments import (
    POLICY,
    add_command,
    option,
    params_of,
    parse_argument,
    policy_of,
)
from policy.command_line.target import (
    CommandError,
    call_of,
    prefixed_errors,
    running_users_code,
    target_of,
)
from policy.inspect.estimate.targets import Target
from policy.inspect.suggest.eight_bits import SMALLEST
from policy.inspect.suggest.suggest import POINTS, suggest
from policy.inspect.suggest.target_costs import require_timed

_OPTIONS = {
    **POLICY,
    "--error": option("ERROR", "the relative error allowed; optional with --on", type=float),
    "--matmul": option("TEXT", "8-bit matmuls to try for layers, such as f8 or i8"),
    "--smallest": option(
        "SIZE",
        "the smallest contraction and output size for a layer in 8 bits (%(default)s)",
        type=int,
        default=SMALLEST,
    ),
    "--on": option("TARGET", "get cost from a target's compiler, such as v5e:1x1 or h100"),
    "--points": option(
        "COUNT",
        "the largest number of points of the front; each compiles a program (%(default)s)",
        type=int,
        default=POINTS,
    ),
    "--plot": option("FILE", "draw the front into a file, with --on (needs matplotlib)"),
}


def add_suggest(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    text = "rules that keep a function within a given error of float32"
    add_command(commands, "suggest", text, __doc__, _OPTIONS, run_suggest)


def run_suggest(options: argparse.Namespace) -> int:
    """Runs the command, and prints the suggestion.

    Raises:
      CommandError: the target can't be called, or no rules meet the budget.
    """
    if options.plot and options.on is None:
        raise CommandError("--plot draws a target's front: give --on too, as in --on v5e:1x1.")
    if options.on is not None:
        with prefixed_errors("--on"):
            require_timed(Target(options.on))
    given = [parse_argument(text) for text in options.arg]
    fn, args, kwargs = call_of(target_of(options.target), given, options.target)
    args, kwargs = jax.tree.map(_filled, (tuple(args), kwargs), is_leaf=_is_shape)
    policy, params = policy_of(options), params_of(options)
    chosen = ("error", "backward", "matmul", "smallest", "on", "points")
    asked = {name: getattr(options, name) for name in chosen}
    with running_users_code(f"{options.target} can't be run"):
        found = suggest(fn, *args, policy=policy, params=params, **asked, **kwargs)
    print(found)
    if options.plot:
        with prefixed_errors(f"--plot {options.plot}"):
            found.plot(options.plot)
    return 0


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _filled(leaf: Any) -> Any:
    """Returns an array in the place of a shape: normal numbers, ones of integers, or a key."""
    if not _is_shape(leaf):
        return leaf
    key = jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)
