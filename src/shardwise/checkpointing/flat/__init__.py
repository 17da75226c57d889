"""FSDP1's flat parameters, taken apart into those that they were made of."""
