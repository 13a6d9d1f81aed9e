"""Where an answer goes whose decode worker stops and has its KV cache: to the emptiest that can.

Always that way, and never by reading it again, once its worker holds it: the same bytes cross a
link either way, so that a link is fast or slow decides nothing, and the reading comes on top. Only
an answer of few tokens is not held at all (`DecodeMember.hand_over`).

Pure.
"""

from collections.abc import Sequence

from router.placing.load import DecodeLoad, Need
from router.placing.placement import Placement, emptiest, load_of
from router.placing.recovery import Origin


def move(origin: Origin, need: Need, decode: Sequence[DecodeLoad]) -> Placement | None:
    """The placement that fetches the KV cache at `origin`; None if nobody can take it now."""
    able = [
        load
        for load in decode
        if need.num_tokens <= load.max_num_tokens
        and load.has_room(need)
        and not origin.layout.obstacles(load.layout, may_convert_dtype=False)
    ]
    if not able:
        return None
    chosen = emptiest(need, able)
    return Placement(
        origin.decode,
        chosen.name,
        f"{origin.decode} stops and ships the KV cache; {load_of(chosen)}",
        origin.incarnation,
        chosen.incarnation,
        held_id=origin.held_id,
    )
