"""Log-probabilities in OpenAI's two shapes."""

from core.completion import Chunk
from core.request import Logprobs
from router.http.logprobs import chat_logprobs, text_logprobs

TOKENS = {1: b"He", 2: b"llo", 3: "é".encode()[:1]}
CHUNKS = [
    Chunk("He", (1,), logprobs=(Logprobs(-0.5, ((1, -0.5), (2, -1.5))),)),
    Chunk("", (3,), logprobs=(Logprobs(-2.0, ((2, -0.25),)),)),
]


def test_a_chat_has_an_object_for_each_token_with_its_bytes():
    assert chat_logprobs(CHUNKS, TOKENS.get) == {
        "content": [
            {
                "token": "He",
                "logprob": -0.5,
                "bytes": [72, 101],
                "top_logprobs": [
                    {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
                    {"token": "llo", "logprob": -1.5, "bytes": [108, 108, 111]},
                ],
            },
            {
                "token": "\N{REPLACEMENT CHARACTER}",
                "logprob": -2.0,
                "bytes": [195],
                "top_logprobs": [{"token": "llo", "logprob": -0.25, "bytes": [108, 108, 111]}],
            },
        ],
        "refusal": None,
    }


def test_a_text_has_parallel_lists_and_offsets_from_the_answers_beginning():
    assert text_logprobs(CHUNKS, TOKENS.get, 10) == {
        "tokens": ["He", "\N{REPLACEMENT CHARACTER}"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [
            {"He": -0.5, "llo": -1.5},
            {"llo": -0.25, "\N{REPLACEMENT CHARACTER}": -2.0},
        ],
        "text_offset": [10, 12],
    }
