"""Collectives under a test of the rank that are right: the other ranks make the call too, or the group is theirs."""

import torch.distributed as dist

import shardwise as sw


def first_rank_first(prepare, rank):
    if rank != 0:
        dist.barrier()
    prepare()
    if rank == 0:
        dist.barrier()


def first_of_machine_first(prepare, args):
    if args.world_size > 1 and args.local_rank not in [-1, 0]:
        dist.barrier()
    prepare()
    if args.world_size > 1 and args.local_rank == 0:
        dist.barrier()


def hand_out(value):
    if dist.get_rank() == 0:
        dist.broadcast_object_list([value])
        return value
    received = [None]
    dist.broadcast_object_list(received)
    return received[0]


def among_some(x, group, rank):
    if rank == 0:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, dist.ReduceOp.SUM, group)
        dist.barrier(group)
        dist.send(x, 1)


def own_saver(build_saver, model, rank):
    saver = build_saver()
    checkpointer = sw.Checkpointer("checkpoints")
    if rank == 0:
        saver.save(model)
        print(checkpointer.path(3))


def as_asked(x, rank0_only):
    if rank0_only:  # a setting, the same on all ranks
        dist.broadcast(x, 0)
