"""Without the mesh secret nobody gets in, learns anything, or costs more than a bounded effort."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import ssl
import time

import pytest
import zmq
from end_to_end.intruders.attacker import Attacker
from end_to_end.intruders.conftest import Attacked

from meshagent.core.model.identity import MeshSecret

pytestmark = pytest.mark.process

HALF_OPEN = 500
HANDSHAKE_S = 5.0  # DESIGN 8
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(1) + bytes(31)
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(1) + bytes(31)


def connect(attacked: Attacked) -> socket.socket:
    return socket.create_connection(("127.0.0.1", attacked.port), timeout=10)


def test_a_client_without_encryption_is_refused(attacked: Attacked) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(f"tcp://{attacked.address}")
        dealer.send(b"let me in")
        attacked.until_refused(1, "outsider")
        assert not dealer.poll(200)
    finally:
        context.destroy(linger=0)
    assert attacked.printed_refused()["outsider"] >= 1


def test_the_wrong_secret_is_refused(attacked: Attacked) -> None:
    with Attacker(MeshSecret(os.urandom(32))).dial(attacked.address) as wire:
        wire.send(Attacker(attacked.secret).hello())
        attacked.until_refused(1, "outsider")
        assert wire.receive(200) is None


@pytest.mark.parametrize(
    "noise",
    [os.urandom(65536), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(65536)],
    ids=["random", "http", "zeros"],
)
def test_noise_is_refused(attacked: Attacked, noise: bytes) -> None:
    for _ in range(20):
        with contextlib.suppress(ConnectionError), connect(attacked) as stranger:
            stranger.sendall(noise)
    attacked.until_refused(20, "outsider")


def test_a_tls_client_is_refused(attacked: Attacked) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    with connect(attacked) as stranger, pytest.raises((ssl.SSLError, OSError)):
        tls.wrap_socket(stranger).close()
    attacked.until_refused(1, "outsider")


def test_500_half_open_connections_are_bounded_and_members_still_come_in(
    attacked: Attacked,
) -> None:
    strangers = [connect(attacked) for _ in range(HALF_OPEN)]
    attacked.until_refused(HALF_OPEN // 2, "outsider")  # the oldest make room for newer ones
    assert attacked.node.descriptors() - attacked.descriptors < HALF_OPEN
    third = attacked.nodes.join(attacked.node.mesh.parent, "third", "--discovery", "file")
    attacked.nodes.until(lambda: attacked.node.sees(third), 5, "a member comes in meanwhile")
    attacked.nodes.end(third)
    for stranger in strangers:
        stranger.close()
    attacked.until_refused(HALF_OPEN, "outsider")


def test_a_byte_at_a_time_is_cut_off_when_the_handshake_time_is_over(attacked: Attacked) -> None:
    with connect(attacked) as stranger:
        stranger.settimeout(0.1)
        begin, ended = time.monotonic(), False
        for byte in CURVE_GREETING * 3:
            with contextlib.suppress(TimeoutError):
                try:
                    stranger.sendall(bytes([byte]))
                    ended = stranger.recv(4096) == b"" or ended
                except ConnectionError:
                    ended = True
            if ended:
                break
            time.sleep(0.1)
        assert ended
        assert time.monotonic() - begin < HANDSHAKE_S + 3
    attacked.until_refused(1, "outsider")


def test_a_stranger_learns_nothing_from_the_port(attacked: Attacked) -> None:
    told = b""
    for words in (b"", CURVE_GREETING, NULL_GREETING + b"\x04\x19\x05READY" + bytes(18), b"GET /"):
        with connect(attacked) as stranger:
            stranger.settimeout(1.0)
            stranger.sendall(words)
            with contextlib.suppress(TimeoutError, ConnectionError):
                while data := stranger.recv(65536):
                    told += data
    assert told, "libzmq says at least its greeting"
    for hidden in hidden_from_strangers(attacked):
        assert hidden not in told


def hidden_from_strangers(attacked: Attacked) -> list[bytes]:
    """The secret and what follows from it, in every usual writing; role, status, ids."""
    secret = attacked.secret.reveal()
    door_public, door_secret = attacked.secret.door()
    keys = [secret, door_public, door_secret, attacked.secret.mesh_id]
    written = [
        form
        for key in keys
        for form in (
            key, key.hex().encode(), base64.b64encode(key).rstrip(b"="),
            base64.urlsafe_b64encode(key).rstrip(b"="),
        )
    ]  # fmt: skip
    texts = [b"secretrole", b"otherrole", b"a secret status", attacked.node.agent.encode()]
    return written + texts
