"""The parts of bench-scaling that need no cluster."""

import asyncio

import pytest

from bench.scaling import HALVES, SETTINGS, THROTTLE, Round, Seen, _seen, facts_of
from bench.scaling_figure import draw
from core.config import load_config
from core.errors import PeerLost


def record(now_s, prefill, decode, *actions):
    pools = [
        {"role": role, "after": size, "view": {"num_serving": size, "num_waiting": 2}}
        for role, size in (("prefill", prefill), ("decode", decode))
    ]
    demand = {"num_in_line": 3}
    return {"now_s": now_s, "pools": pools, "actions": list(actions), "demand": demand}


def played(*records, errors=()):
    return Round(Seen(5, 0, errors, turned_s=15.0), records, other_cores=0.0)


STEADY = played(record(10, 1, 1), record(20, 1, 1))
CHANGE = {"ChangeRole": {"names": ["prefill-1"], "to": "decode"}}
TURNED = (record(10, 1, 1), record(12, 2, 1), record(20, 1, 2, CHANGE), record(30, 1, 2))


@pytest.mark.parametrize("more", [(), THROTTLE])
def test_the_settings_are_a_configuration_with_room_for_one_more_worker(more):
    config = load_config(None, [*SETTINGS, *more])
    assert config.scaling.budget == config.prefill_pool.replicas + config.decode.replicas + 1


def test_the_load_turns():
    first, second = HALVES
    assert first.num_prompt_tokens > second.num_prompt_tokens
    assert first.num_output_tokens < second.num_output_tokens


def test_what_is_to_be_shown_is_read_off_the_decisions():
    assert all(facts_of(played(*TURNED), STEADY).values())
    assert not any(list(facts_of(STEADY, STEADY).values())[:3])
    assert not facts_of(played(*TURNED, errors=("lost",)), STEADY)["no stream failed"]
    facts = facts_of(played(*TURNED), played(*TURNED))
    assert not facts["with a throttled link neither grew"]
    backwards = played(record(10, 1, 2), record(20, 2, 1))
    assert not facts_of(backwards, STEADY)["decode grew after it"]


def test_streams_are_counted_by_how_they_ended_and_a_bug_is_no_failure():
    ended = [None, PeerLost("decode-0", "it died"), asyncio.CancelledError(), None]
    seen = _seen(ended, 7.0)
    assert (seen.num_good, seen.num_cut, len(seen.errors)) == (2, 1, 1)
    with pytest.raises(ZeroDivisionError):
        _seen([*ended, ZeroDivisionError()], 7.0)


def test_the_picture_has_a_panel_for_each_round(tmp_path):
    path = tmp_path / "figures" / "scaling.png"
    draw({"free": (TURNED, 15.0), "throttled": (STEADY.records, 15.0)}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
