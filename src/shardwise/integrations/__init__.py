"""Other systems that run shardwise: each file needs its own extra."""
