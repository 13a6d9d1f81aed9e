"""What was asked for, as a file that `twophase what-if` plays again: lengths and times, no content.

One line of JSON for each answer when its request leaves, failed or not:

    {"at_s": 12.5, "num_prompt_tokens": 40, "num_output_tokens": 7, "block_size": 16,
     "blocks": [..]}

at_s is when the request came, by the router's monotonic clock. blocks tell which prompts begin
alike: hashes of the prompt's full blocks, chained from a salt that is drawn when the router starts
and kept nowhere, so nobody can try texts on them.

Runs in the router's event loop. A file that cannot be written ends the recording, not a request.
"""

import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from core.errors import ConfigError
from router.answer import Answer
from router.placing.prefix_index import PromptBlocks

# That of engines by default; the simulator's, too.
BLOCK_TOKENS = 16


class Recorder:
    """An open file; use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Append to `path`.

        Raises:
            ConfigError: it cannot be opened.
        """
        try:
            self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError("router.record", f"cannot write {path}: {error.strerror}") from error
        self._salt = secrets.randbits(64)
        self._log = logging.getLogger("twophase.router")

    def __enter__(self) -> "Recorder":
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def left(self, received_s: float, answers: Sequence[Answer]) -> None:
        """A request that came then has left, with these answers as far as they came."""
        for answer in answers:
            token_ids = answer.request.prompt_token_ids
            blocks = PromptBlocks(token_ids, seed=self._salt).hashes(BLOCK_TOKENS)
            row = {
                "at_s": round(received_s, 4),
                "num_prompt_tokens": len(token_ids),
                "num_output_tokens": len(answer.log),
                "block_size": BLOCK_TOKENS,
                "blocks": blocks,
            }
            self._write(json.dumps(row) + "\n")

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._log.warning("recording ends: %s", error)
            with suppress(OSError):  # it tries to write what is left once more
                self._file.close()
            self._file = None
