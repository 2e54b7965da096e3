"""The command that shows a run."""

import pytest

import policy
from policy.command_line.command import main
from policy.command_line.watch import show_run
from policy.inspect.runs.advice import ADVICE_KINDS
from tests.eight_devices import ROOT
from tests.policy.inspect.runs.hand_made import made, record, row, run_of, written

HOSTILE = "\x1b[2J\x07model.py"
KERNEL = "params/block_0/kernel"
RUN = [
    *run_of(
        lambda step: row(KERNEL, "update", lost=0.9),
        lambda step: row("params/block_1/kernel", "update", lost=0.8),
        lambda step: row("layers", "activation", "float16", below=[0.0, 0.25], line=HOSTILE),
        scale=1024.0,
    ),
    record(
        10,
        row("layers", nan=0.5),
        row(KERNEL, "update", lost=0.9),
        found=made(HOSTILE, line=HOSTILE),
        scale=1024.0,
    ),
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
    row_shown = next(line for line in shown.splitlines() if line.startswith(f"  {KERNEL}  update"))
    assert row_shown.split()[-3:] == ["bf16", "90.00%", "1"]
    assert shown.rstrip("\n") == str(policy.inspect.RunLog(log)) or "\x1b" in shown


def test_advice_fails_where_that_is_asked_for(log, tmp_path, capsys):
    assert main(["watch", str(log), "--fail-on-advice"]) == 1
    assert main(["watch", str(written(tmp_path, run_of())), "--fail-on-advice"]) == 0
    capsys.readouterr()


def test_no_control_character_reaches_the_terminal(log, capsys):
    assert main(["watch", str(log)]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[2J\x07model.py" in shown and "\x1b[2J" not in shown and "\x07" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["missing.jsonl"],
            "There is no file missing.jsonl. Give the file that a RunLog",
        ),
        (["README.md"], "README.md has no record of a run in version 3"),
    ],
)
def test_bad_files_are_rejected_by_name(arguments, message, capsys):
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

    advice = show_run(str(file), follow=True, pause=pause)
    assert [look.partition(",")[0] for look in looks] == [
        "run.jsonl: 2 records of steps 0 to 1", "", "run.jsonl: 11 records of steps 0 to 10", "",
    ]  # fmt: skip
    assert {one.kind for one in advice} == {"vanished-updates", "overflow"}


def test_the_guide_has_the_kinds_of_advice_and_their_thresholds():
    guide = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
    table = [f"| `{kind}` | {meaning} |" for kind, meaning in ADVICE_KINDS.items()]
    assert "\n".join(table) in guide
