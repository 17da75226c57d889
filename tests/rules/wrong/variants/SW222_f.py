import torch.distributed as dist
import shardwise as sw
from torch.distributed import all_reduce as reduce_over_ranks


class Trainer:
    def __init__(self, model):
        self.model = model
        self.checkpointer = sw.Checkpointer("checkpoints")

    def save(self, step):
        if dist.get_rank() == 0:
            self.checkpointer.save(step, model=self.model)  # expect: SW222


def finish(model, loss, rank):
    with sw.Checkpointer("checkpoints") as checkpointer:
        if rank in (-1, 0):
            checkpointer.save(1, model=model)  # expect: SW222
            sw.save_full("run.pt", model=model)  # expect: SW222
            sw.mean_over_ranks(loss)  # expect: SW222
            reduce_over_ranks(loss)  # expect: SW222
            dist.all_gather_object([None, None], "done")  # expect: SW222
    if rank != 0:
        return
    dist.barrier()  # expect: SW222
