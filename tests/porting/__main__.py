"""Prints the table of docs/porting.md: ``python -m tests.porting``. About a minute on one core."""

import jax
import jax.numpy as jnp
from tabulate import tabulate

import policy
from tests.porting import models, recipe
from tests.porting.test_ports import DIFFERENTIATED, HALVES, gradients_error, logits_error, loss_error, pair, shapes

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def findings(name: str) -> list[int]:
    """How many findings an audit of the loss has, forward and backward: by hand, and after the port."""
    args = shapes(name), models.batch(name)
    losses = (lambda *args, model=model: models.loss_of(model)(*args)[0] for model in pair(name))
    return [len(policy.audit(loss, *args, backward=True).findings) for loss in losses]


def main() -> None:
    rows = []
    for name in recipe.NAMES:
        for dtype in HALVES:
            ulp = float(jnp.finfo(dtype).eps)
            made = ["hand", "policy", *(["rules"] if name in ("lm1b", "wmt") else [])]
            both = dtype == "bfloat16" and name in DIFFERENTIATED
            errors = [logits_error(name, by, dtype, gradients=both and by != "rules") / ulp for by in made]
            gradients = [f"{gradients_error(name, by):.3f}" for by in made[:2]] if both else ["", ""]
            audited = findings(name) if dtype == "bfloat16" else ["", ""]
            losses = [f"{loss_error(name, by, dtype, gradients=both):.1e}" for by in made[:2]]
            logits = [*(f"{error:.2f}" for error in errors), *[""] * (3 - len(made))]
            rows.append([name, dtype, *logits, *losses, *gradients, *audited])
    header = ["model", "dtype", "logits: by hand", "ported", "with two rules", "loss: by hand", "ported"]
    header += ["gradients: by hand", "ported"]
    header += ["findings: by hand", "ported"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
