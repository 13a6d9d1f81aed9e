"""A constraint, as users write it -> the grammar that workers match, checked before any work.

Pure but for the library that parses grammars.
"""

from llguidance import LLMatcher

from core.errors import InvalidRequest
from core.sampling import Constraint, ConstraintKind, Sampling

MAX_CHARACTERS = 65_536
MAX_SHOWN_CHARACTERS = 400


def grammar_of(constraint: Constraint, asked: Sampling, eos_token_ids: tuple[int, ...]) -> str:
    """The constraint as llguidance's own grammar; `asked` is what it came with.

    Contract: may block for a second on a large grammar; thread-safe.

    Raises:
        InvalidRequest: it is not what its kind says, or could not end the answer.
    """
    field = f"constraint.{constraint.kind}"
    if len(constraint.text) > MAX_CHARACTERS:
        limit = f"at most {MAX_CHARACTERS} are taken"
        raise InvalidRequest(field, f"{len(constraint.text)} characters", limit)
    if not eos_token_ids:
        raise InvalidRequest(field, "set", "this checkpoint has no end-of-sequence token")
    if asked.ignore_eos:
        raise InvalidRequest("ignore_eos", True, f"{field} ends with the end-of-sequence token")
    if asked.min_tokens:
        raise InvalidRequest("min_tokens", asked.min_tokens, f"{field} decides when it is complete")
    try:
        grammar = _translated(constraint)
    except ValueError as error:
        raise InvalidRequest(field, "not usable", _shown(str(error))) from error
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise InvalidRequest(field, "not usable", _shown(messages[0]))
    return grammar


def _translated(constraint: Constraint) -> str:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(constraint.text)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.LARK:
            return LLMatcher.grammar_from_lark(constraint.text)


def _shown(problem: str) -> str:
    return " ".join(problem.split())[:MAX_SHOWN_CHARACTERS]
