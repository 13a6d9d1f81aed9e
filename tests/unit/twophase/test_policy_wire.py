"""What a router reads anew for each request survives the wire, and nothing else of it changes."""

import pytest

from core.errors import InvalidRequest
from core.settings.router import LocalPrefill, OnFailure, RouterConfig
from twophase.policy_wire import POLICY_KEYS, policy_from_wire, policy_to_wire


def test_the_settings_arrive_and_the_rest_of_the_section_stays():
    wanted = RouterConfig(
        on_failure=OnFailure.FAIL,
        max_attempts=2,
        max_wait_s=1.5,
        max_queued_requests=0,
        max_queue_s=9,
        local_prefill=LocalPrefill.AUTO,
        local_prefill_tokens=7,
        port=1,
    )
    running = RouterConfig(port=2, drain_s=3)
    taken = policy_from_wire(policy_to_wire(wanted), running)
    assert all(getattr(taken, key) == getattr(wanted, key) for key in POLICY_KEYS)
    assert (taken.port, taken.drain_s) == (2, 3)


@pytest.mark.parametrize(
    ("key", "value"), [("max_attempts", 0), ("max_wait_s", -1.0), ("on_failure", "maybe")]
)
def test_a_setting_out_of_its_range_is_refused_with_its_value(key, value):
    message = policy_to_wire(RouterConfig())
    setattr(message, key, value)
    with pytest.raises(InvalidRequest, match=f"router.{key} is {value}"):
        policy_from_wire(message, RouterConfig())
