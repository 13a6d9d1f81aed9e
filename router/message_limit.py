"""How large one message to the front door may be: what a prompt of the context's length can need.

gRPC refuses what is larger before it is read, and names both sizes.
"""

from pathlib import Path

from router.text.tokenizer import Tokenizer, read_json

MIN_BYTES = 4 << 20  # what gRPC takes by default: clients expect no less
MAX_BYTES = 64 << 20
# Sampling parameters, names and roles beside the prompt.
MARGIN_BYTES = 256 << 10
# A token id in a message takes at most as many.
MAX_ID_BYTES = 5
# Where the tokenizer, or the checkpoint, does not tell.
USUAL_TOKEN_BYTES = 128
USUAL_CONTEXT_TOKENS = 131_072


def message_limit_of(directory: Path, tokenizer: Tokenizer) -> int:
    """The limit in bytes for the checkpoint in `directory`."""
    context = read_json(directory / "config.json").get("max_position_embeddings")
    pieces = tokenizer.pieces
    return max_message_bytes(
        context if isinstance(context, int) else USUAL_CONTEXT_TOKENS,
        max(map(len, pieces), default=0) if pieces is not None else None,
    )


def max_message_bytes(max_context_tokens: int, longest_token_bytes: int | None) -> int:
    """The limit for a context of so many tokens, each of at most so many bytes of text."""
    token_bytes = max(longest_token_bytes or USUAL_TOKEN_BYTES, MAX_ID_BYTES)
    needed = max_context_tokens * token_bytes + MARGIN_BYTES
    return min(max(needed, MIN_BYTES), MAX_BYTES)
