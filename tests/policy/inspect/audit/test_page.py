"""The page of an audit: self-contained, escaped, and alive in a browser."""

import html
import json
import math
import pathlib
import re
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from typing import Any

import pytest

from policy.inspect.audit.operations import tree_of
from policy.inspect.audit.render.html import page
from policy.inspect.audit.report import Audit, Finding, Operation
from policy.inspect.compare.comparison import Comparison, Row
from policy.inspect.render.html import Markup, escaped, join_markup, tag
from tests.scripts import docs_script

HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\"'&"
)


def operation(path, **changes):
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "kind": "dot",
        "name": "dot_general",
        "flops": 1_000_000,
    }
    given |= {"source": "model.py:12 (__call__)"} | changes
    dtype, flops = given["dtype"], given["flops"]
    said = (given["kind"], given["name"], (dtype, dtype), "backend", dtype, given["source"])
    return Operation(path, *said, False, 1, flops, flops // 100)


def finding(path, **changes):
    given: dict[str, Any] = {
        "kind": "low-precision reduction",
        "message": "Sums 4096 terms in bfloat16.",
    }
    given |= {"dtypes": ("bfloat16",), "source": "model.py:3 (f)", "is_backward": False, "count": 1}
    return Finding(path=path, primitive="reduce_sum", **given | changes)


LAYERS = [f"Net/layer_{i}/{name}" for i in range(3) for name in ("attn/query", "mlp/up")]
AUDIT = Audit(
    (
        *map(operation, LAYERS),
        operation("Net/head", dtype="float32", flops=4_000_000),
        operation("", dtype="float16", flops=0, kind="reduction", name="reduce_sum"),
        operation(f"Net/{HOSTILE}", source=HOSTILE),
    ),
    (
        finding("Net/layer_1/attn/query"),
        finding("Net/layer_2", kind=HOSTILE, message=HOSTILE, is_backward=True, count=12),
        finding("Net/nowhere"),  # a module that no operation stands in
    ),
    HOSTILE,
)


def row(path, error, *, kind: Any = "activation", largest=1.0, is_jump=False):
    measured = (error, 1.0, 0.0, 0.0, 0.0, largest, 65504.0, "float16", largest)
    return Row(path, kind, *measured, is_jump=is_jump)


class Elements(HTMLParser):
    """The elements of a page, each with its attributes, and the text of those that are no scripts
    or styles.
    """

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.unclosed = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # every element is closed, in order

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def all_of(elements, tag):
    return [attributes for name, attributes in elements.elements if name == tag]


# --- what is in it --------------------------------------------------------------------------------


def test_markup_is_escaped_unless_it_is_markup_already():
    assert tag("p", "<b>", tag("i", "&"), class_='a"b', data_x=None, hidden=True) == (
        '<p class="a&quot;b" hidden>&lt;b&gt;<i>&amp;</i></p>'
    )
    assert escaped(Markup("<b>")) == "<b>" and join_markup(("<", 1)) == "&lt;1"


def test_hostile_names_are_text_and_nothing_is_fetched():
    text = page(AUDIT)
    elements = Elements(text)
    assert not elements.open
    assert len(all_of(elements, "script")) == 1 and not all_of(elements, "img")
    assert HOSTILE in elements.text
    names = [name for _, attributes in elements.elements for name in attributes]
    assert not [name for name in names if name.startswith("on")]
    assert not {"src", "srcset", "data", "action"} & set(names)
    policies = [meta["content"] for meta in all_of(elements, "meta") if "http-equiv" in meta]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    assert not re.search(r"https?:|url\(|@import", text.replace("http-equiv", ""))


def test_every_link_leads_to_a_place_on_the_page_and_ids_stand_once():
    elements = Elements(page(AUDIT))
    ids = [attributes["id"] for _, attributes in elements.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {link["href"] for link in all_of(elements, "a")}
    assert links and links <= {f"#{each}" for each in ids}


def test_the_tree_adds_up_what_is_below():
    tree = tree_of(AUDIT.operations, AUDIT.findings)
    assert [node.path for node in tree.walk()][:4] == ["", "Net", "Net/layer_0", "Net/layer_0/attn"]
    layer = tree.children["Net"].children["layer_1"]
    assert layer.figures.flops_by_dtype == {"bfloat16": 2_000_000}
    assert tree.figures.flops_by_dtype == AUDIT.flops_by_dtype and tree.flops == 11_000_000
    assert tree.figures.bytes_by_dtype == AUDIT.bytes_by_dtype
    assert (layer.dtypes, layer.findings, tree.findings) == (["bfloat16"], 1, 3)
    assert tree.children["Net"].children["head"].dtypes == ["float32"]
    assert tree.children["Net"].children["nowhere"].dtypes == []


def test_findings_come_first_and_say_where_what_and_how_often():
    text = Elements(page(AUDIT)).text
    places = [text.index(title) for title in ("Findings (3)", "Shares by", "Modules", "Operations")]
    assert places == sorted(places)
    said = ("Net/layer_1/attn/query", "Sums 4096 terms in bfloat16.", "model.py:3 (f)", "backward")
    assert all(part in text for part in (*said, " 12 times"))


SIZES = [(0, "0", "0 B"), (999, "999", "999 B"), (1023_000, "1.02 M", "999 KiB")]


@pytest.mark.parametrize(
    ("number", "count", "size"), [*SIZES, (1023 * 2**20, "1.07 G", "1023 MiB")]
)
def test_numbers_are_shown_with_three_digits_and_a_unit(number, count, size):
    one = Operation("", "dot", "dot", (), "", "", "", False, 1, number, number)
    text = Elements(page(Audit((one,), ()))).text
    assert f" · {count} FLOPs" in text and size in text


def test_an_audit_of_nothing_is_a_page_too():
    text = Elements(page(Audit((), ()))).text
    said = ("A function", "None, and no policy was in force.", "FLOPs: none", "no matmul")
    assert all(part in text for part in said)


def test_a_comparison_is_shown_beside_the_audit():
    rows = row("Net/layer_1", 0.25, largest=6e4, is_jump=True), row("", math.inf, kind="output")
    options: Any = {"first_jump": "Net/layer_1", "jump_step": 2, "policy": "mixed_float16"}
    text = page(AUDIT, Comparison(rows, notes=(HOSTILE,), **options))
    elements = Elements(text)
    said = ("Against float32", "The error jumps first at Net/layer_1. In step 2", "2.50e-01")
    said = (*said, "91.60%", "under mixed_float16", "the result")
    assert all(part in elements.text for part in said)
    cell = {"data-label": "error", "data-value": "Infinity", "class": "number"}
    assert cell in all_of(elements, "td")
    assert len(all_of(elements, "svg")) == 1 and len(all_of(elements, "script")) == 1
    assert "Against float32" not in page(AUDIT)


def test_the_example_of_the_docs_writes_a_page(tmp_path, monkeypatch, capsys):
    example = docs_script("make_audit_page")
    monkeypatch.setattr(example, "audited", lambda: AUDIT)
    monkeypatch.setattr("sys.argv", ["make_audit_page.py", "--out", str(tmp_path), "--no-png"])
    example.main()
    assert (tmp_path / "audit.html").read_text() == page(AUDIT)
    assert "3 findings" in capsys.readouterr().out
    monkeypatch.setattr(example, "BROWSERS", ())
    told = r"No browser is installed .*: apt-get install chromium, or --no-png"
    with pytest.raises(SystemExit, match=told):
        example.photograph(tmp_path / "audit.html", tmp_path / "audit.png")


# --- in a browser ---------------------------------------------------------------------------------

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    # The browser itself asks for updates and time: it finds nobody.
    *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
# What a probe returns is written where `--dump-dom` shows it.
_PROBE = """
<script>
addEventListener("load", () => {
  const probe = document.createElement("pre");
  probe.id = "probe";
  const seen = (() => { PROBE })();
  seen.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  probe.textContent = JSON.stringify(seen);
  document.body.append(probe);
});
</script>
"""


def look(
    page: str, probe: str = "return {};", *, width: int = 1200
) -> tuple[dict[str, Any], list[str]]:
    """Returns what the body of a JavaScript function returns on a loaded page, and the console."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "page.html"
        file.write_text(
            page.replace("</html>", _PROBE.replace("PROBE", probe) + "</html>"), encoding="utf-8"
        )
        flags = (f"--user-data-dir={folder}/profile", f"--window-size={width},900", "--dump-dom")
        ran = subprocess.run(
            (BROWSER, *_FLAGS, *flags, file.as_uri()),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    seen = re.search(r'<pre id="probe">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert seen is not None, ran.stderr
    console = [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(seen[1])), console


needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason="no browser is installed: apt-get install chromium, which opens the page",
)

# What a reader does, in one visit: looks, sorts, searches, follows a link, folds with the keyboard.
VISIT = """
const all = (selector) => [...document.querySelectorAll(selector)];
const shown = (selector) => all(selector).filter((element) => element.checkVisibility());
const paths = () => all("#operations tbody tr").map((row) => row.cells[0].textContent);
const seen = {
  ready: document.documentElement.dataset.ready,
  error: document.documentElement.dataset.error ?? null,
  title: document.title, findings: all(".finding .places li").length, nodes: all(".node").length,
  fits: document.documentElement.scrollWidth <= innerWidth, width: innerWidth,
  opaque: getComputedStyle(document.querySelector("#modules summary.float32")).borderLeftColor,
};
const heading = (name) => all("#operations th").find((th) => th.textContent === name);
heading("FLOPs").firstElementChild.click();
seen.falling = [paths()[0], heading("FLOPs").ariaSort];
heading("FLOPs").firstElementChild.click();
seen.rising = [paths()[0], heading("FLOPs").ariaSort];
heading("path").firstElementChild.click();
seen.named = [paths()[1], heading("path").ariaSort, heading("FLOPs").ariaSort];
const search = document.getElementById("search");
const look = (words) => { search.value = words; search.dispatchEvent(new Event("input")); };
look("LAYER_2 bfloat16");
const names = () => shown(".node > summary .name").map((name) => name.textContent);
const matches = () => document.getElementById("matches").textContent;
seen.searched = [
  shown("#operations tbody tr").length, shown(".finding").length, names(), matches()];
look("");
seen.cleared = [shown("#operations tbody tr").length, matches()];
all("[data-fold=closed]")[0].click();
seen.folded = shown(".node").length;
location.hash = all(".finding a")[0].hash;
dispatchEvent(new Event("hashchange"));
seen.followed = names().includes("query");
const press = (key) => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true}));
all("[data-fold=closed]")[0].click();
document.querySelector(".tree summary").focus();
const steps = ["Right", "Right", "Right", "Down", "Up", "Left", "Left"];
seen.walked = steps.map((step) => {
  press("Arrow" + step);
  return document.activeElement.querySelector(".name").textContent;
});
all("[data-search]")[0].click();
seen.filled = search.value;
return seen;
"""


@needs_browser
def test_the_page_is_alive_in_a_browser_at_phone_width():
    seen, console = look(page(AUDIT), VISIT, width=500)
    assert console == [] and seen["fetched"] == []
    assert (seen["ready"], seen["error"], seen["title"]) == ("true", None, f"Audit of {HOSTILE}")
    nodes = [*tree_of(AUDIT.operations, AUDIT.findings).walk()]
    assert (seen["findings"], seen["nodes"]) == (3, len(nodes))
    assert seen["fits"] and seen["width"] <= 500
    assert seen["opaque"] != "rgba(0, 0, 0, 0)"
    assert seen["falling"] == ["Net/head", "descending"]
    assert seen["rising"] == ["(outside of any module)", "ascending"]
    assert seen["named"][1:] == ["ascending", "none"]
    found = ["all", "Net", "layer_2", "attn", "query", "mlp", "up"]
    assert seen["searched"] == [2, 1, found, "3 of 11 rows"]
    assert seen["cleared"] == [9, ""]
    assert seen["folded"] == 1 and seen["followed"]
    assert seen["walked"] == ["all", "Net", "Net", "layer_0", "Net", "Net", "all"]
    assert seen["filled"] == "(outside of any module)"


# What a reader sees: words that are broken in two, bars, and whether the page is wider than its
# window.
LOOK = """
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const broken = (element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      const tops = [...range.getClientRects()].map((rectangle) => Math.round(rectangle.top));
      const lines = new Set(tops);
      if (lines.size > 1) found.push(word[0]);
    }
  }
  return found;
};
const width = (element) => element.getBoundingClientRect().width;
const barOf = (node) => node.querySelector(":scope > summary .bar");
const place = (element, axis) => [element.textContent, Number(element.getAttribute(axis))];
return {
  width: innerWidth, fits: document.documentElement.scrollWidth <= innerWidth,
  text: document.body.innerText, broken: all("th, td").flatMap(broken),
  scheme: matchMedia("(prefers-color-scheme: dark)").matches,
  bars: Object.fromEntries(all(".node").filter(barOf).map((node) => {
    const pieces = all(".piece", barOf(node)).map(width).reduce((sum, each) => sum + each, 0);
    return [node.dataset.path, pieces / width(barOf(node))];
  })),
  drawn: all(".drawing circle").map((circle) => place(circle, "cx")),
  axis: all(".drawing text[text-anchor=middle]").map((text) => place(text, "x")),
};
"""


@needs_browser
@pytest.mark.parametrize("width", [420, 1300])
def test_a_reader_sees_whole_words_bars_by_share_and_infinity_apart(width):
    flops = {"convert_element_type": 1, "dynamic_update_slice": 2, "dot_general": 5}
    flops["custom_partitioning"] = 2
    operations = (
        operation(f"layer_{i}/attention/query", name=name, kind="transcendental", flops=10**6 * n)
        for i, (name, n) in enumerate(flops.items())
    )
    audit = Audit(tuple(operations), ())
    errors = {"layer_0": 1e-3, "layer_1": math.inf, "layer_2": 1.0}
    compared = tuple(row(path, error, is_jump=error > 1) for path, error in errors.items())
    seen, console = look(page(audit, Comparison(compared, first_jump="layer_1")), LOOK, width=width)
    assert console == [] == seen["broken"] and seen["fits"] and seen["width"] == max(width, 500)
    shares = {"": 1.0, "layer_0": 0.1, "layer_1": 0.2, "layer_2": 0.5, "layer_3": 0.2}
    assert {path: round(seen["bars"][path], 2) for path in shares} == shares
    axis, drawn = dict(seen["axis"]), dict(seen["drawn"])
    assert drawn["layer_1: error ∞, underflow 0.00%"] == axis["∞"] > axis["1e0"] + 20
    assert drawn["layer_2: error 1.00e+00, underflow 0.00%"] == axis["1e0"]
    assert "inf" not in seen["text"].replace("infinity", "") and "∞" in seen["text"]
