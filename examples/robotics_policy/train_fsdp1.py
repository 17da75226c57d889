"""The same policy as openpi's FSDP1 script trains it: one flat parameter, so all weights are float32.

Rank 0 alone loads the pretrained safetensors file; wrapping sends it to the others. Model and optimizer are saved as
one FULL file by rank 0, loaded into a new policy, and training continues.

    torchrun --nproc-per-node 2 -m examples.robotics_policy.train_fsdp1
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from examples.robotics_policy.policy import build, sample, write_pretrained
from safetensors.torch import load_model
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def start(weights: Path | None, device: torch.device) -> tuple[FSDP, torch.optim.Optimizer]:
    """A wrapped policy and its optimizer."""
    policy = build(seed=dist.get_rank())
    if weights is not None and dist.get_rank() == 0:
        load_model(policy, str(weights))
    if device.type == "cpu":  # where FSDP1 cannot
        for tensor in (*policy.parameters(), *policy.buffers()):
            dist.broadcast(tensor.data, src=0)
    policy = FSDP(
        policy.to(device),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        sync_module_states=device.type != "cpu",
        use_orig_params=True,
    )
    return policy, torch.optim.AdamW(policy.parameters(), lr=5e-3)


def train(policy: FSDP, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of this rank."""
    losses = []
    for step in steps:
        loss = policy(*sample(step, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        policy.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    return losses


def full_states(policy: FSDP) -> object:
    """Within it, state dicts are whole, on the CPU of rank 0."""
    offload = torch.cuda.is_available()  # FSDP1 ends by a segmentation fault where states are on the CPU already
    configs = FullStateDictConfig(offload, rank0_only=True), FullOptimStateDictConfig(offload, rank0_only=True)
    return FSDP.state_dict_type(policy, StateDictType.FULL_STATE_DICT, *configs)


def save(policy: FSDP, optimizer: torch.optim.Optimizer, path: Path, step: int) -> None:
    """Every rank takes part; rank 0 writes."""
    with full_states(policy):
        states = {"step": step, "model": policy.state_dict(), "optim": FSDP.optim_state_dict(policy, optimizer)}
    if dist.get_rank() == 0:
        torch.save(states, path)
    dist.barrier()


def load(policy: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Every rank reads the file and keeps its part."""
    states = torch.load(path, map_location="cpu")
    with FSDP.state_dict_type(policy, StateDictType.FULL_STATE_DICT):
        policy.load_state_dict(states["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(policy, optimizer, states["optim"]))
    return states["step"]


def main(num_steps: int = 10, *, resume: bool = True) -> list[float]:
    """Train, save, load, continue; return the losses of this rank."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(0))
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared, src=0)
    weights, checkpoint = Path(shared[0]) / "pretrained.safetensors", Path(shared[0]) / "checkpoint.pt"
    if dist.get_rank() == 0:
        write_pretrained(weights)

    policy, optimizer = start(weights, device)
    half = num_steps // 2 if resume else num_steps
    losses = train(policy, optimizer, range(half))
    if resume:
        save(policy, optimizer, checkpoint, half)
        policy, optimizer = start(None, device)
        losses += train(policy, optimizer, range(load(policy, optimizer, checkpoint), num_steps))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
