"""The examples under policies with matmuls in 8 bits: which matmuls take them, and which stay."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import language_model as lm
import pytest
import resnet_fashion_mnist
import train_digits

import policy as mp
from mpmodules import linen
from policy.programs.jaxprs import equations_within

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
INT8, DOT, CONV = "int8", "dot_general", "conv_general_dilated"


def multiplied(function: Any, *args: Any) -> collections.Counter[tuple[str, ...]]:
    """Returns how many matmuls and convolutions of a program multiply which dtypes."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return collections.Counter(
        (equation.primitive.name, *sorted({str(v.aval.dtype) for v in equation.invars}))
        for equation in equations_within(jaxpr.jaxpr)
        if equation.primitive.name in (DOT, CONV)
    )


@pytest.mark.slow
def test_the_language_models_matmuls_of_weights_are_in_8_bits_and_its_attention_is_not():
    config = lm.Config(vocab_size=12, width=16, layers=2, heads=2, mlp_width=24, length=8)
    model, tokens = lm.Decoder(config), jnp.ones((2, 8), jnp.int32)
    with mp.use_policy("mixed_int8"):
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        found = multiplied(model.apply, variables, tokens)
    # Query, key, value, out, up and down of two layers, and the head; two attentions.
    assert found == {(DOT, INT8): 13, (DOT, "bfloat16"): 4}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_a_rule_keeps_a_resnets_convolutions_out_of_8_bits(kept):
    rules = [(linen.Conv, "p=f32,c=bf16,o=bf16")] if kept else None
    images = jnp.zeros((2, 8, 8, 1))
    for model in (train_digits.LinenResNet(4), resnet_fashion_mnist.MODELS["ResNet8"]()):
        with mp.use_policy("mixed_int8", rules):
            variables = jax.eval_shape(
                lambda key, model=model: model.init(key, images, train=False), jax.random.key(0)
            )
            found = multiplied(lambda v, m=model: m.apply(v, images, train=False), variables)
        assert found[(DOT, INT8)] == 1
        assert found.keys() == {(DOT, INT8), (CONV, "bfloat16" if kept else INT8)}
