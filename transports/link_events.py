"""Calls the owner of a transport when something happens on a link.

Never lets a failure of the owner stop a reader. Invariant: an owner that raises loses that one
link, and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from meshagent.core.model.peers import LinkId
from meshagent.errors import RemoteProtocolError

__all__ = ["notify_owner"]

log = logging.getLogger(__name__)


def notify_owner(
    refused: Counter[str], method: Callable[..., None], link: LinkId, *what: object
) -> bool:
    """Call one of LinkEvents' methods; False when it raised, and the link must be closed.

    The owner raises RemoteProtocolError for a peer that broke the protocol: that is counted.
    """
    try:
        method(link, *what)
    except RemoteProtocolError as error:
        refused["protocol"] += 1
        log.info("Link %d broke the protocol and is closed: %s", link, error)
        return False
    except Exception:
        log.exception("The owner of link %d failed; the link is closed.", link)
        return False
    return True
