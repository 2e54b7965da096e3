"""Mistakes in policies, their texts, scopes and rules."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnhashable=false

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mpmodules import linen as nn
from policy import Policy, PolicyRules, get_policy, set_policy, use_policy
from tests.mistakes.table import KEY, Mistake, X


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

MISTAKES = [
    Mistake("torch's name of a dtype", lambda: get_policy("fp16"), ValueError, ("'fp16'", NAMES)),
    Mistake(
        "half a name", lambda: get_policy("bfloat"), ValueError, ("'bfloat'", "bfloat16, bf16")
    ),
    Mistake(
        "a preset misspelt",
        lambda: set_policy("mixed_bf16"),
        ValueError,
        ("'mixed_bf16'", "mixed_bfloat16"),
    ),
    Mistake("capitals", lambda: use_policy("BF16"), ValueError, ("'BF16'", "bf16")),
    Mistake(
        "a dtype of 8 bits",
        lambda: get_policy("c=float8_e4m3fn"),
        ValueError,
        ("'float8_e4m3fn'", NAMES),
    ),
    Mistake(
        "8 bits in the class",
        lambda: Policy("f32", jnp.float8_e4m3fn, "f32"),
        ValueError,
        ("compute_dtype=float8_e4m3fn", "Use float16 or bfloat16", "m=f8"),
    ),
    Mistake(
        "an integer dtype",
        lambda: Policy("f32", jnp.int8, "f32"),
        ValueError,
        ("compute_dtype=int8", "only floating dtypes"),
    ),
    Mistake(
        "a key misspelt",
        lambda: get_policy("comp=bf16"),
        ValueError,
        ("'comp'", "params, compute, output"),
    ),
    Mistake(
        "a key twice",
        lambda: get_policy("p=f32,params=bf16"),
        ValueError,
        ("'params'", "second time"),
    ),
    Mistake(
        "colons for equals",
        lambda: get_policy("p:f32,c:bf16"),
        ValueError,
        ("'p:f32,c:bf16'", "params=DTYPE"),
    ),
    Mistake(
        "inputs= a dtype",
        lambda: get_policy("c=bf16,inputs=f32"),
        ValueError,
        ("'f32'", "'keep' or 'cast'"),
    ),
    Mistake(
        "a dtype as a policy",
        lambda: use_policy(jnp.bfloat16),
        TypeError,
        ("bfloat16", "'p=f32,c=bf16,o=f32'"),
    ),
    Mistake(
        "a tuple as a policy",
        lambda: get_policy(("f32", "bf16")),
        TypeError,
        ("('f32', 'bf16')", "a Policy"),
    ),
    Mistake(
        "a text in the class",
        lambda: Policy("mixed_bfloat16"),
        TypeError,
        ("'compute_dtype' and 'output_dtype'", "get_policy('mixed_bfloat16')"),
    ),
    Mistake(
        "jmp's keywords in the class",
        lambda: Policy(params="f32", compute="bf16", output="f32"),
        TypeError,
        ("'params'", "Policy('f32', 'bf16', 'f32')"),
    ),
    Mistake(
        "a misspelt caller",
        lambda: Policy("f32", "f32", "caler"),
        ValueError,
        ("output_dtype='caler'", "bf16"),
    ),
    Mistake(
        "no dtype",
        lambda: Policy("f32", None, "f32"),
        ValueError,
        ("compute_dtype=None", "jnp.float32"),
    ),
    Mistake(
        "a list for cast_inputs",
        lambda: Policy("f32", "bf16", "f32", cast_inputs=["t"]),
        TypeError,
        ("cast_inputs=['t']", "True or False"),
    ),
    Mistake(
        "a field of replace misspelt",
        lambda: get_policy("bf16").replace(compute="f16"),
        TypeError,
        ("no field compute", "compute_dtype"),
    ),
    Mistake(
        "float64 without x64", lambda: use_policy("f64"), ValueError, ("float64", "jax_enable_x64")
    ),
    Mistake(
        "a scope without with",
        forgets_with,
        UserWarning,
        ("use_policy(", "`with use_policy", "set_policy"),
    ),
    Mistake(
        "a decorator without a policy",
        lambda: use_policy(under),
        TypeError,
        ("<function under", "'mixed_bfl"),
    ),
    Mistake(
        "a rule that matches nothing",
        lambda: under({"haed": "f32"}),
        ValueError,
        ("'haed'", "seen: head"),
    ),
    Mistake(
        "a path of variables",
        lambda: under({"params.head": "f32"}),
        ValueError,
        ("'params.head'", "seen: head"),
    ),
    Mistake(
        "a rule for a kernel",
        lambda: under({"head/kernel": "f32"}),
        ValueError,
        ("'head/kernel'", "seen: head"),
    ),
    Mistake(
        "a class that is nowhere",
        lambda: under({nn.Conv: "f32"}),
        ValueError,
        ("Rule Conv", "seen: head"),
    ),
    Mistake("a glob", lambda: under({"*/head": "f32"}), ValueError, ("'*/head'", "'.*/head'")),
    Mistake(
        "an open bracket",
        lambda: under({"head(": "f32"}),
        ValueError,
        ("'head('", "regular expression"),
    ),
    Mistake(
        "a layer instead of its class",
        lambda: under({nn.Dense(4): "f32"}),
        TypeError,
        ("a Dense", "its class"),
    ),
    Mistake(
        "rules as one text",
        lambda: under("head=f32"),
        TypeError,
        ("'head=f32'", "a dict or a list"),
    ),
    Mistake(
        "rules as texts",
        lambda: under(["head=f32"]),
        TypeError,
        ("'head=f32'", "PolicyRules.from_texts"),
    ),
    Mistake(
        "one pair instead of a list",
        lambda: under(("head", "f32")),
        TypeError,
        ("'head'", "{'head': 'f32'}"),
    ),
    Mistake(
        "path and policy swapped",
        lambda: under({"bf16": "head"}),
        ValueError,
        ("Rule 'bf16'", "'head'", "bf16,"),
    ),
    Mistake(
        "a rule without a policy",
        lambda: under({"head": None}),
        TypeError,
        ("Rule 'head'", "None", "a Policy"),
    ),
    Mistake(
        "a rule twice",
        lambda: PolicyRules([("head", "f32"), ("head", "bf16")]),
        ValueError,
        ("Rule 'head'", "twice, but only the first"),
    ),
]
