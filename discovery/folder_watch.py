"""Telling the event loop that files came or went in one folder. Never reads the files.

One thread waits in watchfiles. Invariant: after `stop` there is no thread and no call.
Where the folder can't be watched `watching` stays False and the owner polls instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["FolderWatch"]

STEP_MS = 250  # how often watchfiles looks at its queue: at 50 ms it costs 0.14 % CPU, here 0.02 %
TURN_MS = 60_000
_MODIFIED = 2  # watchfiles.Change.modified: a heartbeat, which is no news


class FolderWatch:
    """Calls `changed` in the loop's thread when the watch begins and whenever names changed."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        self.watching = False
        self._folder = folder
        self._changed = changed
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="registry-watch", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; takes at most one step."""
        self._stop.set()
        await self._ended.wait()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except (ImportError, OSError, RuntimeError):
            pass  # inotify's limit, a vanished folder, no wheel for this platform: poll
        finally:
            self.watching = False
            self._call(self._ended.set)

    def _watch(self) -> None:
        # Imported here, in the thread: it takes 50 ms that the loop need not wait for.
        from watchfiles._rust_notify import RustNotify

        if "microsoft" in platform.release().lower():
            return  # on WSL the notifications of Windows folders do not arrive
        with RustNotify([str(self._folder)], False, False, 0, False, True) as notify:
            self.watching = True
            self._call(self._changed)  # what changed between the owner's scan and now
            while True:
                changes = notify.watch(STEP_MS, STEP_MS, TURN_MS, self._stop)
                if changes in ("stop", "signal"):
                    return
                if not isinstance(changes, str) and any(map(_is_news, changes)):
                    self._call(self._changed)

    def _call(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without `stop`
            self._loop.call_soon_threadsafe(callback)


def _is_news(change: tuple[int, str]) -> bool:
    kind, path = change
    return kind != _MODIFIED and not Path(path).name.startswith(".")
