"""An audit as figures, JSON and text."""

import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy import PolicyRules, audit
from policy.inspect.audit.findings import FINDING_KINDS
from policy.inspect.audit.render.text import folded_pattern, text
from policy.inspect.audit.report import Audit, Finding, Operation
from tests.eight_devices import ROOT
from tests.policy.inspect.audit.corpus.planting import BF16, F32, shape

SHARE = 1024 / (1024 + 13 * 64)  # of FLOPs in float32


def block(x, w):
    with jax.named_scope("attention"):
        return jax.nn.softmax(x @ w)


@pytest.fixture(scope="module")
def report() -> Audit:
    def network(x, weights, wide):
        with jax.named_scope("Net"):
            for i, w in enumerate(weights):
                with jax.named_scope(f"block_{i}"):
                    x = block(x, w)
            with jax.named_scope("head"):
                return x @ weights[0], wide @ wide

    return audit(network, shape(2, 4), [shape(4, 4)] * 12, shape(8, 8, dtype=F32))


def test_an_operation_says_what_it_multiplies_sums_and_returns():
    def products(x, w, image, kernel):
        wide = jnp.matmul(x, w, preferred_element_type=F32)
        named = lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.BF16_BF16_F32
        )
        plain, image = x @ w, lax.conv_general_dilated(image, kernel, (1, 1), "SAME")
        return wide, named, plain, image, jnp.sum(x)

    shapes = shape(2, 4), shape(4, 4), shape(1, 2, 5, 5), shape(3, 2, 3, 3)
    found = audit(products, *shapes).operations
    sums = [op for op in found if op.accumulation]
    rows = [(op.kind, op.operands, op.accumulation, op.result, op.flops) for op in sums]
    two = ("bfloat16", "bfloat16")
    assert rows[0] == ("dot", two, "float32", "float32", 64)
    assert rows[1][:3] == ("dot", two, "float32")
    assert rows[2] == ("dot", two, "backend", "bfloat16", 64)
    assert rows[3] == ("convolution", two, "backend", "bfloat16", 2 * 75 * 18)
    assert rows[4] == ("reduction", ("float32",), "float32", "float32", 8)
    assert all(re.fullmatch(r"test_report.py:\d+ \(products\)", op.source) for op in found)


def test_figures_are_sums_over_operations_and_equal_ones_on_one_line_are_one_row(report):
    assert report.f32_matmul_share == pytest.approx(SHARE)
    assert sum(report.bytes_by_dtype.values()) == sum(op.bytes for op in report.operations)
    assert report.paths[0] == "block_0/attention" and "head" in report.paths
    found = [op for op in report.operations if op.path == "block_3/attention"]
    assert [op.count for op in found if op.primitive == "exp"] == [1]


def test_findings_come_the_gravest_first(report):
    kinds = [finding.kind for finding in report.findings]
    assert set(kinds) == {"low-precision-function", "float32-matmul"}
    assert kinds == sorted(kinds, key=list(FINDING_KINDS).index)
    assert f"with {SHARE:.1%} of the FLOPs of all matmuls" in report.findings[-1].message


def test_the_bytes_that_are_kept_in_float32_are_given_for_every_turn_of_a_loop():
    def layers(w, x):
        layer = lambda h, _: (jnp.tanh((h @ w.astype(BF16)).astype(F32)).astype(BF16), None)  # noqa: E731
        return lax.scan(layer, x, None, length=5)[0]

    report = audit(layers, shape(4, 4, dtype=F32), shape(8, 4), backward=True)
    (message,) = [each.message for each in report.findings if each.kind == "float32-residual"]
    found = re.match(r"([\d,]+) bytes in (\d+) float32 arrays? (?:is|are) saved", message)
    assert found is not None and "computed elementwise from bfloat16" in message
    size, arrays = int(found[1].replace(",", "")), int(found[2])  # JAX versions differ in how many
    assert arrays in (1, 2) and size == arrays * 5 * 8 * 4 * 4


def test_the_remedy_of_a_broadcast_gradient_removes_its_finding():
    x, bias = shape(8, 4), shape(4, dtype=F32)
    narrowed = lambda bias, x: x + bias.astype(BF16)[None]  # noqa: E731
    repeated = lambda bias, x: x + jnp.broadcast_to(bias[None], x.shape).astype(BF16)  # noqa: E731
    (finding,) = audit(narrowed, bias, x, backward=True, params=0).findings
    assert finding.is_backward and finding.primitive == "reduce_sum"
    assert "such as a bias: broadcast it in float32 and cast the result." in finding.message
    assert not audit(repeated, bias, x, backward=True, params=0).findings


def test_the_docs_list_every_kind_of_finding_in_this_order():
    page = (ROOT / "docs" / "audit.md").read_text("utf-8")
    table = page.partition("\n## Findings\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(FINDING_KINDS)


def test_json_has_everything_and_keeps_its_names(report):
    read = json.loads(report.to_json())
    figures = "flops_by_dtype bytes_by_dtype matmul_flops_by_dtype f32_matmul_share"
    named = f"version name policy attention {figures} eight_bit_matmul_share findings operations"
    assert list(read) == named.split()
    assert read["version"] == 1 and read["name"] == "network"
    assert read["operations"][0] == json.loads(json.dumps(dataclasses.asdict(report.operations[0])))
    of_operation = "path kind primitive operands accumulation result source is_backward count flops"
    of_finding = "kind path primitive dtypes message source is_backward count"
    for cls, names in (Operation, f"{of_operation} bytes precision"), (Finding, of_finding):
        assert [field.name for field in dataclasses.fields(cls)] == names.split()
    assert "\n" not in report.to_json(indent=None)


def test_text_has_findings_before_the_tree_of_modules(report):
    lines = text(report).splitlines()
    assert lines[0] == "audit of network: 13 findings"
    (header,) = [line for line in lines if line.startswith("  operations")]
    assert lines.index("findings") < lines.index(header)
    assert r"  low-precision-function  block_\d+/attention  exp bf16 x12" in lines
    assert any(line.startswith(r"  block_\d+  ") for line in lines)
    assert sum("attention" in line and "of FLOPs" in line for line in lines) == 1
    dots = [line.split() for line in lines if line.strip().startswith("dot_general")]
    (dot,) = [dot for dot in dots if "f32" in dot]
    assert dot[:5] == ["dot_general", "f32", "f32", "f32", "f32"]
    assert all(len(line) <= 120 for line in lines)
    assert str(report) == text(report)


@pytest.mark.parametrize(
    ("paths", "expected"),
    (
        (["a_0", "a_1", "a_2"], "a_[0-2]"),
        (["Net:a_0", "Net:a_1"], "Net:a_[0-1]"),
        (["layers/0/up", "layers/2/up"], "layers/(?:0|2)/up"),
        (["b_1/d_0", "b_1/d_1"], "b_1/d_[0-1]"),
        (["{odd}/x.1", "{odd}/x.2"], r"\{odd\}/x\.[1-2]"),
        (["a_0/b_0", "a_0/b_1", "a_1/b_1"], "a_0/b_[0-1], a_1/b_1"),
        (["x.y"], "x.y"),
        (["a_00", "a_01"], "a_00, a_01"),
        ([f"a_{i}" for i in range(12)], r"a_\d+"),
        ([f"a_{i}" for i in range(11)], "a_(?:0|1|2|3|4|5|6|7|8|9|10)"),
        ([""], ""),
    ),
)
def test_paths_that_differ_in_numbers_are_folded_to_patterns_that_match_them_and_no_others(
    paths, expected
):
    every = list(map(below, [*paths, *(f"a_{i}" for i in range(12)), "a_1/b_0", "layers/1/up"]))
    assert folded_pattern(paths, every) == expected
    patterns = PolicyRules(dict.fromkeys(expected.split(", "), "f32"))
    assert {path for path in every if patterns.match(path, model="Net") is not None} == set(
        map(below, paths)
    )


def below(path: str) -> str:
    return path.removeprefix("Net:")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("no", ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}))
@pytest.mark.parametrize("file", (Terminal, io.StringIO))
def test_colors_are_for_terminals_and_for_nobody_who_said_no(report, monkeypatch, no, file):
    colored = file is Terminal and not no
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in no.items():
        monkeypatch.setenv(name, value)
    out = file()
    report.show(out)
    assert ("\x1b[" in out.getvalue()) == colored
    assert not colored or "\x1b[31m13 findings\x1b[0m" in out.getvalue()
