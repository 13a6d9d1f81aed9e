"""No request is let in whose deadline is lost by what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Overloaded
from router.placing.admission import Backlog, refuse_if_late


def backlog(**facts):
    idle = {
        "num_prompt_tokens": 0,
        "prefill_tokens_per_s": 100.0,
        "num_link_bytes": 0,
        "link_bytes_per_s": 1000.0,
        "num_sequences": 1,
        "num_slots": 4,
        "num_kv_tokens": 10,
        "num_cache_tokens": 100,
        "decode_s": 3.0,
    }
    return Backlog(**(idle | facts))


class TestTheBacklog:
    @pytest.mark.parametrize(
        ("facts", "wait_s"),
        [
            ({}, 0.0),
            ({"num_prompt_tokens": 500}, 5.0),
            ({"num_prompt_tokens": 500, "num_link_bytes": 2000}, 5.0),
            ({"num_prompt_tokens": 100, "num_link_bytes": 2000}, 2.0),
            ({"num_sequences": 8}, 3.0),
            ({"num_kv_tokens": 150}, 1.5),
            ({"num_sequences": 8, "num_kv_tokens": 150, "num_prompt_tokens": 100}, 4.0),
            ({"num_prompt_tokens": 500, "prefill_tokens_per_s": None}, 0.0),
        ],
    )
    def test_is_a_wait(self, facts, wait_s):
        assert backlog(**facts).wait_s == pytest.approx(wait_s)

    def test_is_unknown_while_nothing_was_measured_and_then_refuses_nobody(self):
        unknown = {"prefill_tokens_per_s": None, "link_bytes_per_s": None, "decode_s": None}
        much = backlog(num_prompt_tokens=10**9, num_sequences=10**6, **unknown)
        assert much.wait_s is None
        refuse_if_late(much, deadline_s=0.0, now_s=1.0)

    @given(
        st.sampled_from(["num_prompt_tokens", "num_link_bytes", "num_sequences", "num_kv_tokens"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
    )
    def test_never_shrinks_when_there_is_more_to_do(self, fact, less, more):
        assert backlog(**{fact: less}).wait_s <= backlog(**{fact: less + more}).wait_s

    def test_refuses_what_would_begin_after_its_deadline_with_the_wait_as_a_hint(self):
        much = backlog(num_prompt_tokens=500)
        refuse_if_late(much, deadline_s=15.1, now_s=10.0)
        with pytest.raises(Overloaded, match="5.0 s of work are ahead of it") as caught:
            refuse_if_late(much, deadline_s=15.0, now_s=10.0)
        assert caught.value.retry_after_s == 5.0

    def test_that_is_empty_refuses_nobody_however_near_the_deadline(self):
        refuse_if_late(backlog(), deadline_s=10.0, now_s=11.0)
