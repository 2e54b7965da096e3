"""What runs in less than reduction_dtype and may, with the reason. One that is not needed fails the
table.
"""

from __future__ import annotations

_GATES = "a gate: elementwise, in compute_dtype as in Flax"
_RATE = "dropout divides each number that is left by a constant"
_LSTM = {"tanh": _GATES, "logistic": _GATES}
_ATTENTION = {"div": f"{_RATE}: what it divides are rounded weights"}

# By layer and primitive: functions of single numbers, of which no statistic or softmax is made.
ELEMENTWISE: dict[str, dict[str, str]] = {
    "Dropout": {"div": _RATE},
    "MultiHeadDotProductAttention": _ATTENTION,
    "MultiHeadAttention": _ATTENTION,
    "SimpleCell": {"tanh": _GATES},
    **dict.fromkeys(("GRUCell", "MGUCell", "LSTMCell", "OptimizedLSTMCell", "ConvLSTMCell"), _LSTM),
    **dict.fromkeys(("RNN", "Bidirectional"), _LSTM),
}

_FLIP = {
    "scatter-add": "the transpose of reversing a sequence: a permutation, each place added to once"
}

# By wing, case and primitive: sums that round nothing.
UNROUNDED_SUMS: dict[tuple[str, str], dict[str, str]] = {
    ("linen", "RNN of lengths"): _FLIP,
    ("nnx", "RNN of lengths"): _FLIP,
}
