"""What migrate has written, migrate leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.fsdp1.codemod.migrate import migrate
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite
from tests.rules.moving import programs, state_programs

TOGETHER = {
    "main.py": programs.source("strategy_at_run_time")
    + """

def main(model, optimizer, loader, cfg):
    model = wrap(model, cfg.kind)
    model.load_state_dict(torch.load(cfg.path))
    keeper = Keeper(cfg)
    keeper.load(model, optimizer, cfg.path)
    train(model, optimizer, loader)
    keeper.save(model, optimizer, cfg.path)


from training import train
from keeping import Keeper
""",
    "training.py": """
def train(model, optimizer, loader):
    for index, batch in enumerate(loader):
        with model.no_sync():
            model(batch).sum().backward()
        norm = model.clip_grad_norm_(1.0).item()
        optimizer.step()
    return norm
""",
    "keeping.py": state_programs.HEADER
    + """

class Keeper:
    def __init__(self, cfg):
        self.is_whole = cfg.is_whole

    def load(self, model, optimizer, path):
        if self.is_whole:
            model.load_state_dict(torch.load(path).get("model"), strict=False)
            return model
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            model.load_state_dict(state)
        return model

    def save(self, model, optimizer, path):
        if isinstance(model, FSDP):
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state, moments = model.state_dict(), FSDP.sharded_optim_state_dict(model, optimizer)
            torch.save({"model": state, "optimizer": moments}, path)
""",
}
MOVED = {
    "moved.py": programs.HEADER
    + """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing


def wrap(model, recomputed):
    model = FSDP(model)
    if recomputed:

        def check(module):
            return not isinstance(module, FSDP) and isinstance(module, (Block, FSDP))

        apply_activation_checkpointing(model, check_fn=check)
    return model
"""
}
CASES = {
    **{name: {f"{name}.py": programs.source(name)} for name in programs.BODIES},
    **{f"states_{name}": {f"{name}.py": state_programs.source(name)} for name in state_programs.PROGRAMS},
    "together": TOGETHER,
    "types_in_what_is_moved": MOVED,
}


def run(texts: dict[str, str], target: str) -> dict[str, str]:
    program = Program(texts)
    return {path: rewrite(program.file(path), program, target)[0] for path in texts}


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("name", CASES)
def test_a_second_run_changes_nothing(name: str, target: str):
    once = run(CASES[name], target)
    assert all(once[path] != text for path, text in CASES[name].items())
    assert run(once, target) == once


LEFT_AT_FIRST = {
    "shared.py": """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Settings:
    def __init__(self, model, **kwargs):
        for name, value in vars(settings).items():
            pass
        for name, value in kwargs.items():
            setattr(self, name, value)


def create(model="small", fsdp=False, **kwargs):
    settings = Settings(model, **kwargs)
    if fsdp:
        model = build(settings)
        model = FSDP(model)
    else:
        model = build(settings)
    return (settings, model, data, optimizer, scheduler, loss)
""",
    "training.py": """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from shared import create


def run(fsdp, counts=[2, 1]):
    fixtures = []
    for _ in counts:
        settings, model, data, optimizer, scheduler, loss = create()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=settings.lr)
        fixtures.append((settings, model, data, optimizer, scheduler, loss))
    for fixture in fixtures[1:]:
        pass
    for fixture, count in zip(fixtures, counts):
        settings, model, data, optimizer, scheduler, loss = fixture
        if fsdp:
            model = FSDP(model)
""",
}


def test_a_file_left_alone_at_first_is_rewritten_in_the_same_run(tmp_path: Path):
    for name, text in LEFT_AT_FIRST.items():
        (tmp_path / name).write_text(text)
    first = migrate([tmp_path], write=True, num_processes=1)
    assert first.summary["constructors_rewritten"] == 2
    assert migrate([tmp_path], num_processes=1).summary["files_changed"] == 0
