"""Make a GPU run out of memory in earnest, and show what is said about it.

python -m benchmarks.out_of_memory        one GPU; doubles the batch of a 1B Llama until it no longer fits
"""

import json
import sys
import traceback
from datetime import UTC, datetime

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.models.llama import SHAPES, Llama


def main() -> int:
    sw.init_distributed()
    with torch.device("meta"):
        model = Llama(SHAPES["llama3-1b"])
    sw.materialize(sw.shard(model))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = 1
    while True:
        tokens = torch.randint(0, 1000, (batch, 8192), device="cuda")
        try:
            with sw.explained(model):
                F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError as error:
            note = "\n".join(getattr(error, "__notes__", []))
            date = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            facts = {"batch": batch, "tokens": 8192, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            print(json.dumps({**facts, "date": date}))
            print(traceback.format_exception_only(error)[0].rstrip())
            print(note)
            return int("parameters (shards)" not in note)
        print(f"a batch of {batch} fits: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most", flush=True)
        batch *= 2


if __name__ == "__main__":
    sys.exit(main())
