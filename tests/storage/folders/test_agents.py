"""The agents of a mesh folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshagent.errors import ConfigError, CorruptFile, LimitReached, StorageError, UsageError
from meshagent.storage.folders import agents as module
from meshagent.storage.folders.agents import AgentFolder, AgentInfo, create_agent, list_agents
from meshagent.storage.folders.mesh_folder import MeshFolder

SEED = bytes(range(100, 132))
TESTER = "tester-aaaaaaaa"


@pytest.fixture
def mesh(tmp_path: Path) -> MeshFolder:
    mesh = MeshFolder(tmp_path / ".meshagent")
    mesh.create("shop")
    return mesh


def create(mesh: MeshFolder, agent: str = TESTER) -> AgentFolder:
    return create_agent(mesh, agent, SEED, "tester", "qa", ["python", "web"])


def test_an_agent_is_read_as_it_was_created(mesh: MeshFolder) -> None:
    folder = create(mesh)
    assert folder.read() == AgentInfo(TESTER, "tester", "qa", ("python", "web"), SEED)
    assert folder.agent == TESTER
    assert folder.warnings == []
    assert sorted(os.listdir(folder.path)) == ["agent.key", "agent.toml"]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.key_file.stat().st_mode & 0o777 == 0o600


def test_the_seed_is_in_no_repr(mesh: MeshFolder) -> None:
    info = create(mesh).read()
    assert "seed" not in repr(info)
    assert SEED.hex()[:12] not in repr(info)
    assert repr(SEED)[:12] not in repr(info)


def test_agents_are_listed_by_id_and_nothing_else_is(mesh: MeshFolder) -> None:
    assert list_agents(mesh) == []
    for agent in ("zeta-bbbbbbbb", TESTER, "alpha-cccccccc"):
        create(mesh, agent)
    (mesh.agents / f".{TESTER}.0123456789abcdef.tmp").mkdir()
    (mesh.agents / "notes.txt").write_text("")
    (mesh.agents / "file-dddddddd").write_text("")
    listed = [folder.agent for folder in list_agents(mesh)]
    assert listed == ["alpha-cccccccc", TESTER, "zeta-bbbbbbbb"]


def test_a_mesh_without_an_agents_folder_has_none_and_can_get_one(mesh: MeshFolder) -> None:
    mesh.agents.rmdir()
    assert list_agents(mesh) == []
    assert create(mesh).read().agent == TESTER


def test_an_agent_is_never_replaced(mesh: MeshFolder) -> None:
    folder = create(mesh)
    with pytest.raises(StorageError, match=f"{TESTER} exists already"):
        create_agent(mesh, TESTER, bytes(32), "other", "other")
    assert folder.read().seed == SEED
    assert os.listdir(mesh.agents) == [TESTER]


def test_an_id_can_not_leave_the_folder(mesh: MeshFolder) -> None:
    for agent in ("../evil-aaaaaaaa", "", "x", "a/b-aaaaaaaa"):
        with pytest.raises(UsageError):
            create(mesh, agent)
    assert os.listdir(mesh.agents) == []


def test_the_number_of_agents_is_bounded(mesh: MeshFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGENTS_MAX", 2)
    create(mesh, "a-aaaaaaaa")
    create(mesh, "b-aaaaaaaa")
    with pytest.raises(LimitReached, match="2 agents"):
        create(mesh, "c-aaaaaaaa")


def test_what_could_not_be_read_back_is_never_written(mesh: MeshFolder) -> None:
    folder = create(mesh)
    before = folder.info_file.read_bytes()
    for name, role, capabilities in (
        ("Tester!", "qa", []),
        ("tester", "", []),
        ("tester", "qa", ["two words"]),
    ):
        with pytest.raises(UsageError):
            folder.write_info(name, role, capabilities)
        with pytest.raises(UsageError):
            create_agent(mesh, "other-aaaaaaaa", SEED, name, role, capabilities)
    with pytest.raises(LimitReached, match="65 capabilities"):
        folder.write_info("tester", "qa", [f"c{number}" for number in range(65)])
    assert folder.info_file.read_bytes() == before
    assert os.listdir(mesh.agents) == [TESTER]


def test_capabilities_can_change_while_the_key_stays(mesh: MeshFolder) -> None:
    folder = create(mesh)
    folder.write_info("tester", "qa", ["rust"])
    assert folder.read() == AgentInfo(TESTER, "tester", "qa", ("rust",), SEED)


@pytest.mark.parametrize("content", [b"", b"agentkey1:zz\n", b"meshkey1:" + b"0" * 64])
def test_a_damaged_key_says_which_file_why_and_what_to_do(mesh: MeshFolder, content: bytes) -> None:
    folder = create(mesh)
    folder.key_file.write_bytes(content)
    with pytest.raises(CorruptFile) as caught:
        folder.read()
    assert str(folder.key_file) in caught.value.message
    assert "damaged: " in caught.value.message
    assert "backup" in caught.value.hint
    assert f"remove the folder {folder.path}" in caught.value.hint


def test_a_missing_key_is_explained(mesh: MeshFolder) -> None:
    folder = create(mesh)
    folder.key_file.unlink()
    with pytest.raises(StorageError, match=r"agent\.key: it does not exist"):
        folder.read()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('name = "tester"\n', "role"),
        ('role = "qa"\n', "name"),
        ('name = "Tester!"\nrole = "qa"\n', "name"),
        ('name = "t"\nrole = "qa"\ncapabilities = ["two words"]\n', "capabilities"),
        ('name = "t"\nrole = "qa"\ncapability = ["x"]\n', "capability"),
    ],
)
def test_a_mistake_in_agent_toml_names_the_field(mesh: MeshFolder, text: str, field: str) -> None:
    folder = create(mesh)
    folder.info_file.write_text(text)
    with pytest.raises(ConfigError, match=r"agent\.toml") as caught:
        folder.read()
    assert caught.value.data["field"] == field
    assert caught.value.hint
