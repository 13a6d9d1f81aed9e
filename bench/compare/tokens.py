"""Whether all ways gave the same tokens.

Two right ways may choose differently where the two likeliest tokens are nearly as likely, since
batches and chunks of other sizes round differently; what follows such a token is of another text
and is not compared. Everything else that differs is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.compare.client import Answer
from core.config import Mode
from core.layout import Dtype

# By how much (natural logarithm) the likeliest token must lead to be the only right one; bfloat16
# keeps 8 bits of each logit of about 20, and of all that went into it.
NEAR_TIE = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.25}


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """What became of the comparison; the counts are of pairs of answers.

    widest_tie: the greatest lead at a difference that was allowed.
    """

    num_equal: int = 0
    num_ties: int = 0
    widest_tie: float = 0.0
    differences: tuple[str, ...] = ()

    @property
    def num_compared(self) -> int:
        """Pairs in which both answers came."""
        return self.num_equal + self.num_ties + len(self.differences)

    @property
    def is_same(self) -> bool:
        """Whether no answer differs but at near ties."""
        return not self.differences


@dataclass(slots=True)
class _Counts:
    num_equal: int = 0
    ties: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def check_tokens(
    rounds: Sequence[Mapping[Mode, Sequence[Answer]]], *, near_tie: float
) -> TokenCheck:
    """Compare each way's answers with those of the first way; a round maps ways to answers."""
    counts = _Counts()
    for answers_by_way in rounds:
        (first, expected), *others = answers_by_way.items()
        for way, answers in others:
            for number, (left, right) in enumerate(zip(expected, answers, strict=True)):
                if left.error is None and right.error is None:
                    _compare(counts, left, right, f"request {number}: {way} and {first}", near_tie)
    return TokenCheck(
        counts.num_equal,
        len(counts.ties),
        max(counts.ties, default=0.0),
        tuple(counts.differences),
    )


def _compare(counts: _Counts, left: Answer, right: Answer, which: str, near_tie: float) -> None:
    pairs = zip(left.token_ids, right.token_ids, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None and len(left.token_ids) == len(right.token_ids):
        counts.num_equal += 1
        return
    if index is None:
        counts.differences.append(
            f"{which} have {len(right.token_ids)} and {len(left.token_ids)} tokens"
        )
        return
    lead = min(left.margins[index], right.margins[index])
    if lead < near_tie:
        counts.ties.append(lead)
    else:
        counts.differences.append(
            f"{which} differ at token {index} of {len(left.token_ids)}, where the likeliest token "
            f"leads by {lead:.3f}"
        )
