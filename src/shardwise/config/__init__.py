"""What the user wants: frozen dataclasses, and the loader that fills them from YAML."""
