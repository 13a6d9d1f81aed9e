"""gRPC in, core types out: what users call.

A request's own way is in `generation`; here its message is unpacked, each delivery is written as
one message, and whatever goes wrong leaves as one gRPC status with the whole error in its trailers.
When the client goes away the handler is cancelled, in a unary call as in a stream.

Runs in the router's event loop.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from core.clock import Clock
from core.completion import Chunk
from core.errors import InvalidRequest, TwophaseError
from core.request import RequestId
from router.codec import Codec
from router.config import FrontDoorConfig
from router.generation import Generation
from router.incoming import Incoming
from router.request import Prompt, checked_sender, mark_of, request_id_of
from router.running import RunningRequests
from router.several import Deliver, Delivery
from router.tracing.context import trace_context
from twophase.server import Context, abort
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import (
    chat_messages_from_wire,
    chunk_to_wire,
    sampling_from_wire,
    sender_from_wire,
)


class InferenceService(pb_grpc.InferenceServicer):
    """What users call."""

    def __init__(
        self,
        generation: Generation,
        codec: Codec,
        running: RunningRequests,
        *,
        config: FrontDoorConfig,
        clock: Clock,
    ) -> None:
        self._generation = generation
        self._codec = codec
        self._running = running
        self._config = config
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        begun: set[int] = set()

        async def deliver(delivery: Delivery) -> None:
            chunk = _joined(delivery.chunks)
            if chunk.index not in begun:
                begun.add(chunk.index)
                chunk = replace(chunk, seed=delivery.request.sampling.seed)
            await context.write(chunk_to_wire(chunk))

        await self._generate(request, context, deliver)

    async def GenerateOnce(
        self, request: pb.GenerateOnceRequest, context: Context
    ) -> pb.GenerateOnceResponse:
        chunks: defaultdict[int, list[Chunk]] = defaultdict(list)

        async def collect(delivery: Delivery) -> None:
            chunks[delivery.chunks[0].index].extend(delivery.chunks)

        await self._generate(request.request, context, collect)
        answer, *others = (chunk_to_wire(_joined(chunks[index])) for index in sorted(chunks))
        return pb.GenerateOnceResponse(answer=answer, other_answers=others)

    async def _generate(
        self, request: pb.GenerateRequest, context: Context, deliver: Deliver
    ) -> None:
        received_s = self._clock.now_s()
        try:
            incoming = Incoming(
                request_id=request_id_of(request.request_id),
                model=request.model,
                prompt=_prompt(request),
                asked=sampling_from_wire(request.sampling),
                received_s=received_s,
                time_limit_s=context.time_remaining(),
                mark=mark_of(request.request_id),
                resumed_token_ids=_resumed_token_ids(request),
                sender=checked_sender(sender_from_wire(request)),
                trace=trace_context(_headers(context)),
            )
            await self._generation.run(incoming, deliver)
        except TwophaseError as error:
            await abort(context, error)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        return pb.CancelResponse(found=self._running.cancel(RequestId(request.request_id)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        try:
            token_ids = await self._codec.encode(_prompt(request), request.model)
        except TwophaseError as error:
            await abort(context, error)
            raise
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        try:
            text = await self._codec.decode(tuple(request.token_ids), request.model)
        except TwophaseError as error:
            await abort(context, error)
            raise
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        try:
            limits = self._generation.limits()
        except TwophaseError as error:
            await abort(context, error)
            raise
        return pb.GetModelResponse(
            model=limits.model,
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            mode=self._config.mode,
        )


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one answer that follow each other as one."""
    if len(chunks) == 1:
        return chunks[0]
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        chunks[-1].completion,
        tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
        chunks[0].index,
        tuple(logprobs for chunk in chunks for logprobs in chunk.prompt_logprobs),
    )


def _headers(context: Context) -> dict[str, str]:
    """What the call's metadata tells in text."""
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}


def _resumed_token_ids(request: pb.GenerateRequest) -> tuple[int, ...] | None:
    return tuple(request.resumption.token_ids) if request.HasField("resumption") else None


def _prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "messages":
            return chat_messages_from_wire(request.messages)
        case "prompt_token_ids":
            assert isinstance(request, pb.GenerateRequest)
            return tuple(request.prompt_token_ids.ids)
    taken = ", ".join(field.name for field in request.DESCRIPTOR.oneofs_by_name["input"].fields)
    raise InvalidRequest("input", "unset", f"must be one of {taken}")
