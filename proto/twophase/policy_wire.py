"""The settings that a router reads anew for each request, on the wire.

Fields of the message are keys of the router's section of the YAML: adding one to both is all that
it takes to let another setting change while a router runs.
"""

from pydantic import ValidationError

from core.errors import InvalidRequest
from core.settings.file import errors_of
from core.settings.router import RouterConfig
from twophase.v1 import admin_pb2 as pb

POLICY_KEYS = tuple(pb.RouterPolicy.DESCRIPTOR.fields_by_name)


def policy_to_wire(router: RouterConfig) -> pb.RouterPolicy:
    """What of the section may change."""
    return pb.RouterPolicy(**router.model_dump(mode="json", include={*POLICY_KEYS}))


def policy_from_wire(message: pb.RouterPolicy, router: RouterConfig) -> RouterConfig:
    """The section with these settings in it.

    Raises:
        InvalidRequest: one of them is out of its range.
    """
    changed = {key: getattr(message, key) for key in POLICY_KEYS}
    try:
        return RouterConfig.model_validate({**router.model_dump(), **changed})
    except ValidationError as error:
        first = errors_of(error, RouterConfig)[0]
        value = changed[first.path]
        raise InvalidRequest(f"router.{first.path}", value, first.problem) from error
