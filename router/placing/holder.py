"""Where the further answers to a prompt go: to the decode worker that has its KV cache already.

All full blocks of the prompt are in that worker's prefix cache, so it reads the last, partial block
alone, in one of its own steps, and nothing is moved. Workers know nothing of it: to them it is a
request like any other.

Pure.
"""

from collections.abc import Sequence

from router.placing.load import DecodeLoad, Need
from router.placing.placement import Placement, Reason, Rejected


def beside(holder: str, need: Need, decode: Sequence[DecodeLoad]) -> Placement | Rejected | None:
    """The placement at incarnation `holder`; rejected while it has no room.

    None, when it is not among the workers or has not got the full blocks any more: then the request
    is placed like any other.
    """
    worker = next((load for load in decode if load.incarnation == holder), None)
    if worker is None or need.num_prompt_tokens - worker.num_cached_tokens > (
        worker.layout.block_size
    ):
        return None
    if not worker.has_room(need):
        return Rejected(f"{worker.name}, which has the prompt, is full", Reason.FULL)
    return Placement(
        None,
        worker.name,
        f"{worker.name} has the prompt: another answer to it began there",
        decode_incarnation=worker.incarnation,
    )
