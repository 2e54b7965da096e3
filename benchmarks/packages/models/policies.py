"""Policies of reinforcement learning: rejax's in linen, nnx-ppo's in nnx."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.packages.cases import Case
from benchmarks.packages.stubs import stubbed


def cases() -> Iterator[Case]:
    """Tiny policies of rejax and nnx-ppo."""
    yield Case("rejax: Gaussian policy", _rejax, _observations, _log_prob_entropy)
    yield Case("nnx-ppo: actor and critic", _actor_critic, _observations, _act)


def _observations(generator: np.random.Generator) -> tuple[Any, ...]:
    draws = (generator.normal(size=(8, size)).astype(np.float32) for size in (6, 3))
    return tuple(draws)


def _rejax(dtype: Any) -> Any:
    with stubbed("gymnax"):
        networks: Any = importlib.import_module("rejax.networks")
    return networks.GaussianPolicy(3, (-1.0, 1.0), (32, 32), jax.nn.swish)


def _log_prob_entropy(model: Any, observations: Any, actions: Any) -> Any:
    return model.log_prob_entropy(observations, actions)


def _actor_critic(dtype: Any) -> Any:
    networks: Any = importlib.import_module("nnx_ppo.networks.factories")
    return networks.make_mlp_actor_critic(6, 3, [32, 32], [32, 32], nnx.Rngs(0))


def _act(model: Any, observations: Any, actions: Any) -> Any:
    return model(model.initialize_state(observations.shape[0]), observations)
