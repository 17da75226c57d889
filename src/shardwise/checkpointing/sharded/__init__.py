"""Our own format: a file a rank, a manifest with every checksum, and one rename that commits them."""
