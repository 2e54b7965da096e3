"""Exchanges beside kernels: the time of a program's schedule."""

import pytest

from policy.inspect.hlo.costs import Costs, costs_of
from policy.inspect.hlo.timeline import Timeline


@pytest.mark.parametrize(
    ("steps", "elapsed"),
    [
        ([("start", "a", 5), ("run", 3), ("wait", "a")], 5),  # two more at its end
        ([("start", "a", 5), ("run", 8), ("wait", "a")], 8),  # hidden
        ([("start", "a", 5), ("wait", "a"), ("run", 8)], 13),  # nothing between
        ([("run", 8), ("exchange", 5)], 13),
        # The links carry one after another.
        ([("start", "a", 5), ("start", "b", 5), ("run", 8), ("wait", "b"), ("wait", "a")], 10),
        ([("start", "a", 5), ("start", "b", 5), ("wait", "a"), ("run", 8), ("wait", "b")], 13),
        # A loop of 8, whose own exchanges leave the links 2.
        ([("start", "a", 5), ("run", 8, 6), ("wait", "a")], 11),
        ([("start", "a", 5), ("run", 3)], 5),  # waited for at the end
        ([("wait", "a"), ("run", 3)], 3),  # started elsewhere
    ],
)
def test_an_exchange_takes_what_the_kernels_beside_it_leave(steps, elapsed):
    timeline = Timeline()
    for name, *arguments in steps:
        getattr(timeline, name)(*arguments)
    timeline.wait_for_all()
    assert timeline.elapsed == elapsed


SENT = 4 * 256  # bytes of an array here
KERNEL = 'f32[256]{0} add(%a, %a), backend_config={"estimated_cycles":"1000"}'


def program(*lines: str, before: str = "") -> Costs:
    """Returns the costs of an entry of some lines, whose exchanges take a cycle for each byte."""
    body = "\n".join(f"  %{line}" for line in lines)
    text = (
        f"HloModule m, is_scheduled=true\n{before}\nENTRY %main (a: f32[256]) -> f32[256] {{\n"
        f"  %a = f32[256]{{0}} parameter(0)\n{body}\n  ROOT %out = f32[256]{{0}} bitcast(%a)\n}}\n"
    )
    return costs_of(text, exchange_time=lambda sent: sum(sent.values()))


START = "p = (f32[256]{0}, f32[256]{0}, u32[], u32[]) collective-permute-start(%a), channel_id=1"
DONE = "q = f32[256]{0} collective-permute-done(%p)"
SYNC = "g = f32[256]{0} all-gather(%a), channel_id=2, dimensions={0}"
K1, K2 = f"k.1 = {KERNEL}", f"k.2 = {KERNEL}"


@pytest.mark.parametrize(
    ("lines", "elapsed"),
    [
        ((START, K1, DONE), SENT),
        ((START, K1, K2, DONE), 2000),
        ((START, DONE, K1), SENT + 1000),
        ((K1, SYNC), 1000 + SENT),
        ((START, SYNC, K1, DONE), 2 * SENT),
    ],
)
def test_kernels_between_a_start_and_its_end_run_beside_the_exchange(lines, elapsed):
    costs = program(*lines)
    sent = sum(costs.collectives.values())
    assert (costs.elapsed, costs.busy) == (elapsed, sent)
    assert costs.time == 1000 * len([line for line in lines if line.startswith("k")])


def gather(name: str) -> str:
    return f"""%{name} (x.{name}: f32[256]) -> f32[256] {{
  %x.{name} = f32[256]{{0}} parameter(0)
  ROOT %g.{name} = f32[256]{{0}} all-gather(%x.{name}), channel_id=7, dimensions={{0}}
}}
"""


def fusion(name: str, of: str, cycles: int) -> str:
    config = f'backend_config={{"estimated_cycles":"{cycles}"}}' if cycles else ""
    return f"{name} = f32[256]{{0}} fusion(%a), kind=kCustom, calls=%{of}, {config}"


LOOP = (
    f"{gather('begin')}{gather('step')}{gather('end')}"
    "%body (a: f32[256]) -> f32[256] {\n  %a = f32[256]{0} parameter(0)\n"
    f"  %{fusion('fusion.1', 'step', 100)}\n  ROOT %b = f32[256]{{0}} bitcast(%fusion.1)\n}}\n"
    "%condition (s: f32[256]) -> pred[] {\n  %s = f32[256]{0} parameter(0)\n"
    "  ROOT %yes = pred[] constant(true)\n}\n"
)


def test_an_exchange_that_a_loop_runs_beside_counts_once():
    turns = 'backend_config={"known_trip_count":{"n":"6"}}'
    loop = f"loop = f32[256]{{0}} while(%a), condition=%condition, body=%body, {turns}"
    begin = fusion("async-collective-start.1", "begin", 0)
    end = fusion("async-collective-done.1", "end", 0)
    costs = program(begin, loop, end, K1, before=LOOP)
    assert costs.collectives == {("all-gather", "f32"): SENT}
    assert (costs.time, costs.busy, costs.elapsed) == (1600, SENT, SENT + 1000)
    alone = program(loop, K1, before=LOOP)  # one that starts in no other place is the loop's own
    assert alone.collectives == {("all-gather", "f32"): 6 * SENT}
    assert alone.elapsed == 6 * (100 + SENT) + 1000


def test_without_times_of_exchanges_kernels_run_one_after_another():
    text = "HloModule m\nENTRY %main (a: f32[256]) -> f32[256] {\n  %a = f32[256]{0} parameter(0)\n"
    text += f"  %{START}\n  %{K1}\n  ROOT %{DONE}\n}}\n"
    assert costs_of(text).elapsed == costs_of(text).time == 1000
