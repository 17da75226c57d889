"""One mistake a function, in the words people use for them."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import wandb
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from my_models import Transformer, load_batches


def setup():
    dist.init_process_group(backend="cuda:nccl", device_id=torch.device("cuda", 0))  # expect: SW220


def by_function(model, lr):
    return torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=lr)  # expect: SW201


def optimizer_by_function(config):
    model = Transformer(config)
    optimizer = by_function(model, config.lr)
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    return model, optimizer


def sharded(config):
    model = Transformer(config)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole_model_saved(config):
    model = sharded(config)
    torch.save(model, "model.pt")  # expect: SW221


def dictionary_of_shards(config):
    model = sharded(config)
    state = get_model_state_dict(model)
    torch.save({"epoch": 3, "state": state}, "model.pt")  # expect: SW221


def gathered_by_hand_on_one_rank(config):
    model = sharded(config)
    if not dist.get_rank():
        state = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}  # expect: SW222
        torch.save(state, "model.pt")


def helper_called_on_one_rank(config, is_main_process):
    model = sharded(config)

    def export():
        options = StateDictOptions(full_state_dict=True)
        return get_model_state_dict(model, options=options)  # expect: SW222

    if is_main_process:
        torch.save(export(), "model.pt")


def norm_in_a_dictionary(config):
    model = sharded(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in load_batches():
        model(batch).sum().backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        wandb.log({"loss": 0.0, "grad_norm": grad_norm})  # expect: SW233
        print(float(grad_norm))  # expect: SW233
        optimizer.step()


def norm_by_hand(config):
    model = sharded(config)
    model(next(load_batches())).sum().backward()
    squares = [torch.linalg.vector_norm(p.grad).item() ** 2 for p in model.parameters()]  # expect: SW233
    return sum(squares) ** 0.5


def same_module_again_and_again(config):
    model = Transformer(config)
    for _ in range(config.num_stages):
        fully_shard(model)  # expect: SW204


def loops_over_the_same_blocks(config):
    model = Transformer(config)
    for layer in model.layers:
        fully_shard(layer)
    for layer in model.layers:
        fully_shard(layer)  # expect: SW204
    fully_shard(model)


def checkpoint_by_index(config):
    model = sharded(config)
    for index in range(len(model.layers)):
        model.layers[index] = checkpoint_wrapper(model.layers[index])  # expect: SW206


def mesh_of_ranks(config):
    mesh = DeviceMesh("cuda", [[0, 1, 2, 3], [4, 5, 6, 7]])  # expect: SW219
    model = Transformer(config)
    fully_shard(model.layers[0], mesh=mesh)
    return model


def dtype_by_flag(bf16):
    dtype = torch.bfloat16 if bf16 else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype)  # expect: SW211


def dtype_by_name(name):
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return MixedPrecisionPolicy(dtypes[name])  # expect: SW211


def old_checkpoint_api(path):
    state_dict = {"model": dict()}
    dcp.load_state_dict(state_dict=state_dict, storage_reader=FileSystemReader(path))  # expect: SW225
    return state_dict


def new_head(config):
    model = sharded(config)
    model.head.weight.data = torch.zeros(10, 10)  # expect: SW228
    return model


def teacher(config):
    model = sharded(config)
    return model, copy.deepcopy(model).eval()  # expect: SW227


def conditional_head(config):
    model = sharded(config)
    if dist.get_rank() == 0:
        return model(torch.zeros(1))  # expect: SW222
    return nn.Identity()
