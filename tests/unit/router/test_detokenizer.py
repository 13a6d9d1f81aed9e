"""Streamed text equals the text of all ids at once, and never holds half a character."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
TEXTS = [
    f"family {FAMILY} and \U0001f389",
    "\ud55c\uad6d\uc5b4 \uc74c\uc808",
    "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u6771\u4eac\u306f\u3001\u65e5\u672c\u306e\u9996\u90fd",
    "a replacement mark \ufffd\ufffd that was really typed",
    "e" + "\u0301" * 20,
    "\U0010ffff\x00\n",
]


def byte_level() -> Tokenizer:
    """Ids 0-1 special, then the 256 bytes, a merged pair and an added word with a space."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120a"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("\u0120", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.add_tokens([AddedToken("two words", special=False)])
    return Tokenizer(backend, template=None, eos_token_ids=(1,))


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary: words, and bytes for what has no word."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"abcdefgh", "\u2581a", "\u2581b"]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<unk>")])
    return Tokenizer(backend, template=None, eos_token_ids=(2,))


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "window"])


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], *, step: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    parts = [
        detokenizer.push(token_ids[begin : begin + step])
        for begin in range(0, len(token_ids), step)
    ]
    return [*parts, detokenizer.finish()]


@pytest.mark.case("B-113")
@BOTH
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_whole_characters_come_out_in_every_script(tokenizer: Tokenizer, text: str, step: int):
    token_ids = tokenizer.encode(text)
    parts = stream(tokenizer, token_ids, step=step)
    assert "".join(parts) == tokenizer.decode(token_ids) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(text=st.text(min_size=1), step=st.integers(1, 5))
def test_any_text_streams_to_itself(text: str, step: int):
    token_ids = BYTE_LEVEL.encode(text)
    assert "".join(stream(BYTE_LEVEL, token_ids, step=step)) == text


ANY_IDS = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 2), max_size=40)
BYTE_RUNS = st.binary(max_size=12).map(lambda run: [3 + byte for byte in run])
FALLBACK_IDS = st.lists(
    st.integers(0, BYTE_FALLBACK.vocab_size - 1).map(lambda i: [i]) | BYTE_RUNS, max_size=12
).map(lambda runs: [token_id for run in runs for token_id in run])


@given(token_ids=ANY_IDS, step=st.integers(1, 4))
def test_any_ids_of_a_byte_level_vocabulary_stream_to_their_decoding(
    token_ids: list[int], step: int
):
    assert "".join(stream(BYTE_LEVEL, token_ids, step=step)) == BYTE_LEVEL.decode(token_ids)


@given(run=st.binary(max_size=24))
@example(b"\xf0\x9f\x98")
@example(b"\xed\xa0\x80\xf4\x90\x80\x80")
def test_invalid_bytes_stream_to_the_same_replacement_marks(run: bytes):
    assert BYTE_LEVEL.pieces is not None
    by_token = {BYTE_LEVEL.pieces[i]: i for i in range(2, 258)}
    token_ids = [by_token[bytes([byte])] for byte in run]
    assert "".join(stream(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)
    assert BYTE_LEVEL.decode(token_ids) == run.decode("utf-8", "replace")


@given(token_ids=FALLBACK_IDS)
def test_any_ids_of_a_byte_fallback_vocabulary_stream_to_their_decoding(token_ids: list[int]):
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)


def test_text_is_given_out_as_soon_as_its_character_is_whole():
    parts = stream(BYTE_LEVEL, BYTE_LEVEL.encode("a\u00e9b"))
    assert parts == ["a", "", "\u00e9", "b", ""]


def test_a_bad_byte_does_not_hold_back_what_follows():
    lone = BYTE_LEVEL.encode("\u00e9")[1:]
    assert stream(BYTE_LEVEL, [*lone * 3, *BYTE_LEVEL.encode("a")]) == [*"\ufffd" * 3, "a", ""]


@BOTH
def test_an_answer_without_tokens_has_no_text(tokenizer: Tokenizer):
    assert stream(tokenizer, []) == [""]


@BOTH
def test_special_tokens_have_no_text(tokenizer: Tokenizer):
    token_ids = [0, *tokenizer.encode("ab"), 1]
    assert "".join(stream(tokenizer, token_ids)) == "ab"


@BOTH
def test_a_token_costs_the_same_late_in_a_long_answer(tokenizer: Tokenizer):
    token_ids = list(tokenizer.encode("ab" * 10_000))
    detokenizer = Detokenizer(tokenizer)

    def seconds(part: list[int]) -> float:
        begin = time.perf_counter()
        for token_id in part:
            detokenizer.push([token_id])
        return time.perf_counter() - begin

    quarter = len(token_ids) // 4
    first = seconds(token_ids[:quarter])
    seconds(token_ids[quarter : 3 * quarter])
    assert seconds(token_ids[3 * quarter :]) < 5 * first + 0.05


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49_151), max_size=60), text=st.text())
def test_the_default_model_streams_to_its_decoding(smollm2: Tokenizer, ids: list[int], text: str):
    token_ids = [*ids, *(smollm2.encode(text + "."))]
    assert "".join(stream(smollm2, token_ids)) == smollm2.decode(token_ids)


@pytest.fixture(scope="module")
def smollm2(smollm2_directory: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_directory)
