"""When a device is given up: it fails every step, and nothing that this process does mends it.

A CUDA error that sticks is such a case, or memory that is not to be had: requests that come are
failed one after another while the process lives and looks well. It ends then, and whoever started
it starts another. Steps that fail between others that succeed are the fault of their requests.

Pure: times in, an error out.
"""

from core.errors import DeviceLost

# So many in a row, over so long: a few requests that cannot be computed must not end a worker.
MAX_FAILED_STEPS = 8
FAILING_S = 5.0


class FailedSteps:
    """Those since the last step that succeeded."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._since_s = 0.0

    def succeeded(self) -> None:
        """A step was computed."""
        self._num_failed = 0

    def failed(self, error: Exception, now_s: float) -> None:
        """A step was not.

        Raises:
            DeviceLost: none succeeds any more.
        """
        if self._num_failed == 0:
            self._since_s = now_s
        self._num_failed += 1
        failing_s = now_s - self._since_s
        if self._num_failed >= MAX_FAILED_STEPS and failing_s >= FAILING_S:
            raise DeviceLost(
                f"{self._num_failed} steps failed in {failing_s:.1f} s and none succeeded: {error}"
            ) from error
