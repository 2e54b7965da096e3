"""Estimates that are written by hand."""

import dataclasses
from typing import Any

from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.rows import Buffer, Exchange, PolicyCost

GIB = 2**30
HOSTILE = "<script>document.title='taken'</script>\"'& \x1b[31m$x_1$"
BUFFER = Buffer(
    bytes=3 * GIB,
    dtype="float32",
    shape=(8, 2048, 50257),
    kind="temporary",
    path="Transformer/head",
    operation="dot_general",
    source="train.py:41 (loss_fn)",
)
COST = PolicyCost(
    name="float32",
    policy="float32",
    route="scope",
    memory=12 * GIB,
    capacity=16 * GIB,
    arguments=6 * GIB,
    temporaries=5 * GIB,
    outputs=GIB,
    code=2**20,
    flops={"float32": 4.2e12},
    matmul_flops={"float32": 4e12},
    bytes=80.0 * GIB,
    cycles=1.2e9,
    compute_seconds=0.8,
    collectives=(Exchange("all-reduce", "float32", 2.0 * GIB, 0.02),),
    kernels=812,
    compile_seconds=3.2,
    cost_by_path={"Transformer/head": 5e8, "": 3.0},
)
HALF = {
    "memory": 6 * GIB,
    "matmul_flops": {"bfloat16": 3.9e12, "float32": 1e11},
    "bytes": 40.0 * GIB,
    "cycles": 6e8,
    "compute_seconds": 0.4,
    "collectives": (Exchange("all-reduce", "bfloat16", 1.0 * GIB, 0.01),),
}
UNKNOWN = {"cycles": None, "compute_seconds": None, "collectives": ()}


def buffer(size: int = 3 * GIB, **changes: Any) -> Buffer:
    return dataclasses.replace(BUFFER, bytes=size, **changes)


def cost(name: str = "float32", **changes: Any) -> PolicyCost:
    """Returns a row that fits, with cycles and one exchange."""
    return dataclasses.replace(COST, name=name, **({"policy": name} | changes))


def half(**changes: Any) -> PolicyCost:
    """Returns a row that costs half as much."""
    return cost("mixed_bfloat16", **(HALF | changes))


def lacking(name: str = "float64", **changes: Any) -> PolicyCost:
    """Returns a row that lacks 4 GiB."""
    argument = buffer(GIB, kind="argument", operation="", source="", path="args[0]")
    return cost(name, **({"memory": 20 * GIB, "buffers": (buffer(), argument)} | changes))


def not_compiled() -> PolicyCost:
    """Returns a row whose program the compiler gave up, without saying what it needs."""
    parts = dict.fromkeys(("memory", "arguments", "temporaries", "outputs", "code"), 0)
    return cost("given up", **parts, **UNKNOWN, bytes=None, kernels=None, is_exhausted=True)


def estimate_of(*rows: PolicyCost, **changes: Any) -> Estimate:
    found = Estimate(
        name="train.py:example",
        target="v5e:4x4",
        devices=16,
        mesh={"data": 4, "model": 4},
        capacity=16 * GIB,
        clock=1.5e9,
        timing="the compiler's cycles",
        source="Google Cloud, TPU v5e: system architecture",
        compiler="jax 0.10.2, libtpu 0.0.17",
        rows=rows,
    )
    return dataclasses.replace(found, **changes)


def on_one_gpu() -> Estimate:
    """Returns an estimate without cycles, exchanges, a known capacity and known seconds."""
    bare = {"capacity": 0, "cost_by_path": {}, **UNKNOWN}
    absent = {"capacity": 0, "clock": 0.0, "timing": "", "source": "", "compiler": ""}
    rows = cost(**bare), half(**bare)
    return estimate_of(*rows, target="h100", devices=1, mesh={}, **absent)


def hostile() -> Estimate:
    """Returns an estimate with names that are HTML, terminal codes and mathematics, and long."""
    return estimate_of(
        lacking(
            name=HOSTILE,
            uncounted=(HOSTILE,),
            buffers=(buffer(path=HOSTILE + "/long" * 60, source="very/" * 40 + HOSTILE),),
            cost_by_path={HOSTILE: 2.0},
        ),
        cost("n" * 300, flops={}, matmul_flops={}, memory=2**70),
        not_compiled(),
        name=HOSTILE * 3,
        notes=(HOSTILE,),
    )
