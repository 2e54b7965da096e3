"""Module paths of a compiled program's instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from policy.inspect.hlo.text import Instruction
from policy.programs.paths import Path, naming, path_of, spelled
from policy.programs.rewriting.placed_interpreter import lost_prefixes, module_path

# Names that JAX's lowering gives to the parts of control flow, inside of which names are relative.
_CONTROL_FLOW = re.compile(
    r"/(?:while/(?:body_pred|body|cond)|cond/branch_\d+_fun|shard_map|closed_call|eval_jaxpr)"
    r"(?=/|$)"
)
# Names of calls and of loops' parts, which are no operations.
_CALLS = re.compile(
    r"checkpoint|rematted_computation|body|cond|body_pred|branch_\d+_fun|closed_call|eval_jaxpr|"
    r"core_call|custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|pjit"
)


def path_in_program(op_name: str) -> Path:
    """Returns the module path in an instruction's `op_name`, ``jit(step)/jvp(Net)/layer/mul``.

    The last name is that of the operation; arguments, whose names begin with no transformation,
    have no path. Of the names of instructions that XLA made one, the first counts.
    """
    op_name = op_name.split(";")[0]
    if not re.match(r"p?jit\(|shard_map", op_name):
        return ()
    path: Path = ()
    is_backward = "transpose(" in op_name
    parts = _CONTROL_FLOW.sub("/\n", op_name).split("/\n")
    for place, part in enumerate(parts):
        names = part if place + 1 < len(parts) else part.rpartition("/")[0]
        path = module_path(path_of(names.strip("/"), path), is_backward)
    return path


def operation_in_program(op_name: str) -> str:
    """Returns the JAX operation in an instruction's `op_name`; "" if it names a call or a part of a
    loop.
    """
    name = op_name.rpartition("/")[2]
    return name if re.fullmatch(r"[\w\-]+", name) and not _CALLS.fullmatch(name) else ""


def path_of_kernel(kernel: Instruction) -> Path:
    """Returns the module path of a kernel: of its own name, or else of the last operation in the
    fusion that has one.
    """
    inner = []
    if fused := kernel.called.get("calls"):
        inner = [fused[0].root, *reversed(fused[0].instructions.values())]
    for instruction in (kernel, *inner):
        if path := path_in_program(instruction.op_name):
            return path
        if instruction.op_name.startswith(("jit(", "pjit(")):
            return ()
    return ()


def with_whole_paths(costs: Mapping[Path, float]) -> dict[Path, float]:
    """Returns costs by path; a path that lost its beginning in a differentiated loop is whole."""
    whole, found = lost_prefixes(costs), {}
    for path, cost in costs.items():
        path = whole.get(path, path)
        found[path] = found.get(path, 0.0) + cost
    return found


def by_spelled_path(costs: Mapping[Path, float]) -> dict[str, float]:
    """Returns costs by path as reports print it, the largest first; "" is outside of any module."""
    found: dict[str, float] = {}
    with naming(costs):
        for path, cost in costs.items():
            found[spelled(path)] = found.get(spelled(path), 0.0) + cost
    return dict(sorted(found.items(), key=lambda item: -item[1]))
