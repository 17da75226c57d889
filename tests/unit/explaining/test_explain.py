"""explain(): known messages are recognised, the cause is told from its echoes, and nothing is guessed."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from shardwise.errors import CheckpointError
from shardwise.explaining import explain
from shardwise.explaining.answer import catalogue

# Messages as torch, accelerate and the launcher print them, one indented block a code.
BLOCK = re.compile(r"^(?P<code>SW\d{3})\n(?P<text>(?:    .*\n)+)", re.MULTILINE)
MESSAGES = {
    match["code"]: textwrap.dedent(match["text"])
    for match in BLOCK.finditer(Path(__file__).with_name("messages.txt").read_text())
}


@pytest.mark.parametrize("code", sorted(catalogue()))
def test_each_known_message_is_recognised_as_itself(code: str):
    explanation = explain(MESSAGES[code])
    assert explanation.failure is not None
    assert explanation.failure.code == code


def test_every_page_says_what_why_and_how():
    for failure in catalogue().values():
        assert failure.what.endswith((".", "!")), failure.code
        assert len(failure.why) > 20, failure.code
        assert len(failure.fix) > 10, failure.code


@pytest.mark.parametrize("text", ["", "all is well", "Epoch 3: loss 0.5, error rate 0.1", "step 17 took 3 s\n" * 50])
def test_a_text_without_an_error_is_not_explained(text: str):
    explanation = explain(text)
    assert explanation.failure is None
    assert "No error was found" in str(explanation)


def test_an_unknown_error_is_said_to_be_unknown():
    text = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nmine.StrangeError: the moon is full\n'
    explanation = explain(text)
    assert explanation.failure is None
    assert "not known" in str(explanation)
    assert "mine.StrangeError: the moon is full" in str(explanation)


def test_the_cause_is_told_from_its_echoes_though_they_come_first():
    log = (
        "[rank0]:[E1115 08:10:00.000001000 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE, NumelIn=1)\n"
        "[rank1]: Traceback (most recent call last):\n"
        "[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer\n"
        '[rank1]:   File "train.py", line 80, in <module>\n'
        "[rank1]: RuntimeError: aten.addmm.default: got mixed torch.Tensor and DTensor, need to convert\n"
        "E1115 08:10:02.1 torch/distributed/elastic/multiprocessing/api.py:900] failed (exitcode: 1) local_rank: 1\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    explanation = explain(log)
    assert explanation.failure is not None
    assert (explanation.failure.code, explanation.rank, explanation.line) == ("SW502", 1, 5)
    assert explanation.echoes == ("SW552", "SW553", "SW558")


def test_the_first_failing_rank_is_named_not_the_last():
    line = "[rank{}]: RuntimeError: Missing key in checkpoint state_dict: {}.\n"
    explanation = explain(line.format(3, "model.a") + line.format(1, "model.b"))
    assert explanation.rank == 3
    assert "model.a" in explanation.message


def test_a_real_exception_is_explained_by_its_cause():
    def step() -> None:
        try:
            torch.empty(2, device="meta").to("cpu")
        except NotImplementedError as error:
            raise ValueError("the step failed") from error

    with pytest.raises(ValueError, match="the step failed") as caught:
        step()
    failure = explain(caught.value).failure
    assert failure is not None
    assert failure.code == "SW542"


@pytest.mark.parametrize("name", ["SW514", "sw514", "TOPDOWN", "parent-sharded-before-child"])
def test_a_code_or_name_gives_its_page(name: str):
    failure = explain(name).failure
    assert failure is not None
    assert failure.code == "SW514"


def test_command_reads_a_log_and_does_not_load_torch(tmp_path: Path):
    (tmp_path / "log").write_text(MESSAGES["SW541"])
    code = (
        "import sys; from shardwise.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "explain", str(tmp_path / "log")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "SW541 parameters-left-on-meta" in result.stdout


def test_an_error_of_our_own_is_told_with_its_fix():
    error = CheckpointError(
        "step 3 is not there", where="checkpoints", why="it was removed", fix="pass step=4\nor none"
    )
    for text in (
        f"[rank1]: Traceback (most recent call last):\n[rank1]:   File 'a.py', line 1, in f\n[rank1]: {_named(error)}",
        _printed(error),
    ):
        explanation = explain(text)
        assert "not known" not in str(explanation)
        assert "shardwise's own" in str(explanation)
        found = explanation.to_dict()
        assert (found["code"], found["what"], found["fix"]) == (None, "step 3 is not there", "pass step=4 or none")
    assert explain(error).to_dict()["why"] == "it was removed"


def _named(error: CheckpointError) -> str:
    return f"shardwise.errors.CheckpointError: {error}".replace("\n", "\n[rank1]: ")


def _printed(error: CheckpointError) -> str:
    return f"step 2 loss 3.1\nerror: {error}\n"
