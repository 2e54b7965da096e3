"""Rules as users write them, in every function that takes some."""

from typing import Any

from mpmodules import PolicyRules, autocast, linen, nnx, set_policy, use_policy

by_path = {"head": "f32", "encoder/.*": "mixed_bfloat16"}
by_class = {linen.LayerNorm: "f32", nnx.LayerNorm: "f32"}
by_both = {"head": "f32", linen.LayerNorm: "f32"}
pairs = [("head", "f32"), (linen.LayerNorm, "f32")]

PolicyRules({"head": "f32", linen.LayerNorm: "f32"})
PolicyRules([("head", "f32"), (linen.LayerNorm, "f32")], strict=False)
PolicyRules(by_path)
PolicyRules(by_class)
PolicyRules(by_both)
PolicyRules(pairs)
PolicyRules(PolicyRules(pairs))
PolicyRules({"head": 3})  # error: arg-type; reportArgumentType
PolicyRules("head=f32")  # error: arg-type; reportArgumentType


def every_function(model: linen.Module, built: nnx.Module, fn: Any) -> None:
    set_policy("bf16", {"head": "f32", linen.LayerNorm: "f32"})
    set_policy("bf16", by_both)
    with use_policy("bf16", {"head": "f32", linen.LayerNorm: "f32"}), use_policy(None, by_both), use_policy("f", pairs):
        fn()
    linen.apply_policy(model, "bf16", {"head": "f32", linen.LayerNorm: "f32"})
    linen.apply_policy(model, "bf16", rules=by_both)
    nnx.apply_policy(built, "bf16", {"head": "f32", nnx.LayerNorm: "f32"})
    nnx.apply_policy(built, "bf16", rules=by_both)
    autocast(fn, "bf16", rules={"head": "f32", linen.LayerNorm: "f32"})
    autocast(fn, "bf16", rules=by_both)
    autocast(fn, "bf16", rules=by_path)
