"""How answers are compared with a reference."""

from bench.parity import Difference, ReferenceCase, first_difference

CASE = ReferenceCase("c", (1, 2), 4, (7, 8, 9), (0.5, 0.0005, 0.2))


def test_equal_answers_have_no_difference():
    assert first_difference(CASE, [7, 8, 9]) is None


def test_a_difference_where_the_reference_was_sure_is_not_a_near_tie():
    difference = first_difference(CASE, [7, 8, 1])

    assert difference == Difference("c", 2, 1, 9, 0.2)
    assert not difference.is_near_tie


def test_a_difference_at_a_tiny_margin_is_a_near_tie():
    difference = first_difference(CASE, [7, 1, 1])

    assert difference is not None and difference.is_near_tie


def test_an_answer_that_ends_early_differs_at_its_end():
    assert first_difference(CASE, [7, 8]) == Difference("c", 2, None, 9, 0.2)


def test_an_answer_that_goes_on_differs_after_the_end_and_is_never_a_near_tie():
    difference = first_difference(CASE, [7, 8, 9, 1])

    assert difference is not None and not difference.is_near_tie
