import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(10, 10) for _ in range(12)])

    def forward(self, x):
        return self.layers(x)


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    net = Net().cuda()
    net = fully_shard(net)  # expect: SW202
    opt = torch.optim.Adam(net.parameters())
    for _ in range(3):
        net(torch.randn(2, 10)).sum().backward()
        opt.step()


main()
