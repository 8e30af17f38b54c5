"""The event loop of a process of the server, from its start to its end, in one run.

asyncio runs a loop once more to close it, and uvloop opens two descriptors for each run. Where the
system has none left, that run fails, and the loop counts as running from then on and cannot be
closed: a server that was asked to end would end with a traceback instead. So here the same work is
done at the end of the first run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


def run_whole(work: Coroutine[Any, Any, Result]) -> Result:
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(_to_the_end(work))
    finally:
        if not loop.is_running():  # it could not even begin
            loop.close()


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await work
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for task in left:
            if not task.cancelled() and (error := task.exception()) is not None:
                told = {"message": "a task failed as it was cancelled", "exception": error}
                loop.call_exception_handler(told)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()
