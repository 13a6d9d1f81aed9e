"""The request that a command is about, by the id that its client saw.

Answers over HTTP have the request's id with OpenAI's prefix before it; both find the request.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from core.errors import InvalidRequest

T = TypeVar("T")

HELP = "As the request's last message tells it; over HTTP the answer's id."
AskedId = Annotated[str, typer.Argument(help=HELP)]


def found(ask: Callable[[str], T], request_id: str) -> T:
    """What `ask` says of the request, by its id as it stands, else without OpenAI's prefix.

    Raises:
        InvalidRequest: neither is known.
    """
    try:
        return ask(request_id)
    except InvalidRequest:
        plain = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        if plain == request_id:
            raise
        return ask(plain)
