"""One catalogue of source rules for lint and migrate. Reads code, never runs it; never imports torch."""
