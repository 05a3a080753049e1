"""[pure] Forms with files (``multipart/form-data``): what a client may not set is not in them.

The body goes to the worker as it came, so this reads it more strictly than any worker does: a form
that could be read in two ways is refused. What HTTP clients write passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from proxy.errors import ClientError
from proxy.turn.wire import STRIPPED_FROM_CLIENTS

_BOUNDARY = r"[A-Za-z0-9'()+_,./:=?-]{1,70}"
_CONTENT_TYPE = re.compile(rf'multipart/form-data; ?boundary=("?)({_BOUNDARY})\1', re.IGNORECASE)
_QUOTED = rb'"(?:[^"\\\r\n]|\\[^\r\n])*"'
_DISPOSITION = re.compile(
    rb'form-data; ?name="([A-Za-z0-9_.\[\]-]{1,64})"(?:; ?filename='
    + _QUOTED
    + rb")?(?:; ?filename\*=[A-Za-z0-9%'._~!#$&+^`|-]*)?",
    re.IGNORECASE,
)
_HEADER = re.compile(rb"([A-Za-z-]{1,64}):[ \t]*([^\r\n]*?)[ \t]*")
_ENGINE_ARGUMENTS = "vllm_xargs"
"""The form field (JSON) that vLLM merges into the dictionary that carries transfer parameters."""


def check_form(content_type: str, body: bytes) -> None:
    """Raises ``ClientError`` for a form that is not plainly written, or sets what is not its to
    set."""
    match = _CONTENT_TYPE.fullmatch(content_type)
    if match is None:
        raise ClientError(
            "The request body must be multipart/form-data with a boundary.", status=415
        )
    for name, content in _fields(match[2].encode(), body):
        if name in STRIPPED_FROM_CLIENTS:
            raise _not_allowed(name)
        if name == _ENGINE_ARGUMENTS:
            try:
                arguments = orjson.loads(content)
            except orjson.JSONDecodeError:
                arguments = None
            if not isinstance(arguments, dict):
                raise ClientError(
                    f"Invalid '{name}': it must be a JSON object.", param=name, code="invalid_value"
                )
            for key in STRIPPED_FROM_CLIENTS:
                if key in arguments:
                    raise _not_allowed(f"{name}.{key}")


def _fields(boundary: bytes, body: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the form's parts."""
    before, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if before or not parts or not parts.pop().startswith(b"--"):
        raise _malformed()
    for part in parts:
        head, found, content = part.partition(b"\r\n\r\n")
        if not found or not head.startswith(b"\r\n"):
            raise _malformed()
        names = []
        for line in head[2:].split(b"\r\n"):
            header = _HEADER.fullmatch(line)
            if header is None:
                raise _malformed()
            if header[1].lower() == b"content-disposition":
                disposition = _DISPOSITION.fullmatch(header[2])
                if disposition is None:
                    raise _malformed()
                names.append(disposition[1].decode())
        if len(names) != 1:
            raise _malformed()
        yield names[0], content


def _malformed() -> ClientError:
    return ClientError("The form is not valid multipart/form-data.", code="invalid_form")


def _not_allowed(name: str) -> ClientError:
    return ClientError(f"Invalid '{name}': clients may not set it.", param=name)
