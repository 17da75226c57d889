"""From boxes of bytes in files to memory: what to read, on which threads, and whether it is what was saved."""
