"""What a program donates, needs and combines."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.traced import program_facts
from policy.programs import jaxprs

X = np.linspace(0.1, 1.2, 6, dtype=np.float32).reshape(2, 3)


def test_dead_equations_leave_and_arguments_stay():
    live = program_facts.live_part(jax.make_jaxpr(lambda x, y: (jnp.cos(y), jnp.sin(x))[1])(X, X))
    body = jaxprs.opened(live)[0]
    assert [e.primitive.name for e in body.eqns] == ["sin"] and len(body.invars) == 2


def test_a_combination_is_of_an_equation_alone():
    summed = jax.make_jaxpr(lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)))(X)
    (equation,) = jaxprs.opened(summed)[0].eqns
    assert program_facts.combines_by(equation, {"mul"})
    assert not program_facts.combines_by(equation, {"sin"})


def test_donated_inputs_are_those_of_the_jitted_function():
    step = jax.jit(lambda a, b: (a + b, b * 2), donate_argnums=1)
    assert program_facts.donated_inputs(jax.make_jaxpr(lambda a, b: step(a, b))(X, X)) == (1,)
    assert program_facts.donated_inputs(jax.make_jaxpr(lambda a, b: a + b)(X, X)) == ()
    assert program_facts.donated_inputs(jax.make_jaxpr(lambda a, b: step(a + 1, b))(X, X)) == (1,)
