"""Reader of Python programs for lint and the codemod; never imports torch."""
