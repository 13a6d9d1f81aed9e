"""API keys: how they are made, kept as hashes, and asked for at the front door.

A key is 256 random bits, so an unsalted SHA-256 is enough at rest: there is no list of likely keys
to try against it. A file of keys has a line for each one; what follows the hash says whose it is::

    sha256:9f86d081...  alice, until the end of the year
    # a comment

Who may call what:

health, reflection, /health, /ready    anybody; also / and the files of the page, which say nothing
Inference, all other HTTP              a line of `api_keys` or of `admin_keys`
Admin, and what the page shows         a line of `admin_keys`, or the cluster secret: by it, what
                                       starts the cluster looks after it
"""

import hashlib
import hmac
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

from core.errors import ConfigError, PermissionDenied, Unauthenticated
from core.settings.security import SecurityConfig, read_source
from twophase.credentials import Access

KEY_PREFIX = "tp-"
KEY_BYTES = 32
NAME_DIGITS = 12
ADMIN = "twophase.v1.Admin"
# Load balancers and orchestrators ask for health without a key; reflection tells what the
# published .proto files tell.
OPEN_SERVICES = frozenset(
    {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)
caller: ContextVar[str] = ContextVar("caller", default="")
"""Who calls: the same short text for all requests with one key; empty where no key was asked."""
_LINE = re.compile(r"sha256:([0-9a-f]{64})(?:\s.*)?")


def new_key(owner: str = "") -> tuple[str, str]:
    """A new key, and the line that admits it; the key itself is kept nowhere."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, f"sha256:{_digest(key).hex()} {owner}".rstrip()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The hashes of the keys that open one kind of door."""

    digests: tuple[bytes, ...]

    @classmethod
    def read(cls, name: str, source: str) -> "KeyRing":
        """The keys of `security.<name>`, which names their file or environment variable.

        Raises:
            ConfigError: it cannot be read, has no key, or a line is none; no line is quoted.
        """
        digests = []
        for number, line in enumerate(read_source(name, source).splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            found = _LINE.fullmatch(text)
            if found is None:
                problem = f"line {number} is not `sha256:` with 64 hex digits, then a name"
                raise ConfigError(f"security.{name}", problem)
            digests.append(bytes.fromhex(found[1]))
        if not digests:
            raise ConfigError(f"security.{name}", "names no key: nobody could come in")
        return cls(tuple(digests))

    def opens(self, digest: bytes) -> bool:
        """Whether a key with this hash is known; takes the same time for all."""
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may use the model and who may run the cluster; None lets everybody."""

    users: KeyRing | None
    admins: KeyRing | None

    @classmethod
    def read(cls, security: SecurityConfig) -> "Keys":
        """The keys that the configuration names.

        Raises:
            ConfigError: they cannot be read.
        """
        users, admins = security.api_keys, security.admin_keys
        secret = security.read_cluster_secret()
        user_ring = KeyRing.read("api_keys", users) if users is not None else None
        if admins is None or secret is None:
            return cls(user_ring, None)
        digests = KeyRing.read("admin_keys", admins).digests
        return cls(user_ring, KeyRing((*digests, _digest(secret))))

    def require_for_method(self, method: str, key: str | None) -> None:
        """Refuse a gRPC call of `method` (/package.Service/Method) that `key` does not allow.

        Raises:
            Unauthenticated, PermissionDenied: the call may not be made.
        """
        service = method.strip("/").rpartition("/")[0]
        if service == ADMIN:
            self.require_admin(key)
        elif service not in OPEN_SERVICES:
            self.require_user(key)

    def require_user(self, key: str | None) -> None:
        """Refuse who may not use the model.

        Raises:
            Unauthenticated: the key is missing or not known.
        """
        if self.users is not None and not self._is_known(key):
            raise Unauthenticated("the API key is missing or wrong")

    def require_admin(self, key: str | None) -> None:
        """Refuse who may not run the cluster.

        Raises:
            Unauthenticated, PermissionDenied: the key is missing, not known, or not enough.
        """
        if self.admins is None or (key is not None and self.admins.opens(_digest(key))):
            return
        if self.users is not None and self._is_known(key):
            raise PermissionDenied("this needs an admin key")
        raise Unauthenticated("the admin key is missing or wrong")

    def _is_known(self, key: str | None) -> bool:
        if key is None:
            return False
        digest = _digest(key)
        rings = [ring.opens(digest) for ring in (self.users, self.admins) if ring is not None]
        if any(rings):
            caller.set(digest.hex()[:NAME_DIGITS])
        return any(rings)


def front_door_access(security: SecurityConfig, listen: str) -> tuple[Access, Keys]:
    """What the router, at `listen` (host:port), asks of its callers: over gRPC, and by key.

    Raises:
        ConfigError: keys cannot be read, or strangers could reach an open door.
    """
    keys = Keys.read(security)
    is_asking = keys.users is not None or keys.admins is not None
    require = keys.require_for_method if is_asking else None
    access = Access(security.front_door_tls, require, security.insecure)
    access.require_may_listen(listen, "router.host")
    return access, keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
