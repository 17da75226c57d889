"""Who reads: every rank its own part, or the first rank everything, which it then sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.agreeing.together import on_first
from shardwise.checkpointing.contents import Box, Contents
from shardwise.checkpointing.reading.broadcasting import read_and_broadcast
from shardwise.checkpointing.reading.requests import Problem, Request, check_requests, read_requests, verify_requests
from shardwise.progress import Progress
from shardwise.sharding.replicas import values_of_ranks


class Reader(Protocol):
    """Checks, verifies and serves requests. All ranks call the same methods in the same order."""

    def check(self, contents: Contents, requests: Sequence[Request]) -> list[Problem]:
        """What is wrong with the files or the requests, before anything is written."""
        ...

    def verify(self, contents: Contents, requests: Sequence[Request], *, progress: Progress | None = None) -> None:
        """Compare the checksums of what is asked for, and write nothing."""
        ...

    def read(
        self, contents: Contents, requests: Sequence[Request], *, verify: bool = True, progress: Progress | None = None
    ) -> None:
        """Fill the targets, comparing checksums on the way."""
        ...


class OwnReader:
    """Every rank reads what it needs.

    Ranks:
        Local throughout.
    """

    def check(self, contents: Contents, requests: Sequence[Request]) -> list[Problem]:
        """See `check_requests`."""
        return check_requests(contents, requests)

    def verify(self, contents: Contents, requests: Sequence[Request], *, progress: Progress | None = None) -> None:
        """See `verify_requests`."""
        verify_requests(contents, requests, progress=progress)

    def read(
        self, contents: Contents, requests: Sequence[Request], *, verify: bool = True, progress: Progress | None = None
    ) -> None:
        """See `read_requests`."""
        read_requests(contents, requests, verify="while" if verify else "no", progress=progress)


class FirstRankReader:
    """Only the first rank of the mesh opens files; the others bring `describe(contents)`.

    Ranks:
        Collective over the mesh throughout.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh

    def check(self, contents: Contents, requests: Sequence[Request]) -> list[Problem]:
        """Check whole tensors, of all that any rank asks for."""
        names = self._names(requests)
        return on_first(lambda: check_requests(contents, _whole(contents, names)), self._mesh)

    def verify(self, contents: Contents, requests: Sequence[Request], *, progress: Progress | None = None) -> None:
        """Let the first rank compare all checksums."""
        names = self._names(requests)
        on_first(lambda: verify_requests(contents, _whole(contents, names), progress=progress), self._mesh)

    def read(
        self, contents: Contents, requests: Sequence[Request], *, verify: bool = True, progress: Progress | None = None
    ) -> None:
        """Let the first rank read and send, a bucket at a time."""
        names = self._names(requests)
        read_and_broadcast(contents, names, requests, self._mesh, verify=verify, progress=progress)

    def _names(self, requests: Sequence[Request]) -> list[str]:
        """What any rank asks for, in one order on all: a rank may hold no part of a tensor."""
        own = list(dict.fromkeys(request.name for request in requests))
        return list(dict.fromkeys(name for names in values_of_ranks(own, self._mesh) for name in names))


def _whole(contents: Contents, names: Sequence[str]) -> list[Request]:
    """Requests for whole tensors, without memory."""
    found = []
    for name in names:
        shape = contents.tensors[name].shape if name in contents.tensors else ()
        found.append(Request(name, torch.empty(shape, device="meta"), Box.whole(shape)))
    return found
