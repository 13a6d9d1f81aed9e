"""Certificates made at test time, by an authority of the test's own."""

from pathlib import Path

import trustme

from core.settings.security import Tls


class Authority:
    """One certificate authority, and the PEM files that it has issued, in `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *hosts: str) -> Tls:
        """Certificate and key for `hosts`, with this authority as the one to check others by."""
        certificate, key = (self._directory / f"{name}-{kind}.pem" for kind in ("cert", "key"))
        issued = self._authority.issue_cert(*hosts)
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return Tls(self.ca, certificate, key)
