"""`python -m shardwise`: the command, for launchers that start modules: `torchrun -m shardwise train RUN.yaml`."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
