"""Kinds of advice, the gravest first, with the thresholds that decide, and parts of messages."""

from __future__ import annotations

import dataclasses

NOT_FINITE = "not-finite"
OVERFLOW = "float16-overflow"
DIVISION = "division-by-zero"
PARAMS = "params-not-finite"
BATCH = "bad-batch"
DEVICE = "bad-device"
SCALE = "loss-scale"
SKIPS = "many-skips"
VANISHED = "vanished-updates"
NO_UPDATE = "no-updates"
UNDERFLOW = "underflow"
DEAD = "dead-module"
SATURATED = "saturated-codes"
LOST_CODES = "lost-codes"
NEAR_OVERFLOW = "near-overflow"
SPIKE = "update-spike"

LEAST = 3  # records in a row, for what one record does not show
HALF = 0.5  # the share that is too much of updates, gradients and codes
SATURATION = 0.3  # a scale by the largest of each row puts 1 of n numbers at the limit
GROWN = (0.2, 3.0)  # the share of codes, and times the least of the run, that is too much as well
TIMES = 10.0  # times the largest of the records before it
BEFORE = 5  # records that a spike needs before it
SAME_SCALE = 4  # skipped steps at one loss scale
SKIPPED = 0.1  # the share of skipped steps, after the first ones
SETTLED = 30  # steps, in which a loss scale finds its level
IDLE = 10  # records in a row without any update

ADVICE_KINDS = {
    NOT_FINITE: "A result is NaN or infinite, though its operands were finite.",
    OVERFLOW: "A float16 result exceeds 65504.",
    DIVISION: "A division, root or logarithm is not finite: its operand is 0, or was rounded to 0.",
    PARAMS: "Params were NaN or infinite before the first recorded step.",
    BATCH: "The inputs of a step are not finite; or they, or its gradients, are over "
    f"{TIMES:.0f} times as large as in the {BEFORE} or more records before, and normal after it.",
    DEVICE: "In two or more records, one and the same device of several is not finite or far off.",
    SCALE: "The loss scale is below 1, or at 1 and gradients still overflow in "
    f"{LEAST} or more steps; or {SAME_SCALE} or more overflow at one scale, that stays.",
    SKIPS: f"Over {SKIPPED:.0%} of the steps are skipped, without the first {SETTLED}.",
    VANISHED: f"{HALF:.0%} or more of a param's updates round away, in {LEAST} or more records in "
    "a row; params in 16 bits or fewer.",
    NO_UPDATE: f"All updates are 0 in {IDLE} or more records in a row, and gradients are not.",
    UNDERFLOW: f"{HALF:.0%} or more of the non-zero float16 gradients or updates are subnormal, in "
    f"{LEAST} or more records in a row, or that share of updates is 0 where gradients are not.",
    DEAD: f"All outputs of a module, or all gradients through it, are 0 in {LEAST} or more records "
    "in a row, after the first update.",
    SATURATED: f"{SATURATION:.0%} or more of 8-bit codes are at the limit, or {GROWN[0]:.0%} and "
    f"{GROWN[1]:.0f} times the least of the run, in two or more records.",
    LOST_CODES: f"{HALF:.0%} or more of 8-bit codes are 0 where numbers are not, in two or more "
    "records.",
    NEAR_OVERFLOW: "The largest float16 activation is within 1/8 of the limit, has grown, and at "
    "its rate overflows before the run is twice as long.",
    SPIKE: f"Updates are over {TIMES:.0f} times as large as in the {BEFORE} or more records "
    "before, and gradients are not.",
}


@dataclasses.dataclass(frozen=True)
class Advice:
    """A fault of a run, and the remedy.

    >>> from policy.inspect.runs.advice import advise
    >>> record = {"step": 7, "skipped": True, "loss_scale": 0.5, "first": None, "rows": []}
    >>> [(one.kind, one.step) for one in advise([record])]
    [('loss-scale', 7)]

    Attributes:
      kind: one of `policy.inspect.runs.advice_kinds.ADVICE_KINDS`.
      path: of the module, or of the array for params and their updates; "" outside of any.
      step, until: the first and last step that show it.
      message: the fault and the remedy, in a sentence or two each.
      line: the line of the user's code, or "".
      layers: the steps of a scan over layers, where it happens in one.
    """

    kind: str
    path: str
    step: int
    until: int
    message: str
    line: str = ""
    layers: tuple[int, ...] = ()


def rule(path: str, text: str = "float32") -> str:
    """Returns how to keep a module in another policy, in words."""
    if not path:
        return "Run these lines in policy.full_precision()"
    return f'Keep it in {text}: use_policy(..., {{"{path}": "{text}"}})'


def share(number: float) -> str:
    """Returns a share in percent, never rounded to all of it.

    >>> share(0.9999), share(1.0)
    ('99.9%', '100%')
    """
    return "100%" if number >= 1 else f"{min(number, 0.999):.1%}"
