"""checkpoint_activations on one process: what is saved, what stays as it was, and what is refused."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import shardwise as sw
from shardwise.models.transformer import Transformer, TransformerConfig


def transformer() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=32, max_sequence_length=8, width=16, num_layers=4, num_heads=2, dropout=0.2)
    return Transformer(config)


def tokens() -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


def saved_bytes(model: nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward, parameters left out."""
    storages: dict[int, int] = {}
    held: list[Tensor] = []  # or an address could be used twice
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in mine:
            storages[address] = tensor.untyped_storage().nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens())
    return sum(storages.values())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    model(tokens()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(model: Transformer) -> list[bool]:
    return ["forward" in vars(block) for block in model.blocks]


def test_full_saves_little_and_every_second_block_half_of_it():
    everything = saved_bytes(transformer())
    full = saved_bytes(sw.checkpoint_activations(transformer()))
    half = saved_bytes(sw.checkpoint_activations(transformer(), "every_n", every=2))
    assert full < 0.2 * everything
    assert full < half < everything
    assert half == pytest.approx((full + everything) / 2, rel=0.1)


def test_selective_runs_matrix_products_once_and_full_twice():
    counts = {}
    for policy in ("none", "selective", "full"):
        model = sw.checkpoint_activations(transformer(), policy)
        with _Products() as products:
            gradients(model)
        counts[policy] = products.count
    assert counts["selective"] == counts["none"]
    assert counts["full"] > counts["none"]


def test_saved_ops_replace_the_default_ones():
    everything = torch.ops.aten.native_layer_norm.default
    model = sw.checkpoint_activations(transformer(), "selective", saved_ops=[everything])
    with _Products() as products:
        gradients(model)
    with _Products() as kept:
        gradients(transformer())
    assert products.count > kept.count


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products and attentions of the forward kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.count += name in ("addmm", "mm") or name.endswith("attention_for_cpu")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["full", "selective", "every_n"])
def test_names_classes_signature_and_gradients_stay(policy: Any):
    plain, model = transformer(), sw.checkpoint_activations(transformer(), policy)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def test_the_plan_is_the_same_before_and_after():
    plain, model = transformer(), sw.checkpoint_activations(transformer())
    assert sw.plan(model) == sw.plan(plain)


def test_a_second_call_replaces_the_first_and_none_undoes_it():
    model = transformer()
    sw.checkpoint_activations(model, "full")
    first = vars(model.blocks[0])["forward"]
    sw.checkpoint_activations(model, "full")
    assert vars(model.blocks[0])["forward"].__wrapped__ == first.__wrapped__  # not around one another
    sw.checkpoint_activations(model, "every_n", every=3)
    assert checkpointed(model) == [True, False, False, True]
    sw.checkpoint_activations(model, "none")
    assert checkpointed(model) == [False] * 4


def test_a_function_chooses_by_name_and_module():
    model = transformer()
    sw.checkpoint_activations(model, lambda name, block: name == "blocks.1")
    assert checkpointed(model) == [False, True, False, False]


def test_a_copy_runs_its_own_weights():
    model = sw.checkpoint_activations(transformer())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.output.weight.zero_()
        for parameter in twin.blocks.parameters():
            parameter.zero_()
    twin(tokens()).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


class StatefulBlock(nn.Module):
    """Keeps batch statistics, a power iteration, and a running mean of its own that it also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x + self.out(torch.relu(self.norm(self.linear(x - self.mean)) * self.table))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_buffers_that_a_block_writes_are_written_once(policy: Any):
    torch.manual_seed(0)
    plain = nn.Sequential(StatefulBlock(), StatefulBlock(), nn.Linear(4, 2))
    model = sw.checkpoint_activations(copy.deepcopy(plain), policy)
    for step in range(4):
        batch = torch.randn(6, 4)
        for one in (plain, model):
            one.train(step != 1)
            one.zero_grad()
            one(batch).square().mean().backward()
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffer, model.get_buffer(name)), name
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter.grad, model.get_parameter(name).grad), name  # pyrefly: ignore
    assert int(model.get_buffer("0.norm.num_batches_tracked")) == 3


class CachedBlock(nn.Module):
    """Appends to a cache as transformers' layers do."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.linear, self.out = layer_idx, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Tensor:
        keys = self.linear(x)
        if past_key_values is not None and use_cache:
            keys = past_key_values.update(keys, self.layer_idx)
        return x + self.out(keys.mean(0, keepdim=True))


class Cache:
    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def update(self, keys: Tensor, layer: int) -> Tensor:
        self.keys[layer] = torch.cat([self.keys[layer], keys]) if layer in self.keys else keys
        return self.keys[layer]

    def get_seq_length(self, layer: int) -> int:
        return len(self.keys.get(layer, ()))


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachedBlock(index) for index in range(2))

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return self.blocks[1](self.blocks[0](x, cache), past_key_values=cache)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_cache_is_left_out_while_gradients_are_recorded_and_filled_otherwise(policy: Any):
    torch.manual_seed(0)
    plain = WithCache()
    model = sw.checkpoint_activations(copy.deepcopy(plain), policy)
    x, cache = torch.randn(3, 4), Cache()
    for one in (plain, model):
        one(x, Cache()).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad), name  # pyrefly: ignore
    with torch.no_grad():
        model(x, cache)
    assert [cache.get_seq_length(layer) for layer in range(2)] == [3, 3]
    with pytest.raises(sw.ShardError, match="past_key_values already holds 3 positions"):
        model(x, cache)


def test_without_gradients_nothing_is_recomputed():
    model = sw.checkpoint_activations(transformer())
    with torch.no_grad(), _Products() as products:
        model(tokens())
    with torch.no_grad(), _Products() as plain:
        transformer()(tokens())
    assert products.count == plain.count


def test_an_unknown_policy_is_refused():
    with pytest.raises(sw.ConfigError, match="the policy is 'selectiv'"):
        sw.checkpoint_activations(transformer(), "selectiv")  # pyrefly: ignore


def test_every_below_one_is_refused():
    with pytest.raises(sw.ConfigError, match="every is 0"):
        sw.checkpoint_activations(transformer(), "every_n", every=0)


def test_a_policy_that_answers_nonsense_leaves_the_model_alone():
    model = transformer()
    answers = iter(["full", "most"])
    with pytest.raises(sw.ConfigError, match=r"answers 'most' for 'blocks\.1'"):
        sw.checkpoint_activations(model, lambda name, block: next(answers))
    assert checkpointed(model) == [False] * 4


def test_a_model_without_blocks_is_refused_with_the_way_to_name_them():
    with pytest.raises(sw.ShardError, match="has no blocks") as raised:
        sw.checkpoint_activations(nn.Linear(3, 3))
    assert "block_patterns" in raised.value.fix


def test_a_compiled_model_is_refused():
    model = sw.compile_blocks(transformer(), backend="eager")
    with pytest.raises(sw.ShardError, match=r"'blocks\.0' is already compiled"):
        sw.checkpoint_activations(model)
