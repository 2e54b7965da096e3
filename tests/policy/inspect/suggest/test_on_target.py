"""suggest(on=): ranked by a compiler's times, few programs, and rules that hold for real."""

import dataclasses
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec

from mpmodules import linen
from policy import PolicyRules, autocast
from policy.core.policy import get_policy
from policy.inspect.estimate import costing
from policy.inspect.estimate.costing import CompiledStep
from policy.inspect.estimate.rows import PolicyCost
from policy.inspect.estimate.steps import Step
from policy.inspect.estimate.targets import CHIPS, Target
from policy.inspect.hlo.memory import MemoryUse
from policy.inspect.suggest.front import FrontPoint, front_lines, unbeaten
from policy.inspect.suggest.on_target import front_sets
from policy.inspect.suggest.suggest import suggest
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.traced.call import traced_call
from policy.inspect.traced.equation_facts import bytes_of, flops_of
from policy.inspect.traced.upcast import dtypes_of
from policy.programs.dtypes import is_half
from policy.programs.jaxprs import opened
from policy.programs.reading.walk import walk
from tests.benchmarks.accelerators import target
from tests.policy.errors import exactly, relative
from tests.programs import apply

F32 = jnp.float32


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Any:
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), F32)


class Fake(Target):
    """A TPU of which the processor at hand stands in for the device."""

    chip = property(lambda self: CHIPS["v5e"])  # type: ignore[assignment]
    devices = property(lambda self: np.array(jax.devices()[:1]))  # type: ignore[assignment]


class Absent(Target):
    """A TPU of which there are figures alone."""

    _device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    devices = property(lambda self: np.array([self._device]))  # type: ignore[assignment]


def cycles(equation: Any) -> float:
    """A kernel's cycles: bytes, or FLOPs, of which float32 takes six times as many."""
    wide = any(v.aval.dtype == F32 for v in (*equation.invars, *equation.outvars))
    is_matmul = equation.primitive.name == "dot_general"
    return bytes_of(equation) + is_matmul * flops_of(equation) * (6 if wide else 1)


def hlo(step: Step) -> str:
    """The program of a step as a compiler that fuses nothing would write it."""
    kernels = [
        f"  %k.{i} = f32[8] sine(%x), "
        f'metadata={{op_name="jit(f)/{"/".join((*site.path, site.name))}"}}, '
        f'backend_config={{"estimated_cycles":"{cycles(site.equation):.0f}"}}'
        for i, site in enumerate(walk(step.traced.jaxpr))
        if site.name not in ("jit", "pjit")
    ]
    head = ["HloModule m", "ENTRY %main (x: f32[8]) -> f32[8] {", "  %x = f32[8] parameter(0)"]
    return "\n".join([*head, *kernels, "}"])


@dataclasses.dataclass
class Compiler:
    """A compiler in the place of the target's.

    Attributes:
      texts: the programs that it has compiled.
      memory: bytes that each takes; in float32 alone, without half precision, `wide_memory`.
      exhausts: whether it rejects a program that takes more than the device has.
    """

    texts: list[str] = dataclasses.field(default_factory=list)
    memory: int = 10**6
    wide_memory: int = 10**6
    exhausts: bool = False

    def __call__(self, lowered: tuple[Step, str], target: Target, names: Any) -> CompiledStep:
        step, _ = lowered
        dtypes = dtypes_of(opened(step.traced.jaxpr)[0])
        memory = self.memory if any(map(is_half, dtypes)) else self.wide_memory
        fails = self.exhausts and memory > target.chip.memory
        self.texts.append(hlo(step))
        return CompiledStep(self.texts[-1], MemoryUse(0, 0, memory, 0, ()), 0, fails, 0.1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(costing, "lowered_step", lambda step, *_: ((step, ""), []))
    monkeypatch.setattr(costing, "compiled_step", found)
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The HLO of each program that a real compiler makes for a target."""
    found: list[str] = []
    compiled_step = costing.compiled_step

    def counted(*args: Any) -> Any:
        program = compiled_step(*args)
        found.append(program.text)
        return program

    monkeypatch.setattr(costing, "compiled_step", counted)
    return found


def model(ws: Any, x: Any) -> Any:
    """Three layers: the second loses digits in an offset, the third is wide and costs most."""
    with jax.named_scope("first"):
        x = jnp.tanh(x @ ws["first"])
    with jax.named_scope("second"):
        x = (x @ ws["second"] + F32(300)) - F32(300)
    with jax.named_scope("third"):
        return jnp.tanh(x @ ws["third"])


def arguments(width: int = 512, size: int = 8) -> Any:
    sizes = {"first": (size, size), "second": (size, size), "third": (size, width)}
    scale = 1 / math.sqrt(size)
    ws = {name: normal(*s, scale=scale, seed=i) for i, (name, s) in enumerate(sizes.items())}
    return ws, normal(8 * size, size, seed=3)


def on(target: Any = None, *args: Any, **options: Any) -> Any:
    options = {"policy": "mixed_bfloat16", "error": 0.05} | options
    return suggest(model, *(args or arguments()), on=target or Fake("v5e"), **options)


@pytest.mark.slow
def test_a_budget_chooses_the_cheapest_point_that_meets_it_and_few_programs_are_compiled(compiler):
    args = arguments()
    found = on(None, *args)
    assert len(compiler.texts) == len(found.points) <= 5
    assert found.chosen is not None and found.chosen.rules == found.rules
    assert found.error == found.chosen.error <= found.budget < found.without
    assert found.paths == ("second",) and not found.chosen.is_emulated
    within = [p.seconds for p in found.points if p.error <= found.budget]
    assert found.chosen.seconds == min(within)
    assert {0, 3} <= {len(point.paths) for point in found.points}, "both ends are points"
    ruled = exactly(autocast(model, "mixed_bfloat16", rules=found.rules))(*args)
    assert relative(ruled, jax.jit(model)(*args)) == pytest.approx(found.error, rel=1e-2)


@pytest.mark.slow
def test_without_a_budget_the_rules_are_those_of_the_cheapest_point_and_each_has_code(compiler):
    found = on(error=None, points=4)
    assert len(compiler.texts) == len(found.points) <= 4 and found.budget == math.inf
    assert found.rules == found.front[0].rules
    for place, point in enumerate(found.front):
        scope: dict[str, Any] = {"PolicyRules": PolicyRules}
        exec(point.code(), scope)
        assert scope["rules"] == point.rules and f"# {place}: PolicyRules(" in str(found)
    times = [point.seconds for point in found.front]
    errors = [point.error for point in found.front]
    assert len(times) > 2 and times == sorted(times) and errors == sorted(errors, reverse=True)
    assert all(point.cost.cycles == pytest.approx(point.seconds * 1.5e9) for point in found.front)
    assert [len(found.front[end].paths) for end in (0, -1)] == [0, 3]


@pytest.mark.slow
def test_the_set_that_meets_the_budget_is_a_point_however_few_there_are(compiler: Compiler) -> None:
    """Of three points without a budget, the third has two paths in float32."""
    assert [len(point.paths) for point in on(error=None, points=3).points] == [0, 2, 3]
    assert on(error=0.05, points=3).paths == ("second",)


@pytest.mark.slow
def test_a_program_without_memory_is_a_point_with_what_it_lacks_and_is_not_chosen(compiler):
    compiler.memory = compiler.wide_memory = 2**35
    found = on(error=None, points=3)
    assert found.chosen is None and found.front == () and found.rules == PolicyRules([])
    assert {point.missing for point in found.points} == {2**35 - int(15.75 * 2**30)}
    assert str(found).startswith("# no program fits on v5e") and "lacks 16.25 GiB" in str(found)
    missing = r"fit into the memory of v5e: at least 16\.25 GiB are missing"
    with pytest.raises(ValueError, match=missing):
        on(points=3)


@pytest.mark.slow
def test_where_float32_does_not_compile_for_memory_the_others_are_ranked_and_chosen(compiler):
    compiler.wide_memory, compiler.exhausts = 2**35, True
    found = on(error=0.05)
    (exhausted,) = (point for point in found.points if point.missing)
    assert (
        len(exhausted.paths) == 3
        and exhausted.seconds == math.inf
        and exhausted.cost.cycles is None
    )
    assert exhausted.missing == 2**35 - int(15.75 * 2**30)
    assert found.paths == ("second",) and found.error <= 0.05 < found.without
    with pytest.raises(ValueError, match=r"within an error of 0\.0001 fit into the memory"):
        on(error=1e-4)


@pytest.mark.slow
def test_paths_in_float32_are_compiled_as_their_errors_are_measured(compiler, monkeypatch):
    """A TPU multiplies float32 in bfloat16 by default: the cost would be another program's."""
    precisions: set[tuple[str, Any]] = set()

    def looked_at(step: Step, *_: Any) -> Any:
        sites = [site for site in walk(step.traced.jaxpr) if site.name == "dot_general"]
        equations = [site.equation for site in sites]
        precisions.update((str(e.invars[0].aval.dtype), e.params["precision"]) for e in equations)
        return (step, ""), []

    monkeypatch.setattr(costing, "lowered_step", looked_at)
    highest = (jax.lax.Precision.HIGHEST,) * 2
    on(error=None, points=3)
    assert precisions == {("bfloat16", None), ("float32", highest)}


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + linen.Dense(16, name="up")(x)  # a sum that takes no float32 from a layer
        return linen.Dense(4, name="head")(x)


@pytest.mark.slow
def test_layers_of_ours_are_ruled_by_the_scope_and_gradients_have_a_front_too(compiler):
    net, x = Net(), normal(8, 16)
    variables = jax.jit(net.init)(jax.random.key(0), x)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(apply(net, params, x).astype(F32)))

    options: Any = {"policy": "mixed_bfloat16", "backward": True, "params": 0, "points": 3}
    found = suggest(loss, variables, x, on=Fake("v5e"), **options)
    assert found.route == "scope" and found.of == "gradients"
    assert {e.path for e in found.evidence} == {"up", "head", "Net:"}
    ends = {len(point.paths): point for point in found.points}
    assert ends[0].error > 1e-4 and ends[3].error == 0.0
    assert ends[3].seconds != ends[0].seconds


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("route", "rules"), [("scope", {".*": "float32"}), ("autocast", {})])
def test_a_known_route_is_taken_whatever_the_rules_leave_in_half(route: Any, rules: Any) -> None:
    """Where rules keep all of it in float32, no matmul says that layers obey the scope."""
    x = jax.ShapeDtypeStruct((8, 16), F32)
    variables = jax.eval_shape(Net().init, jax.random.key(0), x)
    policy, named = get_policy("mixed_bfloat16"), PolicyRules(rules)
    arguments = (Net().apply, (variables, x), {}, False, None, policy, named)
    assert traced_call(*arguments, route)[1] == route != traced_call(*arguments)[1]


class NnxNet(flax_nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs):
        self.up = flax_nnx.Linear(16, 64, rngs=rngs)
        self.norm = flax_nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.up(x))


@pytest.mark.slow
def test_an_nnx_model_of_flax_has_a_front_and_is_as_it_was(compiler: Compiler) -> None:
    net = NnxNet(flax_nnx.Rngs(0))
    before = jax.tree.map(np.asarray, flax_nnx.state(net))
    found = suggest(net, normal(8, 16), policy="mixed_bfloat16", on=Fake("v5e"), points=3)
    assert found.route == "autocast" and len(found.front) >= 2
    assert {"up", "norm"} <= {e.path for e in found.evidence}
    after = jax.tree.map(np.asarray, flax_nnx.state(net))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


# --------------------------------------------------------------------------------------- rejections


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on": None, "error": None}, "suggest needs an error budget"),
        ({"on": "cpu"}, "by a compiler's cycles or by published peaks, and on='cpu' has neither"),
        ({"on": "v9"}, "There is no target 'v9'"),
        ({"policy": "mixed_float8"}, "doesn't search in 8 bits, but the policy is"),
        ({"policy": None}, "policy and its rules, but policy= is missing: pass it too"),
        ({"points": 2}, "points should be a number of programs to compile, at least 3, but got 2"),
        ({"on": None, "mesh": {"data": 1}}, "apply to a target, but on= is missing: pass it too"),
    ],
)
def test_what_can_not_be_asked_of_a_target_is_rejected_before_anything_is_compiled(
    options: Any, text: str, compiler: Compiler
) -> None:
    unusable: Any = None  # nothing looks at the arguments
    given: dict[str, Any] = {"on": Fake("v5e"), "policy": "mixed_bfloat16", "error": 0.1} | options
    with pytest.raises(ValueError, match=re.escape(text)):
        suggest(model, unusable, **given)
    assert not compiler.texts


def test_a_policys_text_means_the_targets_dtypes() -> None:
    with pytest.raises(ValueError, match=r"but the policy is 'p=f32,c=bf16,.*m=i8': give it"):
        suggest(jnp.matmul, normal(8, 8), policy="p=f32,c=half,m=8bit", on=Absent("v5e"))


# ------------------------------------------------------------------------ compilers of accelerators


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:1x1", "h100"])
def test_the_front_is_by_a_real_targets_compiler(name: str, programs: list[str]) -> None:
    found = on(target(name), *arguments(2048, 256), error=None, points=3)
    assert len(programs) == 3 == len(found.points)
    by_kept = {len(point.paths): point for point in found.points}
    assert (by_kept[0].cost.cycles is not None) == (name == "v5e:1x1")
    assert by_kept[3].seconds > by_kept[0].seconds, "float32 products take several passes"
    costs = {one.path: one.cost for one in found.evidence}
    assert max(costs, key=lambda path: costs[path]) == "third"
    assert found.timing in str(found) and found.target == name


@pytest.mark.slow
def test_a_step_is_spread_over_the_devices_of_a_target(programs: list[str]) -> None:
    specs = ({"first": None, "second": None, "third": None}, PartitionSpec("data"))
    found = on(target("v5e:2x2"), error=None, points=3, shardings=specs)
    assert len(programs) == 3 and all("num_partitions=4" in text for text in programs)
    assert all(point.cost.exchange_seconds is not None for point in found.points)


# --- The front of error against cost ------------------------------------------------------------


def point(
    error: float,
    seconds: float | None,
    *,
    missing: int = 0,
    uncounted: tuple[str, ...] = (),
    is_emulated: bool = True,
) -> FrontPoint:
    """Returns a point of a program that takes some seconds, and lacks `missing` bytes of memory."""
    rules = PolicyRules({f"layer_{error}".replace(".", "_"): "float32"})
    memory, capacity = 2**31 + missing, 2**31
    cost = PolicyCost("row", "", "scope", memory, capacity, 0, 0, 0, 0, {}, {}, uncounted=uncounted)
    cost = dataclasses.replace(cost, compute_seconds=seconds)
    return FrontPoint(rules, ("layer",), error, cost, is_emulated)


def test_the_front_has_what_nothing_beats_in_both_the_cheapest_first():
    few, some, every = point(0.1, 1.0), point(0.01, 2.0), point(0.0, 3.0)
    dear, worse = point(0.01, 2.5), point(0.2, 1.0)
    assert unbeaten([every, worse, dear, few, some]) == (few, some, every)


def test_of_points_alike_the_first_stays_and_none_that_does_not_fit():
    first, second = point(0.1, 1.0), point(0.1, 1.0, is_emulated=False)
    lacking, exhausted = point(0.001, 0.5, missing=2**30), point(0.001, None, missing=2**30)
    assert unbeaten([lacking, exhausted, first, second]) == (first,)


def test_the_table_says_who_is_chosen_beaten_and_lacks_memory():
    chosen = point(0.1, 1.0, is_emulated=False)
    other = point(0.01, 2.0, uncounted=("exchanges",))
    beaten, lacking = point(0.02, 3.0), point(0.0, None, missing=3 * 2**29)
    lines = front_lines([chosen, other, beaten, lacking], chosen, "v5e", "cycles", 4)
    text = "\n".join(lines)
    lines = text.splitlines()
    assert lines[0] == "# on v5e, by cycles:"
    assert lines[2].split() == ["#", "0", "0.1", "—", "1", "1.000", "1", "of", "4", "chosen"]
    assert lines[3].split()[:6] == ["#", "1", "~0.01", "—", ">", "2"]
    assert "beaten by 1" in lines[4] and "lacks 1.50 GiB of memory" in lines[5]
    assert '# 1: PolicyRules([ ("layer_0_01", "float32"), ])' in text
    assert not any(line and not line.startswith("#") for line in lines), "it is no code"


def test_the_sets_of_a_front_are_its_ends_those_asked_for_and_the_first_in_order():
    order = [3, 0, 2, 1]
    every = frozenset(order)
    assert front_sets(order, 3) == [frozenset(), every, frozenset([3, 0])]
    assert front_sets(order, 3, [frozenset([2])]) == [frozenset(), every, frozenset([2])]
    assert len(front_sets(order, 99)) == 5


def suggestion(points: tuple[FrontPoint, ...], budget: float = math.inf) -> Suggestion:
    fits = bool(points and not points[0].missing)
    rules, error = (points[0].rules, points[0].error) if fits else (PolicyRules([]), math.nan)
    found = Suggestion(rules, "mixed_bfloat16", budget, error, 0.1, (), points=points)
    chosen, timing = points[0] if fits else None, "the compiler's cycles"
    return dataclasses.replace(found, target="v5e:1x1", timing=timing, chosen=chosen)


def test_the_headline_says_what_chose_the_rules():
    points = (point(0.1, 1.0), point(0.01, 2.0))
    assert "of the cheapest point; error= chooses another" in str(suggestion(points))
    assert "# outputs within 0.2 of float32: 0.1 with" in str(suggestion(points, 0.2))
    lacking = suggestion((point(0.1, None, missing=2**30),))
    assert str(lacking).startswith("# no program fits on v5e:1x1") and lacking.front == ()
