"""Mistakes in policies, their texts, scopes and rules."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnhashable=false

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mpmodules import linen as nn
from policy import Policy, PolicyRules, get_policy, set_policy, use_policy
from tests.mistakes.common import KEY, X


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(x)


def under(rules: Any) -> None:
    """Calls a model whose one module is `head` under rules."""
    with use_policy("mixed_bfloat16", rules=rules):
        Net().init(KEY, X)


def forgets_with() -> None:
    use_policy("mixed_bfloat16")  # as jmp.set_policy would


NAMES = "float16, f16"  # among the names that are known

MISTAKES = {
    ValueError: {
        "torch's name of a dtype": (lambda: get_policy("fp16"), "'fp16'", NAMES),
        "a preset misspelt": (lambda: set_policy("mixed_bf16"), "'mixed_bf16'", "mixed_bfloat16"),
        "a dtype of 8 bits": (lambda: get_policy("c=float8_e4m3fn"), "'float8_e4m3fn'", NAMES),
        "8 bits in the class": (
            lambda: Policy("f32", jnp.float8_e4m3fn, "f32"),
            "compute_dtype=float8_e4m3fn",
            "Use float16 or bfloat16",
            "m=f8",
        ),
        "an integer dtype": (
            lambda: Policy("f32", jnp.int8, "f32"),
            "compute_dtype=int8",
            "only floating dtypes",
        ),
        "a key misspelt": (lambda: get_policy("comp=bf16"), "'comp'", "params, compute, output"),
        "a key twice": (lambda: get_policy("p=f32,params=bf16"), "'params'", "second time"),
        "colons for equals": (lambda: get_policy("p:f32,c:bf16"), "'p:f32,c:bf16'", "params=DTYPE"),
        "inputs= a dtype": (lambda: get_policy("c=bf16,inputs=f32"), "'f32'", "'keep' or 'cast'"),
        "a misspelt caller": (
            lambda: Policy("f32", "f32", "caler"),
            "output_dtype='caler'",
            "bf16",
        ),
        "float64 without x64": (lambda: use_policy("f64"), "float64", "jax_enable_x64"),
        "a rule that matches nothing": (lambda: under({"haed": "f32"}), "'haed'", "seen: head"),
        "a path of variables": (
            lambda: under({"params.head": "f32"}),
            "'params.head'",
            "seen: head",
        ),
        "a rule for a kernel": (
            lambda: under({"head/kernel": "f32"}),
            "'head/kernel'",
            "seen: head",
        ),
        "a class that is nowhere": (lambda: under({nn.Conv: "f32"}), "Rule Conv", "seen: head"),
        "a glob": (lambda: under({"*/head": "f32"}), "'*/head'", "'.*/head'"),
        "an open bracket": (lambda: under({"head(": "f32"}), "'head('", "regular expression"),
        "path and policy swapped": (
            lambda: under({"bf16": "head"}),
            "Rule 'bf16'",
            "'head'",
            "bf16,",
        ),
        "a rule twice": (
            lambda: PolicyRules([("head", "f32"), ("head", "bf16")]),
            "Rule 'head'",
            "twice, but only the first",
        ),
    },
    TypeError: {
        "a dtype as a policy": (
            lambda: use_policy(jnp.bfloat16),
            "bfloat16",
            "'p=f32,c=bf16,o=f32'",
        ),
        "a tuple as a policy": (lambda: get_policy(("f32", "bf16")), "('f32', 'bf16')", "a Policy"),
        "a text in the class": (
            lambda: Policy("mixed_bfloat16"),
            "'compute_dtype' and 'output_dtype'",
            "get_policy('mixed_bfloat16')",
        ),
        "jmp's keywords in the class": (
            lambda: Policy(params="f32", compute="bf16", output="f32"),
            "'params'",
            "Policy('f32', 'bf16', 'f32')",
        ),
        "a list for cast_inputs": (
            lambda: Policy("f32", "bf16", "f32", cast_inputs=["t"]),
            "cast_inputs=['t']",
            "True or False",
        ),
        "a field of replace misspelt": (
            lambda: get_policy("bf16").replace(compute="f16"),
            "no field compute",
            "compute_dtype",
        ),
        "a decorator without a policy": (
            lambda: use_policy(under),
            "<function under",
            "'mixed_bfl",
        ),
        "a layer instead of its class": (
            lambda: under({nn.Dense(4): "f32"}),
            "a Dense",
            "its class",
        ),
        "rules as one text": (lambda: under("head=f32"), "'head=f32'", "a dict or a list"),
        "rules as texts": (lambda: under(["head=f32"]), "'head=f32'", "PolicyRules.from_texts"),
        "one pair instead of a list": (lambda: under(("head", "f32")), "'head'", "{'head': 'f32'}"),
        "a rule without a policy": (
            lambda: under({"head": None}),
            "Rule 'head'",
            "None",
            "a Policy",
        ),
    },
    UserWarning: {
        "a scope without with": (forgets_with, "use_policy(", "`with use_policy", "set_policy"),
    },
}
