"""The plan of sharding a model, computed before the model is modified."""
