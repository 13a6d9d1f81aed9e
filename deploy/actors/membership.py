"""How a process becomes a driver of a Ray cluster that runs already, or says why it cannot."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import ray
from ray.exceptions import RayError

from core.errors import ConfigError
from deploy.actors.actor import first_line
from deploy.actors.name import NAMESPACE

CLIENT = "ray://"
CONNECT_TIMEOUT_S = 5.0
AUTH_MODE = "RAY_AUTH_MODE"
OPTION = "--address"


# Any small call of Ray's head: it answers, or says that it wants a token.
PROBE = "/ray.rpc.NodeInfoGcsService/GetClusterId"


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Be a driver of the cluster at `address` while the context lasts.

    Args:
        address: `auto` (a node of the cluster on this machine), HOST:PORT of its head, from one of
            its nodes, or ray://HOST:PORT of its client server, from anywhere.

    Raises:
        ConfigError: it cannot be joined; what has to be changed.
    """
    wants_token = False
    if address != "auto":
        _require_listener(address)
        wants_token = not address.startswith(CLIENT) and _wants_token(address)
    own = os.environ.get(AUTH_MODE, "not set")
    if wants_token and own != "token":
        raise ConfigError(
            AUTH_MODE,
            f"is {own} here and token in the cluster at {address}: set it to token, and "
            "RAY_AUTH_TOKEN_PATH to the cluster's file",
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (RayError, RuntimeError, OSError, ValueError, AssertionError) as error:
        raise ConfigError(OPTION, _why(address, error, wants_token=wants_token)) from error
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


def _wants_token(address: str) -> bool:
    """Whether the head at `address` refuses a call without a token."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(PROBE, lambda message: message, lambda message: message)
        try:
            call(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def _why(address: str, error: Exception, *, wants_token: bool) -> str:
    """What is wrong, in words that name what to change."""
    said = str(error)
    if re.search(r"version.{0,40}mismatch|versions? .*do(es)? not match", said, re.IGNORECASE):
        words = " ".join(said.split())
        return f"the cluster at {address} runs other versions than this process: {words}"
    if wants_token:
        return (
            f"{AUTH_MODE} is token here and in the cluster at {address}, and the tokens differ: "
            "see RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH"
        )
    if address == "auto":
        return f"no Ray cluster runs on this machine: {first_line(error)}"
    if "raylet" in said.lower():
        return (
            f"this machine is no node of the cluster at {address}: join from one of its nodes, or "
            f"by {CLIENT}HOST:10001 ({first_line(error)})"
        )
    own = os.environ.get(AUTH_MODE, "not set")
    return f"{address} cannot be joined ({AUTH_MODE} is {own} here): {first_line(error)}"
