"""Who may speak to whom: the `security` section of the YAML, and where its secrets are read from.

The YAML names secrets and never holds them: each is a file, or `env:NAME` for an environment
variable. No error made here quotes a value, since a secret may have been written where its name
belongs. Knows no gRPC and no HTTP.
"""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import model_validator

from core.errors import ConfigError
from core.settings.section import Section

ENVIRONMENT = "env:"
# 32 characters of base64 or hex are 128 bits and more.
MIN_SECRET_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of one end of a connection.

    A server has `certificate` and `private_key`; with `ca` it refuses clients without a
    certificate of that authority. A client checks the server by `ca` (None: by the system's
    authorities) and may have a certificate of its own; server_name, if given, is the name that
    the server's certificate must carry, whatever its address.
    """

    ca: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    server_name: str | None = None


class SecurityConfig(Section):
    """Keys, certificates and secrets: files, or `env:NAME` where a secret itself is meant."""

    insecure: bool = False
    """Whether servers may listen beyond loopback although nothing tells who calls them."""
    api_keys: str | None = None
    """File or env:NAME with a line for each key that may use the model: see `twophase key new`."""
    admin_keys: str | None = None
    """As api_keys, for those who may also call the admin service."""
    certificate: Path | None = None
    """PEM chain that the router shows to its clients, over gRPC and HTTP."""
    private_key: Path | None = None
    """PEM key of `certificate`, not encrypted."""
    server_name: str | None = None
    """Name in `certificate` that `twophase serve` checks; default: the address it listens at."""
    client_ca: Path | None = None
    """PEM authorities; the router then refuses clients without a certificate of theirs."""
    cluster_secret: str | None = None
    """File or env:NAME with the secret by which router and workers know each other."""
    internal_certificate: Path | None = None
    """PEM chain that router and workers show to each other."""
    internal_private_key: Path | None = None
    """PEM key of `internal_certificate`, not encrypted."""
    internal_ca: Path | None = None
    """PEM authorities of the cluster's own certificates; both ends of each call are checked."""
    internal_server_name: str | None = None
    """Name that every worker's certificate carries; default: the address it is reached at."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        internal = (self.internal_certificate, self.internal_private_key, self.internal_ca)
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key go together")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca has no effect without certificate and private_key")
        if len({path is None for path in internal}) > 1:
            raise ValueError(
                "internal_certificate, internal_private_key and internal_ca go together"
            )
        if self.server_name is not None and self.certificate is None:
            raise ValueError("server_name has no effect without certificate and private_key")
        if self.internal_server_name is not None and self.internal_ca is None:
            raise ValueError("internal_server_name has no effect without internal_ca")
        if self.api_keys is not None and self.admin_keys is None:
            raise ValueError("api_keys without admin_keys would leave the admin service open")
        if self.admin_keys is not None and self.cluster_secret is None:
            raise ValueError(
                "admin_keys needs cluster_secret: what starts the cluster administers it by that"
            )
        return self

    @property
    def front_door_tls(self) -> Tls | None:
        """The router's end towards its clients; None without TLS."""
        if self.certificate is None:
            return None
        return Tls(self.client_ca, self.certificate, self.private_key)

    @property
    def own_client_tls(self) -> Tls | None:
        """How whoever started the router calls it: trusting the certificate that it was given.

        Where clients need a certificate, it shows the internal one.
        """
        if self.certificate is None:
            return None
        if self.client_ca is None:
            return Tls(self.certificate, server_name=self.server_name)
        return Tls(
            self.certificate,
            self.internal_certificate,
            self.internal_private_key,
            self.server_name,
        )

    @property
    def internal_tls(self) -> Tls | None:
        """Either end of a call between router and workers; None without TLS."""
        if self.internal_ca is None:
            return None
        return Tls(
            self.internal_ca,
            self.internal_certificate,
            self.internal_private_key,
            self.internal_server_name,
        )

    def read_cluster_secret(self) -> str | None:
        """The secret itself; None if there is none.

        Raises:
            ConfigError: it cannot be read, or is no secret.
        """
        if self.cluster_secret is None:
            return None
        secret = read_source("cluster_secret", self.cluster_secret).strip()
        if len(secret) < MIN_SECRET_CHARACTERS or not is_token(secret):
            raise ConfigError(
                "security.cluster_secret",
                f"must hold at least {MIN_SECRET_CHARACTERS} printable ASCII characters without "
                "spaces, as `twophase key new` makes them",
            )
        return secret


def is_token(text: str) -> bool:
    """Whether `text` can travel as a bearer token: printable ASCII without spaces, not empty."""
    return text != "" and text.isascii() and text.isprintable() and " " not in text


def read_source(key: str, source: str) -> str:
    """What stands in the file or environment variable that `security.<key>` names.

    Raises:
        ConfigError: it cannot be read.
    """
    path = f"security.{key}"
    if source.startswith(ENVIRONMENT):
        text = os.environ.get(source.removeprefix(ENVIRONMENT), "")
        if not text:
            raise ConfigError(path, "names an environment variable that is not set")
        return text
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(path, f"names a file that cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(path, "names a file that is no text in UTF-8") from error


def is_loopback(listen: str) -> bool:
    """Whether only this machine reaches what listens at `listen` (host:port)."""
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
