"""What no program on this machine can beat with the same means: the floors beside our figures.

Plain pyzmq, plain apsw, plain files; nothing of the mesh. The far end of a link is a process of
its own (`python -P -m meshagent.bench.floors echo|sink …`) that speaks `children`'s first line.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import garbage

from meshagent.bench.children import Child, say

__all__ = ["RoundTripFloor", "StreamFloor", "copy_and_hash", "rows_per_second"]

RING_BYTES = 4 << 20  # as large as a write-ahead log grows before it is used again from the start
BATCH_ROWS = 100
CHUNK_BYTES = 256 << 10
CHUNKS_QUEUED_MAX = 64  # of a stream: enough to keep both ends busy, and memory flat
REPLY_TIMEOUT_MS = 60_000


class SyncedFile:
    """A file that is overwritten in a ring, each write synced: the cheapest durable record."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(RING_BYTES))
        self._file = os.open(path, os.O_WRONLY)
        os.fsync(self._file)
        self._at = 0

    def write(self, data: bytes) -> None:
        """Durable when this returns."""
        self._at = 0 if self._at + len(data) > RING_BYTES else self._at
        os.pwrite(self._file, data, self._at)
        self._at += len(data)
        os.fdatasync(self._file)

    def close(self) -> None:
        """Leaves the file to its folder's owner."""
        os.close(self._file)


class _Link:
    """A DEALER with CURVE to a child's ROUTER."""

    def __init__(self, folder: Path, *words: str) -> None:
        notes = folder / f"{'-'.join(Path(word).name for word in words)}.stderr"
        self._child = Child("meshagent.bench.floors", *words, notes=notes)
        ready = self._child.wait_ready()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self.socket.curve_serverkey = ready["key"].encode()
        self.socket.linger, self.socket.sndhwm = 0, CHUNKS_QUEUED_MAX
        self.socket.rcvtimeo = self.socket.sndtimeo = REPLY_TIMEOUT_MS
        self.socket.connect(f"tcp://127.0.0.1:{ready['port']}")

    def close(self) -> None:
        self.socket.close()
        self._context.term()
        self._child.kill()
        self._child.close()


class RoundTripFloor:
    """Two fdatasyncs and one CURVE round trip, and the same without the syncs."""

    def __init__(self, folder: Path) -> None:
        self._here = SyncedFile(folder / "here")
        self._link = _Link(folder, "echo", str(folder / "there"))

    def latencies(self, count: int, size: int) -> list[float]:
        """Milliseconds from the first byte written here to the word that it is synced there."""
        payload, socket = b"x" * size, self._link.socket
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            self._here.write(payload)
            socket.send(payload)
            socket.recv()
            taken.append(1000 * (time.perf_counter() - began))
        return taken

    def close(self) -> None:
        """End the far end."""
        self._link.close()
        self._here.close()


class StreamFloor:
    """A file's bytes through CURVE, from memory to nowhere.

    As pyzmq does it when nothing else is said; or without its copies, from one block that stays in
    the processor's cache, which no program that has something to send can do.
    """

    def __init__(self, folder: Path, *, copy: bool) -> None:
        self._copy = copy
        self._link = _Link(folder, "sink", "copy" if copy else "view")

    def seconds(self, size: int) -> float:
        """From the first chunk to the word that all have come."""
        socket, chunk = self._link.socket, bytes(CHUNK_BYTES)
        began = time.perf_counter()
        for _ in range(max(1, size // CHUNK_BYTES)):
            socket.send(chunk, 0, self._copy)
        socket.send(b"")
        socket.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        """End the far end, and the thread that pyzmq keeps for what it does not copy."""
        self._link.close()
        garbage.gc.stop()


def rows_per_second(folder: Path, rows: int, size: int) -> float:
    """SQLite with synchronous=FULL, in batches of a hundred, in a file that is then removed.

    The second of two tries: the first may meet memory that this machine had not used before, which
    a virtual one has to fetch page by page, and a floor is what nobody can beat.
    """
    _write_rows(folder, rows, size)
    return _write_rows(folder, rows, size)


def _write_rows(folder: Path, rows: int, size: int) -> float:
    import apsw

    path = folder / "floor.db"
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", "full")
    db.execute("CREATE TABLE message (seq INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL)")
    bodies = [(b"x" * size,)] * BATCH_ROWS
    began = time.perf_counter()
    for _ in range(max(1, rows // BATCH_ROWS)):
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO message (body) VALUES (?)", bodies)
        db.execute("COMMIT")
    passed = time.perf_counter() - began
    db.close()
    for left in folder.glob("floor.db*"):
        left.unlink()
    return max(1, rows // BATCH_ROWS) * BATCH_ROWS / passed


def copy_and_hash(path: Path, to: Path) -> float:
    """Seconds to copy a file, hash it and sync it: what a shared store can't do without."""
    began = time.perf_counter()
    shutil.copyfile(path, to)
    with to.open("rb") as copy:
        hashlib.file_digest(copy, "sha256")
        os.fsync(copy.fileno())
    return time.perf_counter() - began


def _router() -> tuple[Any, dict[str, Any]]:
    socket = zmq.Context().socket(zmq.ROUTER)
    public, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_server, socket.linger, socket.rcvhwm = True, 0, CHUNKS_QUEUED_MAX
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return socket, {"key": public.decode(), "port": port}


def _echo(path: Path) -> None:
    """Answer each message when it is synced."""
    ring, (socket, ready) = SyncedFile(path), _router()
    say(ready)
    while True:
        sender, payload = socket.recv_multipart()
        ring.write(payload)
        socket.send_multipart([sender, b"ok"])


def _sink(copy: bool) -> None:
    """Answer the empty message that ends a stream."""
    socket, ready = _router()
    say(ready)
    while True:
        sender, chunk = socket.recv_multipart(copy=copy)
        if not len(chunk):
            socket.send_multipart([bytes(sender), b"ok"])


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        _echo(Path(sys.argv[2]))
    else:
        _sink(sys.argv[2] == "copy")
