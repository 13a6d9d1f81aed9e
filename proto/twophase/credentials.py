"""What a caller shows and what a server asks for: TLS and bearer tokens over gRPC.

A token travels as `authorization: Bearer TOKEN` in the metadata of each call, with or without
TLS. A server reads no message of a call that it refuses. Knows no keys: `require` decides.
"""

import functools
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from core.errors import ConfigError, TwophaseError, Unauthenticated
from core.settings.security import SecurityConfig, Tls, is_loopback, is_token
from twophase.errors import status_code, trailer

AUTHORIZATION = "authorization"
_SCHEME = "bearer "

Require = Callable[[str, str | None], None]
"""Called with a method's full name and the caller's token; raises what the caller is told."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call a server: `require` of every call, certificates by `tls`, or anybody."""

    tls: Tls | None = None
    require: Require | None = None
    is_insecure: bool = False

    @property
    def knows_callers(self) -> bool:
        """Whether a stranger is refused."""
        return self.require is not None or (self.tls is not None and self.tls.ca is not None)

    def require_may_listen(self, listen: str, path: str) -> None:
        """Refuse to serve strangers beyond this machine, and names that do not lead there.

        Raises:
            ConfigError: for the setting `path`, `listen` (host:port) is not on loopback, or is a
                name that stands for loopback here and for this machine elsewhere.
        """
        if not (self.knows_callers or self.is_insecure or is_loopback(listen)):
            raise ConfigError(
                path,
                f"{listen} can be reached from other machines, and nothing tells who calls: set "
                "keys, a cluster secret or certificates in `security`, or security.insecure=true",
            )
        if not is_loopback(listen) and (found := _loopback_behind(listen)) is not None:
            raise ConfigError(
                path,
                f"{listen} stands for {found} on this machine, which no other reaches: give the "
                "address by which others do",
            )

    @property
    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """What a gRPC server needs to ask every caller."""
        return () if self.require is None else (_Doorman(self.require),)

    def add_port(self, server: grpc.aio.Server, listen: str) -> int:
        """Have `server` listen; returns the port. Raises RuntimeError if it cannot be bound."""
        if self.tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, _server_credentials(self.tls))


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller shows: a bearer token, a certificate, both, or nothing."""

    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Refuse a token that no header can carry."""
        if self.token is not None and not is_token(self.token):
            raise ConfigError("api_key", "must be printable ASCII without spaces")

    def open_channel(
        self, maker: Any, address: str, options: Iterable[tuple[str, object]]
    ) -> Any:  # Any: `maker` is grpc or grpc.aio, whose channels share no type
        """A channel of `maker` to `address`; every call on it shows the credentials.

        Raises:
            ConfigError: certificates cannot be read or used.
        """
        if self.tls is None:
            channel = maker.insecure_channel(address, options=tuple(options))
        else:
            named = tuple(options)
            if self.tls.server_name is not None:
                named = (*named, ("grpc.ssl_target_name_override", self.tls.server_name))
            channel = maker.secure_channel(address, _channel_credentials(self.tls), options=named)
        if self.token is None:
            return channel
        return _BearerChannel(channel, ((AUTHORIZATION, f"Bearer {self.token}"),))


def _loopback_behind(listen: str) -> str | None:
    """The loopback address that the host of `listen` stands for here; None if it is reachable."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None  # whoever binds it says so
    is_here_alone = all(is_loopback(f"{address}:0") for address in found)
    return min(found) if found and is_here_alone else None


def internal_credentials(security: SecurityConfig) -> Credentials:
    """What router and prefill workers show to a worker.

    Raises:
        ConfigError: the cluster secret cannot be read.
    """
    return Credentials(security.read_cluster_secret(), security.internal_tls)


def internal_access(security: SecurityConfig) -> Access:
    """What a worker asks of router and prefill workers.

    Raises:
        ConfigError: the cluster secret cannot be read.
    """
    secret = security.read_cluster_secret()
    require: Require | None = None
    if secret is not None:
        require = functools.partial(_require_secret, secret.encode())
    return Access(security.internal_tls, require, security.insecure)


def bearer_token(authorization: str | None) -> str | None:
    """The token of an authorization header; None if there is none."""
    if authorization is None or not authorization.lower().startswith(_SCHEME):
        return None
    return authorization[len(_SCHEME) :].strip() or None


def server_context(tls: Tls) -> ssl.SSLContext:
    """TLS 1.2 and later for a server outside of gRPC.

    Raises:
        ConfigError: certificates cannot be read or used.
    """
    assert tls.certificate is not None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Left to itself, ssl asks at the terminal for the password of an encrypted key.
        context.load_cert_chain(tls.certificate, tls.private_key, password=lambda: "")
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(str(path) for path in (tls.certificate, tls.private_key, tls.ca) if path)
        why = error.strerror or "no PEM, not a pair, or encrypted"
        raise ConfigError("security", f"{files} cannot be used for TLS: {why}") from error
    return context


def _require_secret(secret: bytes, method: str, token: str | None) -> None:
    if token is None or not hmac.compare_digest(token.encode(), secret):
        raise Unauthenticated("the cluster secret is missing or wrong")


class _Doorman(grpc.aio.ServerInterceptor):
    """Asks `require` about each call before it reaches a servicer."""

    def __init__(self, require: Require) -> None:
        self._require = require

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # Any: gRPC's handlers are untyped
        """The method's own handler, or one that refuses."""
        details = handler_call_details
        header = dict(details.invocation_metadata or ()).get(AUTHORIZATION)
        try:
            self._require(details.method, bearer_token(str(header) if header else None))
        except TwophaseError as error:
            return _refusal(error)
        return await continuation(details)


def _refusal(error: TwophaseError) -> Any:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status_code(error), str(error), trailer(error))

    # For methods of every kind: a stream's handler is called before a message is read.
    return grpc.stream_stream_rpc_method_handler(refuse)


class _BearerChannel:
    """A channel, blocking or not, whose calls all carry the same metadata."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(*args, **kwargs))

    def close(self) -> Any:
        return self._channel.close()

    def _with_metadata(self, method: Any) -> Any:
        return functools.partial(method, metadata=self._metadata)


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    if tls.certificate is not None:
        server_context(tls)  # says more than gRPC, whose handshakes would fail without a word
    files = (tls.ca, tls.private_key, tls.certificate)
    ca, key, chain = (_read(path) if path is not None else None for path in files)
    return grpc.ssl_channel_credentials(ca, key, chain)


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    assert tls.certificate is not None and tls.private_key is not None
    server_context(tls)
    pair = (_read(tls.private_key), _read(tls.certificate))
    ca = _read(tls.ca) if tls.ca is not None else None
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("security", f"{path} cannot be read ({error.strerror})") from error
