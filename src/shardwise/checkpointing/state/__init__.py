"""A run's objects as flat names and chunks: models, optimizers, random numbers, and what they are called."""
