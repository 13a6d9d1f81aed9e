"""What the front door refuses, each with field, value and limit, and what it fills in."""

import math

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from core.completion import ChatMessage
from core.errors import InvalidRequest
from core.request import MAX_SEED, SamplingParams
from core.sampling import Sampling
from router.request import (
    Limits,
    check_model,
    mark_of,
    request_id_of,
    sampling_of,
    stop_strings_of,
    token_ids_of,
)
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

LIMITS = Limits(model="tiny", vocab_size=258, max_context_tokens=16)
EOS = (1,)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def asked(**fields):
    return Sampling(**fields)


@pytest.fixture(scope="module")
def tokenizer():
    """Ids 0 and 1 special, then one per byte."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend, template=ChatTemplate(TEMPLATE, special_tokens={}), eos_token_ids=EOS)


def refusal(check, *args):
    with pytest.raises(InvalidRequest) as caught:
        check(*args)
    return caught.value.field, caught.value.value, caught.value.limit


class TestNames:
    def test_an_id_is_kept_and_a_missing_one_is_made(self):
        assert request_id_of("my request") == "my request"
        assert request_id_of("x" * 128) == "x" * 128
        assert len({request_id_of("") for _ in range(3)} - {""}) == 3
        assert mark_of("") == ""
        assert len({mark_of("my request") for _ in range(3)} - {""}) == 3

    def test_a_long_id_is_refused_by_its_length(self):
        assert refusal(request_id_of, "x" * 129) == (
            "request_id",
            "129 characters",
            "at most 128 are taken",
        )

    @pytest.mark.parametrize("text", ["a\nb", "\x00", "\x1b[2J"])
    def test_an_id_that_would_break_a_log_line_is_refused(self, text):
        assert refusal(request_id_of, text) == ("request_id", repr(text), "must be printable")

    @pytest.mark.parametrize("model", ["", "tiny"])
    def test_the_served_model_and_none_are_taken(self, model):
        check_model(model, LIMITS)

    def test_another_model_is_refused_with_the_one_that_is_served(self):
        assert refusal(check_model, "big", LIMITS) == ("model", "big", "this cluster serves tiny")


class TestPrompts:
    def test_text_chat_and_ids_become_token_ids(self, tokenizer):
        ids = token_ids_of("abc", tokenizer, LIMITS)
        assert len(ids) == 3
        assert token_ids_of([ChatMessage("user", "abc")], tokenizer, LIMITS) == ids
        assert token_ids_of(ids, tokenizer, LIMITS) == ids

    def test_a_prompt_that_leaves_one_token_of_answer_is_taken(self, tokenizer):
        assert len(token_ids_of("x" * 15, tokenizer, LIMITS)) == 15
        assert len(token_ids_of((5,) * 15, tokenizer, LIMITS)) == 15

    @pytest.mark.parametrize(
        "prompt", ["x" * 16, "x" * 100_000, [ChatMessage("user", "x" * 16)], (5,) * 16]
    )
    def test_a_longer_one_is_refused_with_what_fits(self, tokenizer, prompt):
        field, value, limit = refusal(token_ids_of, prompt, tokenizer, LIMITS)
        assert (field, limit) == ("prompt", "at most 15 fit the context")
        assert int(value.removesuffix(" tokens or more")) >= 16

    @pytest.mark.parametrize("prompt", ["", ()])
    def test_an_empty_one_is_refused(self, tokenizer, prompt):
        assert refusal(token_ids_of, prompt, tokenizer, LIMITS) == (
            "prompt",
            "empty",
            "must hold at least one token",
        )

    def test_an_id_outside_the_vocabulary_is_refused_by_its_place(self, tokenizer):
        assert refusal(token_ids_of, (5, 258), tokenizer, LIMITS) == (
            "prompt_token_ids[1]",
            "258",
            "must be below 258",
        )


class TestSampling:
    def test_unset_fields_take_the_stated_defaults(self):
        params = sampling_of(asked(), 6, EOS, LIMITS)
        assert params == SamplingParams(max_tokens=10, seed=params.seed, stop_token_ids=EOS)
        assert 0 <= params.seed <= MAX_SEED

    def test_a_seed_is_drawn_for_each_request_that_gives_none(self):
        assert len({sampling_of(asked(), 6, EOS, LIMITS).seed for _ in range(4)}) > 1

    @pytest.mark.case("B-043")
    def test_the_default_length_is_256_where_there_is_room(self):
        limits = Limits("tiny", 258, 1000)
        assert sampling_of(asked(), 6, EOS, limits).max_tokens == 256

    def test_what_is_set_is_kept(self):
        fields = {"max_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 0}
        params = sampling_of(asked(**fields, stop_token_ids=(9, 1, 9)), 6, EOS, LIMITS)
        assert params == SamplingParams(**fields, stop_token_ids=(1, 9))

    def test_ignore_eos_leaves_the_callers_own_stops(self):
        params = sampling_of(asked(ignore_eos=True, stop_token_ids=(9,)), 6, EOS, LIMITS)
        assert params.stop_token_ids == (9,)

    def test_64_stops_are_taken_beside_the_checkpoints_own(self):
        stops = tuple(range(100, 164))
        params = sampling_of(asked(stop_token_ids=stops), 6, EOS, LIMITS)
        assert params.stop_token_ids == (*EOS, *stops)

    @pytest.mark.parametrize(
        ("fields", "field", "value", "limit"),
        [
            ({"max_tokens": 0}, "max_tokens", "0", "must be at least 1"),
            (
                {"max_tokens": 11},
                "max_tokens",
                "11",
                "a prompt of 6 tokens leaves 10 of a context of 16",
            ),
            ({"temperature": 2.5}, "temperature", "2.5", "must be 0 to 2"),
            ({"temperature": math.nan}, "temperature", "nan", "must be 0 to 2"),
            ({"top_p": 0.0}, "top_p", "0.0", "must be over 0 and at most 1"),
            ({"top_p": 1.5}, "top_p", "1.5", "must be over 0 and at most 1"),
            ({"seed": MAX_SEED + 1}, "seed", str(MAX_SEED + 1), f"must be 0 to {MAX_SEED}"),
            ({"stop_token_ids": (5, 300)}, "stop_token_ids[1]", "300", "must be below 258"),
            (
                {"stop_token_ids": (5,) * 65},
                "stop_token_ids",
                "65 ids",
                "at most 64 are taken",
            ),
            ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "4", "max_tokens is 3"),
            ({"min_p": -0.1}, "min_p", "-0.1", "must be 0 to 1"),
            (
                {"repetition_penalty": 0.0},
                "repetition_penalty",
                "0.0",
                "must be over 0, at most 10",
            ),
            ({"presence_penalty": 2.5}, "presence_penalty", "2.5", "must be -2 to 2"),
            ({"frequency_penalty": math.nan}, "frequency_penalty", "nan", "must be -2 to 2"),
            ({"logit_bias": ((258, 1.0),)}, "logit_bias[0]", "258", "must be below 258"),
            ({"logit_bias": ((5, 101.0),)}, "logit_bias[5]", "101.0", "must be -100 to 100"),
            (
                {"logit_bias": ((5, 1.0),) * 1025},
                "logit_bias",
                "1025 ids",
                "at most 1024 are taken",
            ),
            ({"num_logprobs": 21}, "num_logprobs", "21", "must be 0 to 20"),
        ],
    )
    def test_a_value_outside_its_range_is_refused(self, fields, field, value, limit):
        assert refusal(sampling_of, asked(**fields), 6, EOS, LIMITS) == (field, value, limit)


class TestStopStrings:
    def test_each_is_kept_once(self):
        assert stop_strings_of(asked(stop=("a", "b", "a"))) == ("a", "b")

    @pytest.mark.parametrize(
        ("stop", "field", "value", "limit"),
        [
            (("x",) * 17, "stop", "17 strings", "at most 16 are taken"),
            (("x", ""), "stop[1]", "0 characters", "must have 1 to 256"),
            (("x" * 257,), "stop[0]", "257 characters", "must have 1 to 256"),
        ],
    )
    def test_others_are_refused(self, stop, field, value, limit):
        assert refusal(stop_strings_of, asked(stop=stop)) == (field, value, limit)
