"""The router's workers and requests as operators are told of them: one line each.

Pure but for reading what it is given.
"""

from core.listing import ListedRequest, ListedWorker
from core.request import WorkerName
from router.members.member import Member
from router.running import RunningRequest


def listed_worker(member: Member, now_s: float) -> ListedWorker:
    """One connected worker."""
    info = member.info
    return ListedWorker(
        name=info.name,
        role=info.role,
        address=member.peer.address,
        incarnation=info.incarnation,
        state=member.state(now_s),
        num_requests=member.num_requests,
        num_prompt_tokens=member.num_prompt_tokens,
        max_context_tokens=info.max_context_tokens,
        num_blocks=info.num_blocks,
        max_num_sequences=info.max_num_sequences,
    )


def listed_request(running: RunningRequest, now_s: float) -> ListedRequest:
    """One request that is inside."""
    answer = running.answer
    prefill_worker, decode_worker = answer.workers if answer else (WorkerName(""), WorkerName(""))
    return ListedRequest(
        request_id=running.request_id,
        state=running.state,
        age_s=now_s - running.received_s,
        remaining_s=answer.request.deadline_s - now_s if answer else None,
        num_prompt_tokens=answer.request.num_prompt_tokens if answer else 0,
        num_output_tokens=running.num_output_tokens,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        num_attempts=answer.num_attempts if answer else 0,
    )
