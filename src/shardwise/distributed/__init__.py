"""Process group, mesh, agreement between ranks, launchers and restarts."""
