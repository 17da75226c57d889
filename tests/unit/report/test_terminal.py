"""Progress and errors on an injected Console."""

import io

import pytest
from rich.console import Console

from shardwise.errors import ConfigError
from shardwise.report.terminal import print_error, progress_on


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=200, color_system=None), file


def test_pipe_gets_a_line_for_each_tenth():
    out, file = console(terminal=False)
    with progress_on(out) as progress:
        progress.start(100, "training [tiny]")
        for step in range(100):
            progress.advance(note=f"loss {step}")
    lines = file.getvalue().splitlines()
    assert lines[0] == "training [tiny] 1/100  loss 0"
    assert lines[-1] == "training [tiny] 100/100  loss 99"
    assert len(lines) == 11


def test_terminal_gets_a_bar_with_the_note():
    out, file = console(terminal=True)
    with progress_on(out) as progress:
        progress.start(2, "training")
        progress.advance(2, note="loss 1.5")
        progress.finish("done")
    assert "2/2" in file.getvalue()
    assert "loss 1.5" in file.getvalue()
    assert file.getvalue().rstrip().endswith("done")


def test_bar_is_taken_down_when_the_work_fails():
    out, file = console(terminal=True)

    def fail_inside() -> None:
        with progress_on(out) as progress:
            progress.start(2, "training")
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert file.getvalue().endswith("\x1b[?25h"), "the cursor must be visible again"


def test_error_prints_its_rows_as_str_does():
    out, file = console(terminal=False)
    error = ConfigError("2 problems in [a].yaml", where="one: x\ntwo: y", why="rule " * 60, fix="type this")
    print_error(out, error)
    assert file.getvalue() == f"error: {error}\n"
