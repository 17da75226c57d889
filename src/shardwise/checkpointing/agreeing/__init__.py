"""How the ranks of a save or load agree, and fail alike."""
