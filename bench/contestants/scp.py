"""scp over a private sshd on loopback, with keys of its own; nothing of the user's is read.

Invariant: the server listens on 127.0.0.1, lets in one throw-away key, and ends with `close`.
"""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import time
from pathlib import Path

from meshagent.bench.contestants import program
from meshagent.bench.nodes import LEASH

__all__ = ["Scp"]

START_TIMEOUT_S = 10.0


class Scp:
    """A server, and copies to it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self._folder, self._port = folder, _free_port()
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        (folder / "allowed").write_bytes((folder / "user.pub").read_bytes())
        config = folder / "sshd_config"
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {self._port}\nHostKey {folder / 'host'}\n"
            f"AuthorizedKeysFile {folder / 'allowed'}\nStrictModes no\nUsePAM no\n"
            f"PidFile none\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
        )
        sshd = program("sshd")
        assert sshd is not None, "asked before"
        with (folder / "sshd.log").open("wb") as log:
            self._server = subprocess.Popen(
                [*LEASH, os.path.abspath(sshd), "-D", "-e", "-f", str(config)], stderr=log
            )
        try:
            self._wait_until_it_listens()
        except OSError:
            self.close()
            raise

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    said = (self._folder / "sshd.log").read_text(errors="replace").strip()
                    raise OSError(f"sshd does not start: {said}") from None
                time.sleep(0.02)

    def copy(self, path: Path) -> float:
        """Seconds of the whole command; scp does not sync."""
        to = self._folder / "copied"
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        words = ["scp", "-q", "-F", "none", "-i", str(self._folder / "user")]
        words += [word for option in options for word in ("-o", option)]
        where = f"{getpass.getuser()}@127.0.0.1:{to}"
        began = time.perf_counter()
        subprocess.run([*words, "-P", str(self._port), str(path), where], check=True)
        passed = time.perf_counter() - began
        to.unlink()
        return passed

    def close(self) -> None:
        """End the server."""
        self._server.terminate()
        self._server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
