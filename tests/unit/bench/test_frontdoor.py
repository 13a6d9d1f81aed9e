"""The front door's bench counts what is there, and its double emits every token once."""

import asyncio

from bench.frontdoor.load import Received, _num_tokens, _request_id_of
from bench.frontdoor.service import Steps
from tests.unit.router.doubles import make_request
from twophase.v1 import inference_pb2 as pb


def test_tokens_of_a_message_are_counted_in_its_bytes():
    for text, ids in (("", [5]), ("", [49151, 1, 300]), ("word", [5, 300]), ("x" * 90, [7])):
        message = pb.GenerateResponse(text=text, token_ids=ids)
        assert _num_tokens(message.SerializeToString()) == len(ids)
    last = pb.GenerateResponse(completion=pb.Completion(request_id="r"))
    assert _num_tokens(last.SerializeToString()) == 0


def test_the_id_of_an_http_answer_is_read_from_its_head():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\nX-Request-Id: abc\r\n\r\n"
    assert _request_id_of(head) == "abc"


def test_each_token_is_timed_from_its_emission():
    received = Received({"r": [1.0, 2.0, 3.0]})
    received.message("r", 0, 2)
    received.message("r", 2, 1)
    assert (received.num_messages, received.num_tokens) == (2, 3)
    assert received.emitting_seconds == 2.0
    assert received.delays_s[0] - received.delays_s[1] == 1.0


async def test_the_double_emits_every_token_in_order_and_then_knows_nothing_of_the_request():
    steps = Steps((50, 51))
    steps.step_s = 0.0
    outbox = asyncio.Queue()
    running = asyncio.create_task(steps.run())
    steps.reserve(make_request("r", max_tokens=4), outbox)
    steps.begin("r")
    tokens = [token for _ in range(3) for token in (await outbox.get()).tokens]
    await asyncio.sleep(0)
    running.cancel()
    assert [(token.index, token.token_id) for token in tokens] == [(1, 51), (2, 50), (3, 51)]
    assert [token.done is not None for token in tokens] == [False, False, True]
    assert outbox.empty()
    assert len(steps.emitted_s["r"]) == 4
