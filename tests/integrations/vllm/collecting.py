"""An ASGI middleware for servers under test: collects Python's garbage every few requests."""

import gc
import itertools
from typing import Any

REQUESTS = 20


class CollectGarbage:
    """vLLM's parser of chat messages leaves the decoded media of every request in a cycle of references, until Python's
    oldest generation is collected: with large pictures that is hundreds of MiB, at any time."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._requests = itertools.count(1)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and next(self._requests) % REQUESTS == 0:
            gc.collect()
        await self._app(scope, receive, send)
