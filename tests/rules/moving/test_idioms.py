"""Ways by which wrapped models and parameters travel in real programs, each in a few lines."""

from __future__ import annotations

import pytest

from shardwise.findings import SourceFinding
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite

IMPORTS = (
    "import functools, itertools, threading, types\nimport torch\nfrom torch import nn\nfrom typing import NamedTuple\n"
)
IMPORTS += "from torch.optim import AdamW\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\n"


def migrate(body: str) -> tuple[str, list[SourceFinding]]:
    program = Program({"main.py": IMPORTS + body})
    return rewrite(program.file("main.py"), program, "torch")


STATES = {
    "tuple_attr": "class R:\n    def __init__(self,m):\n        self.model, self.opt = FSDP(m), None\n"
    "    def save(self):\n        return self.model.state_dict()\n",
    "setattr_name": "class R:\n    def wrap(self):\n        for name in names:\n"
    "            setattr(self, name, FSDP(getattr(self, name)))\n    def save(self):\n"
    "        return self.gen.state_dict()\n",
    "namedtuple": "class S(NamedTuple):\n    model: object\n    step: int\n\nm, step = S(FSDP(build()), 0)\n"
    "out = m.state_dict()\n",
    "partial": "def save(model, path):\n    return model.state_dict()\n\nf = functools.partial(save, FSDP(build()))\n"
    "f('x')\n",
    "classmethod": "class R:\n    def __init__(self, model):\n        self.model = model\n    @classmethod\n"
    "    def make(cls):\n        return cls(FSDP(build()))\n    def save(self):\n"
    "        return self.model.state_dict()\n",
    "moduledict": "d = nn.ModuleDict({'a': FSDP(a)})\nout = d['a'].state_dict()\n",
    "dict": "class R:\n    def __init__(self):\n        self.__dict__['model'] = FSDP(build())\n"
    "    def save(self):\n        return self.model.state_dict()\n",
    "map_lambda": "models = list(map(lambda m: FSDP(m), ms))\nout = models[0].state_dict()\n",
    "match": "match kind:\n    case 'fsdp':\n        model = FSDP(build())\n    case _:\n        model = build()\n"
    "out = model.state_dict()\n",
    "chain_iter": "models = [FSDP(a)]\nfor m in itertools.chain(models, [b]):\n    out = m.state_dict()\n",
    "default_arg": "def wrap():\n    return FSDP(build())\n\n\nmodel = wrap()\ndef save(m=model):\n"
    "    return m.state_dict()\n",
    "getattr_var": "class R:\n    def __init__(self):\n        self.model = FSDP(build())\n    def save(self, name):\n"
    "        return getattr(self, name).state_dict()\n",
    "bound_method": "def wrap():\n    return FSDP(build())\n\n\nmodel = wrap()\nget = model.state_dict\nout = get()\n",
    "nn_attr_loop": "def wrap_all(m):\n    for name, child in m.named_children():\n"
    "        setattr(m, name, FSDP(child))\n"
    "    return m\n\nmodel = wrap_all(build())\nout = model.state_dict()\n",
    "in_place_child": "def wrap_all(m):\n    m.encoder = FSDP(m.encoder)\n    return m\n\nmodel = wrap_all(build())\n"
    "out = model.state_dict()\n",
    "call_obj": "class Wrapper:\n    def __call__(self, m):\n        return FSDP(m)\n\nw = Wrapper()\n"
    "model = w(build())\nout = model.state_dict()\n",
    "namespace": "ns = types.SimpleNamespace(model=FSDP(build()))\nout = ns.model.state_dict()\n",
    "dict_update": "state = {}\nstate.update(model=FSDP(build()))\nout = state['model'].state_dict()\n",
    "dict_of_states": "models = {'a': FSDP(a)}\nout = {k: m.state_dict() for k, m in models.items()}\n",
    "module_fn": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.tower = FSDP(tower())\n    def dump(self):\n        return self.state_dict()\n",
    "subclass_super_state": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.tower = FSDP(tower())\n    def dump(self):\n        return super().state_dict()\n",
    "thread_target": "def save(model):\n    return model.state_dict()\n\n"
    "threading.Thread(target=save, args=(FSDP(build()),)).start()\n",
    "list_star": "models = [*[FSDP(a)], b]\nout = models[0].state_dict()\n",
    "setattr_param": "def attach(run, name, m):\n    setattr(run, name, FSDP(m))\n\nclass R:\n"
    "    def __init__(self, m):\n"
    "        attach(self, 'model', m)\n    def save(self):\n        return self.model.state_dict()\n",
    "unwrap_while": "def unwrap(model):\n    while hasattr(model, 'module'):\n        model = model.module\n"
    "    return model\n\nm = FSDP(build())\nout = unwrap(m).state_dict()\n",
    "table": "def wrap_fsdp(m):\n    return FSDP(m)\n\ndef wrap_ddp(m):\n    return m\n\n"
    "W = {'fsdp': wrap_fsdp, 'ddp': wrap_ddp}\nmodel = W[kind](build())\nout = model.state_dict()\n",
    "weakref": "class L:\n    def __init__(self, m):\n        self._m = [m]\n    @property\n    def model(self):\n"
    "        return self._m[0]\n\nl = L(FSDP(build()))\nout = l.model.state_dict()\n",
    "callback_trainer": "class Saver:\n    def on_end(self, trainer):\n        return trainer.model.state_dict()\n\n"
    "class T:\n"
    "    def __init__(self, callbacks):\n        self.model = FSDP(build())\n"
    "        self.callbacks = callbacks\n    def run(self):\n        for c in self.callbacks:\n"
    "            c.on_end(self)\n",
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_model_is_never_taken_for_that_of_a_plain_one(name: str):
    text, findings = migrate(STATES[name])
    assert "SW111" in [one.code for one in findings], text


OPTIMIZERS = {
    "other_fn": "def main():\n    model = build()\n    opt = AdamW(model.parameters())\n    model = shard(model)\n\n"
    "def shard(m):\n    return FSDP(m, use_orig_params=True)\n",
    "other_fn_attr": "class T:\n    def run(self):\n        self.model = build()\n"
    "        self.opt = AdamW(self.model.parameters())\n        self.model = self.shard(self.model)\n"
    "    def shard(self, m):\n        return FSDP(m, use_orig_params=True)\n",
    "helper_params": "def make(params):\n    return AdamW(params)\n\nmodel = build()\n"
    "opt = make(model.parameters())\nif x:\n"
    "    model = FSDP(model, use_orig_params=True)\n",
    "pair": "def make():\n    model = build()\n    return model, AdamW(model.parameters())\n\nmodel, opt = make()\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "dict_state": "def make():\n    model = build()\n    return {'model': model, 'opt': AdamW(model.parameters())}\n\n"
    "s = make()\ns['model'] = FSDP(s['model'], use_orig_params=True)\n",
    "closure": "def run():\n    model = build()\n    def make():\n        return AdamW(model.parameters())\n"
    "    opt = make()\n    wrapped = FSDP(model, use_orig_params=True)\n    return wrapped, opt\n",
    "single_param": "model = build()\nopt = AdamW([model.weight, model.bias])\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "partial": "model = build()\nmake = functools.partial(AdamW, lr=1)\nopt = make(model.parameters())\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "table": "model = build()\nopt = {'adam': torch.optim.AdamW, 'sgd': torch.optim.SGD}[kind](model.parameters())\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "getattr": "model = build()\nopt = getattr(torch.optim, kind)(model.parameters())\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "lib_opt4": "model = build()\nopt = mylib.Muon(model.parameters())\nmodel = FSDP(model, use_orig_params=True)\n"
    "opt.step()\n",
    "own_opt": "class Mine(torch.optim.Optimizer):\n    pass\n\nmodel = build()\nopt = Mine(model.parameters())\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "add_group": "model = build()\nopt = AdamW([torch.zeros(1)])\nopt.add_param_group({'params': model.parameters()})\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "method": "class M(nn.Module):\n    def configure_optimizers(self, lr):\n"
    "        return AdamW(self.parameters(), lr)\n\nmodel = M()\nopt = model.configure_optimizers(1)\n"
    "model = FSDP(model, use_orig_params=True)\n",
    "yielded": "def trainable(model):\n    for p in model.parameters():\n        if p.requires_grad:\n"
    "            yield p\n\nmodel = build()\nopt = AdamW(trainable(model))\nif x:\n"
    "    model = FSDP(model, use_orig_params=True)\n",
    "dict_models": "models = {'g': build(), 'd': build()}\n"
    "opts = {k: AdamW(m.parameters()) for k, m in models.items()}\n"
    "for k in models:\n    models[k] = FSDP(models[k], use_orig_params=True)\n",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_before_is_never_left_with_the_old_parameters(name: str):
    text, findings = migrate(OPTIMIZERS[name])
    assert "SW128" in [one.code for one in findings], text


TOLD = {
    "wrapper_given_away": (
        "class Run:\n    def __init__(self, work):\n        super().__init__()\n        self.work = work\n"
        "    def wrap(self, model):\n        return FSDP(model)\n    def go(self):\n        self.work(self.wrap)\n",
        "work is not known here",
    ),
    "optimizer_state_counted": (
        "model = FSDP(build())\nopt = AdamW(model.parameters())\n"
        "size = sum(v.numel() for state in opt.state.values() for v in state.values() if torch.is_tensor(v))\n",
        "numel() of an optimizer's state counts the full tensor",
    ),
    "sharded_file": (
        "from torch.distributed.fsdp import StateDictType\n\nmodel = FSDP(build())\n"
        "with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n"
        "    model.load_state_dict(torch.load(f'{rank}.pt'))\n",
        "hold ShardedTensors",
    ),
    "pretrained": (
        "model = FSDP(build())\nmodel.save_pretrained(path)\n",
        "save_pretrained() of a sharded model takes",
    ),
    "saved_elsewhere": (
        "import checkpoints\n\nmodel = FSDP(build())\ncheckpoints.save_model(model, path)\n",
        "save_model is of a file not given",
    ),
    "compiled": (
        "model = FSDP(torch.compile(build()))\nstate = model.state_dict()\n",
        "no longer begin with _orig_mod.",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_is_different_and_stays_is_told(name: str):
    body, said = TOLD[name]
    text, findings = migrate(body)
    assert [one for one in findings if said in one.message], text


def test_a_sharded_state_that_is_filled_first_is_no_file_of_fsdp1():
    body, said = TOLD["sharded_file"]
    body = body.replace(
        "    model.load", "    state = {'model': model.state_dict()}\n    dcp.load(state)\n    model.load"
    )
    assert not [one for one in migrate(body)[1] if said in one.message]


@pytest.mark.parametrize(
    "call",
    [
        "with FSDP.summon_full_params(model):\n    model.save_pretrained(path)\n",
        "model.save_pretrained(path, state_dict=state)\n",
        "save_config(model.config)\n",
    ],
)
def test_saves_of_whole_tensors_are_not_told(call: str):
    _, findings = migrate("from library import save_config\n\nmodel = FSDP(build())\n" + call)
    assert not {one.code for one in findings} & {"SW111", "SW132"}


def test_parts_that_run_while_parameters_are_summoned_gather_by_themselves():
    head = "model = FSDP(build())\nwith FSDP.summon_full_params(model):\n    "
    assert "with _unsharded(model)" in migrate(head + "out = model.encoder(batch)\n")[0]
    assert "with _unsharded(model)" in migrate(head + "out = model.layers[0](batch)\n")[0]
    assert "with _full_params(model" in migrate(head + "model.save_pretrained(path)\n")[0]


@pytest.mark.parametrize("before", ["", "state = model.state_dict()\n", "if cond:\n    state = model.state_dict()\n"])
def test_an_optimizers_state_is_taken_of_the_shards(before: str):
    """An evaluation leaves the root unsharded, and get_optimizer_state_dict raises KeyError; state_dict() reshards."""
    text, _ = migrate(
        f"model = FSDP(build())\nopt = AdamW(model.parameters())\n{before}FSDP.optim_state_dict(model, opt)\n"
    )
    is_taken_anyway = before.startswith("state")
    assert ("get_optimizer_state_dict(_reshard(model), opt" in text) is not is_taken_anyway


def test_what_a_rewritten_file_has_left_of_fsdp1_changes_no_earlier_load():
    body = "from torch.distributed.fsdp import StateDictType\n\nmodel = GPT(config)\nmodel.load_state_dict(saved)\n"
    body += "if ddp:\n    model = FSDP(model, use_orig_params=True, cpu_offload=offload)\nif rank == 0:\n"
    body += "    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n        state = model.state_dict()\n"
    text, _ = migrate(body)
    program = Program({"main.py": text})
    assert rewrite(program.file("main.py"), program, "torch")[0] == text


def test_a_model_built_by_the_sizes_of_a_wrapped_one_is_a_plain_one():
    model = "class Net:\n    def __init__(self, params, hidden):\n        self.params, self.hidden = params, hidden\n"
    train = IMPORTS + "from net import Net\nfrom export import export\nmodel = FSDP(Net({}, 2))\nexport(model)\n"
    export = "from net import Net\n\n\ndef export(model):\n"
    export += "    return Net(model.params, model.layers[0].weight.shape[0])\n"
    sample = "from net import Net\nfrom export import export\nmodel = Net({}, 1)\nmodel.load_state_dict(saved)\n"
    program = Program({"net.py": model, "train.py": train, "export.py": export, "sample.py": sample})
    assert rewrite(program.file("sample.py"), program, "torch")[0] == sample
