"""How fast do attachments go?

Files of 1 MiB, 100 MiB and, with --full, 1 GiB, each new: what a store already has would not move.
Floor: a CURVE stream of plain pyzmq, from memory to nowhere, and one without its copies; for agents
of one mesh folder, where no byte moves: copy, hash and sync of the file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from meshagent.bench.agent import features
from meshagent.bench.answers import Answer, Headline
from meshagent.bench.contestants import takes_part
from meshagent.bench.floors import StreamFloor, copy_and_hash
from meshagent.bench.harness import Setting, interleave, ratio_of, spread_of
from meshagent.bench.pair import MeshPair
from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["blob_path", "measure", "new_file"]

MIB = 1 << 20
OURS, SHARED = "meshagent", "meshagent, one mesh folder"
MOVE = "meshagent, after send returned"
FLOOR, VIEWS = "floor: plain CURVE stream", "floor: CURVE stream without copies"
SHARED_FLOOR = "floor: copy, SHA-256, sync"
TO_FLOOR_BAR = 0.5
WARM_UP_MIB = 100  # a file so large needs no warm-up, and a store keeps each one it was given
Rounds = dict[str, Callable[[], float]]

AMOUNTS = {
    "tiny": {1: 1},
    "quick": {1: 5, 100: 3},
    "full": {1: 15, 100: 7, 1024: 3},
}
"""Rounds for each size in MiB."""


@dataclass(slots=True)
class Movers:
    """Everyone who moves a file; each call is seconds."""

    by_name: dict[str, Callable[[Path], float]]


def measure(setting: Setting) -> Answer:
    """MB per second of each contestant at each size, and the ratios."""
    answer = Answer()
    with ExitStack() as stack:
        movers = _movers(setting, answer, stack)
        for mib, rounds in AMOUNTS[setting.extent].items():
            cases = _cases(setting, movers, mib)
            taken = interleave(cases, rounds, int(mib < WARM_UP_MIB), setting.folder)
            for name, values in taken.items():
                answer.cases[f"{name}, {mib} MiB"] = {"mb_per_s": spread_of(values)}
            answer.headlines += _headlines(taken, mib)
    return answer


def _headlines(taken: dict[str, list[float]], mib: int) -> list[Headline]:
    found = []
    if OURS in taken:
        bar = TO_FLOOR_BAR if mib >= 100 else None  # the bar is for bulk; 1 MiB is mostly latency
        to_floor = ratio_of(taken[OURS], taken[FLOOR])
        found.append(Headline(f"bulk.{mib}mib_to_floor", to_floor, "higher"))
        move_to_floor = ratio_of(taken[MOVE], taken[FLOOR])
        found.append(Headline(f"bulk.{mib}mib_move_to_floor", move_to_floor, "higher", bar=bar))
        to_views = ratio_of(taken[MOVE], taken[VIEWS])
        found.append(Headline(f"bulk.{mib}mib_move_to_views", to_views, "higher"))
        to_disk = ratio_of(taken[MOVE], taken[SHARED_FLOOR])
        found.append(Headline(f"bulk.{mib}mib_move_to_disk", to_disk, "higher"))
        found += [
            Headline(f"bulk.{mib}mib_to_{name}", ratio_of(taken[OURS], taken[name]), "higher")
            for name in ("http", "scp")
            if name in taken
        ]
    if SHARED in taken:
        to_floor = ratio_of(taken[SHARED], taken[SHARED_FLOOR])
        found.append(Headline(f"bulk.{mib}mib_shared_to_floor", to_floor, "higher"))
    return found


def _movers(setting: Setting, answer: Answer, stack: ExitStack) -> Movers:
    plain, views = (
        stack.enter_context(closing(StreamFloor(setting.folder, copy=copy)))
        for copy in (True, False)
    )
    copied = setting.folder / "copied"
    movers: dict[str, Callable[[Path], float]] = {
        FLOOR: lambda path: plain.seconds(path.stat().st_size),
        VIEWS: lambda path: views.seconds(path.stat().st_size),
        SHARED_FLOOR: lambda path: copy_and_hash(path, copied),
    }
    if "attach" in features():
        pair = stack.enter_context(MeshPair(setting.folder / "mesh"))
        neighbour = pair.start(pair.here, "neighbour", [pair.sender.wait_ready()["address"]])
        near = str(neighbour.wait_ready()["agent"])
        pair.sender.ask("meet", agent=near)

        def attach(path: Path, which: int) -> float:
            arrives = str(blob_path(pair.there, path))
            return float(pair.ask("attach", path=str(path), arrives=arrives)[which])

        movers[OURS] = lambda path: attach(path, 0)
        movers[MOVE] = lambda path: attach(path, 1)
        movers[SHARED] = lambda path: float(
            pair.sender.ask("attach", to=near, path=str(path), arrives="")[0]
        )
    else:
        answer.leave_out(OURS, "attachments are not in this version")
    if takes_part("http", setting, answer):
        from meshagent.bench.contestants.http import Http

        movers["http"] = stack.enter_context(closing(Http(setting.folder / "http"))).upload
    if takes_part("scp", setting, answer):
        from meshagent.bench.contestants.scp import Scp

        try:
            movers["scp"] = stack.enter_context(closing(Scp(setting.folder / "scp"))).copy
        except OSError as error:  # as root it wants a user and a folder that only a package makes
            answer.leave_out("scp", str(error))
    return Movers(movers)


def _cases(setting: Setting, movers: Movers, mib: int) -> Rounds:
    def rate(move: Callable[[Path], float]) -> Callable[[], float]:
        def moved() -> float:
            path = new_file(setting.folder, mib * MIB)
            seconds = move(path)
            path.unlink()
            return mib * MIB / 1e6 / seconds

        return moved

    return {name: rate(move) for name, move in movers.by_name.items()}


def new_file(folder: Path, size: int) -> Path:
    """Random bytes that no store has seen, on disk before the clock starts."""
    path = folder / f"file-{time.monotonic_ns()}"
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
    return path


def blob_path(mesh: MeshFolder, path: Path) -> Path:
    """Where the file's bytes will be in that mesh's store (DESIGN 12)."""
    with path.open("rb") as file:
        name = hashlib.file_digest(file, "sha256").hexdigest()
    return mesh.blobs / name[:2] / name[2:]
