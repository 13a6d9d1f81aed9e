"""What operators are told of workers and requests: to messages, and back."""

from core.listing import ListedRequest, ListedWorker, WorkerState
from core.request import RequestId, WorkerName
from core.request_state import RequestState
from core.worker import Role
from twophase.v1 import admin_pb2 as pb

_WORKER_STATES = {
    WorkerState.READY: pb.WORKER_STATE_READY,
    WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
    WorkerState.SUSPECT: pb.WORKER_STATE_SUSPECT,
    WorkerState.WARMING: pb.WORKER_STATE_WARMING,
}
_WORKER_STATES_BACK = {value: key for key, value in _WORKER_STATES.items()}
_REQUEST_STATES = {
    RequestState.RECEIVED: pb.REQUEST_STATE_RECEIVED,
    RequestState.ADMITTED: pb.REQUEST_STATE_ADMITTED,
    RequestState.RESERVING: pb.REQUEST_STATE_RESERVING,
    RequestState.PREFILLING: pb.REQUEST_STATE_PREFILLING,
    RequestState.TRANSFERRING: pb.REQUEST_STATE_TRANSFERRING,
    RequestState.DECODING: pb.REQUEST_STATE_DECODING,
    RequestState.FINISHED: pb.REQUEST_STATE_FINISHED,
    RequestState.FAILED: pb.REQUEST_STATE_FAILED,
}
_REQUEST_STATES_BACK = {value: key for key, value in _REQUEST_STATES.items()}


def listed_worker_to_wire(worker: ListedWorker) -> pb.ListedWorker:
    """A worker as a message."""
    return pb.ListedWorker(
        name=worker.name,
        role=worker.role.value,
        address=worker.address,
        incarnation=worker.incarnation,
        state=_WORKER_STATES[worker.state],
        num_requests=worker.num_requests,
        num_prompt_tokens=worker.num_prompt_tokens,
        max_context_tokens=worker.max_context_tokens,
        num_blocks=worker.num_blocks,
        max_num_sequences=worker.max_num_sequences,
    )


def listed_worker_from_wire(message: pb.ListedWorker) -> ListedWorker:
    """A worker from its message."""
    return ListedWorker(
        name=WorkerName(message.name),
        role=Role(message.role),
        address=message.address,
        incarnation=message.incarnation,
        state=_WORKER_STATES_BACK[message.state],
        num_requests=message.num_requests,
        num_prompt_tokens=message.num_prompt_tokens,
        max_context_tokens=message.max_context_tokens,
        num_blocks=message.num_blocks,
        max_num_sequences=message.max_num_sequences,
    )


def listed_request_to_wire(request: ListedRequest) -> pb.ListedRequest:
    """A request as a message."""
    return pb.ListedRequest(
        request_id=request.request_id,
        state=_REQUEST_STATES[request.state],
        age_s=request.age_s,
        remaining_s=request.remaining_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        num_attempts=request.num_attempts,
    )


def listed_request_from_wire(message: pb.ListedRequest) -> ListedRequest:
    """A request from its message."""
    return ListedRequest(
        request_id=RequestId(message.request_id),
        state=_REQUEST_STATES_BACK[message.state],
        age_s=message.age_s,
        remaining_s=message.remaining_s if message.HasField("remaining_s") else None,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        prefill_worker=WorkerName(message.prefill_worker),
        decode_worker=WorkerName(message.decode_worker),
        num_attempts=message.num_attempts,
    )
