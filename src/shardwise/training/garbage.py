"""Keep Python's garbage collector from stopping steps: it walks over all that was made before the loop, for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """What exists now is not looked at again until the block ends; what is made inside is collected as ever.

    A full collection takes longer than a short step, and each rank makes the others wait for its own.

    Ranks:
        Local.
    """
    gc.collect(1)  # what is young; a look at everything would hold up the first step by a tenth of a second
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
