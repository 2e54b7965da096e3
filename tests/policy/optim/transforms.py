"""Every public transform and alias of optax, found by introspection, with its arguments."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# by the parameter's name
NUMBERS: dict[str, Any] = {"clipping": 0.1, "decay": 0.9, "eta": 0.01, "gamma": 0.55}
NUMBERS |= {"l2_norm_clip": 1.0, "learning_rate": 0.01, "max_backtracking_steps": 3, "seed": 0}
NUMBERS |= {"max_consecutive_errors": 2, "max_delta": 0.1, "max_linesearch_steps": 3}
NUMBERS |= {"max_norm": 0.1, "noise_multiplier": 0.1, "slow_step_size": 0.5, "step_size": 0.01}
NUMBERS |= {"sync_period": 2, "threshold": 0.1, "measure_name": "measured"}
ARGUMENTS: dict[str, Callable[[], Any]] = {  # made anew for each transform
    "adv_optimizer": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "base_optimizer": lambda: optax.sgd(0.01),
    "f": lambda: lambda updates, params=None: updates,
    "fast_optimizer": lambda: optax.sgd(0.01),
    "freeze_mask": lambda: {"b": True, "w": False},
    "inner": lambda: optax.adam(0.01),
    "inner_factory": lambda: optax.adam,
    "mask": lambda: {"b": True, "w": False},
    "measure": lambda: lambda updates, *_, **__: updates,
    "optimizer": lambda: optax.sgd(0.01),
    "param_labels": lambda: {"b": "one", "w": "two"},
    "should_transform_fn": lambda: lambda step, **_: step < 2,
    "step_size_fn": lambda: lambda count: 0.01 * 0.5**count,
    "transforms": lambda: {"one": optax.adam(0.01), "two": optax.sgd(0.01)},
    "tx": lambda: optax.adam(0.01),
}


def muon() -> Any:
    """Its default takes a tree of one leaf only, and matrices."""
    numbers = lambda updates: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)  # noqa: E731
    inner = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    return optax.masked(inner, {"b": False, "w": True})


SPECIAL: dict[str, Callable[[], Any]] = {
    "chain": lambda: optax.chain(optax.clip(0.5), optax.adam(0.01)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(0.01))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.01),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(0.01),
    "scale_by_muon": muon,
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: g * 0.5),
}
# their gradients have an axis more than the params
PER_EXAMPLE = ("differentially_private_aggregate", "dpsgd")
PAIRED = ("lookahead",)  # its params are a pair of the params, its gradients are not


def value_fn(params: Any, **_: Any) -> jax.Array:
    """Computes a loss for transforms that ask for one."""
    squares = (jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(params))
    return sum(squares, jnp.float32(0))


LINE_SEARCH = ("value", "grad", "value_fn")
EXTRA: dict[str, tuple[str, ...]] = {"lbfgs": LINE_SEARCH, "sophia": ("obj_fn",)}
SEARCHES = ("scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")
EXTRA |= dict.fromkeys(SEARCHES, LINE_SEARCH)
VALUE = ("polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau")
EXTRA |= dict.fromkeys(VALUE, ("value",))


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
        return factory(
            **{name: NUMBERS[name] if name in NUMBERS else ARGUMENTS[name]() for name in needed}
        )
