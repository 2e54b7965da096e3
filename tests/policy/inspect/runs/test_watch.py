"""The page of a run and the command that shows it."""

import html

import pytest

from policy.command_line.command import main
from policy.command_line.watch import show_run
from policy.inspect import RunLog
from policy.inspect.runs.advice import ADVICE_KINDS
from policy.inspect.runs.page import run_page
from tests.eight_devices import ROOT
from tests.policy.inspect.runs.hand_made import first, record, row, run_of, written

HOSTILE = "<script>document.title='taken'</script>\"'&"
KERNEL = "params/block_0/kernel"
RUN = [
    *run_of(
        lambda step: row(KERNEL, "update", lost=0.9),
        lambda step: row("params/block_1/kernel", "update", lost=0.8),
        lambda step: row("layers", "activation", "float16", below=[0.0, 0.25], line=HOSTILE),
        scale=1024.0,
    ),
    record(10, row("layers", nan=0.5), found=first(HOSTILE, line=HOSTILE), scale=1024.0),
]


@pytest.fixture
def log(tmp_path):
    return written(tmp_path, RUN)


def test_the_text_has_advice_with_its_places_and_the_rows_that_lose_most(log, capsys):
    assert main(["watch", str(log)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run.jsonl: 11 records of steps 0 to 10, loss scale 1024")
    assert f"vanished-updates  {KERNEL}, step 0 to 9, model.py:3" in shown
    assert "also: params/block_1/kernel" in shown
    row_shown = next(line for line in shown.splitlines() if line.startswith(f"{KERNEL}  update"))
    assert row_shown.split()[-3:] == ["█" * 10, "90.00%", "1"]
    assert shown.rstrip("\n") == str(RunLog(log)) or "\x1b" in shown


def test_advice_fails_where_that_is_asked_for(log, tmp_path, capsys):
    assert main(["watch", str(log), "--fail-on-advice"]) == 1
    assert main(["watch", str(written(tmp_path, run_of())), "--fail-on-advice"]) == 0
    capsys.readouterr()


def test_the_page_goes_to_a_file_or_the_standard_output(log, tmp_path, capsys):
    assert main(["watch", str(log), "--html", str(tmp_path / "run.html")]) == 0
    capsys.readouterr()
    assert main(["watch", str(log), "--html", "-"]) == 0
    page = (tmp_path / "run.html").read_text()
    assert page.rstrip() == capsys.readouterr().out.rstrip() == RunLog(log).to_html().rstrip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["missing.jsonl"],
            "There is no file missing.jsonl. Give the file that a RunLog",
        ),
        (["README.md"], "line 1 is not a record of a run"),
        (["README.md", "--html", "missing/run.html"], "there is no folder missing"),
    ],
)
def test_bad_files_are_refused_by_name(arguments, message, capsys):
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_grows_is_shown_again(tmp_path, capsys):
    file, looks = written(tmp_path, RUN[:2]), []

    def pause():
        looks.append(capsys.readouterr().out)
        if len(looks) == 2:
            written(tmp_path, RUN)
        if len(looks) == 4:
            raise KeyboardInterrupt

    advice = show_run(str(file), None, follow=True, pause=pause)
    assert [look.partition(",")[0] for look in looks] == [
        "run.jsonl: 2 records of steps 0 to 1", "", "run.jsonl: 11 records of steps 0 to 10", "",
    ]  # fmt: skip
    assert {one.kind for one in advice} == {"vanished-updates", "float16-overflow"}


def test_the_page_is_self_contained_and_escaped():
    page = run_page(RUN, HOSTILE)
    assert page.count("<script") == 1 and "http" not in page.replace("http-equiv", "")
    assert html.escape(HOSTILE) in page
    assert "layers[1], step 0 to 9: 25.00% lost" in page
    assert 'class="bad"' in page and "step 10: 50.00% NaN or infinite" in page


def test_a_page_of_many_steps_has_no_more_columns_than_fit():
    records = run_of(lambda step: row("a", below=float(step % 2)), steps=500)
    page = run_page(records, "run")
    assert "a, step 0 to 499: 100.00% lost" in page and len(page) < 100_000


def test_the_guide_has_the_kinds_of_advice_and_their_thresholds():
    guide = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
    table = [f"| `{kind}` | {meaning} |" for kind, meaning in ADVICE_KINDS.items()]
    assert "\n".join(table) in guide


def test_an_empty_log_has_a_page():
    assert "no records" in run_page([], "run")
