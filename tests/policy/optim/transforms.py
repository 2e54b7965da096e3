"""Every public transform and alias of optax, found by introspection, with its arguments."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

ARGUMENTS: dict[str, Callable[[], Any]] = {  # by the parameter's name, made anew for each transform
    "adv_optimizer": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "base_optimizer": lambda: optax.sgd(0.01),
    "clipping": lambda: 0.1,
    "decay": lambda: 0.9,
    "eta": lambda: 0.01,
    "f": lambda: lambda updates, params=None: updates,
    "fast_optimizer": lambda: optax.sgd(0.01),
    "freeze_mask": lambda: {"b": True, "w": False},
    "gamma": lambda: 0.55,
    "inner": lambda: optax.adam(0.01),
    "inner_factory": lambda: optax.adam,
    "l2_norm_clip": lambda: 1.0,
    "learning_rate": lambda: 0.01,
    "mask": lambda: {"b": True, "w": False},
    "max_backtracking_steps": lambda: 3,
    "max_consecutive_errors": lambda: 2,
    "max_delta": lambda: 0.1,
    "max_linesearch_steps": lambda: 3,
    "max_norm": lambda: 0.1,
    "measure": lambda: lambda updates, *_, **__: updates,
    "measure_name": lambda: "measured",
    "noise_multiplier": lambda: 0.1,
    "optimizer": lambda: optax.sgd(0.01),
    "param_labels": lambda: {"b": "one", "w": "two"},
    "seed": lambda: 0,
    "should_transform_fn": lambda: lambda step, **_: step < 2,
    "slow_step_size": lambda: 0.5,
    "step_size": lambda: 0.01,
    "step_size_fn": lambda: lambda count: 0.01 * 0.5**count,
    "sync_period": lambda: 2,
    "threshold": lambda: 0.1,
    "transforms": lambda: {"one": optax.adam(0.01), "two": optax.sgd(0.01)},
    "tx": lambda: optax.adam(0.01),
}
SPECIAL: dict[str, Callable[[], Any]] = {
    "chain": lambda: optax.chain(optax.clip(0.5), optax.adam(0.01)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(0.01))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.01),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(0.01),
    "scale_by_muon": lambda: (
        optax.masked(  # its default takes a tree of one leaf only, and matrices
            optax.contrib.scale_by_muon(
                weight_dimension_numbers=lambda updates: jax.tree.map(
                    lambda _: optax.contrib.MuonDimensionNumbers(), updates
                )
            ),
            {"b": False, "w": True},
        )
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: g * 0.5),
}
PER_EXAMPLE = (
    "differentially_private_aggregate",
    "dpsgd",
)  # their gradients have an axis more than the params
PAIRED = ("lookahead",)  # its params are a pair of the params, its gradients are not


def value_fn(params: Any, **_: Any) -> jax.Array:
    """Computes a loss for transforms that ask for one."""
    return sum(
        (jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(params)),
        jnp.float32(0),
    )


LINE_SEARCH = ("value", "grad", "value_fn")
EXTRA = {
    "lbfgs": LINE_SEARCH,
    "scale_by_backtracking_linesearch": LINE_SEARCH,
    "scale_by_zoom_linesearch": LINE_SEARCH,
    "polyak_sgd": ("value",),
    "scale_by_polyak": ("value",),
    "momo": ("value",),
    "momo_adam": ("value",),
    "reduce_on_plateau": ("value",),
    "sophia": ("obj_fn",),
}


def extra_arguments(name: str, params: Any, gradients: Any) -> dict[str, Any]:
    """Returns arguments for line searches, Polyak's step, MoMo, Sophia and reduce_on_plateau."""
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    every = {"value": value_fn(params), "grad": wide, "value_fn": value_fn, "obj_fn": value_fn}
    return {key: every[key] for key in EXTRA.get(name, ())}


def found() -> dict[str, Callable[..., Any]]:
    """Returns names and factories: exports of optax and optax.contrib that return transforms."""
    factories: dict[str, Callable[..., Any]] = {}
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                factory = getattr(module, name)
            if name.startswith("_") or not inspect.isfunction(factory):
                continue
            returned = str(inspect.signature(factory).return_annotation)
            if "Gradient" in returned or "Transform" in returned or name in SPECIAL:
                factories[name] = factory
    return factories


def make(name: str, factory: Callable[..., Any]) -> Any:
    """The transform; KeyError by name where a new parameter has no argument here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in SPECIAL:
            return SPECIAL[name]()
        parameters = inspect.signature(factory).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind in (*plain, p.KEYWORD_ONLY)
        ]
        return factory(**{name: ARGUMENTS[name]() for name in needed})
