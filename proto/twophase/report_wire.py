"""What was measured of one answer, and what is concluded from it: to messages, and back."""

from core.events.clock_offset import WorkerClock
from core.finding import Diagnosis, Finding, PhaseSpread, Symptom, Trouble
from core.request import RequestId
from core.timeline import DecodeReport, Gap, PrefillReport
from twophase.event_wire import event_to_wire, events_from_wire
from twophase.v1 import admin_pb2, worker_pb2
from twophase.v1 import inference_pb2 as pb

_SYMPTOMS = {
    Symptom.FIRST_TOKEN: admin_pb2.SYMPTOM_FIRST_TOKEN_LATE,
    Symptom.LATER_TOKENS: admin_pb2.SYMPTOM_LATER_TOKENS_SLOW,
}
_SYMPTOMS_BACK = {value: key for key, value in _SYMPTOMS.items()}


def prefill_report_to_wire(report: PrefillReport) -> worker_pb2.PrefillTimes:
    """What was measured of a prompt, as a message."""
    return worker_pb2.PrefillTimes(
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        num_cached_tokens=report.num_cached_tokens,
        num_chunks=report.num_chunks,
        events=map(event_to_wire, report.events),
    )


def prefill_report_from_wire(message: worker_pb2.PrefillTimes, clock: WorkerClock) -> PrefillReport:
    """What was measured of a prompt, from its message; `clock` is the sender's."""
    return PrefillReport(
        message.queue_s,
        message.prefill_s,
        message.num_cached_tokens,
        message.num_chunks,
        events_from_wire(message.events, clock),
    )


def decode_report_to_wire(report: DecodeReport) -> pb.DecodeReport:
    """What decode measured, as a message."""
    gap = report.longest_gap
    return pb.DecodeReport(
        slot_wait_s=report.slot_wait_s,
        decode_s=report.decode_s,
        step_s=report.step_s,
        mean_num_sequences=report.mean_num_sequences,
        mean_num_history_tokens=report.mean_num_history_tokens,
        prompt_gap_s=report.prompt_gap_s,
        longest_gap=None
        if gap is None
        else pb.Gap(
            index=gap.index,
            gap_s=gap.gap_s,
            step_s=gap.step_s,
            num_sequences=gap.num_sequences,
            num_history_tokens=gap.num_history_tokens,
            num_prompt_tokens=gap.num_prompt_tokens,
            prompts=gap.prompts,
        ),
    )


def decode_report_from_wire(message: pb.DecodeReport) -> DecodeReport:
    """What decode measured, from its message."""
    gap = message.longest_gap
    return DecodeReport(
        slot_wait_s=message.slot_wait_s,
        decode_s=message.decode_s,
        step_s=message.step_s,
        mean_num_sequences=message.mean_num_sequences,
        mean_num_history_tokens=message.mean_num_history_tokens,
        prompt_gap_s=message.prompt_gap_s,
        longest_gap=Gap(
            index=gap.index,
            gap_s=gap.gap_s,
            step_s=gap.step_s,
            num_sequences=gap.num_sequences,
            num_history_tokens=gap.num_history_tokens,
            num_prompt_tokens=gap.num_prompt_tokens,
            prompts=tuple(map(RequestId, gap.prompts)),
        )
        if message.HasField("longest_gap")
        else None,
    )


def finding_to_wire(finding: Finding) -> admin_pb2.Finding:
    """What one request suffered from, as a message."""
    return admin_pb2.Finding(
        phase=finding.phase,
        symptom=_SYMPTOMS[finding.symptom],
        seconds=finding.seconds,
        usual_s=finding.usual_s,
        evidence=finding.evidence,
        advice=finding.advice,
    )


def finding_from_wire(message: admin_pb2.Finding) -> Finding:
    """What one request suffered from, from its message."""
    return Finding(
        phase=message.phase,
        symptom=_SYMPTOMS_BACK[message.symptom],
        seconds=message.seconds,
        usual_s=message.usual_s if message.HasField("usual_s") else None,
        evidence=message.evidence,
        advice=message.advice,
    )


def trouble_to_wire(trouble: Trouble) -> admin_pb2.Trouble:
    """What many requests suffered from, as a message."""
    return admin_pb2.Trouble(
        num_requests=trouble.num_requests,
        seconds=trouble.seconds,
        worst_request_id=trouble.worst_request_id,
        worst=finding_to_wire(trouble.worst),
    )


def trouble_from_wire(message: admin_pb2.Trouble) -> Trouble:
    """What many requests suffered from, from its message."""
    return Trouble(
        num_requests=message.num_requests,
        seconds=message.seconds,
        worst_request_id=RequestId(message.worst_request_id),
        worst=finding_from_wire(message.worst),
    )


def spread_to_wire(spread: PhaseSpread) -> admin_pb2.PhaseSpread:
    """A phase over many requests, as a message."""
    return admin_pb2.PhaseSpread(
        phase=spread.phase, p50_s=spread.p50_s, p95_s=spread.p95_s, max_s=spread.max_s
    )


def spread_from_wire(message: admin_pb2.PhaseSpread) -> PhaseSpread:
    """A phase over many requests, from its message."""
    return PhaseSpread(message.phase, message.p50_s, message.p95_s, message.max_s)


def diagnosis_from_wire(message: admin_pb2.DiagnoseResponse) -> Diagnosis:
    """What lately ended requests suffered from, from its message."""
    return Diagnosis(
        message.num_requests,
        tuple(map(trouble_from_wire, message.troubles)),
        tuple(map(spread_from_wire, message.phases)),
    )
