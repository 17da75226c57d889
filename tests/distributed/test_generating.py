"""Generation from a sharded model: equal tokens everywhere, equal to one process, nothing left gathered or changed."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.models import multimodal
from shardwise.models.llama import SHAPES, Llama
from shardwise.training.generating import generate
from tests.ranks import ranks

PROMPT = torch.tensor([5, 6, 7])


def build() -> Llama:
    torch.manual_seed(0)
    model = Llama(SHAPES["llama3-debug"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that some tokens are likelier than others
    return model


def everywhere(value: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def gathered_parameters(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


@ranks(2)
def test_sharded_model_draws_what_one_process_draws(rank: int):
    alone, sharded = build(), sw.shard(build())
    for temperature in (0.0, 1.0):
        expected = generate_alone(alone, temperature)
        drawn = generate(sharded, PROMPT, 12, temperature=temperature, seed=3)
        assert drawn.shape == (15,)
        assert drawn.tolist() == expected.tolist()
        assert everywhere(drawn.tolist()) == [expected.tolist()] * 2


def generate_alone(model: nn.Module, temperature: float) -> Tensor:
    """A loop without `generate`."""
    ids, generator = PROMPT[None], torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _ in range(12):
            logits = model(ids)[:, -1]
            if temperature:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
    return ids[0]


def by_hand(model: Llama) -> Llama:
    """Sharded without shardwise: torch leaves the root gathered after a forward without backward."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("shard", [sw.shard, by_hand], ids=["shardwise", "by hand"])
@ranks(2)
def test_everything_is_as_it_was(rank: int, shard: Callable[[Llama], Llama]):
    model = shard(build())
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    generate(model, PROMPT, 3)
    assert not gathered_parameters(model)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    model(PROMPT[None]).square().mean().backward()  # and training continues
    assert all(parameter.grad is not None for parameter in model.parameters())


@ranks(2)
def test_prompts_of_rank_zero_count_and_rows_end_on_their_own(rank: int):
    model = sw.shard(build())
    prompts = torch.tensor([[1, 2], [3, 4]]) if rank == 0 else torch.tensor([[9, 9, 9]])
    free = generate(model, prompts, 6, temperature=0)
    assert free[:, :2].tolist() == [[1, 2], [3, 4]]
    end = int(free[0, 3])
    ended = generate(model, prompts, 6, temperature=0, end_id=end)
    after = ended[0, 3:].tolist()
    assert after == [end] * len(after)
    assert everywhere(ended.tolist()) == [ended.tolist()] * 2


@ranks(2)
def test_text_longer_than_the_model_is_seen_through_a_window(rank: int):
    model = sw.shard(build())
    window = SHAPES["llama3-debug"].max_sequence_length
    prompt = torch.arange(window + 5) % 100
    first, second = generate(model, prompt, 2, temperature=0).tolist()[-2:]
    assert first == generate(model, prompt[-window:], 1, temperature=0)[-1]
    assert second == generate(model, torch.tensor([*prompt.tolist(), first])[-window:], 1, temperature=0)[-1]
    near = generate(model, prompt, 1, temperature=0, window=4)[-1]
    assert near == generate(model, prompt[-4:], 1, temperature=0)[-1] != first


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean((1, 2))


@ranks(2)
def test_a_model_without_logits_is_refused_and_left_sharded(rank: int):
    model = sw.shard(Regressor())
    with pytest.raises(ConfigError, match="does not return logits"):
        generate(model, PROMPT, 2)
    assert not gathered_parameters(model)
    assert model.training


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="shape"):
        generate(build(), torch.zeros(0, dtype=torch.int64), 2)
    with pytest.raises(ConfigError, match="temperature is -1"):
        generate(build(), PROMPT, 2, temperature=-1)


@ranks(2)
def test_multimodal_model_trains_and_draws_in_bfloat16(rank: int):
    torch.manual_seed(0)
    shape = multimodal.SHAPES["multimodal-debug"]
    config = sw.ShardConfig(precision=sw.PrecisionConfig(param_dtype="bfloat16"))
    model = sw.shard(multimodal.Multimodal(shape), config)
    size = shape.vision_config.image_size
    ids, picture = torch.randint(0, shape.vocab_size, (2, 16)), torch.randn(2, 3, size, size)
    loss = model(input_ids=ids, pixel_values=picture, target_pixels=picture)["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(model.generate_image(ids, picture, num_steps=2)).all()
