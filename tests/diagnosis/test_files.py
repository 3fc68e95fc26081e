"""The doctor reads all attachments again: with real nodes, through the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from diagnosis.place import Place, Started, eventually, matching

from meshagent.diagnosis import files
from meshagent.diagnosis.finding import State
from meshagent.storage.blobs.verification import Audit

SHA = bytes(range(32))


# -- verdicts -------------------------------------------------------------------------------------


def test_a_sound_store_is_told_with_its_count_and_size() -> None:
    (finding,) = files.check_store(Audit(3, 2 * 1024 * 1024, (), (), ()))
    assert (finding.state, finding.text) == (State.OK, "3 files are whole, 2.0 MiB in all")
    (finding,) = files.check_store(Audit(1, 5, (), (), ()))
    assert finding.text == "1 file is whole, 5 bytes in all"
    (finding,) = files.check_store(Audit(0, 0, (), (), ()))
    assert (finding.state, finding.text) == (State.OK, "none is stored here")


def test_what_can_not_be_read_is_a_problem_and_an_empty_store_is_not_claimed() -> None:
    (finding,) = files.check_store(Audit(0, 0, (), (), ("Can't read x.",)))
    assert (finding.state, finding.text) == (State.PROBLEM, "Can't read x.")


@pytest.mark.parametrize(
    ("named", "needed_by", "said", "advised"),
    [
        (
            [files.Naming("b-1", "7k2m", "shot.png", False)],
            ["b-1"],
            "shot.png (000102030405…, in 7k2m of b-1) is damaged",
            "meshagent fetch 7k2m --as b-1",
        ),
        (
            [
                files.Naming("b-1", "7k2m", "shot.png", False),
                files.Naming("t-1", "7k2m", "shot.png", True),
            ],
            ["b-1", "t-1"],
            "7k2m of b-1, 7k2m of t-1",
            "Attach the same file",
        ),
        ([], ["b-1"], "The file 000102030405… is damaged", "b-1 can tell"),
        ([], [], "The file 000102030405… is damaged", "nothing to do"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(
    named: list[files.Naming], needed_by: list[str], said: str, advised: str
) -> None:
    (finding,) = files.check_damaged([SHA], {SHA.hex(): named}, {SHA: needed_by}, Path("/aside"))
    assert finding.state is State.PROBLEM
    assert said in finding.text
    assert "/aside" in finding.text
    assert advised in finding.hint


def test_a_disk_that_dies_does_not_fill_the_screen() -> None:
    many = [bytes([each]) * 32 for each in range(50)]
    found = list(files.check_damaged(many, {}, {each: [] for each in many}, Path("/aside")))
    assert len(found) == files.FILES_EXPLAINED_MAX + 1
    assert found[-1].text.startswith("40 more files are damaged")


def test_what_nobody_needs_is_not_missed() -> None:
    assert not list(files.check_lost([SHA], {}, {SHA: []}))
    (finding,) = files.check_lost([SHA], {}, {SHA: ["b-1"]})
    assert finding.state is State.NOTE


# -- real nodes -----------------------------------------------------------------------------------


@pytest.fixture
def sent(place: Place) -> tuple[Started, Started, str, Path]:
    """Two agents in two folders of one mesh; a file that came; and where it lies there."""
    place.init()
    tester = place.join("tester")
    there = place.root / "there"
    there.mkdir()
    code = place.run("invite").stdout.splitlines()[-1]
    backend = place.join("backend", "--peer", tester.address, "--invite", "-", at=there, text=code)
    (place.project / "shot.bin").write_bytes(os.urandom(300_000))
    words = ("send", backend.agent, "look", "--attach", "shot.bin", "--json", "--wait", "15")
    eventually(lambda: backend.agent in place.run("peers").stdout)
    receipt = json.loads(place.run(*words).stdout)
    assert receipt["state"] == "delivered", receipt
    (message,) = json.loads(place.run("inbox", "--json", at=there).stdout)
    return tester, backend, message["id"], Path(message["attachments"][0]["path"])


@pytest.mark.process
def test_a_flipped_bit_is_found_by_name_and_fetched_anew(
    place: Place, sent: tuple[Started, Started, str, Path]
) -> None:
    _, backend, ident, path = sent
    there = place.root / "there"
    assert "1 file is whole" in matching(place.doctor("--files", at=there), "files", "ok")
    data = path.read_bytes()
    path.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    assert not matching(place.doctor(at=there), "files", "problem")  # nobody asked for it
    words = matching(place.doctor("--files", at=there), "files", "problem")
    assert "shot.bin" in words
    assert f"{ident} of {backend.agent}" in words
    assert f"meshagent fetch {ident} --as {backend.agent}" in words
    assert not path.exists()
    assert "not here again" in matching(place.doctor("--files", at=there), "files", "note")
    fetched = place.run("fetch", ident, "--as", backend.agent, at=there)
    assert fetched.returncode == 0, fetched
    assert path.read_bytes() == data
    findings = place.doctor("--files", at=there)
    assert "1 file is whole" in matching(findings, "files", "ok")
    assert not matching(findings, "files", "problem") + matching(findings, "files", "note")


@pytest.mark.process
def test_the_sender_of_a_damaged_file_is_told_to_attach_it_again(
    place: Place, sent: tuple[Started, Started, str, Path]
) -> None:
    tester, _, ident, path = sent
    ours = place.mesh / path.relative_to(place.root / "there" / ".meshagent")
    data = ours.read_bytes()
    ours.write_bytes(data[:-1])
    words = matching(place.doctor("--files"), "files", "problem")
    assert f"{ident} of {tester.agent}" in words
    assert "Attach the same file" in words
    assert place.run("send", "backend", "again", "--attach", "shot.bin").returncode == 0
    assert ours.read_bytes() == data
    assert "1 file is whole" in matching(place.doctor("--files"), "files", "ok")


@pytest.mark.process
def test_a_mesh_without_files_says_so_in_words_and_exits_well(place: Place) -> None:
    place.init()
    ran = place.run("doctor", "--files")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "none is stored here" in ran.stdout
    assert "none is stored here" not in place.run("doctor").stdout
