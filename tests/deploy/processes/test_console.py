import io
import json

from deploy.processes.console import Console

LOADING = "2026-11-23 12:00:00.123 I [prefill-0] loading weights 40 %"
WARNING = "2026-11-23 12:00:00.124 W [prefill-0] slow disk"


def test_without_a_terminal_every_line_is_printed_once() -> None:
    log = io.StringIO()
    console = Console(log, None)
    console.child_line("prefill-0", LOADING)
    console.child_line("prefill-0", "Traceback (most recent call last):")
    console.end_loading()
    console.child_line("prefill-0", WARNING)
    assert log.getvalue().splitlines() == [LOADING, "Traceback (most recent call last):", WARNING]


def test_on_a_terminal_progress_is_live_and_trouble_is_kept() -> None:
    terminal = io.StringIO()
    console = Console(terminal, terminal)
    console.child_line("prefill-0", LOADING)
    console.child_line("prefill-0", WARNING)
    console.end_loading()
    shown = terminal.getvalue()
    assert LOADING not in shown
    assert "prefill-0  loading weights 40 %" in shown
    assert f"{WARNING}\n" in shown
    assert shown.endswith("\x1b[1F\x1b[J")  # the live line is taken away
    console.child_line("prefill-0", LOADING)
    assert terminal.getvalue().endswith(f"{LOADING}\n")


def test_a_separate_log_gets_everything_while_the_terminal_shows_progress() -> None:
    log, terminal = io.StringIO(), io.StringIO()
    console = Console(log, terminal)
    console.child_line("decode-0", LOADING)
    assert log.getvalue() == f"{LOADING}\n"
    assert "loading weights" in terminal.getvalue()


def test_a_redrawn_progress_bar_leaves_its_last_state() -> None:
    log = io.StringIO()
    Console(log, None).child_line("router", "10 %\r20 %\r30 %")
    assert log.getvalue() == "30 %\n"


def test_lines_of_its_own_are_json_where_those_of_others_are() -> None:
    log = io.StringIO()
    Console(log, None, "json").say("99 % done", "W")
    told = json.loads(log.getvalue())
    assert (told["level"], told["process"], told["message"]) == ("WARNING", "baton", "99 % done")


def test_what_is_made_for_people_stands_where_the_log_does_as_it_is_or_as_one_record() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    console = Console(terminal, terminal)
    console.child_line("prefill-0", LOADING)
    console.end_loading()
    console.show("ready: a\n  b")
    assert terminal.getvalue().endswith("ready: a\n  b\n")
    Console(log, None, "json").show("ready: a\n  b")
    assert json.loads(log.getvalue())["message"] == "ready: a\n  b"
