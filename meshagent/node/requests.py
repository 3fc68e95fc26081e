"""What a session may ask of a node: one model for the fields of each request, and its limits.

Decides whether a request is well-formed, and says which field is not. Never does what is asked.
Invariant: nothing of a malformed request is repeated to anybody but the name of its field, since
a text may be private. Importing it takes a third of a join, so a node does when it is first asked.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshagent.errors import MalformedRequest
from meshagent.node.mailbox import LIST_MAX
from meshagent.node.submitting import DEFAULT_KIND

__all__ = [
    "Backup",
    "Inbox",
    "Leave",
    "Log",
    "OneMessage",
    "Outbox",
    "Peers",
    "Recipients",
    "Request",
    "Restore",
    "SendMessage",
    "Status",
    "Subscribe",
    "validate",
]

ROWS_MAX = 10**9  # that one request may ask for: more than any mailbox holds
TTL_MAX_S = 100 * 365 * 86400.0
FIELD_CHARACTERS_MAX = 40  # of a field that is not known, in an answer and in the log

Rows = Annotated[int, Field(ge=1, le=ROWS_MAX)]
Pair = Annotated[tuple[str, str], Field(strict=False)]  # JSON has lists only


class Request(BaseModel):
    """The fields of a request, apart from its number and its verb."""

    # Each model is built when it is first used.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Peers(Request):
    """Who is here."""


class Status(Request):
    """This agent at a glance; what is given is set first."""

    text: str | None = None
    presence: str | None = None


class Leave(Request):
    """End the node."""


class Subscribe(Request):
    """A channel's snapshot, then its actions."""

    channel: str


class Recipients(Request):
    """Whom a name means."""

    to: str


class SendMessage(Request):
    """A message; `attach` are names, each with the SHA-256 of what is in the blob store."""

    to: str
    text: str = ""
    kind: str = DEFAULT_KIND
    data: Any = None
    thread: str = ""
    reply_to: str = ""
    ttl_s: Annotated[float, Field(gt=0, le=TTL_MAX_S)] | None = None
    attach: Annotated[tuple[Pair, ...], Field(strict=False)] = ()
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    strict: bool = False


class Inbox(Request):
    """What has come; with `follow`, also each message that comes later."""

    limit: Rows = LIST_MAX
    unread: bool = False
    follow: bool = False


class Outbox(Request):
    """What waits; with `ended`, also what no longer does."""

    limit: Rows = LIST_MAX
    ended: bool = False


class Log(Request):
    """What was said, by text, peer and kind."""

    limit: Rows = LIST_MAX
    search: str = ""
    peer: str = ""
    kind: str = ""


class OneMessage(Request):
    """For all that is done with one message, by its id or a unique beginning of it."""

    ident: str


class Backup(Request):
    """Where to put a copy of this agent's messages."""

    path: str


class Restore(Request):
    """Which copy to go on from."""

    path: str


_Model = TypeVar("_Model", bound=Request)


def validate(verb: str, model: type[_Model], fields: dict[str, Any]) -> _Model:
    """The request; a MalformedRequest names the first field that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))[:FIELD_CHARACTERS_MAX]
    if first["type"] == "missing":
        wrong = "is missing"
    elif first["type"] == "extra_forbidden":
        wrong = "is not known"
    else:
        wrong = first["msg"].removeprefix("Input ")
    raise MalformedRequest(
        f"The request {verb!r} is malformed: {field!r} {wrong}.",
        hint="If node and command differ in version, restart the node.",
        field=field,
    )
