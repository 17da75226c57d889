"""What only a GPU shows of the functions of the loop: no waiting on the host, pinned offload, streams."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardwise.sharding.full_params import full_params, iter_full_tensors
from shardwise.sharding.registry import recover
from shardwise.training.ema import EMA
from shardwise.training.step import AccumulationMode, accumulate, clip_grad_norm_, lockstep, token_mean
from tests.by_hand import (
    Tiny,
    assert_same,
    full,
    full_gradients,
    loss_of,
    reference_gradients,
    shard_by_hand,
    tiny,
    tokens,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = {"atol": 1e-4, "rtol": 1e-3}  # another device, other kernels
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        yield init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """The test makes any wait of the host for the device an error; here that ends."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(mesh: DeviceMesh, **settings) -> tuple[Tiny, Tiny]:
    reference = tiny().cuda()
    return reference, shard_by_hand(reference, mesh, **settings)


@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_accumulate(mesh: DeviceMesh, mode: AccumulationMode, policy: MixedPrecisionPolicy):
    reference, model = on_gpu(mesh, mp_policy=policy)
    skips = [(), (1,), (0,)]
    for step, skip in enumerate(skips):
        with accumulate(model, step, 3, mode):
            loss_of(model, tokens(0, step).cuda(), skip=skip).backward()
        loss_of(reference, tokens(0, step).cuda(), skip=skip).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_same(full_gradients(model), expected, **(GPU if policy is not BF16 else {"atol": 0.05, "rtol": 0.1}))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_clip_and_token_mean_never_wait(mesh: DeviceMesh, no_waiting: None):
    reference, model = on_gpu(mesh)
    batch = tokens(0).cuda()
    num_tokens = torch.tensor(12, device="cuda")
    expected = reference_gradients(reference, [batch])
    loss = loss_of(model, batch)
    clip_grad_norm_(reference.parameters(), 1.0)  # kernels are loaded on first use, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    token_mean(12 * loss, num_tokens, mesh=mesh).backward()
    norm = clip_grad_norm_(model.parameters(), 1e9)
    largest = clip_grad_norm_(model.parameters(), 1e9, float("inf"))
    torch.cuda.set_sync_debug_mode("default")
    assert norm.device.type == "cuda"
    whole = torch.cat([grad.flatten() for grad in expected.values()])
    torch.testing.assert_close(norm, whole.norm(), **GPU)
    torch.testing.assert_close(largest, whole.abs().max(), **GPU)
    assert_same(full_gradients(model), expected, **GPU)


def test_offloaded_shards_are_clipped_gathered_and_averaged(mesh: DeviceMesh):
    reference = tiny().cuda()
    model = shard_by_hand(reference, mesh, offload_policy=CPUOffloadPolicy())
    batch = tokens(0).cuda()
    loss_of(model, batch).backward()
    expected = reference_gradients(reference, [batch])
    whole = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm.cuda(), whole, **GPU)
    gradients = {name: grad.cuda() for name, grad in full_gradients(model).items()}
    assert_same(gradients, {name: grad * (0.1 / whole) for name, grad in expected.items()}, **GPU)
    ema = EMA(model, 0.5)
    ema.update()
    with full_params(model, writeback=True):
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        for parameter in model.parameters():
            parameter.data.add_(1)
    for name, tensor in iter_full_tensors(model, include_buffers=False):
        torch.testing.assert_close(tensor, reference.get_parameter(name).cpu() + 1)
    for parameter in reference.frozen.parameters():
        parameter.data.add_(1)  # the average leaves frozen parameters as they are
    with ema.swap():
        logits = model(batch)
    torch.testing.assert_close(logits, reference(batch), **GPU)


def test_full_params_of_a_mixed_precision_model(mesh: DeviceMesh):
    reference, model = on_gpu(mesh, mp_policy=BF16)
    with torch.no_grad():
        model(tokens(0).cuda())
    with full_params(model):
        inside = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_same(inside, {name: p.detach() for name, p in reference.named_parameters()}, atol=0, rtol=0)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise FloatingPointError("in backward")


@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
def test_step_after_a_failed_backward(mesh: DeviceMesh, mode: AccumulationMode):
    reference, model = on_gpu(mesh)
    batch = tokens(0).cuda()
    with accumulate(model, 0, 2, mode):
        loss_of(model, batch).backward()
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: Fuse.apply(output))
    with pytest.raises(FloatingPointError), accumulate(model, 1, 2, mode):
        loss_of(model, batch).backward()
    handle.remove()
    recover(model)
    for _ in range(2):
        loss_of(model, batch).backward()
        assert_same(full_gradients(model), reference_gradients(reference, [batch]), **GPU)
        model.zero_grad()


def test_average_equals_one_process(mesh: DeviceMesh):
    _, model = on_gpu(mesh)
    ema = EMA(model, 0.9)
    average = {name: full(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        loss_of(model, tokens(0, step).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        for name, value in copy.copy(average).items():
            average[name] = 0.9 * value + 0.1 * full(model.get_parameter(name).detach())
    shadow = {name: full(tensor) for name, tensor in ema.state_dict()["shadow"].items()}
    assert_same(shadow, average, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_lockstep_agrees_on_the_cpu(mesh: DeviceMesh, no_waiting: None):
    torch.cuda.set_sync_debug_mode("error")
    assert list(lockstep(range(3))) == [0, 1, 2]
