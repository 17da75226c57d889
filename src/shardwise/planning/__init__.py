"""What will happen to a model, written down before anything does."""
