"""Draws programs, runs each in classes under policies, and reports wrong numbers.

python -m tests.random_programs --seed 0 --n 100
python -m tests.random_programs --seed 0 --n 2000 --rotate
python -m tests.random_programs --seed 17 --n 1 --class nnx --policy bfloat16 --minimize
"""

import argparse
import collections
import json
import secrets
import sys
import warnings
from typing import Any

import jax

from policy import get_policy
from tests.random_programs.draw import Program, draw
from tests.random_programs.judge import (
    CLASSES,
    POLICIES,
    Failure,
    Judge,
    confirmed,
    failures,
    way_of,
)
from tests.random_programs.minimize import minimized, snippet


def known(program: Program, failure: Failure, policy: str) -> str:
    """Returns the name of a known fault that explains a failure, else nothing."""
    constants = {dict(op.args).get("c") for op in program.ops}
    if policy == "mixed_float16" and constants & {1e-7, 1e4}:
        return "float16 constant"
    return ""


def smallest(
    program: Program, way: str, policy: str, mode: str, failure: Failure
) -> tuple[Program, str, Failure]:
    """Returns the smallest program found that fails alike, as a function where that fails too."""

    def fails(candidate: Program, way: str) -> bool:
        found = failures(candidate, way, policy, mode).values()
        return any(each.kind == failure.kind for each in found)

    way = "function" if fails(program, "function") else way
    program = minimized(program, lambda candidate: fails(candidate, way))
    return program, way, confirmed(program, way, policy, mode).get(mode, failure)


def failing(
    program: Program, way: str, policy: str, seed: int, minimize: bool, judge: Judge
) -> list[dict[str, Any]]:
    """Returns the failures of a program in one way, each as a record."""
    records = []
    for mode, failure in confirmed(program, way, policy, judge=judge).items():
        small, ways = program, way
        if minimize and not records:
            small, ways, failure = smallest(program, way, policy, mode, failure)
        records.append(
            {
                "seed": seed,
                "class": way,
                "policy": policy,
                "mode": mode,
                "kind": failure.kind,
                "where": failure.where,
                "detail": failure.detail[:300],
                "ops": sorted(small.kinds()),
                "known": known(small, failure, policy),
                "minimized as": ways,
                "script": snippet(small, ways, policy, mode, failure.where),
            }
        )
    return records


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a number is wrong that is not known to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the first")
    parser.add_argument("--n", type=int, default=20, help="programs")
    parser.add_argument("--class", dest="classes", action="append", choices=CLASSES)
    parser.add_argument("--policy", dest="policies", action="append", choices=POLICIES)
    parser.add_argument("--rotate", action="store_true", help="one class and policy a program")
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--json", help="a file for the records")
    options = parser.parse_args(arguments)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.simplefilter("error")
    print(f"python -m tests.random_programs --seed {options.seed} --n {options.n}", flush=True)
    counts, records = collections.Counter(), []
    for seed in range(options.seed, options.seed + options.n):
        for half in ("bfloat16", "float16"):
            policies = [POLICIES[seed % 3]] if options.rotate else options.policies or POLICIES
            classes = [CLASSES[seed // 3 % 4]] if options.rotate else options.classes or CLASSES
            chosen = [p for p in policies if get_policy(p).compute_dtype == half]
            program = draw(seed, half) if chosen else None
            if program is None or not (judge := Judge(program, half)).is_usable:
                continue
            for policy in chosen:
                for kind in classes:
                    way = way_of(kind, seed)
                    counts[way, policy] += 1
                    for record in failing(program, way, policy, seed, options.minimize, judge):
                        records.append(record)
                        shown = {k: v for k, v in record.items() if k != "script"}
                        print(json.dumps(shown), flush=True)
        if seed % 4 == 3:
            jax.clear_caches()
        if options.json:
            with open(options.json, "w") as file:
                json.dump(
                    {"counts": {" ".join(k): v for k, v in counts.items()}, "records": records},
                    file,
                )
    for (way, policy), count in sorted(counts.items()):
        print(f"{count:6d} programs  {way:12s} {policy}")
    kinds = collections.Counter((r["kind"], r["known"] or "new") for r in records)
    for (kind, name), count in sorted(kinds.items()):
        print(f"{count:6d} failures  {kind:14s} {name}")
    shown = set()
    for record in records:
        key = record["kind"], tuple(record["ops"])
        if options.minimize and key not in shown and not record["known"]:
            shown.add(key)
            print(
                f"\n# seed {record['seed']}, {record['class']}, {record['policy']}, "
                f"{record['mode']}: {record['kind']} of {record['where']}, {record['detail']}"
            )
            print(record["script"])
    return int(any(not record["known"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
