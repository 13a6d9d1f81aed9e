"""Prints the size of each package and fails when a file or a package grows past its limit.

Files are measured in lines as they stand; packages and the product in lines of code, that is,
lines that hold a token other than a comment or a docstring. A package inside a package is counted
by itself. The product has no limit of its own: its sum is printed to be looked at.
"""

import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "core", "proto/twophase", "engine", "kv_transfer", "kv_link", "prefill_worker",
    "decode_worker", "router", "deploy", "bench",
)  # fmt: skip
MAX_FILE_LINES = 350
MAX_PACKAGE_CODE_LINES = 2000

_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def num_lines(path: Path) -> int:
    """Lines of a file as it stands."""
    return len(path.read_text(encoding="utf-8").splitlines())


def num_code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    is_statement_start = True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _LAYOUT and not (token.type == tokenize.STRING and is_statement_start):
            lines.update(range(token.start[0], token.end[0] + 1))
        is_statement_start = token.type in _LAYOUT - {tokenize.COMMENT}
    return len(lines)


def _packages() -> list[str]:
    """PACKAGES and the packages in them; generated modules are left out."""
    found = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name != "v1")


def main() -> int:
    """Print the table; 1 if a limit is broken."""
    problems, total = [], 0
    for package in _packages():
        files = list((ROOT / package).glob("*.py"))
        code = sum(num_code_lines(path) for path in files)
        longest = max(files, key=num_lines)
        total += code
        sys.stdout.write(
            f"{package:20}{code:6} lines of code in {len(files):3} files, "
            f"longest {longest.name} with {num_lines(longest)} lines\n"
        )
        problems += [f"{p}: {num_lines(p)} lines" for p in files if num_lines(p) > MAX_FILE_LINES]
        if code > MAX_PACKAGE_CODE_LINES:
            problems.append(f"{package}: {code} lines of code")
    tests = sum(num_code_lines(path) for path in (ROOT / "tests").rglob("*.py"))
    sys.stdout.write(f"{'product':20}{total:6} lines of code; tests {tests}\n")
    for problem in problems:
        sys.stderr.write(f"too long: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
