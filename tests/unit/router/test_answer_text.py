"""Stop strings: cut at the first match, held back no longer than they may match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.answer_text import StopStrings

texts = st.text("ab.", max_size=30)
stop_lists = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def feed(stops, parts):
    """(text that went out with each part, the closing rest, what matched)."""
    strings = StopStrings(stops)
    out = [strings.push(part) for part in parts]
    return out, strings.finish(), strings.match


def first_end(text, stops):
    """Where the match that ends first begins; the whole length if nothing matches."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending))
    return len(text)


class TestStopStrings:
    def test_a_match_across_parts_is_cut_out(self):
        out, rest, match = feed(("END",), ["so E", "N", "D of it"])
        assert ("".join(out), rest, match) == ("so ", "", "END")

    def test_a_beginning_that_goes_on_otherwise_goes_out(self):
        out, rest, match = feed(("END",), ["E", "N", "O"])
        assert (out, rest, match) == (["", "", "ENO"], "", None)

    def test_a_beginning_at_the_very_end_goes_out_last(self):
        assert feed(("END",), ["the EN"]) == (["the "], "EN", None)

    def test_the_match_that_ends_first_wins_and_the_longer_of_equals(self):
        assert feed(("b.", "ab."), ["xab.b."])[0] == ["x"]
        assert feed(("aaaa", "b"), ["aab"])[0] == ["aa"]

    def test_without_stop_strings_nothing_is_held(self):
        assert feed((), ["a", "b"]) == (["a", "b"], "", None)

    @pytest.mark.case("B-115", "B-117")
    @given(stop_lists, texts, st.lists(st.integers(0, 30), max_size=5))
    def test_the_text_ends_before_the_first_match_however_it_is_cut(self, stops, text, cuts):
        edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
        parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        out, rest, match = feed(stops, parts)
        begin = first_end(text, stops)
        assert "".join(out) + rest == text[:begin]
        assert (match is not None) == any(stop in text for stop in stops)

    @given(stop_lists, texts)
    def test_what_is_held_could_still_become_a_stop_string(self, stops, text):
        strings = StopStrings(stops)
        out = "".join(strings.push(character) for character in text)
        if strings.match is None:
            held = text[len(out) :]
            assert not held or any(stop.startswith(held) for stop in stops)
