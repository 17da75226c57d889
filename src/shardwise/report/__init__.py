"""Rendering of results for people and programs."""
