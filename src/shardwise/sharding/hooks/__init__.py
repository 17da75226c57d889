"""What happens while a sharded model runs: around forwards, backwards, writes to parameters and collectives."""
