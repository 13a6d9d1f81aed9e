"""A bounded number of requests inside, each id once."""

import pytest

from core.errors import InvalidRequest, Overloaded
from router.admission import Admission


def test_a_place_is_held_while_the_context_lasts():
    admission = Admission(2)
    with admission.admitted("a"), admission.admitted("b"):
        assert admission.num_active_requests == 2
        assert admission.is_active("a") and not admission.is_active("c")
    assert admission.num_active_requests == 0


def test_one_more_than_may_be_inside_is_refused_and_holds_nothing():
    admission = Admission(1)
    with admission.admitted("a"):
        with pytest.raises(Overloaded, match="1 requests are active") as caught:
            with admission.admitted("b"):
                pytest.fail("it was let in")
        assert caught.value.retry_after_s > 0
        assert admission.num_active_requests == 1
    with admission.admitted("b"):
        assert admission.num_active_requests == 1
    assert admission.num_active_requests == 0


def test_an_id_that_is_inside_is_refused_even_when_full():
    admission = Admission(1)
    with admission.admitted("a"):
        with pytest.raises(InvalidRequest) as caught, admission.admitted("a"):
            pytest.fail("it was let in")
        assert (caught.value.field, caught.value.value) == ("request_id", "a")
        assert admission.num_active_requests == 1
    assert admission.num_active_requests == 0


def test_a_failure_inside_gives_the_place_back():
    admission = Admission(1)
    with pytest.raises(ZeroDivisionError), admission.admitted("a"):
        raise ZeroDivisionError
    assert admission.num_active_requests == 0
