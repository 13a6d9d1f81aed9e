"""Which phase was slow, and why: the table of symptoms as code.

A high time to first token does not prove that prefill is slow, and slow tokens do not prove that
decode is. Each phase of a request is therefore judged by itself:

- Waits (queue, place, reserve, exposed transfer, ...) should be short, whatever others met: one
  that took long and was a notable share of the whole is named.
- Work (prefill, decode) takes what it takes. It is named when it took at least twice what other
  requests of this cluster needed for as many tokens; without enough of them it is not judged.
- A single gap between two tokens that stands out is named with what ran in it.

Pure: completions in, findings out. Knows no configuration but the names of its keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from core.completion import Completion
from core.finding import Finding, PhaseSpread, Symptom, Trouble
from core.request import id_of_attempt, is_further_answer

# Seconds below which nobody would ask; and the share of the whole from which a phase matters.
MIN_WAIT_S = 0.2
MIN_SHARE = 0.1
# Work is slow from so many times what is usual, which so many other requests must have shown.
SLOW_FACTOR = 2.0
MIN_SAMPLES = 5
# A gap stands out from so many times the answer's own mean.
GAP_FACTOR = 3.0
# Prompts cost a step's overhead whatever their length: shorter ones are taken for this long.
MIN_PREFILL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Usual:
    """What work took lately, for each token; None while too few requests showed it."""

    prefill_token_s: float | None = None
    decode_token_s: float | None = None
    num_sequences: float | None = None
    num_history_tokens: float | None = None


_WAITS = {
    "tokenize": (
        "its prompt was turned into tokens",
        "the router was short of processor time, or the prompt is very long",
    ),
    "place": (
        "it waited in the router's line until workers had room",
        "all workers were full: add replicas to the pool that `twophase status` shows waiting, "
        "or lower router.max_wait_s so that such requests are refused early",
    ),
    "recovery": (
        "earlier attempts failed before this one was placed",
        "see which worker failed and why; router.max_attempts bounds the tries",
    ),
    "reserve": (
        "the decode worker had no free KV blocks for it",
        "raise decode.kv_cache, lower max_tokens of the requests, or add decode.replicas",
    ),
    "queue": (
        "its prompt waited for other prompts at the prefilling worker",
        "add prefill.replicas; prefill itself was not slow",
    ),
    "exposed_transfer": (
        "decode waited for the KV cache after the last chunk was computed",
        "look at the link in `twophase status` (bandwidth, backend and why that one)",
    ),
    "slot_wait": (
        "its KV cache was there, and it waited for a place in a decode step",
        "raise decode.max_num_sequences, or add decode.replicas",
    ),
    "delivery": (
        "tokens were ready, and the client took them late",
        "the client reads slowly, or the network to it is slow: no server setting helps",
    ),
    "unaccounted": (
        "no phase covers it: messages between the processes were under way",
        "a process was short of processor time, or the network between workers is slow",
    ),
}
# What further answers to a prompt wait for in the place of workers.
_BESIDE = (
    "it waited until the first answer to its prompt had read it",
    "explain the first answer: this one began when the prompt's KV cache was at decode",
)
_AFTER_FIRST_TOKEN = ("exposed_transfer", "slot_wait", "decode", "delivery")


def usual_of(completions: Sequence[Completion]) -> Usual:
    """What these requests took for each token, by the median."""
    completions = [c for c in completions if _is_whole(c)]
    prefill = [c.phases.prefill_s / _num_prefilled(c) for c in completions if c.phases.prefill_s]
    decode = [
        c.phases.decode_s / (c.usage.num_output_tokens - 1)
        for c in completions
        if c.usage.num_output_tokens > 1 and c.phases.decode_s
    ]
    reports = [c.decode for c in completions if c.decode is not None]
    return Usual(
        prefill_token_s=_median(prefill),
        decode_token_s=_median(decode),
        num_sequences=_median([report.mean_num_sequences for report in reports]),
        num_history_tokens=_median([report.mean_num_history_tokens for report in reports]),
    )


def explain(completion: Completion, usual: Usual) -> list[Finding]:
    """What this request suffered from, most seconds too many first; empty when nothing stood out.

    Args:
        completion: how it ended.
        usual: what other requests of the cluster took.
    """
    findings = _waits(completion)
    if _is_whole(completion):
        findings += [*_prefill(completion, usual), *_decode(completion, usual)]
    return sorted(findings, key=lambda finding: (finding.usual_s or 0.0) - finding.seconds)


def spreads(completions: Sequence[Completion]) -> list[PhaseSpread]:
    """Each phase over these requests; empty without any."""
    if not completions:
        return []
    rows = [[*c.phases.items(), ("unaccounted", c.phases.unaccounted_s)] for c in completions]
    columns = {
        same[0][0]: sorted(seconds for _, seconds in same) for same in zip(*rows, strict=True)
    }
    return [
        PhaseSpread(name, median(values), _p95(values), values[-1])
        for name, values in columns.items()
    ]


def troubles(completions: Sequence[Completion]) -> list[Trouble]:
    """What these requests suffered from, by phase, most seconds first."""
    usual = usual_of(completions)
    by_phase: dict[str, list[tuple[Finding, Completion]]] = {}
    for completion in completions:
        for finding in explain(completion, usual):
            by_phase.setdefault(finding.phase, []).append((finding, completion))
    found = [_trouble(named) for named in by_phase.values()]
    return sorted(found, key=lambda trouble: -trouble.seconds)


def _trouble(named: list[tuple[Finding, Completion]]) -> Trouble:
    worst, completion = max(named, key=lambda pair: pair[0].seconds)
    seconds = sum(finding.seconds for finding, _ in named)
    return Trouble(len(named), seconds, completion.request_id, worst)


def _waits(completion: Completion) -> list[Finding]:
    phases = completion.phases
    taken = dict(phases.items()) | {"unaccounted": phases.unaccounted_s}
    findings = []
    for phase, (what, advice) in _WAITS.items():
        if phase == "recovery" and not completion.failures:
            continue  # a worker that stopped in order handed it over: it was served meanwhile
        if phase == "place" and is_further_answer(completion.request_id):
            what, advice = _BESIDE
        if taken[phase] >= max(MIN_WAIT_S, MIN_SHARE * phases.total_s):
            detail = _DETAILS[phase](completion) if phase in _DETAILS else ""
            findings.append(
                Finding(phase, _symptom(phase), taken[phase], None, what + detail, advice)
            )
    return findings


def _prefill(completion: Completion, usual: Usual) -> list[Finding]:
    taken_s, num_tokens = completion.phases.prefill_s, _num_prefilled(completion)
    if usual.prefill_token_s is None:
        return []
    usual_s = usual.prefill_token_s * num_tokens
    if not _is_slow(taken_s, usual_s, completion):
        return []
    cached = completion.usage.num_prefill_cached_tokens
    evidence = (
        f"{num_tokens} tokens were computed ({cached} were cached) on {completion.prefill_worker} "
        f"at {num_tokens / taken_s:.0f} tokens/s; usual are {1 / usual.prefill_token_s:.0f}"
    )
    advice = (
        f"something else ran on the device of {completion.prefill_worker}, or it is slower than "
        "the others; a longer prompt alone does not show here"
    )
    return [Finding("prefill", Symptom.FIRST_TOKEN, taken_s, usual_s, evidence, advice)]


def _decode(completion: Completion, usual: Usual) -> list[Finding]:
    num_tokens = completion.usage.num_output_tokens - 1
    report = completion.decode
    if report is None or num_tokens < 1:
        return []
    gap = report.longest_gap
    # The mean of all gaps but this one, which would hide itself.
    mean_s = (report.decode_s - gap.gap_s) / max(num_tokens - 1, 1) if gap is not None else 0.0
    usual_token_s = usual.decode_token_s if usual.decode_token_s is not None else mean_s
    usual_s = usual_token_s * num_tokens
    if gap is not None and _stands_out(gap.gap_s, max(mean_s, usual_token_s), completion):
        return [_gap_finding(completion, usual_s)]
    if usual.decode_token_s is None or not _is_slow(report.decode_s, usual_s, completion):
        return []
    return [_steady_finding(completion, usual, usual_s)]


def _gap_finding(completion: Completion, usual_s: float) -> Finding:
    assert completion.decode is not None and completion.decode.longest_gap is not None
    gap = completion.decode.longest_gap
    evidence = f"token {gap.index} came {gap.gap_s:.2f} s after the one before it"
    if gap.prompts == (id_of_attempt(completion.request_id),):
        evidence += f"; in that gap {gap.num_prompt_tokens} tokens of its own prompt were read"
        advice = "its other answers began beside it, and each reads the prompt's last block"
    elif gap.num_prompt_tokens:
        names = ", ".join(gap.prompts)
        evidence += f"; in that gap {gap.num_prompt_tokens} prompt tokens of {names} were read"
        advice = (
            "another request's prompt ran between its tokens: mode disaggregated keeps them "
            "apart, a smaller decode.max_batch_tokens cuts prompts into smaller chunks"
        )
    elif gap.step_s >= gap.gap_s / 2:
        evidence += f"; one step of {gap.num_sequences} sequences took {gap.step_s:.2f} s"
        advice = f"the device of {completion.decode_worker} was held up by something else"
    else:
        evidence += f"; its steps took {gap.step_s:.2f} s of that"
        advice = f"the process of {completion.decode_worker} stood still between two steps"
    return Finding(
        "decode", Symptom.LATER_TOKENS, completion.phases.decode_s, usual_s, evidence, advice
    )


def _steady_finding(completion: Completion, usual: Usual, usual_s: float) -> Finding:
    report = completion.decode
    assert report is not None and usual.decode_token_s is not None
    num_tokens = completion.usage.num_output_tokens - 1
    evidence = (
        f"{report.decode_s / num_tokens * 1e3:.0f} ms for each token, usual are "
        f"{usual.decode_token_s * 1e3:.0f}; {report.mean_num_sequences:.0f} sequences in a step "
        f"and {report.mean_num_history_tokens:.0f} tokens of KV read by it"
    )
    if report.prompt_gap_s > report.decode_s / 2:
        advice = (
            f"in {report.prompt_gap_s:.2f} s of its gaps prompts of others were read: mode "
            "disaggregated keeps them apart"
        )
    elif report.mean_num_history_tokens > SLOW_FACTOR * (usual.num_history_tokens or 0.0):
        advice = "each step reads more history than usual: long contexts run together here"
    elif report.mean_num_sequences > SLOW_FACTOR * (usual.num_sequences or 0.0):
        advice = "larger batches than usual: add decode.replicas or lower max_num_sequences"
    else:
        advice = f"the device of {completion.decode_worker} was slower than usual at the same work"
    return Finding("decode", Symptom.LATER_TOKENS, report.decode_s, usual_s, evidence, advice)


def _is_whole(completion: Completion) -> bool:
    """Whether prefill and decode, as they are told, made all of the answer."""
    return completion.num_resumed_tokens == 0


def _is_slow(taken_s: float, usual_s: float, completion: Completion) -> bool:
    excess_s = taken_s - usual_s
    is_notable = excess_s >= max(MIN_WAIT_S, MIN_SHARE * completion.phases.total_s)
    return is_notable and taken_s >= SLOW_FACTOR * usual_s


def _stands_out(gap_s: float, mean_s: float, completion: Completion) -> bool:
    is_notable = gap_s - mean_s >= max(MIN_WAIT_S, MIN_SHARE * completion.phases.total_s)
    return is_notable and gap_s >= GAP_FACTOR * mean_s


def _symptom(phase: str) -> Symptom:
    return Symptom.LATER_TOKENS if phase in _AFTER_FIRST_TOKEN else Symptom.FIRST_TOKEN


def _num_prefilled(completion: Completion) -> int:
    usage = completion.usage
    return max(usage.num_prompt_tokens - usage.num_prefill_cached_tokens, MIN_PREFILL_TOKENS)


def _transfer_detail(completion: Completion) -> str:
    transfer = completion.transfer
    if transfer is None:
        return ""
    return (
        f"; {transfer.num_bytes / 1e6:.1f} MB went over {transfer.backend} in "
        f"{transfer.num_pieces} pieces and {transfer.push_s:.2f} s"
    )


_DETAILS: dict[str, Callable[[Completion], str]] = {
    "recovery": lambda completion: "".join(f"; {failure}" for failure in completion.failures),
    "exposed_transfer": _transfer_detail,
    "queue": lambda completion: f" {completion.prefill_worker}",
    "reserve": lambda completion: f" ({completion.decode_worker})",
}


def _median(values: list[float]) -> float | None:
    return median(values) if len(values) >= MIN_SAMPLES else None


def _p95(ordered: list[float]) -> float:
    return ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
