"""Workers that fit together and serve the request soonest, and words for why."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Mode
from core.layout import Dtype
from router.placing.load import ENOUGH_PROMPTS, DecodeLoad, Need, PrefillLoad
from router.placing.placement import Placement, Reason, Rejected, Rules, place
from tests.unit.router.doubles import LAYOUT

OTHER = dataclasses.replace(LAYOUT, num_layers=9)
SPLIT = Rules(Mode.DISAGGREGATED)
NEED = Need(num_prompt_tokens=40, num_tokens=50)
layouts = st.sampled_from([LAYOUT, OTHER])


def prefill(name, num_prompt_tokens=0, layout=LAYOUT, *, holds=400, **more):
    return PrefillLoad(name, f"{name}-life", layout, num_prompt_tokens, holds, 100, **more)


def decode(name, num_sequences=0, layout=LAYOUT, *, holds=400, num_blocks=100, **more):
    return DecodeLoad(name, f"{name}-life", layout, num_sequences, 4, holds, num_blocks, **more)


class TestWhoIsChosen:
    def test_the_least_loaded_of_each_pool_serve_and_the_words_say_so(self):
        placement = place(
            SPLIT,
            NEED,
            [prefill("prefill-0", 300), prefill("prefill-1", 20)],
            [decode("decode-0", 2), decode("decode-1", 1)],
        )
        assert (placement.prefill, placement.decode) == ("prefill-1", "decode-1")
        assert placement.why == (
            "prefill-1 has 20 prompt tokens to read; decode-1 has 1 of 4 sequences"
        )

    def test_names_break_ties_whatever_the_order(self):
        workers = [decode("decode-1"), decode("decode-0")]
        chunked = Rules(Mode.CHUNKED)
        assert place(chunked, NEED, [], workers).decode == "decode-0"
        assert place(chunked, NEED, [], workers[::-1]).decode == "decode-0"

    @pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.CHUNKED])
    def test_the_other_modes_read_prompts_where_they_decode(self, mode):
        placement = place(Rules(mode), NEED, [prefill("prefill-0")], [decode("decode-0")])
        assert placement.prefill is None
        assert placement.why == f"decode-0 has 0 of 4 sequences; mode {mode} reads prompts there"

    def test_a_measured_rate_tells_a_short_queue_from_a_soon_end(self):
        slow = prefill("prefill-0", 100, tokens_per_s=10.0)
        fast = prefill("prefill-1", 300, tokens_per_s=100.0)
        assert place(SPLIT, NEED, [slow, fast], [decode("d")]).prefill == "prefill-1"

    def test_a_cached_prefix_counts_as_much_as_the_tokens_it_saves(self):
        def chosen(backlog):
            cached = prefill("prefill-1", backlog, num_cached_tokens=32)
            return place(SPLIT, NEED, [prefill("prefill-0", 10), cached], [decode("d")])

        assert chosen(10).prefill == "prefill-1"
        assert chosen(41).prefill == "prefill-1"
        assert chosen(43).prefill == "prefill-0"
        assert "32 of this prompt cached" in chosen(10).why

    def test_decode_goes_to_the_cache_unless_that_worker_has_much_more_to_do(self):
        def chosen(num_sequences, cached):
            workers = [decode("d0", 0), decode("d1", num_sequences, num_cached_tokens=cached)]
            return place(SPLIT, NEED, [prefill("p")], workers)

        assert chosen(1, 32).decode == "d1"
        assert chosen(2, 32).decode == "d0"
        assert chosen(1, 16).decode == "d0"  # less than half of the prompt
        assert chosen(1, 32).why.endswith("d1 has 1 of 4 sequences, 32 tokens cached")

    def test_a_session_goes_on_where_it_was_among_like_loads(self):
        def chosen(num_sequences):
            workers = [decode("d0", 0), decode("d1", num_sequences, is_of_session=True)]
            return place(SPLIT, NEED, [prefill("p")], workers)

        assert chosen(1).decode == "d1"
        assert chosen(1).why.endswith("served this session")
        assert chosen(2).decode == "d0"

    @given(st.lists(st.integers(0, 39), min_size=2, max_size=4), st.integers(1, 300))
    def test_a_popular_prefix_never_piles_its_requests_on_one_worker(self, cached, num_requests):
        """Each is placed in turn and none ends; no worker has much more than another."""
        slots = 64
        numbers = [0] * len(cached)
        for _ in range(min(num_requests, slots * len(cached))):
            workers = [
                dataclasses.replace(
                    decode(f"d{i}", numbers[i], num_cached_tokens=tokens, num_blocks=10**6),
                    max_num_sequences=slots,
                )
                for i, tokens in enumerate(cached)
            ]
            name = place(SPLIT, NEED, [prefill("p")], workers).decode
            numbers[int(name[1:])] += 1
            assert max(numbers) - min(numbers) <= slots // 8 + 1


class TestWhoCannotServe:
    @pytest.mark.parametrize(
        ("prefills", "decodes", "why"),
        [
            ([], [], "no decode worker can be used"),
            ([prefill("p")], [], "no decode worker can be used"),
            ([], [decode("d")], "no prefill worker can be used"),
            (
                [prefill("p", layout=OTHER)],
                [decode("d")],
                f"no prefill worker fits d: num_layers 9 != 2 ({OTHER} != {LAYOUT})",
            ),
        ],
    )
    def test_a_pool_that_cannot_serve_is_named(self, prefills, decodes, why):
        assert place(SPLIT, NEED, prefills, decodes) == Rejected(why, Reason.NOBODY)

    @pytest.mark.parametrize(
        "change", [{"block_size": 8}, {"tensor_parallel_size": 2}, {"dtype": Dtype.BFLOAT16}]
    )
    def test_shapes_may_differ_and_formats_if_they_may_be_converted(self, change):
        workers = [prefill("p", layout=dataclasses.replace(LAYOUT, **change))], [decode("d")]
        is_format = "dtype" in change
        rules = dataclasses.replace(SPLIT, may_convert_dtype=is_format)
        placement = place(rules, NEED, *workers)
        assert (placement.prefill, placement.decode) == ("p", "d")
        if is_format:
            assert isinstance(place(SPLIT, NEED, *workers), Rejected)

    def test_a_less_loaded_decode_worker_that_no_prefill_worker_fits_is_passed_over(self):
        workers = [decode("decode-0", 0, OTHER), decode("decode-1", 3)]
        placement = place(SPLIT, NEED, [prefill("prefill-0")], workers)
        assert (placement.prefill, placement.decode) == ("prefill-0", "decode-1")

    def test_workers_that_cannot_hold_the_request_are_passed_over(self):
        placement = place(
            SPLIT,
            NEED,
            [prefill("p0", 0, holds=39), prefill("p1", 300, holds=40)],
            [decode("d0", 0, holds=49), decode("d1", 3, holds=50)],
        )
        assert (placement.prefill, placement.decode) == ("p1", "d1")

    def test_a_request_that_nobody_can_hold_is_told_how_much_would_fit(self):
        decodes = [decode("d0", holds=30), decode("d1", holds=49)]
        assert place(SPLIT, NEED, [prefill("p")], decodes) == Rejected(
            "50 tokens, and the largest decode worker holds 49", Reason.TOO_LARGE
        )
        assert place(SPLIT, NEED, [prefill("p", holds=39)], [decode("d")]) == Rejected(
            "a prompt of 40 tokens, and the largest prefill worker holds 39", Reason.TOO_LARGE
        )

    @pytest.mark.parametrize("prefills", [[], [prefill("p", holds=39)]])
    def test_a_prompt_that_no_prefill_worker_takes_is_read_at_decode_if_it_may(self, prefills):
        rules = dataclasses.replace(SPLIT, may_recompute=True)
        placement = place(rules, NEED, prefills, [decode("d")])
        assert (placement.prefill, placement.is_fallback) == (None, True)
        assert placement.why.endswith("so it reads the prompt")


class TestRoom:
    @pytest.mark.parametrize(
        "busy",
        [
            decode("d", 8),  # two for each slot
            decode("d", 1, num_kv_tokens=360),
        ],
    )
    def test_a_full_decode_worker_takes_nothing(self, busy):
        rejected = place(SPLIT, NEED, [prefill("p")], [busy])
        assert rejected.reason is Reason.FULL
        assert place(SPLIT, NEED, [prefill("p")], [busy, decode("e", 7)]).decode == "e"

    def test_cached_tokens_need_no_new_blocks(self):
        assert isinstance(
            place(SPLIT, NEED, [prefill("p")], [decode("d", 1, num_kv_tokens=350)]), Placement
        )
        sharing = decode("d", 1, num_kv_tokens=360, num_cached_tokens=16)
        assert isinstance(place(SPLIT, NEED, [prefill("p")], [sharing]), Placement)

    def test_a_prefill_worker_with_enough_to_do_takes_no_more(self):
        def busy(**more):
            return prefill("p", 500, **({"num_prompts": ENOUGH_PROMPTS} | more))

        rejected = place(SPLIT, NEED, [busy(tokens_per_s=100.0)], [decode("d")])
        assert rejected == Rejected("every prefill worker has enough prompts to read", Reason.FULL)
        for free in (busy(), busy(tokens_per_s=1e4), busy(tokens_per_s=9.0, num_prompts=7)):
            assert place(SPLIT, NEED, [free], [decode("d")]).prefill == "p"

    @given(st.integers(1, 400), st.integers(0, 10**6))
    def test_an_idle_cluster_takes_whatever_it_can_hold(self, num_tokens, num_kv_tokens):
        need = Need(num_tokens, num_tokens)
        idle = decode("d", 0, num_kv_tokens=num_kv_tokens)
        assert isinstance(place(SPLIT, need, [prefill("p")], [idle]), Placement)


class TestReadingAtDecode:
    RULES = dataclasses.replace(SPLIT, max_local_tokens=40)

    def chosen(self, *, backlog=1000, num_sequences=1, cached=0, exposed_s=0.1, **rates):
        rates = {"reader": 1000.0, "worker": 1000.0} | rates
        return place(
            self.RULES,
            NEED,
            [prefill("p", backlog, tokens_per_s=rates["reader"])],
            [decode("d", num_sequences, num_cached_tokens=cached, tokens_per_s=rates["worker"])],
            exposed_transfer_s=exposed_s,
        )

    def test_is_chosen_where_it_is_measured_to_be_sooner(self):
        placement = self.chosen()
        assert (placement.prefill, placement.is_fallback) == (None, False)
        assert "against 1.140 s by way of p" in placement.why

    @pytest.mark.parametrize(
        "facts",
        [
            {"backlog": 0, "exposed_s": 0.001},
            {"backlog": 0, "num_sequences": 7},
            {"exposed_s": None},
            {"reader": None},
            {"worker": None},
        ],
    )
    def test_is_not_where_it_is_not(self, facts):
        assert self.chosen(**facts).prefill == "p"

    def test_is_for_what_is_short_without_its_cached_prefix(self):
        self.RULES = dataclasses.replace(SPLIT, max_local_tokens=39)
        assert self.chosen().prefill == "p"
        assert self.chosen(cached=32).prefill is None

    def test_is_never_where_the_rules_do_not_allow_it(self):
        self.RULES = SPLIT
        assert self.chosen(cached=39).prefill == "p"


@given(
    st.lists(st.builds(prefill, st.text(), st.integers(0, 9), layouts), max_size=4),
    st.lists(st.builds(decode, st.text(), st.integers(0, 7), layouts), max_size=4),
)
def test_any_pair_that_fits_is_enough_and_none_that_does_not_is_made(prefills, decodes):
    prefills = [dataclasses.replace(p, incarnation=f"p{i}") for i, p in enumerate(prefills)]
    decodes = [dataclasses.replace(d, incarnation=f"d{i}") for i, d in enumerate(decodes)]
    placement = place(SPLIT, NEED, prefills, decodes)
    pairs = [(p, d) for p in prefills for d in decodes if p.layout == d.layout]
    if not pairs:
        assert isinstance(placement, Rejected)
        return
    incarnations = (placement.prefill_incarnation, placement.decode_incarnation)
    (chosen,) = [d for p, d in pairs if (p.incarnation, d.incarnation) == incarnations]
    assert chosen.num_sequences == min(d.num_sequences for _, d in pairs)
