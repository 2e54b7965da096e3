"""The command ``suggest``: rules within an error budget, from the shell.

    python -m policy suggest models/net.py:example --error 0.02 --policy mixed_bfloat16
    python -m policy suggest models/net.py:example --error 0.05 --policy mixed_bfloat16 --matmul f8

The function runs. Arguments that are shapes are filled with numbers drawn from a normal
distribution: give arrays of your own data for figures that hold there.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from policy.command_line.arguments import params_of, parse_argument, policy_of
from policy.command_line.target import CommandError, call_of, running_users_code, target_of
from policy.suggest.eight_bits import SMALLEST
from policy.suggest.suggest import suggest


def add_suggest(commands: Any) -> argparse.ArgumentParser:
    """Adds the command to a parser's commands."""
    command = commands.add_parser(
        "suggest",
        help="the rules under which a function stays within an error of float32",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--error", type=float, required=True, help="the relative error allowed")
    command.add_argument(
        "--matmul", metavar="TEXT", help="layers may run in these 8 bits, as f8 or i8"
    )
    command.add_argument(
        "--smallest",
        type=int,
        default=SMALLEST,
        metavar="SIZE",
        help="the least contraction and outputs of a layer to run in 8 bits (%(default)s)",
    )
    command.set_defaults(run=run_suggest)
    return command


def run_suggest(options: argparse.Namespace) -> int:
    """Runs the command, and prints the suggestion.

    Raises:
      CommandError: the target can't be called, or no rules meet the budget.
    """
    given = [parse_argument(text) for text in options.arg]
    fn, args, kwargs = call_of(target_of(options.target), given, options.target)
    policy, _ = policy_of(options)
    args, kwargs = jax.tree.map(_filled, (tuple(args), kwargs), is_leaf=_is_shape)
    with running_users_code(f"{options.target} can't be run"):
        try:
            found = suggest(
                fn,
                *args,
                error=options.error,
                policy=policy,
                backward=options.backward,
                params=params_of(options),
                matmul=options.matmul,
                smallest=options.smallest,
                **kwargs,
            )
        except ValueError as error:
            raise CommandError(str(error)) from None
    print(found)
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
