"""The four models before and after the port, called alike: ``logits(variables, batch)``."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from policy import use_policy
from policy.porting.port import ported
from policy.porting.source import PythonFile
from tests.porting import sources

BATCH, LENGTH = 6, 8
STAGES = (0, 1)  # one block, with a projected shortcut
# Compiling is the slow part, and these programs run for a moment.
QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


@functools.cache
def before(name: str) -> types.ModuleType:
    return sources.load(sources.before(name), f"before_{name}")


@functools.cache
def after(name: str) -> types.ModuleType:
    """Returns the module that ``python -m policy port`` makes."""
    source = PythonFile(sources.before(name).encode())
    return sources.load(ported(source, f"{name}.py").after, f"after_{name}")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of either kind; variables are linen's collections or nnx's parameters."""

    init: Callable[[], Any]
    logits: Callable[[Any, Any], Any]


def batch(name: str, seed: int = 0) -> dict[str, Any]:
    """Inputs that every model of that name takes, and labels."""
    rng = np.random.default_rng(seed)
    if name == "imagenet":
        images = rng.normal(size=(BATCH, 16, 16, 3)).astype(np.float32)
        return {"images": images, "labels": rng.integers(0, 5, BATCH)}
    tokens = rng.integers(1, 32, (BATCH, LENGTH))
    tokens[0, -2:] = 0  # padding
    sources = {"sources": rng.integers(1, 32, (BATCH, LENGTH - 2))} if name == "wmt" else {}
    return {"tokens": tokens, "labels": tokens, **sources}


def _linen(name: str, model: Any, policy: Any, rules: Any = None) -> Model:
    names = {"imagenet": ("images",), "lm1b": ("tokens",), "wmt": ("sources", "tokens")}[name]

    def init() -> Any:
        with use_policy(policy, rules):
            return model.init(jax.random.key(0), *(jnp.asarray(batch(name)[n]) for n in names))

    def logits(variables: Any, inputs: Any) -> Any:
        # Flax's norms and attention mix half with float32
        promotion = "standard" if policy is None else "strict"
        with use_policy(policy, rules), jax.numpy_dtype_promotion(promotion):
            if name != "imagenet":
                return model.apply(variables, *(inputs[n] for n in names))
            return model.apply(variables, inputs["images"], mutable=["batch_stats"])[0]

    return Model(init, logits)


def _nnx(make: Callable[[], Any]) -> Model:
    built = flax_nnx.eval_shape(make)
    graphdef, params = flax_nnx.split(built, flax_nnx.Param)

    def init() -> Any:
        return flax_nnx.to_pure_dict(flax_nnx.state(make(), flax_nnx.Param))

    def logits(variables: Any, inputs: Any) -> Any:
        state = jax.tree.map(lambda x: x, params)
        flax_nnx.replace_by_pure_dict(state, variables)
        return causal(flax_nnx.merge(graphdef, state), inputs["tokens"])[0]

    return Model(init, logits)


def causal(model: Any, tokens: Any, cache: Any = None) -> Any:
    """Calls a gemma with the positions and the mask that its trainer makes."""
    length = tokens.shape[1]
    there = jnp.asarray(tokens) > 0
    mask = there[:, None, :] & jnp.tril(jnp.ones((length, length), bool))[None]
    mask = mask | jnp.eye(length, dtype=bool)[None]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    # Upstream's rotary angles divide integers by float32, and its scales are vectors beside (n, T,
    # D).
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return model(jnp.asarray(tokens), positions, cache, mask)


def by_hand(name: str, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32) -> Model:
    module = before(name)
    if name == "imagenet":
        return _linen(name, module.ResNet(STAGES, dtype=dtype), None)
    if name == "gemma":
        config = module.TransformerConfig(num_layers=1, dtype=dtype, weight_dtype=param_dtype)
        return _nnx(lambda: module.Transformer(config, rngs=flax_nnx.Rngs(0)))
    model = module.TransformerLM if name == "lm1b" else module.Transformer
    return _linen(name, model(module.TransformerConfig(num_layers=1, dtype=dtype)), None)


def by_policy(name: str, policy: Any, rules: Any = None) -> Model:
    module = after(name)
    if name == "imagenet":
        return _linen(name, module.ResNet(STAGES), policy)
    if name == "gemma":

        def make() -> Any:
            with use_policy(policy):
                config = module.TransformerConfig(num_layers=1)
                return module.Transformer(config, rngs=flax_nnx.Rngs(0))

        return _nnx(make)
    model = module.TransformerLM if name == "lm1b" else module.Transformer
    return _linen(name, model(module.TransformerConfig(num_layers=1)), policy, rules)


def random_tree(shapes: Any, seed: int, dtype: Any = None) -> Any:
    """Random variables: matrices keep the size of what they multiply, scales are about 1."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        values = rng.normal(size=leaf.shape)
        if name in ("scale", "var"):
            values = 1 + 0.1 * values
        elif leaf.ndim == 1:
            values = 0.1 * values
        elif name != "embedding":
            values = values * 1.5 / np.sqrt(np.prod(leaf.shape[:-1]))
        return jnp.asarray(np.abs(values) if name == "var" else values, dtype or leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def loss_of(model: Model) -> Callable[[Any, Any], tuple[Any, Any]]:
    """(variables, batch) -> the mean cross-entropy in the logits' dtype, and the logits."""

    def loss(variables: Any, inputs: Any) -> tuple[Any, Any]:
        logits = model.logits(variables, inputs)
        wanted = jax.nn.one_hot(inputs["labels"], logits.shape[-1], dtype=logits.dtype)
        return -jnp.sum(wanted * jax.nn.log_softmax(logits), -1).mean(), logits

    return loss


def compiled(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(*args).compile(compiler_options=QUICKLY)


def relative_error(actual: Any, desired: Any) -> float:
    """The root of the mean square of what is off, over all leaves, by that of what is right."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    off = sum(np.square(a - b).sum() for a, b in pairs)
    return float(np.sqrt(off / sum(np.square(b).sum() for _, b in pairs)))
