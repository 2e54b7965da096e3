"""NumPyro's NUTS and SVI with a network in float32 and in half precision.

    python -m benchmarks.sampling  # a minute on an idle core

A network of 4, 8 and 1 units, 256 rows, noise of 0.05. NUTS: 300 steps of warmup and 300 samples of
one chain. SVI: 500 steps of Adam at 0.01, with an `AutoNormal` guide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro

from policy import autocast, mixed_precision

ROWS, NOISE, STEPS = 256, 0.05, 300


def network(weights: Any, x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ weights["w1"]) @ weights["w2"])[:, 0]


def model_of(network: Callable[..., Any]) -> Callable[..., Any]:
    def model(x: jax.Array, y: jax.Array) -> None:
        normal = dist.Normal(0.0, 1.0)
        w1 = numpyro.sample("w1", normal.expand([4, 8]).to_event(2))
        w2 = numpyro.sample("w2", normal.expand([8, 1]).to_event(2))
        scale = numpyro.sample("s", dist.LogNormal(-1.0, 0.5))
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Normal(network({"w1": w1, "w2": w2}, x), scale), obs=y)

    return model


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (ROWS, 4))
    y = jnp.sin(2 * x[:, 0]) + NOISE * jax.random.normal(jax.random.key(9), (ROWS,))
    tx = optax_to_numpyro(mixed_precision(optax.adam(1e-2), "mixed_bfloat16"))
    print(f"{'':16}{'scale':>8}{'accepted':>10}{'step':>9}{'SVI loss':>10}")
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        model = model_of(network if name == "float32" else autocast(network, name))
        chain = MCMC(NUTS(model), num_warmup=STEPS, num_samples=STEPS, progress_bar=False)
        chain.run(jax.random.key(3), x, y, extra_fields=("accept_prob", "adapt_state.step_size"))
        of_steps = chain.get_extra_fields()
        accepted, step = (of_steps[key].mean() for key in ("accept_prob", "adapt_state.step_size"))
        svi = SVI(model, AutoNormal(model), tx, Trace_ELBO())
        losses = svi.run(jax.random.key(1), 500, x, y, progress_bar=False).losses
        mean = chain.get_samples()["s"].mean()
        print(f"{name:16}{mean:8.3f}{accepted:10.2f}{step:9.4f}{losses[-50:].mean():10.2f}")


if __name__ == "__main__":
    main()
