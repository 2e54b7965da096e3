"""Prints the tables of docs/ports.md: ``python -m tests.porting``. About a minute on one core."""

import jax
import jax.numpy as jnp
from tabulate import tabulate

from tests.porting import sources
from tests.porting.test_ports import HALVES, error, findings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def main() -> None:
    logits, losses = [], []
    for name in sources.NAMES:
        for dtype in HALVES:
            ulp = float(jnp.finfo(dtype).eps)
            made = ["hand", "policy", *(["rules"] if name in ("lm1b", "wmt") else [])]
            errors = [f"{error(name, by, dtype) / ulp:.2f}" for by in made]
            logits.append([name, dtype, *errors, *[""] * (3 - len(made))])
        error_of_loss = [f"{error(name, by, 'bfloat16', 'loss'):.1e}" for by in ("hand", "policy")]
        losses.append([name, *error_of_loss, *map(len, findings(name))])
    header = ["model", "dtype", "by hand", "ported", "with two rules"]
    print(tabulate(logits, header, tablefmt="github", disable_numparse=True), end="\n\n")
    header = ["model", "loss: by hand", "ported", "findings: by hand", "ported"]
    print(tabulate(losses, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
