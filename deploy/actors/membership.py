"""How a process becomes a driver of a Ray cluster that runs already, or says why it cannot."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import AuthenticationError, RayError

from core.errors import ConfigError
from deploy.actors.actor import first_line
from deploy.actors.name import NAMESPACE

CLIENT = "ray://"
CONNECT_TIMEOUT_S = 5.0
AUTH_MODE = "RAY_AUTH_MODE"
OPTION = "--address"


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Be a driver of the cluster at `address` while the context lasts.

    Args:
        address: `auto` (a node of the cluster on this machine), HOST:PORT of its head, from one of
            its nodes, or ray://HOST:PORT of its client server, from anywhere.

    Raises:
        ConfigError: it cannot be joined; what has to be changed.
    """
    if address != "auto":
        _require_listener(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RayError, RuntimeError, OSError, ValueError, AssertionError) as error:
        raise ConfigError(OPTION, _why(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(OPTION, f"is {address!r}: auto, HOST:PORT or ray://HOST:PORT is taken")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        raise ConfigError(OPTION, f"no Ray cluster is at {address}: {error}") from error


def _why(address: str, error: Exception) -> str:
    """What is wrong, in words that name what to change."""
    said = str(error)
    if isinstance(error, AuthenticationError) or "uthenticat" in said or "InvalidAuthToken" in said:
        return _why_refused(address)
    if re.search(r"version mismatch|[Vv]ersion.*(mismatch|do(es)? not match)", said):
        versions = " ".join(said.split())
        return f"the cluster at {address} runs other versions than this process: {versions}"
    if address == "auto":
        return f"no Ray cluster runs on this machine: {first_line(error)}"
    if "Raylet" in said or "raylet" in said:
        return (
            f"this machine is no node of the cluster at {address}: join from one of its nodes, or "
            f"by {CLIENT}HOST:10001 ({first_line(error)})"
        )
    return f"{address} cannot be joined: {first_line(error)}"


def _why_refused(address: str) -> str:
    own = os.environ.get(AUTH_MODE, "not set")
    other = "disabled" if own == "token" else "token"
    if own == "token":
        return (
            f"the cluster at {address} refused the token: {AUTH_MODE} is token here, and the "
            f"cluster's is either {other} or has another token (RAY_AUTH_TOKEN, "
            "RAY_AUTH_TOKEN_PATH)"
        )
    return (
        f"the cluster at {address} asks for a token: {AUTH_MODE} is {own} here and {other} there; "
        "set it to token, and RAY_AUTH_TOKEN_PATH to the cluster's token file"
    )
