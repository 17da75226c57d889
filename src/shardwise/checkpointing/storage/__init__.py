"""Bytes on disks and in object stores, and their checksums."""
