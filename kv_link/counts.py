"""What a worker counts of the handoffs that it sent since it began, for /metrics."""

from core import telemetry
from core.request import WorkerName
from core.tally import Tally
from core.timeline import TransferReport


class LinkCounts:
    """Handoffs over the links to one decode worker that were sealed."""

    def __init__(self, tally: Tally, decode: WorkerName, backend: str) -> None:
        labels = (decode, backend)
        self._num_bytes = tally.total(telemetry.LINK_BYTES, *labels)
        self._transfer_s = tally.distribution(telemetry.LINK_TRANSFER, *labels)
        self._wait_s = tally.distribution(telemetry.LINK_WAIT, *labels)

    def sealed(self, report: TransferReport) -> None:
        """One more."""
        self._num_bytes.value += report.num_bytes
        self._transfer_s.observe(report.push_s)
        self._wait_s.observe(report.exposed_s)
