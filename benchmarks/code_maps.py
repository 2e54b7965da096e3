"""Maps of codes in 8 and 4 bits to numbers, and the error that each brings to a step of Adam."""

from __future__ import annotations

import numpy as np

BLOCK, BLOCKS, EPSILON = 128, 4000, 1e-8


def linear(count: int) -> np.ndarray:
    """Equal steps from 0 to 1."""
    return np.arange(count) / (count - 1)


def minifloat(exponent_bits: int, fraction_bits: int) -> np.ndarray:
    """The numbers of a small floating-point format, with its largest as 1."""
    parts = 2**fraction_bits
    codes = np.arange(2 ** (exponent_bits + fraction_bits))
    exponents, fractions = codes // parts, codes % parts / parts
    small = exponents == 0
    numbers = np.where(small, 2 * fractions, (1 + fractions) * 2.0**exponents)
    return numbers / numbers[-1]


def dynamic(is_signed: bool, decades: int = 7) -> np.ndarray:
    """The magnitudes of Dettmers et al.'s dynamic map (bitsandbytes' `create_dynamic_map`).

    Of 8 bits; signed and with 3 decades of 4 bits.
    """
    numbers = [np.zeros(1), np.ones(1)]
    for decade in range(decades):
        count = 2 ** (decade if is_signed else decade + 1)
        edges = np.linspace(0.1, 1, count + 1)
        numbers.append(10.0 ** (decade + 1 - decades) * (edges[:-1] + edges[1:]) / 2)
    return np.sort(np.concatenate(numbers))


# of 4 bits: Li et al. 2023, "Memory Efficient Optimizers with 4-bit States", arXiv:2309.01507
LI_FIRST, LI_SECOND = dynamic(True, 3), np.arange(1, 17) / 16


def rounded(x: np.ndarray, numbers: np.ndarray, *, never_zero: bool = False) -> np.ndarray:
    """Rounds blocks to the nearest numbers of a map, times the largest magnitude of the block."""
    blocks = np.abs(x).reshape(-1, BLOCK)
    largest = blocks.max(1, keepdims=True)
    middles = (numbers[1:] + numbers[:-1]) / 2
    found = numbers[np.searchsorted(middles, blocks / largest)]
    if never_zero:
        found = np.where(blocks > 0, np.maximum(found, numbers[1]), found)
    return (found * largest).reshape(x.shape) * np.sign(x)


def moments(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """First and second moments, of gradients whose magnitudes' logarithm deviates by sigma."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.normal(size=BLOCK * BLOCKS)  # noqa: E731
    magnitude = np.exp(sigma * draw())
    second = magnitude**2 * np.exp(0.1 * draw())
    return magnitude * draw() * 0.23, second  # 0.23: the deviation of a mean with b1 = 0.9


def error(found: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """The relative root mean square error of the step that rounded moments give."""
    exact = first / (np.sqrt(second) + EPSILON)
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


FIRST = {
    "e4m3: int8": minifloat(4, 3),
    "e3m4": minifloat(3, 4),
    "e5m2": minifloat(5, 2),
    "Dettmers' map": dynamic(True),
    "linear": linear(128),
    "4 bits, e3m0": minifloat(3, 0),
    "4 bits, e2m1": minifloat(2, 1),
    "4 bits, Li et al.'s map": LI_FIRST,
}
SECOND = {
    "e5m3, never 0: int8": minifloat(5, 3),
    "e5m2, never 0": minifloat(5, 2),
    "e4m4, never 0": minifloat(4, 4),
    "Dettmers' map": dynamic(False),
    "linear": linear(256),
    "4 bits, e4m0, never 0": minifloat(4, 0),
    "4 bits, e3m1, never 0": minifloat(3, 1),
    "4 bits, Li et al.'s map": LI_SECOND,
}


def errors(sigma: float) -> dict[str, float]:
    """The errors of all maps of first and of second moments."""
    first, second = moments(sigma)
    found = {}
    for name, numbers in FIRST.items():
        step = rounded(first, numbers) / (np.sqrt(second) + EPSILON)
        found[f"first moment, {name}"] = error(step, first, second)
    for name, numbers in SECOND.items():
        root = np.sqrt(rounded(second, numbers, never_zero="never 0" in name))
        found[f"second moment, {name}"] = error(first / (root + EPSILON), first, second)
    return found
