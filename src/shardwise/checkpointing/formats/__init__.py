"""One file per format: each reads its folder or file into `Contents`, or writes one. Nothing here runs a model."""
