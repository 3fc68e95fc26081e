"""Which folder is the mesh, and what is where in it (DESIGN 12).

Decides where a mesh is found and how one comes into being. Never prints or logs, and never puts
the secret into a text. Invariant: a folder is a mesh exactly when it holds mesh.key, and that
file appears once, whole, and is never replaced here: all who create at once end with one secret.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshagent.errors import UsageError
from meshagent.storage.folders.files import (
    link_new,
    make_private_folder,
    mapped_errors,
    place_folder,
    write_new,
)
from meshagent.storage.folders.key_files import KEY_BYTES, format_key, read_key
from meshagent.storage.folders.settings import Settings, parse_settings
from meshagent.storage.folders.toml_files import (
    QUOTA_BYTES,
    format_settings,
    is_mesh_name,
    parse_size,
    parse_toml,
    read_text,
)

__all__ = ["FOLDER_NAME", "MeshFolder", "find_mesh", "is_mesh", "personal_mesh"]

FOLDER_NAME = ".meshagent"
KEY_KIND = "meshkey1"
_REPAIR = (
    "Restore mesh.key from a backup or from another machine of this mesh; or remove it and take a "
    "new invite."
)
# First in the folder: a crash must not leave a key that a careless 'git add' would commit.
_GITIGNORE = b"*\n!.gitignore\n!mesh.toml\n"


def find_mesh(start: Path, dir_override: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The mesh folder to use, or None when there is none here.

    `--dir`, else MESHAGENT_DIR, names it outright and is returned even when no mesh is there yet:
    the folder itself if it is a mesh or called `.meshagent`, otherwise the `.meshagent` in it.
    """
    if dir_override is None and environ.get("MESHAGENT_DIR"):
        dir_override = Path(environ["MESHAGENT_DIR"])
    if dir_override is not None:
        named = Path(os.path.abspath(dir_override.expanduser()))
        return named if named.name == FOLDER_NAME or is_mesh(named) else named / FOLDER_NAME
    here = Path(os.path.abspath(start))
    upward = (folder / FOLDER_NAME for folder in (here, *here.parents))
    return next((folder for folder in upward if is_mesh(folder)), None)


def is_mesh(folder: Path) -> bool:
    """Whether there is a mesh in this very folder; a folder we may not look into holds none."""
    return os.path.lexists(folder / "mesh.key")


def personal_mesh(environ: Mapping[str, str]) -> Path:
    """The mesh folder of a person outside any project."""
    chosen = environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen) / "meshagent"
    import platformdirs

    return platformdirs.user_data_path("meshagent", appauthor=False)


class MeshFolder:
    """The files of one mesh on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        """What was put right while reading, for the person; each is one sentence."""

    def __repr__(self) -> str:
        return f"MeshFolder({str(self.path)!r})"

    @property
    def settings_file(self) -> Path:
        return self.path / "mesh.toml"

    @property
    def key_file(self) -> Path:
        return self.path / "mesh.key"

    @property
    def registry(self) -> Path:
        return self.path / "registry"

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def agents(self) -> Path:
        return self.path / "agents"

    @property
    def exists(self) -> bool:
        """Whether this is a mesh already."""
        return is_mesh(self.path)

    def create(self, name: str, secret: bytes | None = None) -> bool:
        """Make the mesh, durably; False when it was there or somebody else was first.

        With a `secret` (from an invite), a mesh that is there with another one is a UsageError.
        """
        created = False
        if not self.exists:
            key = format_key(KEY_KIND, secret or secrets.token_bytes(KEY_BYTES))
            with mapped_errors(self.path, "create"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            created = place_folder(self.path, lambda folder: _fill(folder, name, key))
            # A fresh clone brings a folder with mesh.toml and no key.
            created = created or self._adopt(name, key)
        if not created and secret is not None and self.read_secret() != secret:
            raise UsageError(
                f"{self.path} is a mesh already, with another secret.",
                hint="Join from another folder, or remove this one if you no longer need it.",
                path=str(self.path),
            )
        return created

    def _adopt(self, name: str, key: bytes) -> bool:
        """Turn a folder that lacks only the key into a mesh; the key comes last."""
        make_private_folder(self.path)
        link_new(self.path / ".gitignore", _GITIGNORE, 0o644)
        link_new(self.settings_file, format_settings(name).encode("utf-8"), 0o644)
        for folder in (self.registry, self.spool, self.blobs, self.agents):
            make_private_folder(folder)
        return link_new(self.key_file, key)

    def read_secret(self) -> bytes:
        """The mesh secret; a CorruptFile says what is wrong with its file, never what is in it."""
        secret, warnings = read_key(self.key_file, KEY_KIND, _REPAIR)
        self.warnings.extend(warnings)
        return secret

    def read_settings(self) -> Settings:
        """What mesh.toml says; a mesh without one (nobody committed it) has the defaults."""
        return parse_settings(self._settings_text(), self.settings_file)

    def read_name(self) -> str:
        """What people call this mesh; pydantic is loaded only to say what is wrong with it."""
        name = self._settings_table().get("name")
        return str(name) if is_mesh_name(name) else self.read_settings().name

    def read_quota(self) -> int:
        """How many bytes of attachments may be kept; light in the same way."""
        size = self._settings_table().get("attachments_quota")
        try:
            return QUOTA_BYTES if size is None else parse_size(size)
        except ValueError:
            return self.read_settings().attachments_quota

    def _settings_text(self) -> str:
        return read_text(self.settings_file) if self.settings_file.exists() else ""

    def _settings_table(self) -> dict[str, Any]:
        return parse_toml(self._settings_text(), self.settings_file)


def _fill(folder: Path, name: str, key: bytes) -> None:
    """The files of a new mesh, in a folder that nobody looks at yet."""
    write_new(folder / ".gitignore", _GITIGNORE, 0o644)
    write_new(folder / "mesh.toml", format_settings(name).encode("utf-8"), 0o644)
    for part in ("registry", "spool", "blobs", "agents"):
        os.mkdir(folder / part, 0o700)
    write_new(folder / "mesh.key", key)
