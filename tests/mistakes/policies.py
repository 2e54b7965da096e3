"""Mistakes in policies, their texts, scopes and rules."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnhashable=false

from typing import Any

import jax.numpy as jnp

from mpmodules import linen as nn
from policy import Policy, PolicyRules, get_policy, set_policy, use_policy
from tests.mistakes.layers import KEY, Net, X


def under(rules: Any) -> None:
    with use_policy("mixed_bfloat16", rules=rules):
        Net().init(KEY, X)


def forgets_with() -> None:
    use_policy("mixed_bfloat16")  # as jmp.set_policy would


NAMES = "float16, f16"  # among the names that are known

MISTAKES = {
    ValueError: {
        f"'fp16' … {NAMES}": lambda: get_policy("fp16"),
        "'mixed_bf16' … mixed_bfloat16": lambda: set_policy("mixed_bf16"),
        f"'float8_e4m3fn' … {NAMES}": lambda: get_policy("c=float8_e4m3fn"),
        "compute_dtype=float8_e4m3fn … Use float16 or bfloat16 … m=f8": lambda: Policy(
            "f32", jnp.float8_e4m3fn, "f32"
        ),
        "compute_dtype=int8 … a floating dtype, such as": lambda: Policy("f32", jnp.int8, "f32"),
        "'comp' … params, compute, output": lambda: get_policy("comp=bf16"),
        "'params' … second time": lambda: get_policy("p=f32,params=bf16"),
        "'p:f32,c:bf16' … params=DTYPE": lambda: get_policy("p:f32,c:bf16"),
        "'f32' … 'keep' or 'cast'": lambda: get_policy("c=bf16,inputs=f32"),
        "output_dtype='caler' … bf16": lambda: Policy("f32", "f32", "caler"),
        "float64 … jax_enable_x64": lambda: use_policy("f64"),
        "'params.head' … seen: head": lambda: under({"params.head": "f32"}),
        "'head/kernel' … seen: head": lambda: under({"head/kernel": "f32"}),
        "'*/head' … '.*/head'": lambda: under({"*/head": "f32"}),
        "Rule 'bf16' … 'head' … bf16,": lambda: under({"bf16": "head"}),
        "Rule 'head' … twice, but only the first": lambda: PolicyRules(
            [("head", "f32"), ("head", "bf16")]
        ),
    },
    TypeError: {
        "bfloat16 … 'p=f32,c=bf16,o=f32'": lambda: use_policy(jnp.bfloat16),
        "('f32', 'bf16') … a Policy": lambda: get_policy(("f32", "bf16")),
        "missing … 'compute_dtype' and 'output_dtype'": lambda: Policy("mixed_bfloat16"),
        "unexpected keyword argument 'params'": lambda: Policy(
            params="f32", compute="bf16", output="f32"
        ),
        "cast_inputs=['t'] … True or False": lambda: Policy(
            "f32", "bf16", "f32", cast_inputs=["t"]
        ),
        "no field compute … compute_dtype": lambda: get_policy("bf16").replace(compute="f16"),
        "<function under … 'mixed_bfl": lambda: use_policy(under),
        "a Dense … its class": lambda: under({nn.Dense(4): "f32"}),
        "'head=f32' … a dict or a list": lambda: under("head=f32"),
        "'head=f32' … PolicyRules.from_texts": lambda: under(["head=f32"]),
        "'head' … {'head': 'f32'}": lambda: under(("head", "f32")),
        "Rule 'head' … None … a Policy": lambda: under({"head": None}),
    },
    UserWarning: {"use_policy( … `with use_policy … decorate": forgets_with},
}
