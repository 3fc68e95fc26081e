"""What no outside view shows: every buffer of every engine stays within its bound."""

from __future__ import annotations

from meshagent.core.delivery import conversations, receiving, send_stream
from meshagent.core.transfer.downloads import DownloadConfig
from meshagent.core.transfer.uploads import UploadConfig
from meshagent.core.wire.frames import MESSAGE_BYTES_MAX
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.node import SimNode

WINDOW = DownloadConfig().window_max


def check_bounds(mesh: SimMesh) -> None:
    for node in mesh.running():
        check_delivery(node)
        check_transfer(node)


def check_delivery(node: SimNode) -> None:
    assert node.engine is not None
    delivery = node.engine.delivery
    if delivery is None:
        return
    streams = [known.out for _, known in delivery._all]
    assert delivery.sending.pending == sum(each.waiting for each in streams)
    due = [each.due for each in streams if each.due is not None]
    assert delivery.deadline() == min(due, default=None)
    for peer, known in delivery._all:
        out = known.out
        linked = node.engine.links.link_to(peer) is not None
        assert out.is_linked == linked
        assert linked or not out.items, "memory is for those who are here"
        assert out.floor - 1 <= out.sent <= out.loaded < out.next_seq
        assert out.durable < out.next_seq
        assert len(out.items) <= send_stream.WINDOW_ITEMS_MAX
        sizes = [send_stream.ITEM_BYTES + len(each.body) for each in out.items]
        assert out.loaded_bytes == sum(sizes)
        assert all(out.floor <= seq <= out.loaded for seq in out.states)
        assert out.loaded_bytes < send_stream.WINDOW_BYTES_MAX + MESSAGE_BYTES_MAX + 64
        assert len(known.inward) <= conversations.EPOCHS_KEPT_MAX
        for stream in known.inward.values():
            assert len(stream.exceptions) <= receiving.MAIL_ITEMS_MAX


def check_transfer(node: SimNode) -> None:
    assert node.engine is not None
    downloads, uploads = node.engine.transfer.downloads, node.engine.transfer.uploads
    held = sum(each.held for each in downloads.slots.active.values())
    assert held == downloads.window.used <= WINDOW, "more in flight than the window"
    assert len(downloads.slots.active) <= DownloadConfig().active_max
    assert uploads._reading <= UploadConfig().reads_max
    assert node.blobs.most_unwritten <= WINDOW, "more to write than the window"
