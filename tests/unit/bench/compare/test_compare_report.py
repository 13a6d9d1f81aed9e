"""What a comparison says: every sentence follows the numbers, and the pictures are whole."""

import json
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from bench.compare.crossover import Crossover, sentence
from bench.compare.report import Origin, write_report
from bench.compare.summary import SPLITWISE, summaries
from bench.compare.verdict import in_short, on_workload
from bench.machine import CpuUse
from core.config import Mode
from core.errors import Overloaded
from tests.unit.bench.compare import made
from tests.unit.bench.compare.made import answered, beside, comparison_of, failed, played

ORIGIN = Origin("twophase compare --input 100", "2 cores", datetime(2026, 11, 30, tzinfo=UTC))


@pytest.fixture
def two_ways():
    return made.two_ways()


def words_on(comparison) -> str:
    return "\n".join(on_workload(summaries(comparison)[0]))


class TestTheVerdict:
    def test_wins_and_losses_are_told_with_their_numbers(self, two_ways):
        words = words_on(two_ways)

        loses, wins = words.splitlines()[:2]
        assert "**Where disaggregation loses**" in loses
        assert "TTFT p50 800 ms against 500 ms (colocated)" in loses
        assert "**Where it wins**" in wins
        assert "ITL p99 60 ms against 400 ms (colocated)" in wins
        assert "ITL" not in loses and "TTFT p50" not in wins

    def test_what_differs_by_little_is_no_difference(self):
        ways = [Mode.COLOCATED, Mode.DISAGGREGATED]
        equal = [played(way, answered(way, 0.0), answered(way, 1.0)) for way in ways]

        words = words_on(comparison_of(*equal))

        assert words.count("nowhere (a difference of less than 5 % is none)") == 2

    def test_the_move_is_told_in_bytes_and_seconds(self, two_ways):
        words = words_on(two_ways)

        assert "**The move** of KV caches in `disaggregated`: 4 MB for 4 answers" in words

    def test_failures_are_told_and_count_against_goodput(self):
        comparison = comparison_of(
            played(
                Mode.COLOCATED, answered(Mode.COLOCATED, 0.0), failed(1.0, Overloaded("no room"))
            ),
            played(Mode.CHUNKED, answered(Mode.CHUNKED, 0.0), answered(Mode.CHUNKED, 1.0)),
        )

        (found,) = summaries(comparison)

        assert found.ways[0].num_failed == 1
        assert found.ways[0].slo.share == 0.5
        assert found.ways[1].slo.share == 1.0
        assert "**Failed** in `colocated`: 1 of 2 requests (no room)" in words_on(comparison)

    def test_noise_is_told(self):
        busy = CpuUse(1.0, 0.7, 0.1)
        comparison = comparison_of(
            played(Mode.COLOCATED, answered(Mode.COLOCATED, 0.0), cpu=busy),
            played(Mode.CHUNKED, answered(Mode.CHUNKED, 0.0)),
        )

        assert "0.80 in `colocated`, 0.00 in `chunked`" in words_on(comparison)
        first, *_ = in_short(None, None, summaries(comparison))
        assert first.startswith("**The machine was busy**: other processes took up to 0.80 cores")

    def test_the_cost_of_a_pool_that_only_reads_is_told(self, two_ways):
        words = "\n".join(in_short(two_ways.crossover, two_ways.plan.crossover, []))

        assert "8 running streams get 200 tokens/s in `colocated`, 114 tokens/s" in words
        assert "**Disaggregation loses 43% of the capacity for tokens** to `colocated`" in words

    def test_a_way_that_answered_nothing_leads_in_nothing(self):
        comparison = comparison_of(
            played(Mode.COLOCATED, failed(0.0, Overloaded("no room"))),
            played(Mode.DISAGGREGATED, answered(Mode.DISAGGREGATED, 0.0)),
        )

        (words,) = in_short(None, None, summaries(comparison))

        assert "colocated" not in words
        assert "soonest first token: `disaggregated` (TTFT p50 500 ms)" in words

    def test_ways_that_are_alike_are_said_to_be(self):
        ways = [Mode.COLOCATED, Mode.CHUNKED]
        alike = comparison_of(*(played(way, answered(way, 0.0)) for way in ways))

        (words,) = in_short(None, None, summaries(alike))

        assert "most good answers: all alike (answers within the SLO 100%)" in words


class TestSlowdowns:
    def test_nine_limits_are_multiples_of_the_request_alone(self, two_ways):
        colocated, disaggregated = summaries(two_ways)[0].ways

        found = {(limit.measure, limit.percent): limit for limit in disaggregated.splitwise}
        assert len(found) == 9
        assert found["ttft", 50].found == pytest.approx(1.6)
        assert found["tpot", 50].found == pytest.approx(1.2)
        assert found["tpot", 50].limit == SPLITWISE["tpot"][0]
        assert disaggregated.num_limits_met == 7  # e2e is 1.51 times: above P50's and P90's limit
        assert (
            colocated.num_limits_met == 4
        )  # TTFT's, and e2e's of P99: a token takes 8 times as long

    def test_gaps_are_multiples_of_a_step_that_nothing_disturbs(self, two_ways):
        colocated, disaggregated = summaries(two_ways)[0].ways

        assert disaggregated.decode_step_s == 0.04
        assert colocated.sarathi_multiple == pytest.approx(10)
        assert disaggregated.sarathi_multiple == pytest.approx(1.5)


class TestTokens:
    def compared(self, left, right):
        comparison = comparison_of(played(Mode.COLOCATED, left), played(Mode.CHUNKED, right))
        return summaries(comparison)[0].tokens

    def test_equal_answers_are_equal(self):
        check = self.compared(answered(Mode.COLOCATED, 0.0), answered(Mode.CHUNKED, 0.0))

        assert (check.num_equal, check.is_same) == (1, True)

    def test_another_token_where_the_choice_was_clear_is_a_difference(self):
        left = answered(Mode.COLOCATED, 0.0)
        right = answered(Mode.CHUNKED, 0.0, tokens=(1, 9, 3, 4))

        check = self.compared(left, right)

        assert not check.is_same
        assert "chunked and colocated differ at token 1 of 4" in check.differences[0]

    def test_another_token_at_a_near_tie_is_none_nor_is_what_follows(self):
        left = answered(Mode.COLOCATED, 0.0)
        right = answered(Mode.CHUNKED, 0.0, tokens=(1, 9, 8, 7))
        left.margins[1] = 0.1

        check = self.compared(left, right)

        assert (check.num_ties, check.widest_tie, check.is_same) == (1, 0.1, True)

    def test_a_shorter_answer_is_a_difference(self):
        left = answered(Mode.COLOCATED, 0.0)
        right = answered(Mode.CHUNKED, 0.0, tokens=(1, 2, 3))

        assert "have 3 and 4 tokens" in self.compared(left, right).differences[0]

    def test_answers_that_failed_are_not_compared(self):
        check = self.compared(answered(Mode.COLOCATED, 0.0), failed(0.0, Overloaded("no room")))

        assert check.num_compared == 0


class TestTheCrossover:
    def of(self, colocated, disaggregated, chunked=None) -> Crossover:
        """(gap, first token) by length, 128, 512 and 1024 tokens; a step takes 40 ms alone."""
        ways = {
            Mode.COLOCATED: colocated,
            Mode.CHUNKED: chunked,
            Mode.DISAGGREGATED: disaggregated,
        }
        return Crossover(
            {
                way: tuple(
                    beside(length, gap_s=gap_s, ttft_s=ttft_s)
                    for length, (gap_s, ttft_s) in zip((128, 512, 1024), points, strict=True)
                )
                for way, points in ways.items()
                if points is not None
            }
        )

    def test_it_is_where_the_others_stop_keeping_the_pace(self):
        crossover = self.of(
            [(0.15, 0.2), (0.9, 0.8), (2.0, 1.7)], [(0.08, 0.3), (0.08, 1.0), (0.09, 2.0)]
        )

        assert crossover.target_s == pytest.approx(0.2)
        assert crossover.choices(0.2) == [Mode.COLOCATED, *[Mode.DISAGGREGATED] * 2]
        assert crossover.from_tokens(0.2) == 512
        assert sentence(crossover).startswith("Disaggregate above 128 prompt tokens")

    def test_it_never_pays_where_chunking_keeps_the_pace_and_is_sooner(self):
        crossover = self.of(
            [(0.15, 0.2), (0.9, 0.8), (2.0, 1.7)],
            [(0.08, 0.3), (0.08, 1.0), (0.09, 2.0)],
            chunked=[(0.15, 0.25), (0.18, 0.9), (0.18, 1.8)],
        )

        assert crossover.from_tokens(crossover.target_s) is None
        assert sentence(crossover) == (
            "Disaggregation does not pay on this machine up to 1024 prompt tokens, with gaps of "
            "running streams of at most 200 ms: chunked keeps that, too, and has the first token "
            "after 1.80 s, not 2.00 s."
        )
        assert crossover.targets_s() == (0.09, 0.18)

    def test_a_length_at_which_another_way_is_the_choice_again_moves_it_up(self):
        crossover = self.of(
            [(0.9, 0.2), (0.1, 0.8), (2.0, 1.7)], [(0.08, 0.3), (0.08, 1.0), (0.09, 2.0)]
        )

        assert crossover.from_tokens(0.2) == 1024
        assert "above 512 prompt tokens" in sentence(crossover)

    def test_from_the_shortest_prompt_on(self):
        crossover = self.of([(0.9, 0.2)] * 3, [(0.08, 0.3)] * 3)

        assert sentence(crossover).startswith("Disaggregate on this machine from 128 prompt tokens")

    def test_no_way_keeps_the_pace(self):
        crossover = self.of([(0.9, 0.2)] * 3, [(0.5, 0.3)] * 3)

        assert crossover.choices(0.2) == [None] * 3
        assert "no way keeps that" in sentence(crossover)
        assert crossover.targets_s() == (0.5, 0.9)

    def test_without_disaggregation_there_is_none(self):
        crossover = Crossover({Mode.CHUNKED: (beside(128, gap_s=0.1, ttft_s=0.2),)})

        assert "not played" in sentence(crossover)


class TestTheFiles:
    @pytest.fixture
    def directory(self, two_ways, tmp_path):
        write_report(two_ways, summaries(two_ways), ORIGIN, tmp_path / "out")
        return tmp_path / "out"

    def test_the_markdown_names_every_picture_that_was_written(self, directory):
        text = (directory / "README.md").read_text()

        pictures = {path.name for path in directory.glob("*.svg")}
        assert pictures == {"crossover.svg", "gaps-chat.svg", "steps-chat.svg", "shares-chat.svg"}
        assert all(f"]({name})" in text for name in pictures)
        assert "twophase compare --input 100" in text
        assert "Disaggregate above 128 prompt tokens" in text

    def test_pictures_are_whole_and_have_a_panel_for_each_way(self, directory):
        for name in ("gaps-chat.svg", "steps-chat.svg", "shares-chat.svg", "crossover.svg"):
            text = (directory / name).read_text()
            root = ElementTree.fromstring(text)
            words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
            assert {"colocated", "disaggregated"} <= set(words)
            assert "prefers-color-scheme:dark" in text

    def test_pictures_of_a_report_before_it_do_not_stay(self, two_ways, directory):
        (directory / "gaps-old.svg").write_text("<svg/>")
        (directory / "own.svg").write_text("<svg/>")

        write_report(two_ways, summaries(two_ways), ORIGIN, directory)

        assert not (directory / "gaps-old.svg").exists()
        assert (directory / "own.svg").exists()

    def test_the_page_needs_nothing_else(self, directory):
        page = (directory / "report.html").read_text()

        assert page.count("<svg") == 4
        assert "prefers-color-scheme:dark" in page
        addresses = page.replace("http://www.w3.org/2000/svg", "")
        assert "http" not in addresses and "src=" not in addresses

    def test_the_numbers_can_be_read_by_programs(self, directory):
        result = json.loads((directory / "result.json").read_text())

        ways = {way["way"]: way for way in result["workloads"][0]["ways"]}
        assert ways["disaggregated"]["latencies"]["ttft_s"]["p50"] == pytest.approx(0.8)
        assert result["crossover"]["points"]["colocated"][0]["num_prompt_tokens"] == 128

    def test_a_comparison_without_probe_or_answers_is_told_too(self, tmp_path):
        nothing = comparison_of(
            played(Mode.COLOCATED, failed(0.0, Overloaded("no room"))),
            played(Mode.DISAGGREGATED, failed(0.0, Overloaded("no room"))),
        )

        write_report(nothing, summaries(nothing), ORIGIN, tmp_path)

        assert "1 of 1 requests (no room)" in (tmp_path / "README.md").read_text()
