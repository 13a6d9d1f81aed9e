"""Bodies of the OpenAI-compatible endpoint: what is taken, and refusals that name the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.completion import ChatMessage
from core.errors import InvalidRequest, ModelError
from core.request import Priority, Sender
from core.sampling import Constraint, ConstraintKind, Sampling
from router.http.body import Kind, defaults_of, read_body
from router.http.defaults import checkpoint_defaults
from router.http.fields import CHAT, TEXT
from router.http.readers import StreamOptions
from router.request import Defaults

USER = [{"role": "user", "content": "hi"}]


def text(**fields):
    return read_body(json.dumps({"prompt": "hi"} | fields).encode(), Kind.TEXT)


def chat(**fields):
    return read_body(json.dumps({"messages": USER} | fields).encode(), Kind.CHAT)


def refusal(read, *args, **fields):
    with pytest.raises(InvalidRequest) as caught:
        read(*args, **fields)
    return caught.value.field, caught.value.value, caught.value.limit


class TestTaken:
    def test_every_sampling_field_arrives(self):
        body = text(
            model="tiny",
            max_tokens=5,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            seed=7,
            ignore_eos=True,
            stop_token_ids=[4, 5],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            return_token_ids=True,
            user="someone",
            stop="END",
            min_tokens=2,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-1,
            logit_bias={"5": 1, "7": -100},
            logprobs=3,
        )

        assert (body.model, body.prompt) == ("tiny", "hi")
        assert body.asked == Sampling(
            max_tokens=5,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            seed=7,
            stop_token_ids=(4, 5),
            ignore_eos=True,
            stop=("END",),
            min_tokens=2,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-1.0,
            logit_bias=((5, 1.0), (7, -100.0)),
            num_logprobs=3,
        )
        assert body.is_stream and body.return_token_ids
        assert body.stream_options == StreamOptions(True, True)

    def test_what_is_left_out_or_null_stays_unset(self):
        names = ("model", "max_tokens", "temperature", "stream", "stream_options", "stop", "tools")

        assert chat(**dict.fromkeys(names)) == chat()
        assert chat().asked == Sampling()

    @pytest.mark.parametrize(
        ("fields", "num_logprobs"),
        [
            ({}, None),
            ({"logprobs": False}, None),
            ({"logprobs": True}, 0),
            ({"logprobs": True, "top_logprobs": 4}, 4),
            ({"logprobs": False, "top_logprobs": 0}, None),
        ],
    )
    def test_a_chat_asks_for_log_probabilities_in_two_fields(self, fields, num_logprobs):
        assert chat(**fields).asked.num_logprobs == num_logprobs

    @pytest.mark.parametrize(
        ("sent", "prompt"),
        [
            ("hi", "hi"),
            (["hi"], "hi"),
            ([1, 2], (1, 2)),
            ([[1, 2]], (1, 2)),
            ("", ""),
            ([], ()),
        ],
    )
    def test_one_prompt_comes_in_four_forms(self, sent, prompt):
        assert text(prompt=sent).prompt == prompt

    def test_text_parts_of_a_message_are_joined_line_by_line(self):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]

        assert chat(messages=messages).prompt == (
            ChatMessage("system", "be brief"),
            ChatMessage("user", "one\ntwo"),
        )

    def test_an_answer_of_the_openai_package_goes_back_as_history(self):
        answer = {"role": "assistant", "content": "ok", "refusal": None, "annotations": None}
        answer |= {"audio": None, "function_call": None, "tool_calls": None}

        assert chat(messages=[*USER, answer]).prompt[1] == ChatMessage("assistant", "ok")

    def test_both_names_of_the_token_limit_count_for_chats(self):
        assert chat(max_tokens=4).asked.max_tokens == 4
        assert chat(max_completion_tokens=4).asked.max_tokens == 4
        assert chat(max_completion_tokens=4, max_tokens=4).asked.max_tokens == 4
        assert chat(max_completion_tokens=4).names["max_tokens"] == "max_completion_tokens"

    @pytest.mark.parametrize(
        ("fields", "sender"),
        [
            ({}, Sender()),
            ({"user": "u", "priority": -3}, Sender("u", "u", Priority.HIGH)),
            ({"user": "u", "prompt_cache_key": "k", "priority": 0}, Sender("u", "k")),
            ({"prompt_cache_key": "k", "priority": 9}, Sender("", "k", Priority.LOW)),
        ],
    )
    def test_a_chat_says_for_whom_it_is_and_how_urgent(self, fields, sender):
        assert chat(**fields).sender == sender

    @pytest.mark.parametrize(("sent", "kept"), [(-1, 0), (0, 0), (7, 7), (7.0, 7)])
    def test_minus_one_keeps_all_tokens_as_zero_does(self, sent, kept):
        assert text(top_k=sent).asked.top_k == kept


class TestRefused:
    @pytest.mark.parametrize("kind", Kind)
    @pytest.mark.parametrize(
        "data",
        [b"", b"{", b"{}{}", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"seed": NaN}', b"[" * 9999],
    )
    def test_what_is_no_json_is_refused_as_a_whole(self, kind, data):
        assert refusal(read_body, data, kind)[:2] == ("body", "not JSON in UTF-8")

    @pytest.mark.parametrize("data", [b"[]", b"null", b'"text"', b"5"])
    def test_what_is_no_object_is_refused_as_a_whole(self, data):
        assert refusal(read_body, data, Kind.TEXT) == ("body", data.decode(), "must be an object")

    def test_an_unknown_field_is_named_with_the_nearest_known_one(self):
        limit = "did you mean temperature?"
        assert refusal(text, temprature=1) == ("temprature", "unknown", limit)
        assert refusal(chat, xyz=1) == ("xyz", "unknown", "no field is called so")
        nested = refusal(chat, stream=True, stream_options={"include_usag": True})
        assert nested[2] == "did you mean stream_options.include_usage?"

    def test_a_very_long_name_is_cut_and_not_compared(self):
        field, _, limit = refusal(text, **{"x" * 1_000_000: 1})
        assert (field, limit) == ("x" * 64, "no field is called so")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("cache_salt", "x"),
            ("prompt_logprobs", 1),
        ],
    )
    def test_what_is_not_served_yet_is_refused_by_name(self, name, value):
        for read in (text, chat):
            field, shown, limit = refusal(read, **{name: value})
            assert (field, shown) == (name, json.dumps(value))
            assert limit.startswith("is not supported yet; leave it out")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("stop", []),
            ("logit_bias", {}),
            ("length_penalty", 1.0),
            ("response_format", {"type": "text"}),
        ],
    )
    def test_values_that_change_nothing_are_accepted(self, name, value):
        assert text(**{name: value}) == text()
        assert chat(**{name: value}) == chat()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("tool_choice", "required"),
            ("functions", [{"name": "f"}]),
            ("modalities", ["text", "audio"]),
            ("reasoning_effort", "high"),
            ("store", True),
            ("top_logprobs", 5),
            ("chat_template", "{{ 1 }}"),
        ],
    )
    def test_tools_and_other_chat_fields_are_refused_by_name(self, name, value):
        assert refusal(chat, **{name: value})[0] == name

    @pytest.mark.parametrize(
        ("name", "value", "limit"),
        [
            ("temperature", "hot", "must be a number"),
            ("temperature", True, "must be a number"),
            ("max_tokens", 1.5, "must be a whole number"),
            ("max_tokens", True, "must be a whole number"),
            ("max_tokens", "4", "must be a whole number"),
            ("stream", 1, "must be true or false"),
            ("model", 5, "must be a string"),
            ("stop_token_ids", 5, "must be a list of token ids"),
            ("top_k", -2, "must be -1 or 0 (off) to 4294967295"),
            ("top_k", 2**32, "must be -1 or 0 (off) to 4294967295"),
        ],
    )
    def test_a_wrong_type_is_refused_with_what_was_sent(self, name, value, limit):
        assert refusal(text, **{name: value}) == (name, json.dumps(value), limit)

    def test_a_number_beyond_every_range_is_refused(self):
        field, value, _ = refusal(text, temperature=10**400)
        assert field == "temperature" and len(value) < 100

    @pytest.mark.parametrize(
        ("prompt", "field"),
        [
            (5, "prompt"),
            (["a", "b"], "prompt"),
            ([[1], [2]], "prompt"),
            (["a", 1], "prompt"),
            ([1, 2.5], "prompt[1]"),
            ([1, None], "prompt[1]"),
            ([[1, True]], "prompt[1]"),
        ],
    )
    def test_other_prompts_are_refused(self, prompt, field):
        assert refusal(text, prompt=prompt)[0] == field

    @pytest.mark.parametrize(
        ("message", "field"),
        [
            ("hi", "messages[0]"),
            ({"content": "hi"}, "messages[0].role"),
            ({"role": 1, "content": "hi"}, "messages[0].role"),
            ({"role": "user"}, "messages[0].content"),
            ({"role": "user", "content": None}, "messages[0].content"),
            ({"role": "user", "content": 5}, "messages[0].content"),
            ({"role": "user", "content": "hi", "name": "me"}, "messages[0].name"),
            ({"role": "user", "content": "hi", "rol": 1}, "messages[0].rol"),
            ({"role": "user", "content": ["hi"]}, "messages[0].content[0].type"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                "messages[0].content[0].type",
            ),
            (
                {"role": "user", "content": [{"type": "text"}]},
                "messages[0].content[0].text",
            ),
            ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
            ({"role": "tool", "tool_call_id": "1", "content": "2"}, "messages[0].tool_call_id"),
        ],
    )
    def test_a_message_that_cannot_be_used_is_refused_by_its_place(self, message, field):
        assert refusal(chat, messages=[message])[0] == field

    def test_what_must_be_there_is_asked_for(self):
        assert refusal(read_body, b"{}", Kind.TEXT) == ("prompt", "unset", "is required")
        assert refusal(read_body, b"{}", Kind.CHAT) == ("messages", "unset", "is required")

    def test_two_different_token_limits_are_refused(self):
        assert refusal(chat, max_tokens=4, max_completion_tokens=5)[0] == "max_tokens"

    def test_stream_options_are_for_streams(self):
        assert refusal(text, stream_options={"include_usage": True})[0] == "stream_options"

    @given(
        fields=st.dictionaries(
            st.sampled_from([*TEXT, *CHAT, "other"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                max_leaves=5,
            ),
        ),
        kind=st.sampled_from(Kind),
    )
    def test_any_object_is_read_or_refused(self, fields, kind):
        data = json.dumps(fields).encode()
        try:
            body = read_body(data, kind)
        except InvalidRequest as error:
            assert error.field and len(error.value) < 200
        else:
            assert body.prompt is not None


class TestDefaults:
    def test_the_checkpoint_decides_what_an_unset_field_means(self, tmp_path):
        said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2}
        (tmp_path / "generation_config.json").write_text(json.dumps(said))

        assert checkpoint_defaults(tmp_path) == Defaults(temperature=0.6, top_k=20, top_p=0.95)

    def test_where_it_says_nothing_openai_defaults_hold(self, tmp_path):
        (tmp_path / "generation_config.json").write_text('{"temperature": null}')

        assert checkpoint_defaults(tmp_path) == Defaults(temperature=1.0, top_k=0, top_p=1.0)

    @pytest.mark.parametrize("said", ['{"temperature": 3}', '{"top_p": 0}', '{"top_k": "x"}'])
    def test_a_value_that_no_request_could_have_is_refused_at_the_start(self, tmp_path, said):
        (tmp_path / "generation_config.json").write_text(said)

        with pytest.raises(ModelError, match="generation_config"):
            checkpoint_defaults(tmp_path)

    def test_completions_are_short_unless_asked_otherwise(self):
        assert defaults_of(Kind.TEXT, Defaults()).max_tokens == 16
        assert defaults_of(Kind.CHAT, Defaults()) == Defaults()


class TestConstraints:
    @pytest.mark.parametrize(
        ("fields", "kind", "written"),
        [
            ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
                "json_schema",
                '{"a": 1}',
            ),
            ({"structured_outputs": {"json": '{"a": 1}'}}, "json_schema", '{"a": 1}'),
            ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
            ({"structured_outputs": {"choice": ["a.b", "c"]}}, "regex", r"(?:a\.b|c)"),
            ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
        ],
    )
    def test_each_way_to_ask_becomes_one_constraint(self, fields, kind, written):
        for read in (text, chat):
            assert read(**fields).asked.constraint == Constraint(ConstraintKind(kind), written)

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"response_format": "json"}, "response_format"),
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
                "response_format.json_schema.schema",
            ),
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
            ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
            ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
            ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
            (
                {
                    "response_format": {"type": "json_object"},
                    "structured_outputs": {"regex": "a"},
                },
                "structured_outputs",
            ),
        ],
    )
    def test_what_is_none_is_refused_by_name(self, fields, field):
        assert refusal(chat, **fields)[0] == field
