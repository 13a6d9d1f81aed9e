"""The time of one request as a line: a bar with a segment per phase, then the figures in words."""

from rich.text import Text

from core.completion import Completion

BAR_WIDTH = 40
_COLOURS = {
    "tokenize": "bright_black",
    "place": "bright_black",
    "recovery": "bright_magenta",
    "reserve": "yellow",
    "queue": "red",
    "prefill": "blue",
    "exposed_transfer": "magenta",
    "slot_wait": "bright_red",
    "decode": "green",
    "delivery": "cyan",
    "unaccounted": "white",
}


def phase_bar(completion: Completion, *, width: int = BAR_WIDTH) -> Text:
    """The bar: each phase as long as its share of the time; phases below half a cell are left out.

    Args:
        completion: how the request ended.
        width: cells of the bar.
    """
    phases = completion.phases
    spans = [*phases.items(), ("unaccounted", max(phases.unaccounted_s, 0.0))]
    total_s = sum(seconds for _, seconds in spans) or 1.0
    bar = Text()
    elapsed_s, cell = 0.0, 0
    for name, seconds in spans:
        elapsed_s += seconds
        end = round(width * elapsed_s / total_s)
        bar.append("\u2588" * (end - cell), style=_COLOURS[name])
        cell = end
    return bar


def phase_legend(completion: Completion) -> Text:
    """Every phase that took at least a millisecond or 1 %, in its colour, longest waits named."""
    phases = completion.phases
    legend = Text()
    spans = [*phases.items(), ("unaccounted", phases.unaccounted_s)]
    for name, seconds in spans:
        if seconds < 0.001 and seconds < 0.01 * phases.total_s:
            continue
        if legend:
            legend.append(" \u00b7 ", style="dim")
        legend.append(f"{name.replace('_', ' ')} {duration(seconds)}", style=_COLOURS[name])
    return legend


def summary(completion: Completion) -> str:
    """Tokens, first token, speed, bytes moved, and who served."""
    usage, phases, transfer = completion.usage, completion.phases, completion.transfer
    parts = [
        f"{usage.num_prompt_tokens} + {usage.num_output_tokens} tokens",
        f"first token after {duration(phases.time_to_first_token_s)}",
    ]
    decoding_s = phases.total_s - phases.time_to_first_token_s
    if usage.num_output_tokens > 1 and decoding_s > 0:
        parts.append(f"then {(usage.num_output_tokens - 1) / decoding_s:.1f} tokens/s")
    if transfer is None:
        parts.append(f"all on {completion.decode_worker}")
    else:
        moved = f"{transfer.num_bytes / 1e6:.2f} MB of KV over {transfer.backend}"
        parts.append(f"{moved}, {completion.prefill_worker} to {completion.decode_worker}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds for people: 0.8 ms, 43 ms, 1.52 s."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
