"""The command line: each command parses, calls one function, renders and sets the exit status."""
