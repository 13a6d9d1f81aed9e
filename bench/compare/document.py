"""A report as blocks, and two forms of it: Markdown beside its pictures, and one HTML page.

The page needs nothing but itself: pictures are part of it, and it follows the reader's theme.
Inline, `code` and **bold** are understood in both.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.compare.figures.canvas import FONT, THEME, Canvas

_STYLE = (
    f"{THEME}*{{box-sizing:border-box}}"
    f"body{{font:16px/1.55 {FONT};color:var(--ink);background:var(--face);margin:0}}"
    "main{max-width:1040px;margin:0 auto;padding:24px 20px 64px}"
    "h1{font-size:28px;line-height:1.2}h2{margin-top:48px;padding-top:12px;"
    "border-top:1px solid var(--grid)}h3{margin-top:32px}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin:12px 0}"
    "th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--grid);text-align:right}"
    "th{color:var(--muted);font-weight:600;vertical-align:bottom}"
    "th:first-child,td:first-child{text-align:left}"
    "code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    "pre{background:var(--panel);padding:14px;overflow-x:auto;border-radius:6px}"
    "code{background:var(--panel);padding:1px 4px;border-radius:4px}pre code{padding:0}"
    "figure{margin:20px 0}figure svg{width:100%;height:auto;display:block}"
    "figcaption{color:var(--muted);font-size:14px;margin-top:4px}li{margin:4px 0}"
    "@media (max-width:700px){figure{overflow-x:auto}figure svg{min-width:760px}}"
)


@dataclass(frozen=True, slots=True)
class Heading:
    """Level 1 is the report's own."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Words."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """Sentences, one below the other."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below a head; the first column names them."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure; its name is the file's, without the ending."""

    name: str
    canvas: Canvas
    caption: str


@dataclass(frozen=True, slots=True)
class Code:
    """Lines as they are."""

    text: str


Block = Heading | Paragraph | Bullets | Table | Picture | Code


def markdown(blocks: Sequence[Block]) -> str:
    """As Markdown; pictures are expected beside it as NAME.svg."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(head, rows):
            rule = ["---", *["---:"] * (len(head) - 1)]
            return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
        case Picture(name, _, caption):
            return f"![{caption}]({name}.svg)\n\n*{caption}*"
        case Code(text):
            return f"```\n{text}\n```"


def html(blocks: Sequence[Block]) -> str:
    """As one page."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(map(_html, blocks))
        + "\n</main></body></html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>"
        case Table(head, rows):
            lines = [_row(head, "th"), *(_row(row, "td") for row in rows)]
            return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
        case Picture(_, canvas, caption):
            words = _inline(caption)
            return f"<figure>{canvas.inline()}<figcaption>{words}</figcaption></figure>"
        case Code(text):
            return f"<pre><code>{escape(text)}</code></pre>"


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in cells)}</tr>"


def _inline(text: str) -> str:
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", coded)
