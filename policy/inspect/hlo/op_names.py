"""Module paths and JAX operations, read from names of a compiled program's instructions."""

from __future__ import annotations

import re

from policy.programs.paths import Path, path_of

# Names that lowering adds: of the parts of loops and conditionals, and of calls.
_ADDED = re.compile(
    r"(?:(?<=/)|^)(?:while/(?:body_pred|body|cond)|cond/branch_\d+_fun|closed_call|eval_jaxpr|core_call|"
    r"custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|pjit)(?=/|$)"
)
_CALLS = frozenset(("checkpoint", "rematted_computation", "body", "cond", "body_pred"))


def path_and_operation(op_name: str) -> tuple[Path, str]:
    """Returns the module path and the JAX operation in the name of an instruction.

    It reads ``jit(step)/transpose(jvp(Net))/while/body/closed_call/layers/out/dot_general`` as
    ``("Net", "layers", "out")`` and "dot_general". The operation is "" if the name is that of a
    call or of a loop's part.
    """
    name = op_name.split(";")[0]  # of instructions that XLA made one, the first
    stack = re.sub("/{2,}", "/", _ADDED.sub("", name)).strip("/")
    above, _, last = stack.rpartition("/")
    is_operation = name.endswith(last) and re.fullmatch(r"[\w\-]+", last) and last not in _CALLS
    return (path_of(above), last) if is_operation else (path_of(stack), "")
