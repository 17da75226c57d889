"""The calls that hand out or take in the state of a model or an optimizer, in FSDP2's words."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.state_settings import FULL, LOCAL, Gather

STATE_CODE, PLAIN_CODE, OPTIMIZER_CODE, LOCAL_CODE = "SW110", "SW111", "SW112", "SW113"


class Unmovable(Exception):
    """A state-dict call that stays as it is: where, why, and what a person should do."""

    def __init__(self, node: ast.AST, why: str, fix: str, code: str = STATE_CODE) -> None:
        super().__init__(why)
        self.node, self.why, self.fix, self.code = node, why, fix, code


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes calls of `torch.distributed.checkpoint.state_dict` into one draft."""

    draft: Draft

    def model_state(self, model: str, gather: Gather) -> str:
        """What `model.state_dict()` gave."""
        if not gather.is_known:
            return self._at_run_time("_model_state", [model], gather)
        self._refuse_local(gather)
        return self._gathered(f"{self.draft.name('get_model_state_dict')}({model}", gather)

    def load_model(self, model: str, state: str, gather: Gather, strict: str = "") -> str:
        """What `model.load_state_dict(state)` did."""
        extra = [f"strict={strict}"] if strict else []
        if gather.kind is None:
            return self._at_run_time("_load_model_state", [model, state, *extra], gather, config=False)
        self._refuse_local(gather)
        options = self._options(full_state_dict=gather.kind == FULL, extra=extra)
        return f"{self.draft.name('set_model_state_dict')}({model}, {state}{options})"

    def optimizer_state(self, model: str, optimizer: str, gather: Gather) -> str:
        """What `FSDP.optim_state_dict(model, optimizer)` gave."""
        if not gather.is_known:
            return self._at_run_time("_optimizer_state", [model, optimizer], gather)
        self._refuse_local(gather)
        return self._gathered(f"{self.draft.name('get_optimizer_state_dict')}({model}, {optimizer}", gather)

    def whole_state(self, model: str) -> str:
        """`model.state_dict()` where the model may also be a plain one."""
        return f"{self.draft.helper('_whole_state')}({model})"

    def load_whole_state(self, model: str, state: str, strict: str = "") -> str:
        """`model.load_state_dict(state)` where the model may also be a plain one."""
        more = f", strict={strict}" if strict else ""
        return f"{self.draft.helper('_load_whole_state')}({model}, {state}{more})"

    def load_optimizer(self, model: str, optimizer: str, state: str, gather: Gather, *, sure: bool = True) -> str:
        """What loading the result of `FSDP.optim_state_dict_to_load(...)` into the optimizer did.

        Not `sure`: the model may also be a plain one, whose optimizer loads its state itself.
        """
        if gather.kind is None or gather.rank0_only is None:
            if not sure:
                raise Unmovable(self.draft.context.tree, "what it loads is only known at run time", "write it out")
            return self._at_run_time("_load_optimizer_state", [model, optimizer, state], gather)
        self._refuse_local(gather)
        is_full = gather.kind == FULL
        switches = {"full_state_dict": is_full, "broadcast_from_rank0": is_full and gather.rank0_only}
        if not sure:
            told = "".join(f", {name}=True" for name, value in switches.items() if value)
            return f"{self.draft.helper('_load_optimizer')}({model}, {optimizer}, {state}{told})"
        options = self._options(**switches)
        return f"{self.draft.name('set_optimizer_state_dict')}({model}, {optimizer}, {state}{options})"

    def _gathered(self, start: str, gather: Gather) -> str:
        """A `get_*_state_dict` call, and what it takes to have the values where FSDP1 had them."""
        offload, rank0_only = bool(gather.offload), bool(gather.rank0_only)
        if gather.kind != FULL:
            return f"{start}{self._options(cpu_offload=offload)})"
        if offload and rank0_only:
            return f"{start}{self._options(full_state_dict=True, cpu_offload=True)})"
        call = f"{start}{self._options(full_state_dict=True)})"
        if offload:
            return f"{self.draft.helper('_on_cpu')}({call})"
        return f"{self.draft.helper('_on_rank0')}({call})" if rank0_only else call

    def _options(self, *, extra: list[str] | None = None, **switches: object) -> str:
        given = [f"{name}=True" for name, value in switches.items() if value] + (extra or [])
        return f", options={self.draft.name('StateDictOptions')}({', '.join(given)})" if given else ""

    def _at_run_time(self, helper: str, arguments: list[str], gather: Gather, *, config: bool = True) -> str:
        kind = gather.kind_text or f"{self.draft.name('StateDictType')}.{gather.kind}"
        told = [f"kind={kind}"] + ([f"config={gather.config_text}"] if config and gather.config_text != "None" else [])
        return f"{self.draft.helper(helper)}({', '.join([*arguments, *told])})"

    def _refuse_local(self, gather: Gather) -> None:
        if gather.kind == LOCAL:
            raise Unmovable(
                self.draft.context.tree,
                "LOCAL_STATE_DICT holds FSDP1's flat shards, which FSDP2 does not have",
                "save SHARDED_STATE_DICT instead; `shardwise ckpt convert` reads checkpoints that are there already",
                LOCAL_CODE,
            )
