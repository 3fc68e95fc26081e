"""Where a mesh is found, and how one comes into being."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from meshagent.errors import ConfigError, CorruptFile, StorageError, UsageError
from meshagent.storage.folders.mesh_folder import MeshFolder, find_mesh, personal_mesh

SECRET = bytes(range(32))


def new_mesh(folder: Path, secret: bytes | None = None) -> MeshFolder:
    mesh = MeshFolder(folder / ".meshagent")
    assert mesh.create(folder.name, secret)
    return mesh


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_mesh_has_everything_of_the_design(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path)
    assert sorted(os.listdir(mesh.path)) == sorted(
        [".gitignore", "agents", "blobs", "mesh.key", "mesh.toml", "registry", "spool"]
    )
    assert os.listdir(tmp_path) == [".meshagent"]
    assert len(mesh.read_secret()) == 32
    assert mesh.read_settings().name == tmp_path.name[:64]
    assert mesh.warnings == []
    assert mode(mesh.path) == 0o700
    assert mode(mesh.key_file) == 0o600
    assert all(mode(f) == 0o700 for f in (mesh.registry, mesh.spool, mesh.blobs, mesh.agents))


def test_git_sees_the_settings_and_never_the_secret(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path)
    (mesh.agents / "a").write_text("x")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    command = ["git", "-C", str(tmp_path), "status", "--porcelain", "-uall"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.split() == ["??", ".meshagent/.gitignore", "??", ".meshagent/mesh.toml"]


def test_creating_again_changes_nothing(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path)
    secret = mesh.read_secret()
    assert not mesh.create("other")
    assert mesh.read_secret() == secret
    assert mesh.read_settings().name == tmp_path.name[:64]


def test_an_invited_secret_is_kept_and_never_replaces_another(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path, SECRET)
    assert mesh.read_secret() == SECRET
    assert not mesh.create("again", SECRET)
    with pytest.raises(UsageError, match="with another secret"):
        mesh.create("again", b"\x07" * 32)
    assert mesh.read_secret() == SECRET


def test_a_fresh_clone_becomes_a_mesh_with_its_committed_settings(tmp_path: Path) -> None:
    mesh = MeshFolder(tmp_path / ".meshagent")
    mesh.path.mkdir()
    mesh.settings_file.write_text('name = "shop"\n')
    assert find_mesh(tmp_path, None, {}) is None
    assert mesh.create("other")
    assert mesh.read_settings().name == "shop"
    assert find_mesh(tmp_path, None, {}) == mesh.path
    assert mode(mesh.path) == 0o700
    assert (mesh.path / ".gitignore").exists()
    assert mesh.agents.is_dir()


def test_the_nearest_mesh_upward_is_found(tmp_path: Path) -> None:
    outer = new_mesh(tmp_path).path
    deep = tmp_path / "src" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "src" / ".meshagent").mkdir()  # without a key it is no mesh
    assert find_mesh(deep, None, {}) == outer
    inner = MeshFolder(tmp_path / "src" / ".meshagent")
    inner.create("src")
    assert find_mesh(deep, None, {}) == inner.path
    assert find_mesh(tmp_path, None, {}) == outer
    assert find_mesh(Path("/"), None, {}) is None


def test_a_named_folder_wins_over_what_is_near(tmp_path: Path) -> None:
    new_mesh(tmp_path)
    one, two, bare = tmp_path / "one", tmp_path / "two", tmp_path / "bare"
    mesh_one, mesh_two = new_mesh(one).path, new_mesh(two).path
    MeshFolder(bare).create("bare")
    environ = {"MESHAGENT_DIR": str(two)}
    assert find_mesh(tmp_path, one, environ) == mesh_one
    assert find_mesh(tmp_path, mesh_one, environ) == mesh_one
    assert find_mesh(tmp_path, None, environ) == mesh_two
    assert find_mesh(tmp_path, bare, {}) == bare
    assert find_mesh(tmp_path, None, {"MESHAGENT_DIR": ""}) == tmp_path / ".meshagent"


def test_a_named_folder_without_a_mesh_is_where_one_will_be(tmp_path: Path) -> None:
    new_mesh(tmp_path)
    assert find_mesh(tmp_path, tmp_path / "new", {}) == tmp_path / "new" / ".meshagent"
    named = tmp_path / "new" / ".meshagent"
    assert find_mesh(tmp_path, named, {}) == named


def test_a_relative_name_is_taken_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = new_mesh(tmp_path)
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    assert find_mesh(Path(), Path(".."), {}) == mesh.path
    assert find_mesh(Path(), Path("."), {}) == tmp_path / "src" / ".meshagent"
    assert find_mesh(Path(), None, {}) == mesh.path


def test_the_personal_mesh_is_in_the_users_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert personal_mesh({"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "meshagent"
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert personal_mesh({}).is_relative_to(tmp_path)
    mesh = MeshFolder(personal_mesh({}))
    assert mesh.create("personal")
    assert find_mesh(tmp_path, mesh.path, {}) == mesh.path


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"\x00" * 75, "does not begin with 'meshkey1:'"),
        (b"agentkey1:" + SECRET.hex().encode() + b"\n", "does not begin with 'meshkey1:'"),
        (b"meshkey1:" + SECRET.hex().encode()[:-1] + b"\n", "64 hexadecimal digits"),
        (b"meshkey1:" + SECRET.hex().encode() + b"00\n", "64 hexadecimal digits"),
        (b"meshkey1:" + SECRET.hex().encode()[:-1] + b"g\n", "64 hexadecimal digits"),
        (b"meshkey1:" + SECRET.hex().encode() + b"\nmore", "64 hexadecimal digits"),
        (b"meshkey1:" + b"0" * 5000, "more than 1024 bytes"),
    ],
)
def test_a_damaged_key_is_explained_without_a_byte_of_it(
    tmp_path: Path, content: bytes, why: str
) -> None:
    mesh = new_mesh(tmp_path, SECRET)
    mesh.key_file.write_bytes(content)
    with pytest.raises(CorruptFile) as caught:
        mesh.read_secret()
    error = caught.value
    assert str(mesh.key_file) in error.message
    assert why in error.message
    assert "estore" in error.hint
    told = [str(error), repr(error), repr(error.data), repr(mesh)]
    assert SECRET.hex()[:12] not in "".join(told + traceback.format_exception(error))
    assert mesh.key_file.read_bytes() == content


def test_a_key_with_windows_line_endings_is_read(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path, SECRET)
    for ending in (b"", b"\n", b"\r\n"):
        mesh.key_file.write_bytes(b"meshkey1:" + SECRET.hex().encode() + ending)
        assert mesh.read_secret() == SECRET


def test_a_key_that_others_can_read_is_closed_to_them_with_a_warning(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path, SECRET)
    mesh.key_file.chmod(0o644)
    assert mesh.read_secret() == SECRET
    assert mode(mesh.key_file) == 0o600
    assert len(mesh.warnings) == 1
    assert "mesh.key" in mesh.warnings[0]
    assert mesh.read_secret() == SECRET
    assert len(mesh.warnings) == 1


def test_a_link_in_the_place_of_the_key_is_refused(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path, SECRET)
    mesh.key_file.rename(tmp_path / "elsewhere")
    mesh.key_file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="symbolic link"):
        mesh.read_secret()


def test_a_typo_in_the_settings_is_explained(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path)
    mesh.settings_file.write_text('name = "x"\ndiscover = "file"\n')
    with pytest.raises(ConfigError, match=r"mesh\.toml has an unknown setting 'discover'"):
        mesh.read_settings()


def test_a_place_where_no_folder_can_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="in its place"):
        MeshFolder(tmp_path / "file" / ".meshagent").create("x")
    (tmp_path / ".meshagent").write_text("")
    with pytest.raises(StorageError, match="not a folder"):
        MeshFolder(tmp_path / ".meshagent").create("x")
    assert sorted(os.listdir(tmp_path)) == [".meshagent", "file"]


CREATE = """
import hashlib, sys
from pathlib import Path
from meshagent.storage.folders.mesh_folder import MeshFolder
mesh = MeshFolder(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
created = mesh.create("shop")
print(created, hashlib.sha256(mesh.read_secret()).hexdigest())
"""


@pytest.mark.process
@pytest.mark.parametrize("cloned", [False, True], ids=["fresh", "cloned"])
def test_all_who_create_at_once_get_one_secret(tmp_path: Path, cloned: bool) -> None:
    mesh = MeshFolder(tmp_path / ".meshagent")
    if cloned:
        mesh.path.mkdir()
        mesh.settings_file.write_text('name = "shop"\n')
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, str(mesh.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in processes]
    assert sorted(created for created, _ in answers) == ["False"] * 5 + ["True"]
    digest = hashlib.sha256(mesh.read_secret()).hexdigest()
    assert {secret for _, secret in answers} == {digest}
    assert os.listdir(tmp_path) == [".meshagent"]
    assert not [name for name in os.listdir(mesh.path) if name.endswith(".tmp")]


DIE = """
import os, sys
from pathlib import Path
from meshagent.storage.folders import files
from meshagent.storage.folders import mesh_folder as folder
real = files.write_new
def deadly(path, data, mode=0o600):
    real(path, data[: len(data) // 2] if "mesh.key" in path.name else data, mode)
    if "mesh.key" in path.name:
        os.kill(os.getpid(), 9)
files.write_new = folder.write_new = deadly
folder.MeshFolder(Path(sys.argv[1])).create("shop")
"""


@pytest.mark.process
@pytest.mark.parametrize("cloned", [False, True], ids=["fresh", "cloned"])
def test_a_creator_killed_half_way_leaves_no_half_mesh(tmp_path: Path, cloned: bool) -> None:
    mesh = MeshFolder(tmp_path / ".meshagent")
    if cloned:
        mesh.path.mkdir()
        mesh.settings_file.write_text('name = "shop"\n')
    died = subprocess.run([sys.executable, "-c", DIE, str(mesh.path)], cwd="/", check=False)
    assert died.returncode == -9
    assert not mesh.exists
    assert find_mesh(tmp_path, None, {}) is None
    assert mesh.create("shop")
    assert len(mesh.read_secret()) == 32
    assert mesh.read_settings().name == "shop"


def test_one_value_alone_is_what_all_settings_say_it_is(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path)
    for text in ("", 'name = "shop"', 'attachments_quota = "3 MiB"', 'discovery = "none"'):
        mesh.settings_file.write_text(text)
        settings = mesh.read_settings()
        assert mesh.read_name() == settings.name
        assert mesh.read_quota() == settings.attachments_quota
    mesh.settings_file.unlink()
    assert mesh.read_name() == mesh.read_settings().name


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('name = "\\u001b[2J"', "name"),
        ("name = 3", "name"),
        (f'name = "{"x" * 65}"', "name"),
        ('attachments_quota = "much"', "attachments_quota"),
        ("attachments_quota = 5", "attachments_quota"),
        ('attachments_quota = "-1 KiB"', "attachments_quota"),
    ],
)
def test_one_bad_value_alone_is_explained_as_in_all_settings(
    tmp_path: Path, text: str, field: str
) -> None:
    mesh = new_mesh(tmp_path)
    mesh.settings_file.write_text(text)
    read = mesh.read_name if field == "name" else mesh.read_quota
    with pytest.raises(ConfigError, match=rf"mesh\.toml: {field} "):
        read()
