"""Recurrence beside the table of layers: cells; what loops over them return and carry, with their
options, rules and ports; and gradients over many steps. No boundary casts a carry.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, get_policy, use_policy
from policy.programs.reading.walk import walk
from tests.mpmodules.apis import BOTH, KEY, MIXED, Text, assert_same_bits, layer
from tests.mpmodules.table.cases import CASES, SEQUENCE, Case
from tests.mpmodules.table.running import THEIRS, Built, built, dtypes_of, scope_of
from tests.programs import named, operations

BATCH, TIME, WIDTH, HIDDEN = 2, 5, 4, 3
ROWS = [(api, case) for api, case in CASES if case.is_cell]
EACH_CELL = pytest.mark.parametrize(
    ("api", "case"), ROWS, ids=[f"{api}-{case}" for api, case in ROWS]
)


def assert_close(ours: Any, theirs: Any, atol: float) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=atol)


def rnn_of_table(api: str, case: Case, policy: str) -> Built:
    """Returns the RNN over a cell."""
    (rnn,) = (each for at, each in CASES if (at, str(each)) == (api, f"RNN over {case}"))
    return built(api, rnn, policy)


@pytest.mark.cases(fast=1, slow=10)
@EACH_CELL
def test_a_hand_threaded_cell_lowers_to_the_same_program(api, case):
    call, params, (carry, x) = built(api, case, "p=f32,c=bf16,o=bf16", inputs_in=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        hand, theirs, _ = built(api, case, None, THEIRS[api], dtype=jnp.bfloat16)
    texts = [
        jax.jit(lambda *args, run=run: run(*args)).lower(held, carry, x).as_text()
        for run, held in ((call, params), (hand, theirs))
    ]
    assert texts[0] == texts[1]


@pytest.mark.cases(fast=1, slow=4)
@EACH_CELL
def test_the_carry_keeps_its_type_through_a_scan_also_where_it_was_made_in_float32(api, case):
    call, params, (half, x) = built(api, case, MIXED)
    wide = built(api, case)[2][0]
    steps = jnp.stack([x, -x, x / 2])

    def scan(carry):
        return jax.lax.scan(lambda carry, x: call(params, carry, x), carry, steps)

    (last, y), (wide_last, wide_y) = jax.jit(scan)(half), jax.jit(scan)(wide)
    assert dtypes_of((half, last, y, wide_y)) == {"bfloat16"}
    assert dtypes_of(wide_last) == {"float32"}
    assert_close((wide_last, wide_y), (last, y), atol=2**-7)


@pytest.mark.cases(fast=1, slow=6)
@EACH_CELL
def test_a_cell_with_a_policy_of_its_own_returns_output_dtype_and_leaves_its_carry(api, case):
    call, params, (carry, x) = built(api, case, dtype_policy=MIXED)
    new_carry, y = jax.eval_shape(call, params, carry, x)
    assert dtypes_of((carry, new_carry)) == {"bfloat16"} and dtypes_of(y) == {"float32"}


def test_a_carry_that_is_given_by_name_is_left_too():
    carry, x = jnp.zeros((BATCH, HIDDEN)), jnp.ones((BATCH, WIDTH))
    cell = linen.GRUCell(HIDDEN, dtype_policy=MIXED)
    (new, y), _ = cell.init_with_output(KEY, carry=carry, inputs=x)
    assert (new.dtype, y.dtype) == (jnp.float32, jnp.float32)
    made = nnx.GRUCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0), dtype_policy=MIXED)
    new, y = made(carry=carry.astype(jnp.bfloat16), inputs=x)
    assert (new.dtype, y.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.cases(fast=1, slow=4)
@EACH_CELL
def test_steps_of_decoding_feed_the_carry_back_and_are_those_of_an_rnn(api, case):
    call, _, (first, _) = built(api, case, MIXED)
    rnn, params, (steps,) = rnn_of_table(api, case, MIXED)
    step, outputs = jax.jit(call), []
    zeros = jnp.zeros((*steps.shape[:1], *steps.shape[2:-1], HIDDEN))
    carry = jax.tree.map(lambda leaf: zeros.astype(leaf.dtype), first)
    for t in range(TIME):
        carry, y = step(params["cell"], carry, steps[:, t])
        assert dtypes_of((carry, y)) == {"bfloat16"}
        outputs.append(y)
    assert step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    assert_close(jnp.stack(outputs, 1), jax.jit(rnn)(params, steps), atol=2**-7)


@pytest.mark.cases(fast=1)
@BOTH
def test_a_carry_is_drawn_with_the_initializer_given_in_compute_dtype(api):
    def carry(init: Any, lib: Any = api.module) -> Any:
        if api.name == "linen":
            return lib.GRUCell(HIDDEN, carry_init=init).initialize_carry(KEY, (BATCH, WIDTH))
        cell = lib.GRUCell(WIDTH, HIDDEN, rngs=lib.Rngs(0))
        return cell.initialize_carry((BATCH, WIDTH), lib.Rngs(1), init)

    normal, orthogonal = jax.nn.initializers.normal(), jax.nn.initializers.orthogonal()
    full = carry(normal)
    assert_same_bits(full, carry(normal, api.flax))
    with use_policy("mixed_float16"):
        assert_same_bits(carry(normal), full.astype(jnp.float16))
    with use_policy("bfloat16"):
        assert dtypes_of(carry(orthogonal)) == {"bfloat16"}


def _leaky(h: Any, carry: Any) -> Any:
    count, average, _ = carry
    return (count + 1, average * 0.9 + h.astype(jnp.float32) * 0.1, h), h


def _first(shape: Any) -> Any:
    zeros = jnp.zeros((*shape[:-1], HIDDEN))
    return jnp.zeros((), jnp.int32), zeros, zeros


class Leaky:
    """Its carry holds a count, a float32 average and the last hidden state."""

    @property
    def num_feature_axes(self) -> int:
        return 1


class LeakyLinen(Leaky, linen.RNNCellBase):
    @linen.compact
    def __call__(self, carry, inputs):
        h = linen.tanh(linen.Dense(HIDDEN)(inputs) + linen.Dense(HIDDEN)(carry[2]))
        return _leaky(h, carry)

    @linen.nowrap
    def initialize_carry(self, rng, input_shape):
        return _first(input_shape)


class LeakyNnx(Leaky, nnx.RNNCellBase):
    def __init__(self):
        self.i = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
        self.h = nnx.Linear(HIDDEN, HIDDEN, rngs=nnx.Rngs(0))

    def __call__(self, carry, inputs):
        return _leaky(nnx.tanh(self.i(inputs) + self.h(carry[2])), carry)

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return _first(input_shape)


def pure(module: Any, *args: Any) -> Any:
    """Returns a call of a module that was just made."""
    if isinstance(module, nnx.Module):
        return lambda *args: nnx.clone(module)(*args)
    variables = module.init(KEY, *args)
    return lambda *args: module.apply(variables, *args)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("lib", "cls"), [(linen, LeakyLinen), (nnx, LeakyNnx)])
def test_a_users_cell_is_a_boundary_for_inputs_and_outputs_and_keeps_the_types_of_its_carry(
    lib, cls
):
    def types(tree: Any) -> list[str]:
        return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]

    x, carry = jnp.asarray(SEQUENCE), _first((BATCH, WIDTH))
    with use_policy(MIXED):
        cell, rnn = pure(cls(), carry, x[:, 0]), pure(lib.RNN(cls(), return_carry=True), x)
        new_carry, y = jax.eval_shape(cell, carry, x[:, 0])
        dots = named(operations(cell, carry, x[:, 0]), "dot_general")
        last, ys = rnn(x)
    assert (types(new_carry), y.dtype) == (types(carry), jnp.float32)
    assert {(*op.inputs, *op.outputs) for op in dots} == {("bfloat16",) * 3}
    assert (types(last), ys.dtype, int(last[0])) == (types(carry), jnp.float32, TIME)


def rnn_over(name: str, **options: Any) -> Text:
    rnn = layer(
        lambda nn: nn.RNN(getattr(nn, name)(HIDDEN, **options)),
        lambda nnx, rngs: nnx.RNN(
            getattr(nnx, name)(WIDTH, HIDDEN, rngs=rngs, **options), rngs=rngs
        ),
    )
    return Text(lambda self, x: self.rnn(x), rnn=rnn)


@pytest.mark.cases(slow=2)
@BOTH
@pytest.mark.parametrize("stored", ("f32", "bf16"))
def test_the_gradient_of_a_1024_step_rnn_is_accurate(api, stored):
    # One sign: rounding errors can't cancel.
    x = np.random.default_rng(1).uniform(0.5, 1.5, size=(1, 1024, WIDTH))
    text = rnn_over("SimpleCell", recurrent_kernel_init=jax.nn.initializers.zeros)
    inputs = jnp.asarray(x, jnp.float32)
    model = api.scoped(text, f"p={stored},c=bf16,o=bf16", None, inputs)

    def input_kernel(tree: Any) -> Any:
        (kernel,) = (leaf for leaf in jax.tree.leaves(tree) if leaf.shape == (WIDTH, HIDDEN))
        return np.asarray(kernel, np.float64)

    slopes = 1 - np.tanh(x[0] @ input_kernel(model.params)) ** 2
    truth = np.einsum("tw,th->wh", x[0], slopes)  # of the sum of all outputs
    found = input_kernel(jax.jit(jax.grad(model.total(inputs)))(model.params))
    # Summed in half over the steps: 2% off.
    np.testing.assert_allclose(found, truth, atol=2**-8 * np.abs(truth).max())


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("name", ("LSTMCell", "OptimizedLSTMCell", "GRUCell"))
def test_second_derivatives_of_an_rnn_reach_its_biases(api, name):
    text = rnn_over(name, bias_init=jax.nn.initializers.normal(0.5))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, TIME, WIDTH)), jnp.float32)

    def penalty(model: Any) -> Any:
        value = lambda v, x: jnp.tanh(model.pure(v, x)).sum()  # noqa: E731
        gradient = jax.grad(lambda v: jnp.sum(jnp.square(jax.grad(value, 1)(v, x))))
        return jax.tree.leaves(jax.jit(gradient)(model.params))

    models = api.scoped(text, MIXED, None, x), api.theirs(text, x)
    for a, b in zip(*map(penalty, models), strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.08


@pytest.mark.cases(fast=1, slow=6)
@EACH_CELL
def test_what_backward_keeps_of_the_steps_is_half(api, case):
    rnn, params, (x,) = rnn_of_table(api, case, "p=f32,c=bf16,o=bf16")
    gradient = jax.grad(lambda v: rnn(v, x).astype(jnp.float32).sum())
    sites = walk(jax.make_jaxpr(gradient)(params))
    forward, _ = (site.equation for site in sites if site.name == "scan")
    assert {v.aval.dtype.name for v in forward.outvars if TIME in v.aval.shape} == {"bfloat16"}


@dataclasses.dataclass(frozen=True)
class Pure:
    """A built module as a function of its parameters, which calls it under the policy given."""

    module: Any
    call: Callable[..., Any]
    params: Any


@dataclasses.dataclass(frozen=True)
class Api:
    name: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return self.name

    def cell(self, lib: Any, name: str, **options: Any) -> Any:
        """Makes a cell; a name may end with options: "SimpleCell residual"."""
        name, _, option = name.partition(" ")
        given = {"residual": {"residual": True}, "no reset": {"reset_gate": False}}
        options |= given.get(option, {})
        if name == "ConvLSTMCell":
            return lib.ConvLSTMCell(HIDDEN, kernel_size=(2,), **options)
        if self.name == "linen":
            return getattr(lib, name)(HIDDEN, **options)
        return getattr(lib, name)(WIDTH, HIDDEN, rngs=lib.Rngs(0), **options)

    def pure(
        self, build: Callable[[], Any], *args: Any, policy: Any = None, abstract: bool = False
    ) -> Pure:
        """Builds a module and its parameters; `args` are what it is initialized with.

        Where it is `abstract`, linen's parameters are shapes and dtypes.
        """
        graphdef: Any = None
        rest: Any = None
        with scope(policy):
            module = build()
            if self.name == "linen":
                init = functools.partial(jax.eval_shape, module.init)
                params = (init if abstract else jax.jit(module.init))(KEY, *args)
            else:
                graphdef, params, rest = flax.nnx.split(module, flax.nnx.Param, ...)

        def call(params: Any, *args: Any, **kwargs: Any) -> Any:
            with scope(policy):
                if self.name == "linen":
                    return module.apply(params, *args, **kwargs)
                return flax.nnx.merge(graphdef, params, rest, copy=True)(*args, **kwargs)

        return Pure(module, call, params)


LINEN, NNX = Api("linen", linen, flax.linen), Api("nnx", nnx, flax.nnx)
_BOTH = ("SimpleCell", "SimpleCell residual", "LSTMCell", "OptimizedLSTMCell", "GRUCell")
CELLS = [(api, name) for api in (LINEN, NNX) for name in _BOTH]
CELLS += [(LINEN, name) for name in ("MGUCell", "MGUCell no reset", "ConvLSTMCell")]


def scope(policy: Any) -> Any:
    """The scope of a policy, or of a policy and rules."""
    return use_policy(*policy) if isinstance(policy, tuple) else scope_of(policy)


def shape_of(name: str) -> tuple[int, ...]:
    """The shape of one step's input."""
    return (BATCH, 3, WIDTH) if name == "ConvLSTMCell" else (BATCH, WIDTH)


def sequence(name: str = "", steps: int = TIME) -> jax.Array:
    """(batch, time, features...)."""
    batch, *rest = shape_of(name)
    return jnp.asarray(np.random.default_rng(0).normal(size=(batch, steps, *rest)), jnp.float32)


def rnn_of(api: Any, lib: Any, name: str = "LSTMCell", **options: Any) -> Any:
    return lib.RNN(api.cell(lib, name, **options), return_carry=True)


def loop(api: Api, lib: Any, policy: str | None = None, name: str = "LSTMCell") -> Pure:
    """An RNN over a cell of `lib`."""
    return api.pure(lambda: rnn_of(api, lib, name), sequence(name), policy=policy)


def matmul_dtypes(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of all operands and results of all matmuls and convolutions."""
    found = named(operations(fn, *args), "dot_general", "conv_general_dilated")
    assert found
    return {dtype for op in found for dtype in (*op.inputs, *op.outputs)}


EACH_LOOP = pytest.mark.parametrize(("api", "name"), CELLS, ids=lambda x: str(x))
EACH_POLICY = pytest.mark.parametrize(
    "policy", ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
)
LOOPS_OF_BOTH = pytest.mark.parametrize("api", (LINEN, NNX), ids=str)


def traced(api: Any, build: Any, policy: Any = None, name: str = "", **kwargs: Any) -> Any:
    """Returns the dtypes of parameters, carry, outputs and matmuls."""
    x = sequence(name)
    model = api.pure(build, x, policy=policy, abstract=True)
    carry, y = jax.eval_shape(lambda p, x: model.call(p, x, **kwargs), model.params, x)
    return tuple(map(dtypes_of, (model.params, carry, y))), matmul_dtypes(
        model.call, model.params, x
    )


def text(model: Any, *args: Any) -> str:
    return jax.jit(lambda *args: model.call(*args)).lower(model.params, *args).as_text()


def names(*given: str) -> tuple[set[str], ...]:
    """Returns a set of one dtype for each name."""
    return tuple({jnp.dtype(name).name} for name in given)


def of_policy(text: str) -> tuple[tuple[set[str], ...], set[str]]:
    policy = get_policy(text)
    compute = policy.compute_dtype.name
    return names(policy.param_dtype.name, compute, policy.output_dtype.name), {compute}


@pytest.mark.cases(fast=1, slow=13)
@EACH_POLICY
@EACH_LOOP
def test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype(api, name, policy):
    build = lambda: rnn_of(api, api.ours, name)  # noqa: E731
    assert traced(api, build, policy, name) == of_policy(policy)
    if name in ("LSTMCell", "ConvLSTMCell"):  # an initial carry may come in any dtype
        for given in ("float32", "bfloat16", "float16"):
            carry = (jnp.zeros((*shape_of(name)[:-1], HIDDEN), given),) * 2
            assert traced(api, build, policy, name, initial_carry=carry) == of_policy(policy)


@pytest.mark.cases(fast=1, slow=10)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@EACH_LOOP
def test_a_ported_rnn_obeys_as_ours_does(api, name, policy):
    def port() -> Any:
        return api.ours.apply_policy(rnn_of(api, api.theirs, name), policy)

    x = sequence(name)
    ours = api.pure(lambda: rnn_of(api, api.ours, name), x, policy=policy, abstract=True)
    ported = api.pure(port, x, abstract=True)
    assert dtypes_of(ported.params) == dtypes_of(ours.params)
    assert text(ported, x) == text(ours, x)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without its carry": {"return_carry": False},
    "seq_lengths": {"seq_lengths": np.array([2, 5])},
    "reverse": {"reverse": True},
    "reverse, keep_order": {"reverse": True, "keep_order": True},
    "all": {"reverse": True, "keep_order": True, "seq_lengths": np.array([4, 1])},
    "time_major": {"time_major": True},
    "init_key": {"init_key": jax.random.key(3)},
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("option", OPTIONS)
@LOOPS_OF_BOTH
def test_every_option_of_an_rnn_does_what_it_does_in_flax(api, option):
    if api is NNX and option == "init_key":
        pytest.skip("linen's alone")
    runs = (api.theirs, None), (api.ours, None), (api.ours, MIXED)
    models = [loop(api, lib, policy) for lib, policy in runs]
    expected, plain, out = (m.call(m.params, sequence(), **OPTIONS[option]) for m in models)
    assert_same_bits(plain, expected)
    *carry, y = out if isinstance(out, tuple) else (out,)
    assert dtypes_of(y) == {"float32"} and dtypes_of(carry) <= {"bfloat16"}
    assert_close(out, expected, atol=2**-6)


@pytest.mark.cases(slow=1)
@LOOPS_OF_BOTH
def test_the_carry_that_an_rnn_returns_starts_the_next_call_exactly_where_one_long_call_would_be(
    api,
):
    x, rnn = sequence(steps=6), loop(api, api.ours, MIXED)
    _, whole = rnn.call(rnn.params, x)
    carry, first = rnn.call(rnn.params, x[:, :3])
    _, second = rnn.call(rnn.params, x[:, 3:], initial_carry=carry)
    assert_same_bits(jnp.concatenate([first, second], 1), whole)


@pytest.mark.cases(fast=1, slow=9)
@EACH_POLICY
@pytest.mark.parametrize("ported", [False, True])
@LOOPS_OF_BOTH
def test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype(api, ported, policy):
    def build() -> Any:
        lib = api.theirs if ported else api.ours
        halves = [lib.RNN(api.cell(lib, "GRUCell")) for _ in range(2)]
        model = lib.Bidirectional(*halves, return_carry=True)
        return api.ours.apply_policy(model, policy) if ported else model

    found, _ = traced(api, build, policy)
    assert found == of_policy(policy)[0]
    model = api.pure(build, sequence(), policy=policy, abstract=True)
    carry, y = jax.eval_shape(model.call, model.params, sequence())
    wide = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), carry)
    again, _ = jax.eval_shape(lambda p: model.call(p, sequence(), initial_carry=wide), model.params)
    assert (y.shape, again) == ((BATCH, TIME, 2 * HIDDEN), carry)


@pytest.mark.cases(slow=1)
@LOOPS_OF_BOTH
def test_a_cell_may_have_a_policy_of_its_own_and_linens_takes_that_of_its_rnn(api):
    def around(scope: Any = None, **options: Any) -> Any:
        return traced(api, lambda: rnn_of(api, api.ours, **options), scope)[0]

    assert around(dtype_policy=MIXED) == names("f4", "bfloat16", "f4")
    assert around("bfloat16", dtype_policy="float32") == names("f4", "f4", "bfloat16")

    def given() -> Any:
        cell = api.cell(api.ours, "LSTMCell")
        return api.ours.RNN(cell, return_carry=True, dtype_policy=MIXED)

    if api is LINEN:
        assert traced(api, given)[0] == names("f4", "bfloat16", "f4")
        return
    with pytest.raises(ValueError, match=r"^RNN\(dtype_policy=.*LSTMCell.* had been built bef"):
        given()


def ruled(api: Any, lib: Any, policy: str, rules: Any, name: str = "LSTMCell") -> Any:
    """Traces an RNN under rules: those of a scope for linen's cells of ours, else of a port."""
    if api is LINEN and lib is api.ours:
        return traced(api, lambda: rnn_of(api, lib, name), (policy, rules))
    build = lambda: api.ours.apply_policy(rnn_of(api, lib, name), policy, rules)  # noqa: E731
    return traced(api, build)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("ported", [False, True])
@pytest.mark.parametrize("pattern", ["cell", "our class", "Flax's class"])
@LOOPS_OF_BOTH
def test_rules_by_path_and_class_reach_a_cell(api, pattern, ported):
    classes = {"our class": api.ours.LSTMCell, "Flax's class": api.theirs.LSTMCell}
    rules = [(classes.get(pattern, pattern), "float32")]
    found = ruled(api, api.theirs if ported else api.ours, "bfloat16", rules)
    assert found == (names("f4", "f4", "bfloat16"), {"float32"})


@pytest.mark.cases(slow=1)
@LOOPS_OF_BOTH
def test_rules_reach_the_layers_inside_a_cell_under_strict_promotion_too(api):
    found = ruled(api, api.ours, MIXED, [("cell/h.", "float32")])
    assert found == (names("f4", "bfloat16", "f4"), {"bfloat16", "float32"})
    with pytest.raises(ValueError, match="Rule 'cell/h_' matched no module"):
        ruled(api, api.ours, MIXED, [("cell/h_", "float32")])


@pytest.mark.cases(fast=1)
@LOOPS_OF_BOTH
def test_a_ported_cell_keeps_an_explicit_dtype_where_asked(api):
    def build(**options: Any) -> Any:
        model = rnn_of(api, api.theirs, dtype=jnp.float32)
        return api.ours.apply_policy(model, MIXED, **options)

    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
        kept, _ = traced(api, lambda: build(keep_explicit=True))
    assert kept == names("f4", "f4", "f4")
    assert traced(api, build)[0] == names("f4", "bfloat16", "f4")


@pytest.mark.cases(slow=1)
@LOOPS_OF_BOTH
def test_stacked_cells_and_stacked_rnns_hand_on_compute_dtype(api):
    def cell(name: str, *sizes: int) -> Any:
        cls = getattr(api.ours, name)
        return cls(sizes[-1]) if api is LINEN else cls(*sizes, rngs=api.ours.Rngs(0))

    def stacked(wrap: Any, name: str) -> Any:
        layers = [wrap(cell(name, WIDTH, WIDTH)) for _ in range(2)]
        return api.ours.Sequential(layers) if api is LINEN else api.ours.Sequential(*layers)

    carry = (jnp.zeros((BATCH, WIDTH), jnp.bfloat16),) * 2
    cells, rnns = (lambda cell: cell, "LSTMCell"), (api.ours.RNN, "GRUCell")
    for how, args in ((cells, (carry, sequence()[:, 0])), (rnns, (sequence(),))):
        model = api.pure(lambda how=how: stacked(*how), *args, policy=MIXED, abstract=True)
        out = jax.eval_shape(model.call, model.params, *args)
        assert jax.tree.leaves(out)[-1].dtype == jnp.float32
        assert matmul_dtypes(model.call, model.params, *args) == {"bfloat16"}
        casts = named(operations(model.call, model.params, *args), "convert_element_type")
        wide = [op for op in casts if op.outputs == ("float32",)]
        # On the way out, and for a half-precision carry, which own code reads in float32.
        assert len(wide) <= len(jax.tree.leaves(out)) + 2 * len(jax.tree.leaves(args[0]))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("lib", [linen, flax.linen], ids=["ours", "ported"])
def test_a_rule_for_the_parts_of_an_optimized_linen_cell_is_rejected(lib):
    name = "OptimizedLSTMCell"
    text = r"^Rule 'cell/hi' matched no module. Modules seen: cell\. Rules for"
    with pytest.raises(ValueError, match=text):
        ruled(LINEN, lib, MIXED, {"cell/hi": "float32"}, name)
    (params, *_), _ = ruled(LINEN, lib, MIXED, {"cell(/hi)?": "p=bf16,c=f32"}, name)
    assert params == {"bfloat16"}
    cell: Any = linen.OptimizedLSTMCell(HIDDEN)
    carry, x = cell.initialize_carry(KEY, (BATCH, WIDTH)), jnp.ones((BATCH, WIDTH))
    with use_policy(MIXED, {"h.": "float32"}), pytest.raises(ValueError, match="only the root"):
        jax.eval_shape(cell.init, KEY, carry, x)


OVER_TIME: Any = {
    "variable_broadcast": "params",
    "split_rngs": {"params": False},
    "in_axes": 1,
    "out_axes": 1,
}
OF_EITHER = pytest.mark.parametrize("nn", [linen, flax.linen], ids=["ours", "flax"])


class FunctionScan(flax.linen.Module):
    """The function form, as third-party models have it, with cells of either library."""

    nn: Any

    @flax.linen.compact
    def __call__(self, x):
        cell = self.nn.LSTMCell(HIDDEN)
        carry = cell.initialize_carry(KEY, x[:, 0].shape)
        return flax.linen.scan(lambda cell, carry, x: cell(carry, x), **OVER_TIME)(cell, carry, x)


@pytest.mark.cases(fast=1)
@OF_EITHER
def test_a_class_lifted_cell_runs_in_compute_dtype_with_its_boundary_outside_the_loop(nn):
    x, cell = sequence(), nn.scan(nn.LSTMCell, **OVER_TIME)(HIDDEN)
    cell = linen.apply_policy(cell, MIXED) if nn is flax.linen else cell.clone(dtype_policy=MIXED)
    carry = cell.initialize_carry(KEY, x[:, 0].shape)
    (last, y), variables = jax.eval_shape(lambda: cell.init_with_output(KEY, carry, x))
    assert (dtypes_of(variables), dtypes_of(last), dtypes_of(y)) == (
        {"float32"},
        dtypes_of(carry),
        {"float32"},
    )
    assert matmul_dtypes(cell.apply, variables, carry, x) == {"bfloat16"}
    (scan,) = named(operations(cell.apply, variables, carry, x), "scan")
    assert set(scan.outputs) == {"bfloat16"} | dtypes_of(carry)


@pytest.mark.slow
@OF_EITHER
def test_a_function_form_scan_of_a_cell_keeps_its_carrys_type(nn):
    model: Any = linen.apply_policy(FunctionScan(nn), MIXED)
    (_, y), variables = jax.eval_shape(lambda: model.init_with_output(KEY, sequence()))
    assert (dtypes_of(variables), dtypes_of(y)) == ({"float32"}, {"float32"})
    assert matmul_dtypes(model.apply, variables, sequence()) == {"bfloat16"}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_a_rematerialized_cell_and_rnn_give_the_same_gradients(name):
    x, plain = sequence(), loop(LINEN, linen, MIXED, name)
    cell, rematerialized = getattr(linen, name), linen.remat(getattr(linen, name))

    def gradients(rnn: Any) -> Any:
        return jax.jit(jax.grad(lambda v: rnn.apply(v, x).sum()))(plain.params)

    with use_policy(MIXED):
        expected = gradients(linen.RNN(cell(HIDDEN)))
        for rnn in (linen.RNN(rematerialized(HIDDEN)), linen.remat(linen.RNN)(cell(HIDDEN))):
            assert dtypes_of(jax.eval_shape(rnn.apply, plain.params, x)) == {"float32"}
            assert_close(gradients(rnn), expected, atol=2**-5)


@pytest.mark.slow
def test_a_scan_over_stacked_rnns_and_a_rematerialized_rnn_run_in_compute_dtype():
    class Stack(nnx.Module):
        def __init__(self) -> None:
            @flax.nnx.vmap(in_axes=0, out_axes=0)
            def build(key: Any) -> Any:
                return nnx.RNN(nnx.GRUCell(HIDDEN, HIDDEN, rngs=flax.nnx.Rngs(key)))

            self.rnns = build(jax.random.split(jax.random.key(0), 2))

        def __call__(self, x: Any) -> Any:
            @flax.nnx.scan(in_axes=(0, flax.nnx.Carry), out_axes=flax.nnx.Carry)
            @flax.nnx.remat
            def layers(rnn: Any, x: Any) -> Any:
                return rnn(x)

            return layers(self.rnns, x)

    x = sequence()[..., :HIDDEN]
    with use_policy(MIXED):
        graph, params, rest = flax.nnx.split(Stack(), flax.nnx.Param, ...)
    call = lambda params, x: flax.nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
    assert matmul_dtypes(call, params, x) == {"bfloat16"}
    y = jax.jit(call)(params, x)
    assert (y.dtype, y.shape) == (jnp.float32, x.shape)
    loss = lambda params: jnp.square(call(params, x)).sum()  # noqa: E731
    assert dtypes_of(jax.eval_shape(jax.grad(loss), params)) == {"float32"}
