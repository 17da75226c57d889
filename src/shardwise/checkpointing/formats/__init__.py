"""One file per format: each reads a folder or file into `Contents`, or writes one. No module runs a model."""
