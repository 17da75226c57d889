"""See `shardwise.checkpointing.formats.fsdp1`."""

from shardwise.checkpointing.formats.fsdp1 import record_flat_params as record_flat_params
