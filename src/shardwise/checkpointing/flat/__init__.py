"""The path under which `record_flat_params` was first published."""
