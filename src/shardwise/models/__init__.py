"""Reference models of published shapes, and the resolver of a MODEL argument."""
