"""compile_blocks on one process: one compilation for all blocks, nothing renamed."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.models.transformer import Transformer, TransformerConfig

# torch's tracer looks at `.grad` of every tensor, whose warning it hides only from the default filters.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def transformer() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=32, max_sequence_length=8, width=16, num_layers=12, num_heads=2, dropout=0.2)
    return Transformer(config)


def tokens() -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    model(tokens()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Counting:
    """A backend that runs the graphs it is given and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


def test_one_compilation_serves_twelve_blocks_and_names_stay():
    backend, plain = Counting(), transformer()
    model = sw.compile_blocks(transformer(), backend=backend)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    assert backend.num_graphs == 1


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_recomputed_blocks_compile_and_draw_the_same_random_numbers(policy: Any, backend: str):
    expected = gradients(transformer())
    model = sw.compile_blocks(sw.checkpoint_activations(transformer(), policy), backend=backend)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


def kept_bytes(model: nn.Module) -> int:
    """What a forward keeps for backward, parameters left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, size in kept.items() if address not in own)


def test_a_memory_budget_says_how_much_is_kept():
    """Operation by operation: more than recomputed blocks, less than compiled ones, and the same gradients."""
    expected, sizes = gradients(transformer().eval()), []
    for policy in (1.0, 0.6, 0.3, 0, "full"):
        torch.compiler.reset()
        model = sw.checkpoint_activations(transformer().eval(), policy)  # pyrefly: ignore[bad-argument-type]
        sw.compile_blocks(model, backend="aot_eager_decomp_partition")
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name])
        sizes.append(kept_bytes(model))
    assert sorted(sizes[:4], reverse=True) == sizes[:4]
    assert len(set(sizes[:4])) == 4
    assert sizes[3] <= 1.1 * sizes[4]


def test_a_memory_budget_needs_a_compiler():
    model = sw.checkpoint_activations(transformer(), 0.5)
    with pytest.raises(sw.ConfigError, match=r"activations is 0\.5, and blocks are not compiled"):
        model(tokens())
    with pytest.raises(sw.ConfigError, match=r"the policy is 1\.5"):
        sw.checkpoint_activations(transformer(), 1.5)


def test_a_second_call_changes_the_options_and_compiles_no_deeper():
    first, second = Counting(), Counting()
    model = sw.compile_blocks(sw.compile_blocks(transformer(), backend=first), backend=second)
    gradients(model)
    assert (first.num_graphs, second.num_graphs) == (0, 1)


def test_a_copy_runs_its_own_weights():
    model = sw.compile_blocks(transformer(), backend="eager")
    gradients(model)
    model.zero_grad()
    twin = copy.deepcopy(model)
    gradients(twin)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_plan_is_the_same_before_and_after():
    assert sw.plan(sw.compile_blocks(transformer())) == sw.plan(transformer())


def test_hooks_on_a_block_run_outside_the_compiled_code():
    model = sw.compile_blocks(transformer(), backend="eager")
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    gradients(model)
    assert seen == [False]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(sw.ShardError, match="has no blocks"):
        sw.compile_blocks(nn.Linear(3, 3))
