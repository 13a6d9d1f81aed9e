"""The line that shows where a request's time went."""

import pytest

from core.completion import Completion
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases, TransferReport
from deploy.commands.phase_bar import duration, phase_bar, phase_legend, summary


def completion(phases: Phases, transfer: TransferReport | None = None) -> Completion:
    return Completion(
        request_id=RequestId("r"),
        finish_reason=FinishReason.STOP,
        usage=Usage(num_prompt_tokens=10, num_output_tokens=5),
        phases=phases,
        transfer=transfer,
        prefill_worker=WorkerName("prefill-0" if transfer else "decode-0"),
        decode_worker=WorkerName("decode-0"),
        placement="",
        seed=0,
    )


def test_each_phase_has_its_share_of_the_bar():
    bar = phase_bar(completion(Phases(prefill_s=1.0, decode_s=3.0, total_s=4.0)), width=40)

    assert len(bar) == 40
    assert [
        len(bar.plain[span.start : span.end]) for span in bar.spans if span.end > span.start
    ] == [
        10,
        30,
    ]


def test_phases_that_do_not_add_up_still_fill_the_bar_exactly():
    phases = Phases(prefill_s=0.3333, decode_s=0.3333, total_s=1.0)

    assert len(phase_bar(completion(phases), width=37)) == 37


def test_the_legend_leaves_out_what_took_no_time_and_shows_what_is_unaccounted():
    phases = Phases(tokenize_s=0.0001, prefill_s=0.5, decode_s=0.4, total_s=1.0)

    legend = phase_legend(completion(phases)).plain

    assert "prefill 500 ms" in legend
    assert "unaccounted 99.9 ms" in legend or "unaccounted 100 ms" in legend
    assert "tokenize" not in legend


def test_the_summary_tells_tokens_speed_and_who_served():
    phases = Phases(total_s=3.0, time_to_first_token_s=1.0)

    assert summary(completion(phases)) == (
        "10 + 5 tokens, first token after 1.00 s, then 2.0 tokens/s, all on decode-0"
    )


def test_the_summary_tells_what_was_moved():
    transfer = TransferReport("shm", 2_000_000, 3, 0.1, 0.01)

    assert "2.00 MB of KV over shm, prefill-0 to decode-0" in summary(
        completion(Phases(total_s=1.0, time_to_first_token_s=1.0), transfer)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (0.0434, "43 ms"), (1.515, "1.51 s"), (12.0, "12.00 s")],
)
def test_durations_are_written_for_people(seconds, text):
    assert duration(seconds) == text
