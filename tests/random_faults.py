"""Runs the random tests for long: many more examples than the suite's, from a seed that it prints.

python -m tests.random_faults                     # 300 examples of each test
python -m tests.random_faults --examples 20 --seed 7
"""

import argparse
import os
import secrets
import sys

import pytest


def main(arguments: list[str] | None = None) -> int:
    """Returns pytest's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=300, help="examples of each test")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="repeats a run")
    options = parser.parse_args(arguments)
    os.environ["MPMODULES_RANDOM_EXAMPLES"] = str(options.examples)
    again = f"--examples {options.examples} --seed {options.seed}"
    print(f"python -m tests.random_faults {again}", flush=True)
    chosen = ["-m", "random", "--hypothesis-profile=long", f"--hypothesis-seed={options.seed}"]
    return int(pytest.main([*chosen, "tests"]))


if __name__ == "__main__":
    sys.exit(main())
