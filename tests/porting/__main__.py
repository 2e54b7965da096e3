"""Prints the table of docs/porting.md: ``python -m tests.porting``. About a minute on one core."""

import jax
import jax.numpy as jnp
from tabulate import tabulate

import policy
from tests.porting import models, recipe
from tests.porting.test_ports import DIFFERENTIATED, HALVES, error, gradients_error, pair, shapes

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def findings(name: str) -> list[int]:
    """How many findings an audit of the loss has, forward and backward: by hand, and after the
    port.
    """
    args = shapes(name), models.batch(name)
    losses = (lambda *args, model=model: models.loss_of(model)(*args)[0] for model in pair(name))
    return [len(policy.audit(loss, *args, backward=True).findings) for loss in losses]


def main() -> None:
    rows = []
    for name in recipe.NAMES:
        for dtype in HALVES:
            ulp = float(jnp.finfo(dtype).eps)
            made = ["hand", "policy", *(["rules"] if name in ("lm1b", "wmt") else [])]
            errors = [error(name, by, dtype) / ulp for by in made]
            differentiated = name in DIFFERENTIATED[dtype]
            gradients = [
                f"{gradients_error(name, by, dtype):.3f}" if differentiated else ""
                for by in made[:2]
            ]
            audited = findings(name) if dtype == "bfloat16" else ["", ""]
            losses = [f"{error(name, by, dtype, 'loss'):.1e}" for by in made[:2]]
            logits = [*(f"{e:.2f}" for e in errors), *[""] * (3 - len(made))]
            rows.append([name, dtype, *logits, *losses, *gradients, *audited])
    header = [
        "model",
        "dtype",
        "logits: by hand",
        "ported",
        "with two rules",
        "loss: by hand",
        "ported",
    ]
    header += ["gradients: by hand", "ported"]
    header += ["findings: by hand", "ported"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
