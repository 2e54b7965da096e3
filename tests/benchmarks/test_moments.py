"""The tables of moments in 8 bits: maps of codes are those of the optimizer, and a short run."""

import jax.numpy as jnp
import numpy as np

from benchmarks import code_maps, moments
from policy.optim.blockwise import FORMATS, decode, encode


def test_the_maps_of_the_optimizers_codes_give_its_roundings():
    first, second = (x[: 128 * 50] for x in code_maps.moments(2.0))
    for form in FORMATS.values():
        x = (first if form.is_signed else second).astype(np.float32)
        numbers = code_maps.minifloat(form.exponent_bits, form.fraction_bits)
        numbers = numbers[: form.largest_code + 1] / numbers[form.largest_code]
        right = code_maps.rounded(x, numbers, never_zero=not form.is_signed)
        found = decode(*encode(jnp.asarray(x).reshape(-1, 128), form), form).reshape(-1)
        off = np.abs(np.asarray(found, np.float64) - right) > 1e-5 * np.abs(right)
        assert off.mean() < 1e-3  # ties


def test_a_quadratic_ends_as_in_float32_in_8_bits_and_not_with_one_linear_scale():
    by_name = {storage.name: storage for storage in moments.STORAGES}
    exact = moments.quadratic(by_name["float32"], 300)
    assert moments.quadratic(by_name["int8"], 300) < 1.05 * exact
    assert moments.quadratic(by_name["control: one linear scale"], 300) > 1.5 * exact
