"""The names of `policy`: those of a training script and of jmp; others in its namespaces."""

import types

import policy

NAMESPACES = {"grads", "losses", "optim", "reductions", "sharding", "testing"}
OF_JMP = {
    *("DynamicLossScale", "LossScale", "NoOpLossScale", "StaticLossScale"),
    *("Policy", "get_policy", "cast_to_full", "cast_to_half", "half_dtype"),
    *("all_finite", "select_tree"),
}


def test_dir_and_all_agree():
    assert dir(policy) == sorted(policy.__all__) == policy.__all__


def test_only_namespaces_are_modules():
    modules = {n for n in policy.__all__ if isinstance(getattr(policy, n), types.ModuleType)}
    assert modules == NAMESPACES


def test_a_star_import_leaves_policy_alone_and_has_the_names_of_jmp():
    scope = {"policy": policy}
    exec("from policy import *", scope)
    assert scope["policy"] is policy
    assert set(scope) - {"__builtins__", "policy"} == set(policy.__all__) >= OF_JMP


def test_returned_types_are_exported_where_the_function_is():
    returned = {"audit": "Audit", "compare": "Comparison", "suggest": "Suggestion"}
    assert set(returned.values()) | {"Finding", "MixedPrecision"} <= set(policy.__all__)
    for function, result in returned.items():
        assert getattr(policy, function).__annotations__["return"] == result


def test_namespaces_say_what_they_export():
    for module in (getattr(policy, name) for name in NAMESPACES):
        assert dir(module) == sorted(module.__all__)
        assert all(callable(getattr(module, name)) for name in module.__all__)
