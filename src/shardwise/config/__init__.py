"""Settings: frozen dataclasses, and the loader that reads them from YAML."""
