"""What workers were measured to do in a second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.timeline import TransferReport
from router.placing.rates import Latest, Meter, Rates


def test_nothing_is_known_before_it_is_measured():
    rates = Rates()
    assert rates.prefill_tokens_per_s("p") is None
    assert rates.link_bytes_per_s() is rates.exposed_transfer_s() is rates.decode_s() is None


def test_requests_that_share_a_step_do_not_make_it_look_slow():
    meter = Meter()
    for _ in range(4):  # four prompts of 100 tokens, all in the same second
        meter.note(100, 1.0, 1.0)
    assert meter.per_s == pytest.approx(100 * (0.9**3 + 0.9**2 + 0.9 + 1) / 0.9**3)


def test_idle_time_does_not_count():
    meter = Meter()
    meter.note(100, 1.0, 1.0)
    meter.note(100, 1.0, 60.0)
    assert meter.per_s == pytest.approx(100)


def test_what_changed_is_noticed_within_some_reports():
    meter = Meter()
    for second in range(1, 101):
        meter.note(10 if second <= 50 else 1000, 1.0, float(second))
    assert meter.per_s == pytest.approx(1000, rel=0.02)


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=30
    )
)
def test_busy_time_is_never_more_than_time(reports):
    meter, now_s = Meter(), 0.0
    first_s = None
    for amount, span_s, pause_s in reports:
        now_s += pause_s
        first_s = now_s - span_s if first_s is None else min(first_s, now_s - span_s)
        meter.note(amount, span_s, now_s)
        assert meter._busy_s <= now_s - first_s + 1e-9


def test_an_unmeasured_worker_is_taken_for_the_mean_of_the_others():
    rates = Rates()
    rates.note_prefill("p0", 100, 1.0, 1.0)
    rates.note_prefill("p1", 300, 1.0, 1.0)
    assert rates.prefill_tokens_per_s("p0") == 100
    assert rates.prefill_tokens_per_s("p2") == 200


def test_links_add_up_and_workers_that_are_gone_are_forgotten():
    rates = Rates()
    for name, num_bytes in (("p0", 100), ("p1", 50)):
        report = TransferReport("memory", num_bytes, 1, push_s=1.0, exposed_s=0.5)
        rates.note_transfer((name, "d"), report, 1.0)
        rates.note_prefill(name, 10, 1.0, 1.0)
    rates.note_decode("d", 2.0)
    assert (rates.link_bytes_per_s(), rates.exposed_transfer_s()) == (150, 0.5)
    rates.keep({"p1", "d"})
    assert (rates.link_bytes_per_s(), rates.decode_s()) == (50, 2.0)
    rates.keep({"p1"})
    assert rates.link_bytes_per_s() is rates.decode_s() is rates.exposed_transfer_s() is None
    assert rates.prefill_tokens_per_s("p1") == 10


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.1, 1e9)), max_size=60))
def test_sums_are_those_of_the_latest_values(notes):
    latest, values = Latest(), {}
    assert latest.sum is latest.mean is latest.sum_of("ab") is None
    for key, value in notes:
        latest.note(key, value)
        latest.note(key, None)
        values[key] = value
        mean = sum(values.values()) / len(values)
        assert latest.sum == pytest.approx(sum(values.values()), rel=1e-6)
        wanted = sum(values.get(key, mean) for key in "abx")
        assert latest.sum_of("abx") == pytest.approx(wanted, rel=1e-6)
    latest.keep("a")
    assert latest.sum == values.get("a")
