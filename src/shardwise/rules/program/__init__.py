"""What a program does to its models, in order: a light reading of the code that follows values, not types."""
