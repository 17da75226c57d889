"""A run's objects as flat names and boxes: models, optimizers, random numbers, and what they are called."""
