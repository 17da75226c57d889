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
