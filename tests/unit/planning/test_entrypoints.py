"""read_calls: every way in which code enters modules or reads parameters, on models written by hand."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardwise.planning.calls import Calls
from shardwise.planning.planner import read_calls


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def assert_plain(calls: Calls) -> None:
    """Every module is entered by its own call and nothing else happens."""
    assert not calls.bypassed
    assert not calls.foreign_reads
    assert not calls.methods
    assert not calls.conditional
    assert not calls.unreadable
    assert not calls.assumed
    assert not calls.repeated


def blocks_called(calls: Calls, *names: str) -> None:
    for name in names:
        assert {name, f"{name}.norm", f"{name}.linear"} <= calls.called


class HeldInModuleList(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class HeldInModuleDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x):
        for name, block in self.blocks.items():
            x = block(x) if name else x
        return x


class HeldInModuleDictByKey(HeldInModuleDict):
    def forward(self, x):
        for name in self.blocks:
            x = self.blocks[name](x)
        return x


class HeldInNestedLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])

    def forward(self, x):
        for i in range(len(self.stages)):
            for j, block in enumerate(self.stages[i]):
                x = block(x) * (j + 1)
        return x


class HeldInAttributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.block0, self.block1, self.block2 = Block(), Block(), Block()
        self.rest = [self.block2]

    def forward(self, x):
        for i in range(2):
            x = getattr(self, f"block{i}")(x)
        (last,) = self.rest
        return last(x)


class HeldInSequential(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)


class HeldInLocalList(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x):
        steps = []
        for step in (self.a, self.b):
            steps.append(step)
        return functools.reduce(lambda value, step: step(value), steps, x)


class ZippedAndReversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Block(), Block()])
        self.up = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for (i, down), up in zip(enumerate(self.down), reversed(self.up), strict=True):
            x = up(down(x)) + i
        return x


class InHelperFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Block()

    @property
    def last(self):
        return self.head

    def run(self, x, *, blocks):
        return run_all(blocks, x)

    def forward(self, x):
        return self.last(self.run(x, blocks=list(self.blocks)))


def run_all(blocks, x):
    """A helper of the same file that gets modules as arguments."""
    for block in blocks:
        x = block(x)
    return x


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self._checkpoint = functools.partial(checkpoint, use_reentrant=False)
        self.tail = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False)
                continue
            x = self._checkpoint(block.__call__, x)
        return checkpoint_sequential(list(self.tail), 2, x, use_reentrant=False)


class CalledThroughSuper(HeldInModuleList):
    def forward(self, x):
        return super().forward(x) + 1


class NamedWithWalrusAndConditionals(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.missing = Block(), Block(), Block(), None
        self.wide = True

    def forward(self, x, scale=None):
        if (block := self.first) is not None:
            x = block(x)
        if self.missing is not None:
            x = self.missing(x)
        chosen = self.second if scale is None else self.third
        if self.wide and not self.training and isinstance(x, torch.Tensor) and x.shape[0] > 1:
            return chosen(x)
        return chosen(x * 2)


PLAIN_MODELS = {
    HeldInModuleList: ("blocks.0", "blocks.1", "blocks.2"),
    HeldInModuleDict: ("blocks.a", "blocks.b"),
    HeldInModuleDictByKey: ("blocks.a", "blocks.b"),
    HeldInNestedLists: ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"),
    HeldInAttributes: ("block0", "block1", "block2"),
    HeldInSequential: ("blocks.0", "blocks.1"),
    HeldInLocalList: ("a", "b"),
    ZippedAndReversed: ("down.0", "down.1", "up.0", "up.1"),
    InHelperFunctions: ("blocks.0", "blocks.1", "head"),
    Checkpointed: ("blocks.0", "blocks.1", "tail.0", "tail.1"),
    CalledThroughSuper: ("blocks.0", "blocks.1", "blocks.2"),
    NamedWithWalrusAndConditionals: ("first", "second", "third"),
}


@pytest.mark.parametrize("kind", PLAIN_MODELS, ids=lambda kind: kind.__name__)
def test_blocks_are_found_wherever_they_are_held(kind):
    calls = read_calls(kind())
    blocks_called(calls, *PLAIN_MODELS[kind])
    assert_plain(calls)


class Attention(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scaling = 0.5

    def forward(self, x):
        return self.o_proj(self.q_proj(x)) * self.scaling


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(8)
        self.self_attn = Attention()
        self.mlp = Block()

    def forward(self, x):
        return self.mlp(self.self_attn(self.input_layernorm(x)))


class Tower(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Tower()

    @property
    def language_model(self):
        return self.model

    def forward(self, x):
        return self.model(x)


def attend(module, query):
    """Gets an attention module for its settings only, as HF's eager attention does."""
    return query * module.scaling


class JointAttention(nn.Module):
    """Two towers whose layers are run side by side, part by part, as openpi does."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_language, self.expert = Wrapped(), Tower()
        self.gradient_checkpointing = False

    def forward(self, inputs):
        models = [self.vision_language.language_model, self.expert]
        num_layers = len(self.expert.layers)

        def compute_layer(layer_idx, inputs):
            models = [self.vision_language.language_model, self.expert]
            queries = []
            for i, hidden in enumerate(inputs):
                layer = models[i].layers[layer_idx]
                hidden = layer.input_layernorm(hidden)
                queries.append(layer.self_attn.q_proj(hidden))
            mixed = attend(self.expert.layers[layer_idx].self_attn, torch.cat(queries))
            outputs = []
            for i, hidden in enumerate(inputs):
                layer = models[i].layers[layer_idx]
                if mixed.dtype != layer.self_attn.o_proj.weight.dtype:
                    mixed = mixed.to(layer.self_attn.o_proj.weight.dtype)
                outputs.append(layer.mlp(layer.self_attn.o_proj(mixed) + hidden))
            return outputs

        for layer_idx in range(num_layers):
            if self.gradient_checkpointing and self.training:
                inputs = checkpoint(compute_layer, layer_idx, inputs, use_reentrant=False)
            else:
                inputs = compute_layer(layer_idx, inputs)
        return [models[i].norm(hidden) for i, hidden in enumerate(inputs)]


def test_layers_run_part_by_part_are_bypassed_and_never_called():
    calls = read_calls(JointAttention())
    for tower in ("vision_language.model", "expert"):
        for i in range(3):
            layer = f"{tower}.layers.{i}"
            parts = {f"{layer}.{part}" for part in ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp")}
            assert calls.bypassed[layer] == parts
            assert calls.bypassed[f"{layer}.self_attn"] == {p for p in parts if "self_attn" in p}
            assert parts <= calls.called
            assert layer not in calls.called
            assert f"{layer}.self_attn" not in calls.called
        assert f"{tower}.norm" in calls.bypassed[tower]
    assert not calls.foreign_reads  # only dtypes of weights were looked at
    assert not calls.conditional
    assert not calls.repeated
    assert not calls.assumed


class DispatchingLayer(Block):
    def forward(self, x):
        if self.training:
            return self.forward_train(x)
        return self.forward_inference(x)

    def forward_train(self, x):
        return self._mix(x)

    def forward_inference(self, x):
        return self._mix(x) * 2

    def _mix(self, x):
        return self.linear(self.norm(x))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)

    def forward(self, x):
        return self.decode(self.encode(x))


class Bagel(nn.Module):
    """A language model, a vision tower and a VAE behind several entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DispatchingLayer() for _ in range(2)])
        self.vit, self.vae = Block(), Vae()
        self.connector = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.connector(x) + self.vae.encode(x)

    def forward_cache_update_vit(self, x):
        return self.vit(x)

    def generate_image(self, x):
        return self.vae.decode(self(x))

    @torch.no_grad()
    def stream(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x

    def init_moe(self):
        self.connector.weight.data.copy_(self.vit.linear.weight)

    def prepare_input(self, tokens):
        return [token + 1 for token in tokens]

    @property
    def dtype(self):
        return self.connector.weight.dtype

    @staticmethod
    def loss(x):
        return x.sum()


def test_methods_and_public_entries_are_told_apart():
    calls = read_calls(Bagel())
    assert calls.methods == {"vae": {"encode", "decode"}}
    assert set(calls.public_methods) == {"forward_cache_update_vit", "generate_image"}
    assert any("stream" in note for note in calls.notes)
    blocks_called(calls, "layers.0", "layers.1", "vit", "vae.encoder", "vae.decoder")
    assert "vae" not in calls.called
    assert not calls.bypassed
    assert not calls.foreign_reads


class CallsMethodsOfLayers(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DispatchingLayer() for _ in range(num_layers)])
        self.last = Block()

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward_train(x)
        return self.last.forward(x)


@pytest.mark.parametrize("num_layers", [2, 40])
def test_methods_called_on_layers_are_entries_of_the_layers(num_layers):
    calls = read_calls(CallsMethodsOfLayers(num_layers))
    names = [f"layers.{i}" for i in range(num_layers)]
    assert calls.methods == {**{name: {"forward_train"} for name in names}, "last": {"forward"}}
    assert not calls.called & {*names, "last"}
    assert {f"{name}.linear" for name in names} <= calls.called
    assert not calls.bypassed
    assert not calls.conditional


class FunctionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.table = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, ids):
        x = self.embed(ids) * self.scale + self.table[0]
        x = x.to(self.blocks[0].linear.weight.dtype) + torch.zeros_like(self.blocks[0].norm.weight)
        for block in self.blocks:
            x = x @ block.linear.weight
        shape = self.unused.weight.shape
        return F.linear(x, self.embed.weight).reshape(-1, shape[0])


def test_reading_weights_of_others_is_told_from_reading_their_metadata():
    calls = read_calls(FunctionalHead())
    assert calls.foreign_reads == {
        "embed.weight": {""}, "blocks.0.linear.weight": {""}, "blocks.1.linear.weight": {""}
    }  # fmt: skip
    assert "embed" in calls.called
    assert not calls.called & {"blocks.0", "blocks.0.linear"}
    assert "unused" in calls.assumed


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    @property
    def gained(self):
        return self.gain * 2

    def forward(self, x, weight, embed):
        return F.linear(self.proj(x), weight) + embed(x.long()).sum()


class HandsOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decoder = nn.Embedding(10, 8), Decoder()

    def forward(self, ids):
        x = self.embed(ids) + self.decoder.gained
        return self.decoder(x, self.embed.weight, embed=self.embed)


def test_weights_and_modules_handed_to_another_module_are_followed_into_it():
    calls = read_calls(HandsOver())
    assert calls.foreign_reads == {"embed.weight": {"decoder"}, "decoder.gain": {""}}
    assert {"embed", "decoder", "decoder.proj"} <= calls.called


class WithTorchComposites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.old = nn.utils.weight_norm(nn.Linear(8, 8))
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        x, _ = self.attention(x, x, x)
        return self.lstm(self.old(self.normed(self.encoder(x))))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_torch_modules_that_use_their_childrens_weights_are_opaque():
    calls = read_calls(WithTorchComposites())
    assert {
        "attention",
        "encoder",
        "encoder.layers.0",
        "encoder.layers.1.linear1",
        "normed",
        "old",
        "lstm",
    } <= calls.called
    inside = {"attention.out_proj", "encoder.layers.0.self_attn.out_proj", "normed.parametrizations"}
    assert not calls.called & inside
    assert_plain(calls)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_parametrised_weight_read_from_outside_is_a_read_of_its_parts():
    class Reads(WithTorchComposites):
        def forward(self, x):
            return F.linear(x, self.normed.weight) + F.linear(x, self.old.weight)

    reads = read_calls(Reads()).foreign_reads
    assert set(reads) == {
        "normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1",
        "old.weight_g", "old.weight_v",
    }  # fmt: skip


class Shared(nn.Module):
    """ALBERT: one group of layers serves all depths."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.num_layers = 4
        self.groups = nn.ModuleList([Block() for _ in range(num_groups)])
        self.head = Block()

    def forward(self, x):
        for i in range(self.num_layers):
            group = int(i / (self.num_layers / len(self.groups)))
            x = self.groups[group](x)
        if self.training:
            return self.head(x)
        return self.head(x * 2)


def test_modules_called_again_in_a_loop_are_repeated_with_all_they_call():
    calls = read_calls(Shared(2))
    assert calls.repeated == {f"groups.{i}{part}" for i in range(2) for part in ("", ".norm", ".linear")}
    assert not read_calls(Shared(4)).repeated


def test_a_module_called_at_two_places_is_repeated_but_not_one_in_two_branches():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.either = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a, b, flag=None):
            if flag is None:
                return self.either(self.encoder(a) - self.encoder(b))
            return self.either(self.encoder(a) + self.encoder(b))

    assert read_calls(Siamese()).repeated == {"encoder"}


def test_a_slice_of_a_sequential_bypasses_it():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(Block(), Block(), Block())

        def forward(self, x):
            return self.features[2](self.features[:2](x))

    calls = read_calls(Sliced())
    assert calls.bypassed == {"features": {"features.0", "features.1", "features.2"}}
    assert "features" not in calls.called
    blocks_called(calls, "features.0", "features.1", "features.2")


def test_parts_of_a_model_without_forward_are_assumed_to_be_called_by_the_script():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit, self.llm = Block(), Tower()

    calls = read_calls(Parts())
    assert calls.assumed == {"vit", "llm"}
    assert {"vit.linear", "llm.layers.0.self_attn.q_proj"} <= calls.called
    assert not calls.is_known("vit")
    assert calls.is_known("llm.layers.0")
    assert not calls.bypassed


class ReturnsBias(nn.Module):
    """Megatron's way: the bias is handed to the caller, to be added after the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.linear(x), self.bias


def test_a_parameter_that_a_module_returns_is_read_by_its_caller():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ReturnsBias()

        def forward(self, x):
            output, bias = self.attention(x)
            return output + bias

    assert read_calls(nn.Sequential(Layer(), Layer())).foreign_reads == {
        "0.attention.bias": {"0"}, "1.attention.bias": {"1"}
    }  # fmt: skip


def test_code_for_submodules_that_a_model_does_not_have_proves_nothing():
    class Head(nn.Module):
        def __init__(self, legacy):
            super().__init__()
            self.embed, self.legacy = HeldInSequential(), legacy
            if legacy:
                self.old = nn.Linear(8, 8)
            else:
                self.new = Decoder()

        def forward(self, x):
            x = self.embed(x)
            return self.old(x) if self.legacy else self.new(x, None, self.embed.blocks[0])

    assert not read_calls(Head(legacy=True)).bypassed
    assert read_calls(Head(legacy=False)).bypassed == {
        "embed": {"embed.blocks.0"}, "embed.blocks": {"embed.blocks.0"}
    }  # fmt: skip


def test_names_set_before_leaving_a_loop_are_known_after_it():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.sizes = {4: 0, 8: 1}

        def forward(self, x):
            block = None
            for size, index in self.sizes.items():
                if x.shape[-1] == size:
                    block = self.blocks[index]
                    break
            if block is None:
                raise ValueError(x.shape)
            return block(x)

    calls = read_calls(Chooses())
    blocks_called(calls, "blocks.0", "blocks.1")
    assert_plain(calls)


def test_calling_a_part_of_an_opaque_module_reads_its_owners_weights():
    class Reaches(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0] + self.attention.out_proj(x)

    calls = read_calls(Reaches())
    assert calls.foreign_reads == {"attention.out_proj.weight": {""}, "attention.out_proj.bias": {""}}
    assert "attention.out_proj" not in calls.called


def test_of_a_list_the_block_that_is_in_it_twice_is_repeated():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([shared, nn.Linear(8, 8), shared])

        def forward(self, x):
            for number, block in enumerate(self.blocks):
                x = block(x) + number
            return x

    assert read_calls(Twice()).repeated == {"blocks.0"}
