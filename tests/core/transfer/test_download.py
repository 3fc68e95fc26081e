"""A download's states, and which source is asked."""

from __future__ import annotations

import pytest

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import CHUNK_BYTES
from meshagent.core.transfer.download import (
    ABSENT,
    NEXT_STATES,
    NOT_ALLOWED,
    BlobOffer,
    Download,
    DownloadState,
)

BOB, CAROL, DAVE = (AgentId(name) for name in ("bob", "carol", "dave"))


def download_from(*sources: AgentId) -> Download:
    download = Download(bytes(32), 3 * CHUNK_BYTES, 1)
    download.merge(BlobOffer(download.size, sources, BOB, b"grant"))
    return download


@pytest.mark.parametrize("before", DownloadState)
@pytest.mark.parametrize("after", DownloadState)
def test_a_state_follows_only_as_the_table_says(
    before: DownloadState, after: DownloadState
) -> None:
    download = download_from()
    download.state = before
    if after in NEXT_STATES.get(before, ()):
        download.enter(after)
        assert download.state is after
    else:
        with pytest.raises(AssertionError):
            download.enter(after)


def test_every_state_can_be_reached_and_all_but_the_ends_left() -> None:
    reached = set().union(*NEXT_STATES.values())
    assert reached == set(DownloadState)
    ends = {DownloadState.DONE, DownloadState.FAILED, DownloadState.CANCELLED}
    assert set(DownloadState) - set(NEXT_STATES) == ends


def test_what_is_cancelled_stays_so_whatever_the_driver_answers() -> None:
    download = download_from()
    download.leave_for(DownloadState.CANCELLED)
    for state in (DownloadState.FAILED, DownloadState.WAITING_FOR_DISK, DownloadState.QUEUED):
        download.leave_for(state)
        assert download.is_cancelled


def test_the_source_that_failed_least_is_asked() -> None:
    download = download_from(CAROL, DAVE)
    everyone = {BOB, CAROL, DAVE}
    assert download.choose_source(everyone, 0.0) == BOB
    download.sources[BOB].failures = 1
    assert download.choose_source(everyone, 0.0) == CAROL
    download.sources[CAROL].verdict = ABSENT
    download.sources[DAVE].paused_until = 5.0
    assert download.choose_source(everyone, 0.0) == BOB
    assert download.choose_source({DAVE}, 0.0) is None
    assert download.choose_source({DAVE}, 5.0) == DAVE


def test_wrong_contents_of_several_stay_with_one_source() -> None:
    download = download_from(CAROL)
    download.contributors, download.single_source = {CAROL}, True
    assert download.choose_source({BOB, CAROL}, 0.0) == CAROL


def test_a_download_is_hopeless_only_when_the_granters_said_no() -> None:
    download = download_from(CAROL)
    assert not download.is_hopeless(())
    download.sources[BOB].verdict = NOT_ALLOWED
    assert download.is_hopeless(())
    assert not download.is_hopeless({CAROL})
    assert download.verdicts() == NOT_ALLOWED
